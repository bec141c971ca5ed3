"""GGUF files of Qwen 2, 3.5 and 3 Next with the values of the safetensors fixtures, in the order that llama.cpp's converter gives them.

Run by hand: `python oracle/gguf_qwen.py`, in a virtual environment with gguf 0.19.0, numpy and safetensors. Values are stored without
loss (BF16 and F32), so that the expected logits of the safetensors fixture hold; they are copied beside the new file.

What the converter does (`conversion/qwen.py` of llama.cpp): of Qwen 2 it changes nothing but names. Otherwise it adds one to the gains of norms, stores `-exp(A_log)`, drops the middle
dimension of the convolution, stacks experts, takes queries, keys, values and gates of Qwen 3 Next apart, and puts the value heads of
Qwen 3.5 in rounds, the first of every key head, then the second of every key head.
"""

import json
import re
import shutil
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from gguf_tokens import write_tokens

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.gate_proj.weight": "ffn_gate_exps.weight",
    "mlp.experts.up_proj.weight": "ffn_up_exps.weight",
    "mlp.experts.down_proj.weight": "ffn_down_exps.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
}


def read(path: Path) -> dict[str, np.ndarray]:
    """All tensors as f32; the safetensors package gives numpy no BF16."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        raw = data[start:end]
        match entry["dtype"]:
            case "BF16":
                values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
            case "F32":
                values = np.frombuffer(raw, "<f4")
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def in_rounds(tensor: np.ndarray, config: dict, width: int, axis: int = 0) -> np.ndarray:
    """Value heads of `width` values along `axis`, from those of each key head together to one of each in turn."""
    keys = config["linear_num_key_heads"]
    tensor = np.moveaxis(tensor, axis, 0)
    heads = tensor.reshape(keys, -1, width, *tensor.shape[1:]).swapaxes(0, 1)
    return np.moveaxis(heads.reshape(tensor.shape), 0, axis)


# Qwen 2 has another norm behind the attention than its successors.
QWEN2_NAMES = NAMES | {"post_attention_layernorm.weight": "ffn_norm.weight"}


def converted_qwen2(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out = {}
    for name, tensor in tensors.items():
        local, prefix = name.removeprefix("model."), ""
        if local.startswith("layers."):
            _, layer, local = local.split(".", 2)
            prefix = f"blk.{layer}."
        weight, is_bias = re.subn(r"\.bias$", ".weight", local)
        out_name = QWEN2_NAMES[weight]
        out[prefix + (out_name.replace(".weight", ".bias") if is_bias else out_name)] = tensor
    return out


def converted(tensors: dict[str, np.ndarray], config: dict, rounds: bool) -> dict[str, np.ndarray]:
    keys, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    out = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        name = name.replace("model.language_model.", "model.")
        if "visual" in name or name.startswith("mtp."):
            continue
        if name == "lm_head.weight":
            out["output.weight"] = tensor
            continue
        local = name.removeprefix("model.")
        prefix = ""
        if local.startswith("layers."):
            _, layer, local = local.split(".", 2)
            prefix = f"blk.{layer}."
        if local.endswith("norm.weight") and local != "linear_attn.norm.weight":
            tensor = tensor + 1
        if local == "linear_attn.conv1d.weight":
            tensor = tensor.squeeze(1)
        if local == "linear_attn.A_log":
            tensor = -np.exp(tensor)
        if local == "linear_attn.in_proj_qkvz.weight":
            group = values // keys * value_dim
            q, k, v, z = np.split(tensor.reshape(keys, -1, tensor.shape[-1]), np.cumsum([key_dim, key_dim, group]), axis=1)
            flat = lambda part: part.reshape(-1, tensor.shape[-1])
            out[prefix + "attn_qkv.weight"] = np.concatenate([flat(q), flat(k), flat(v)])
            out[prefix + "attn_gate.weight"] = flat(z)
            continue
        if rounds and local.startswith("linear_attn.") and local != "linear_attn.norm.weight":
            kind = local.removeprefix("linear_attn.").removesuffix(".weight")
            if kind in ("in_proj_qkv", "conv1d"):
                before = 2 * keys * key_dim
                tensor = np.concatenate([tensor[:before], in_rounds(tensor[before:], config, value_dim)])
            elif kind == "in_proj_z":
                tensor = in_rounds(tensor, config, value_dim)
            elif kind == "out_proj":
                tensor = in_rounds(tensor, config, value_dim, axis=1)
            else:
                tensor = in_rounds(tensor, config, 1)
        if local.startswith("mlp.experts."):
            parts = local.split(".")
            if parts[2] == "gate_up_proj":
                gate, up = np.split(tensor, 2, axis=1)
                out[prefix + NAMES["mlp.experts.gate_proj.weight"]] = gate
                out[prefix + NAMES["mlp.experts.up_proj.weight"]] = up
            elif parts[2] == "down_proj":
                out[prefix + NAMES["mlp.experts.down_proj.weight"]] = tensor
            else:
                stacked = prefix + NAMES[f"mlp.experts.{parts[3]}.weight"]
                experts.setdefault(stacked, {})[int(parts[2])] = tensor
            continue
        out[prefix + NAMES[local]] = tensor
    for name, bank in experts.items():
        out[name] = np.stack([bank[expert] for expert in sorted(bank)])
    return out


def write_hybrid(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(4)


def write(source: str, target: str, architecture: str) -> None:
    directory = FIXTURES / target
    directory.mkdir(exist_ok=True)
    config = json.loads((FIXTURES / source / "config.json").read_text())
    config = config.get("text_config", config)
    tensors = read(FIXTURES / source / "model.safetensors")
    is_qwen2 = architecture == "qwen2"
    tensors = converted_qwen2(tensors) if is_qwen2 else converted(tensors, config, rounds=architecture != "qwen3next")

    writer = gguf.GGUFWriter(directory / "model.gguf", architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if is_qwen2:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config["rope_theta"])
    else:
        write_hybrid(writer, config)
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    write_tokens(writer, config["vocab_size"])
    for name, tensor in tensors.items():
        tensor = np.ascontiguousarray(tensor, np.float32)
        if tensor.ndim > 1 and np.array_equal(gguf.dequantize(gguf.quantize(tensor, Type.BF16), Type.BF16), tensor):
            writer.add_tensor(name, gguf.quantize(tensor, Type.BF16), raw_dtype=Type.BF16)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for file in ["expected.json", "expected.safetensors"]:
        shutil.copy(FIXTURES / source / file, directory / file)


write("qwen2", "qwen2-gguf", "qwen2")
write("qwen3_5", "qwen3_5-gguf", "qwen35")
write("qwen3_5_moe", "qwen3_5_moe-gguf", "qwen35moe")
write("qwen3_next", "qwen3_next-gguf", "qwen3next")
