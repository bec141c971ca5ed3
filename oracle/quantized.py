"""The quantized fixtures: which tensors of which tiny model are stored in which scheme, and what config.json says."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from families import FAMILIES, GPT_OSS, SMALL
from family import Family
from schemes import (
    AffineMlx,
    Awq4,
    ConvolutionMlx,
    Fp8Block,
    Fp8Channel,
    Fp8Tensor,
    GainMlx,
    Gptq4,
    Mxfp4GptOss,
    Mxfp4Mlx,
    Mxfp8Mlx,
    Nvfp4CompressedTensors,
    Nvfp4FusedExperts,
    Nvfp4Mlx,
    Nvfp4ModelOpt,
)

LLAMA = SMALL | dict(
    vocab_size=128,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    tie_word_embeddings=True,
)

# Sizes that are no multiples of 128, so that every matrix has ragged blocks of scales at an edge.
RAGGED_LLAMA = LLAMA | dict(hidden_size=144, intermediate_size=136, num_attention_heads=6, num_key_value_heads=3)

LINEAR = r"layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight$"
LINEAR_AND_EMBEDDING = LINEAR + r"|embed_tokens\.weight$|lm_head\.weight$"


@dataclass
class Quantized:
    """A family's model with some weights in schemes; the first rule whose pattern is found in a name holds."""

    family: Family
    rules: list[tuple]
    config: dict
    other_files: dict = field(default_factory=dict)
    rename: Callable[[dict], dict] = lambda tensors: tensors

    def store(self, plain: Path, directory: Path, seed: int) -> None:
        """Writes the quantized checkpoint, and into `plain` what its decoders make of it."""
        tensors = load_file(plain / "model.safetensors")
        generator = np.random.default_rng(seed)
        stored, decoded = {}, {}
        for name, tensor in tensors.items():
            scheme = next((scheme for pattern, scheme in self.rules if re.search(pattern, name)), None)
            if scheme is None:
                stored[name] = decoded[name] = tensor
                continue
            parts = scheme.encode(textured(tensor.float().numpy(), generator))
            stored |= {name.removesuffix("weight") + ending: part for ending, part in parts.items()}
            decoded[name] = torch.from_numpy(np.ascontiguousarray(scheme.decode(parts), np.float32))
        save_file(decoded, plain / "model.safetensors", metadata={"format": "pt"})
        save_file(self.rename(stored), directory / "model.safetensors", metadata={"format": "pt"})
        self.family.write_config(plain, directory, **self.config)
        for file, content in self.other_files.items():
            (directory / file).write_text(json.dumps(content, indent=2) + "\n")


