"""GGUF fixtures: tiny llamas whose tensors cover the block types of ggml.

For types that the `gguf` package can encode, weights are drawn and encoded. For the others the codes are drawn, so that
every code and every scale occurs; only the f16 factors of a block are chosen, for values of mean zero and the wanted
size. Either way the reference computes with what the package's decoder makes of the bytes.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from families import SMALL
from family import Family
from gguf_tokens import write_tokens

ENCODED = {Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.MXFP4}

# Where a block keeps its f16 factors: of the codes and, in some types, of the minimum that is subtracted.
FACTORS = {
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108, None),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208, None),
    Type.IQ4_NL: (0, None),
    Type.IQ4_XS: (0, None),
}

GGUF_NAMES = [
    (r"^model\.embed_tokens\.", "token_embd."),
    (r"^model\.norm\.", "output_norm."),
    (r"^lm_head\.", "output."),
    (r"^model\.layers\.", "blk."),
    (r"input_layernorm", "attn_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"self_attn\.([qkv])_proj", r"attn_\1"),
    (r"self_attn\.o_proj", "attn_output"),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
]


@dataclass
class Gguf:
    """A llama as one GGUF file or several; the first rule whose pattern is found in a GGUF name gives the type."""

    config: dict
    rules: list[tuple[str, Type]]
    tensors_per_file: int = 0
    family: Family = field(init=False)

    def __post_init__(self):
        self.family = Family("LlamaForCausalLM", self.config)

    def store(self, plain: Path, directory: Path, seed: int) -> None:
        """Writes the GGUF, and into `plain` what its decoders make of it."""
        generator = np.random.default_rng(seed)
        writer = gguf.GGUFWriter(directory / "model.gguf", "llama", split_max_tensors=self.tensors_per_file)
        self._write_metadata(writer)
        decoded = {}
        for name, tensor in load_file(plain / "model.safetensors").items():
            weight = tensor.float().numpy()
            heads = next((self.config[key] for ending, key in HEADS.items() if ending in name), None)
            gguf_name = to_gguf_name(name)
            kind = next((kind for pattern, kind in self.rules if re.search(pattern, gguf_name)), Type.F32)
            blocks = encode(weight if heads is None else pair_neighbours(weight, heads), kind, generator)
            writer.add_tensor(gguf_name, blocks, raw_dtype=kind)
            values = gguf.dequantize(blocks, kind).reshape(weight.shape)
            decoded[name] = values if heads is None else pair_halves(values, heads)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        decoded = {name: torch.from_numpy(np.array(values, np.float32)) for name, values in decoded.items()}
        save_file(decoded, plain / "model.safetensors", metadata={"format": "pt"})

    def _write_metadata(self, writer: gguf.GGUFWriter) -> None:
        config = self.config
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
        writer.add_rope_freq_base(10000.0)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_vocab_size(config["vocab_size"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        write_tokens(writer, config["vocab_size"])


HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def to_gguf_name(name: str) -> str:
    for pattern, replacement in GGUF_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def pair_neighbours(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k from RoPE pairs (i, i + head_dim / 2) to pairs (2i, 2i + 1), which llama files have in ggml."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def pair_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """The way back."""
    return weight.reshape(heads, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def encode(weight: np.ndarray, kind: Type, generator: np.random.Generator) -> np.ndarray:
    """The bytes `[rows, bytes per row]` of a matrix, or numbers for F32 and F16."""
    if kind in (Type.F32, Type.F16):
        return weight.astype(np.float32 if kind == Type.F32 else np.float16)
    if kind in ENCODED:
        return gguf.quantize(weight, kind)
    values_per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (weight.size // values_per_block, block_bytes), dtype=np.uint8)
    if kind == Type.NVFP4:
        blocks[:, :4] = generator.integers(0x10, 0x20, (len(blocks), 4))  # unsigned E4M3 scales from 2^-5 to 2^-3
    else:
        set_factors(blocks, kind, np.sqrt((weight**2).mean()))
    return blocks.reshape(len(weight), -1)


def set_factors(blocks: np.ndarray, kind: Type, size: float) -> None:
    """Gives every block mean zero, where the type has minima, and the wanted root mean square."""
    scale_at, minimum_at = FACTORS[kind]

    def write(offset: int, factors) -> None:
        blocks[:, offset : offset + 2] = (
            np.broadcast_to(factors, len(blocks)).astype("<f2").view(np.uint8).reshape(-1, 2)
        )

    def decode() -> np.ndarray:
        return gguf.dequantize(blocks, kind).reshape(len(blocks), -1)

    write(scale_at, 1.0)
    ratio = 0.0
    if minimum_at is not None:
        write(minimum_at, 0.0)
        mean_of_codes = decode().mean(-1)
        write(scale_at, 0.0)
        write(minimum_at, 1.0)
        ratio = mean_of_codes / -decode().mean(-1)
        write(scale_at, 1.0)
        write(minimum_at, ratio)
    scale = size / np.sqrt((decode() ** 2).mean(-1))
    write(scale_at, scale)
    if minimum_at is not None:
        write(minimum_at, scale * ratio)


WIDE = SMALL | dict(vocab_size=64, hidden_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4)

GGUF = {
    "llama-gguf": Gguf(
        SMALL | dict(vocab_size=128, num_attention_heads=8, num_key_value_heads=4),
        [
            (r"token_embd", Type.F16),
            (r"^output\.", Type.Q8_0),
            (r"blk\.0\.attn_q", Type.Q4_0),
            (r"blk\.0\.attn_k", Type.Q4_1),
            (r"blk\.0\.attn_v", Type.Q5_0),
            (r"blk\.0\.attn_output", Type.Q5_1),
            (r"blk\.0\.ffn_gate", Type.Q8_0),
            (r"blk\.0\.ffn_up", Type.BF16),
            (r"blk\.0\.ffn_down", Type.F16),
            (r"blk\.1\.attn_(q|k|v)\.", Type.Q8_0),
            (r"blk\.\d\.attn_(q|k|v|output)\.", Type.Q4_0),
            (r"blk\.\d\.ffn_(gate|up)", Type.Q4_1),
            (r"blk\.\d\.ffn_down", Type.Q5_1),
        ],
    ),
    "llama-gguf-k": Gguf(
        WIDE | dict(intermediate_size=256, tie_word_embeddings=True),
        [
            (r"token_embd", Type.Q6_K),
            (r"blk\.0\.attn_q\.", Type.Q2_K),
            (r"blk\.0\.attn_k", Type.Q3_K),
            (r"attn_v", Type.Q6_K),
            (r"blk\.0\.attn_output", Type.Q5_0),
            (r"blk\.0\.ffn_gate", Type.Q4_K),
            (r"blk\.0\.ffn_up", Type.Q3_K),
            (r"blk\.0\.ffn_down", Type.Q2_K),
            (r"blk\.1\.attn_q\.", Type.Q4_K),
            (r"blk\.1\.attn_k", Type.Q5_K),
            (r"blk\.1\.attn_output", Type.Q8_0),
            (r"blk\.1\.ffn_gate", Type.Q5_K),
            (r"blk\.1\.ffn_up", Type.Q2_K),
            (r"blk\.1\.ffn_down", Type.Q6_K),
        ],
    ),
    "llama-gguf-iq": Gguf(
        WIDE | dict(intermediate_size=64),
        [
            (r"token_embd|^output\.", Type.IQ4_XS),
            (r"attn_(q|k)\.", Type.IQ4_XS),
            (r"attn_v", Type.IQ4_NL),
            (r"attn_output", Type.NVFP4),
            (r"blk\.0\.ffn_(gate|up)", Type.MXFP4),
            (r"blk\.0\.ffn_down", Type.IQ4_NL),
            (r"blk\.1\.ffn_(gate|up)", Type.NVFP4),
            (r"blk\.1\.ffn_down", Type.MXFP4),
        ],
    ),
    "llama-gguf-split": Gguf(
        SMALL | dict(vocab_size=128, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4),
        [(r"attn_(q|k|v|output)\.|ffn_|token_embd|^output\.", Type.Q8_0)],
        tensors_per_file=10,
    ),
}