def textured(weight: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Makes some patches of 8 x 16 louder than others, so that a scale of the wrong block is heard."""
    if weight.ndim < 2 or weight.shape[-2] == 1:  # a norm or a convolution
        return weight
    *leading, outputs, inputs = weight.shape
    loudness = np.exp(0.5 * generator.normal(size=(*leading, -(-outputs // 8), -(-inputs // 16))))
    return (weight * loudness.repeat(8, -2).repeat(16, -1)[..., :outputs, :inputs]).astype(np.float32)


def llama(**changes) -> Family:
    return Family("LlamaForCausalLM", LLAMA | changes)


def compressed_tensors(layout: str, bits: int, strategy: str, group_size: int | None = None) -> dict:
    weights = dict(num_bits=bits, type="float", strategy=strategy, symmetric=True, dynamic=False, group_size=group_size)
    return dict(
        quantization_config=dict(
            quant_method="compressed-tensors",
            format=layout,
            quantization_status="compressed",
            config_groups=dict(
                group_0=dict(targets=["Linear"], weights=weights, input_activations=None, output_activations=None)
            ),
            ignore=["lm_head"],
            kv_cache_scheme=None,
        )
    )


def modelopt(ignore: list[str]) -> dict:
    return dict(
        quantization_config=dict(
            quant_method="modelopt",
            quant_algo="NVFP4",
            group_size=16,
            ignore=ignore,
            producer=dict(name="modelopt", version="0.37.0"),
        )
    )


def mlx(group_size: int, bits: int, mode: str = "affine", **layers) -> dict:
    settings = dict(group_size=group_size, bits=bits, mode=mode) | layers
    return dict(quantization=settings, quantization_config=settings)


def stack_experts_as_mlx(tensors: dict) -> dict:
    """`mlp.experts.3.up_proj.scales` of every expert -> `mlp.switch_mlp.up_proj.scales`."""
    stacked, experts = {}, {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*)mlp\.experts\.(\d+)\.(.*)", name):
            prefix, index, ending = match.groups()
            experts.setdefault(f"{prefix}mlp.switch_mlp.{ending}", {})[int(index)] = tensor
        else:
            stacked[name] = tensor
    return stacked | {name: torch.stack([parts[i] for i in range(len(parts))]) for name, parts in experts.items()}


def wrap_as_mlx(tensors: dict) -> dict:
    """mlx_lm writes Qwen 3.5 under `language_model.model` and leaves out what it does not run."""
    prefix = "model.language_model."
    return {
        name.replace(prefix, "language_model.model."): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


MIXED_BITS = {
    "model.layers.0.self_attn.q_proj": (2, 32),
    "model.layers.0.self_attn.k_proj": (3, 64),
    "model.layers.0.self_attn.v_proj": (5, 64),
    "model.layers.0.self_attn.o_proj": (6, 128),
    "model.layers.0.mlp.gate_proj": (8, 32),
    "model.layers.0.mlp.up_proj": (3, 32),
    "model.layers.0.mlp.down_proj": (5, 128),
    "model.layers.1.self_attn.q_proj": (6, 64),
    "model.layers.1.self_attn.k_proj": (8, 128),
    "model.embed_tokens": (8, 64),
}

MUSE = FAMILIES["muse_spark"].config
MUSE_SPARSE = Family(
    "MuseSparkForConditionalGeneration",
    MUSE
    | dict(
        text_config=MUSE["text_config"]
        | dict(
            mlp_layer_types=["sparse"] * 4,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=6,
            moe_intermediate_size=32,
        )
    ),
)

QUANTIZED = {
    # One scale per matrix; layer 0 stores it as a scalar, layer 1 as a vector of one.
    "ministral3-fp8": Quantized(
        FAMILIES["ministral3"],
        [(r"layers\.1.*" + LINEAR, Fp8Tensor([1])), (r"language_model.*" + LINEAR, Fp8Tensor([]))],
        dict(
            quantization_config=dict(
                quant_method="fp8",
                activation_scheme="static",
                dequantize=False,
                modules_to_not_convert=["model.vision_tower", "model.multi_modal_projector", "lm_head"],
                weight_block_size=None,
            )
        ),
    ),
    "llama-fp8-channel": Quantized(
        llama(), [(LINEAR, Fp8Channel())], compressed_tensors("float-quantized", 8, "channel")
    ),
    "llama-fp8-block": Quantized(
        Family("LlamaForCausalLM", RAGGED_LLAMA),
        [(LINEAR, Fp8Block(128))],
        dict(
            quantization_config=dict(
                quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128]
            )
        ),
    ),
    "llama-fp8-ue8m0": Quantized(
        Family("LlamaForCausalLM", RAGGED_LLAMA),
        [(LINEAR, Fp8Block(32, scales_are_powers_of_two=True))],
        dict(
            quantization_config=dict(
                quant_method="fp8",
                fmt="e4m3",
                scale_fmt="ue8m0",
                activation_scheme="dynamic",
                weight_block_size=[32, 32],
            )
        ),
    ),
    "llama-nvfp4-modelopt": Quantized(
        llama(),
        [(LINEAR, Nvfp4ModelOpt())],
        modelopt(["lm_head"]),
        {
            "hf_quant_config.json": dict(
                producer=dict(name="modelopt", version="0.37.0"),
                quantization=dict(
                    quant_algo="NVFP4", kv_cache_quant_algo=None, group_size=16, exclude_modules=["lm_head"]
                ),
            )
        },
    ),
    "llama-nvfp4-compressed": Quantized(
        llama(),
        [(LINEAR, Nvfp4CompressedTensors())],
        compressed_tensors("nvfp4-pack-quantized", 4, "tensor_group", group_size=16),
    ),
    "llama-nvfp4-mlx": Quantized(
        llama(tie_word_embeddings=False),
        [(LINEAR_AND_EMBEDDING, Nvfp4Mlx(with_global_scale=False))],
        mlx(16, 4, "nvfp4"),
    ),
    # MLX gives only experts a global scale.
    "qwen3_moe-nvfp4-mlx": Quantized(
        FAMILIES["qwen3_moe"],
        [(r"experts\.", Nvfp4Mlx(with_global_scale=True)), (LINEAR, Nvfp4Mlx(with_global_scale=False))],
        mlx(16, 4, "nvfp4"),
        rename=stack_experts_as_mlx,
    ),
    # Experts of the first and the last layer stay in BF16.
    "muse_spark-nvfp4": Quantized(
        MUSE_SPARSE,
        [
            (r"layers\.[12]\.mlp\.experts\.gate_up_proj$", Nvfp4FusedExperts(halves=2)),
            (r"layers\.[12]\.mlp\.experts\.down_proj$", Nvfp4FusedExperts(halves=1)),
        ],
        modelopt(["lm_head", "*self_attn*", "*layers.0.*", "*layers.3.*", "*vision*", "*audio*"]),
    ),
    "llama-mxfp4-mlx": Quantized(llama(), [(LINEAR_AND_EMBEDDING, Mxfp4Mlx())], mlx(32, 4, "mxfp4")),
    "llama-mxfp8-mlx": Quantized(llama(), [(LINEAR_AND_EMBEDDING, Mxfp8Mlx())], mlx(32, 8, "mxfp8")),
    # Every width and group size in one file; one matrix is left alone.
    "llama-affine-mlx": Quantized(
        llama(tie_word_embeddings=False),
        [
            *[(f"^{re.escape(layer)}\\.", AffineMlx(*setting)) for layer, setting in MIXED_BITS.items()],
            (r"^(?!model\.layers\.1\.mlp\.up_proj)(" + LINEAR_AND_EMBEDDING + ")", AffineMlx(4, 64)),
        ],
        mlx(
            64,
            4,
            **{layer: dict(group_size=group_size, bits=bits) for layer, (bits, group_size) in MIXED_BITS.items()},
            **{"model.layers.1.mlp.up_proj": False},
        ),
    ),
    # A hybrid as mlx_lm.convert leaves it: other names, gains with the 1 in them, the convolution turned.
    "qwen3_5-affine-mlx": Quantized(
        FAMILIES["qwen3_5"],
        [
            (r"(layernorm|[qk]_norm|language_model\.norm)\.weight$", GainMlx()),
            (r"conv1d\.weight$", ConvolutionMlx()),
            (r"language_model.*(proj(_\w+)?|embed_tokens)\.weight$", AffineMlx(4, 64)),
        ],
        mlx(64, 4),
        rename=wrap_as_mlx,
    ),
    "llama-gptq": Quantized(
        llama(),
        [(LINEAR, Gptq4(64))],
        dict(
            quantization_config=dict(
                quant_method="gptq", bits=4, group_size=64, desc_act=False, sym=False, checkpoint_format="gptq"
            )
        ),
    ),
    "llama-awq": Quantized(
        llama(),
        [(LINEAR, Awq4(64))],
        dict(quantization_config=dict(quant_method="awq", bits=4, group_size=64, version="gemm", zero_point=True)),
    ),
    "gpt_oss-mxfp4": Quantized(
        Family(
            "GptOssForCausalLM",
            SMALL | GPT_OSS | dict(intermediate_size=64, num_local_experts=6),
            legacy_rope_keys=True,
        ),
        [(r"experts\.(gate_up|down)_proj$", Mxfp4GptOss())],
        dict(
            quantization_config=dict(
                quant_method="mxfp4",
                modules_to_not_convert=[
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
            )
        ),
    ),
}
