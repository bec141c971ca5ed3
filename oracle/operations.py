"""Writes the fixture of consort-compute's operation tests: inputs, and what torch and transformers make of them.

    pip install numpy torch transformers
    python oracle/operations.py crates/consort-compute/tests/data

A matrix is [rows, columns, little-endian f32 in hexadecimal]. Results are computed in f64 where the reference allows.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_next import modeling_qwen3_next

torch.manual_seed(7)


def random(rows, cols, scale=1.0):
    return torch.randn(rows, cols, dtype=torch.float32) * scale


def matrix(values):
    values = values.detach().float()
    values = values.reshape(-1, values.shape[-1])
    return [*values.shape, values.contiguous().numpy().tobytes().hex()]


cases = []


def case(operation, parameters, inputs, outputs):
    cases.append({
        "operation": operation,
        "parameters": parameters,
        "inputs": {name: matrix(values) for name, values in inputs.items()},
        "outputs": {name: matrix(values) for name, values in outputs.items()},
    })  # fmt: skip


# Norms, over whole rows and over heads.

x, epsilon = random(3, 24, 3.0), 1e-5
for width in (24, 8):
    gain = random(1, width)
    groups, wide_gain = x.double().reshape(3, -1, width), gain.double().reshape(-1)
    for order, result in {
        "none": F.rms_norm(groups, (width,), None, epsilon),
        "after": F.rms_norm(groups, (width,), wide_gain, epsilon),
        "before": F.rms_norm(groups * wide_gain, (width,), None, epsilon),
    }.items():
        parameters = {"width": width, "gain": order, "epsilon": epsilon}
        case("rms_norm", parameters, {"x": x, "gain": gain}, {"out": result.reshape(3, 24)})


# Gated activations, far into both tails.

gate = torch.cat([random(2, 24, 3.0), torch.tensor([[-30, -9, -5, -1e-4, 0, 1e-4, 5, 9, 30, 300, 7, -7] * 2]).float()])
up = random(3, 24, 5.0)
up[2, 9] = 300.0
experts = SimpleNamespace(limit=7.0, alpha=1.702)
interleaved = torch.stack([gate.double(), up.double()], dim=-1).reshape(3, 48)
for name, result in {
    "silu": F.silu(gate.double()) * up,
    "gelu": F.gelu(gate.double()) * up,
    "gelu_tanh": F.gelu(gate.double(), approximate="tanh") * up,
    "clamped_swiglu": modeling_gpt_oss.GptOssExperts._apply_gate(experts, interleaved),
}.items():
    case("gated", {"activation": name}, {"gate": gate, "up": up}, {"out": result})


# Rotary embeddings, at small and large positions, over whole heads and parts of them.

positions = torch.tensor([0, 1, 77, 40_000, 1_048_575])
heads, head_dim = 2, 16
for rotary_dims, magnitude in ((16, 1.0), (8, 1.4158883)):
    x = random(len(positions), heads * head_dim)
    frequencies = (500_000.0 ** (-torch.arange(0, rotary_dims, 2).float() / rotary_dims)).float()
    angles = (positions[:, None].float() * frequencies[None, :]).double()
    rotated, rest = x.double().reshape(-1, heads, head_dim).split([rotary_dims, head_dim - rotary_dims], dim=-1)
    inputs = {"x": x, "frequencies": frequencies[None]}
    parameters = {"head_dim": head_dim, "positions": positions.tolist(), "magnitude": magnitude}

    # Hugging Face's order.
    both = torch.cat([angles, angles], dim=-1)[None]
    states = rotated.transpose(0, 1)[None]
    result, _ = modeling_llama.apply_rotary_pos_emb(states, states, both.cos() * magnitude, both.sin() * magnitude)
    result = torch.cat([result[0].transpose(0, 1), rest], dim=-1)
    case("rope", parameters | {"pairs": "halves"}, inputs, {"out": result.reshape(len(positions), -1)})

    # The original order: complex numbers.
    pairs = torch.view_as_complex(rotated.reshape(len(positions), heads, -1, 2).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.tensor(magnitude).double(), angles)[:, None])
    result = torch.cat([turned.reshape(len(positions), heads, rotary_dims), rest], dim=-1)
    case("rope", parameters | {"pairs": "interleaved"}, inputs, {"out": result.reshape(len(positions), -1)})


# Attention over prompts around the width of a window, six tokens decoded after each.

heads, kv_heads, key_dim, value_dim, scale = 4, 2, 6, 4, 0.3


def attention_case(tokens, window=None, softcap=None, sinks=None):
    q, k = random(tokens, heads * key_dim, 2.0), random(tokens, kv_heads * key_dim, 2.0)
    v = random(tokens, kv_heads * value_dim)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    visible = (distance >= 0) & (distance < (window or tokens))
    mask = torch.zeros(tokens, tokens, dtype=torch.float64).masked_fill(~visible, float("-inf"))[None, None]
    widths = ((q, key_dim), (k, key_dim), (v, value_dim))
    states = [x.double().reshape(1, tokens, -1, width).transpose(1, 2) for x, width in widths]
    module = SimpleNamespace(num_key_value_groups=heads // kv_heads, training=False)
    inputs = {"q": q, "k": k, "v": v}
    if sinks is not None:
        module.sinks = sinks.double()
        inputs["sinks"] = sinks
        result, _ = modeling_gpt_oss.eager_attention_forward(module, *states, mask, scale)
    else:
        result, _ = modeling_gemma2.eager_attention_forward(module, *states, mask, scaling=scale, softcap=softcap)
    parameters = {"heads": heads, "kv_heads": kv_heads, "scale": scale, "window": window, "softcap": softcap}
    case("attention", parameters, inputs, {"out": result.reshape(tokens, -1)})


for prompt in (3, 4, 5, 9):
    attention_case(prompt + 6, window=4)
attention_case(9)
attention_case(9, softcap=1.5)
attention_case(9, window=4, sinks=random(1, heads, 2.0))


# Mixture of experts: the choice, and the sum of the chosen products.

tokens, experts, top_k = 5, 8, 3
logits = random(tokens, experts, 2.0)
correction = random(1, experts, 0.5)
wide = logits.double()
softmax_weights, softmax_experts = wide.softmax(-1).topk(top_k)
top_logits, top_experts = wide.topk(top_k)
sigmoids = wide.sigmoid()
sigmoid_experts = (sigmoids + correction.double()).topk(top_k).indices
sigmoid_weights = sigmoids.gather(1, sigmoid_experts)
x, weights = random(tokens, 8), random(experts * 3, 8)
products = torch.einsum("tc,erc->ter", x.double(), weights.double().reshape(experts, 3, 8))
for score, chosen, factors, parameters in (
    ("softmax", softmax_experts, softmax_weights / softmax_weights.sum(-1, keepdim=True), {"normalize": 0.0, "scale": 1.0}),
    ("softmax", softmax_experts, softmax_weights * 2.5, {"normalize": None, "scale": 2.5}),
    ("softmax_of_top", top_experts, top_logits.softmax(-1), {"normalize": None, "scale": 1.0}),
    ("sigmoid", sigmoid_experts, sigmoid_weights / (sigmoid_weights.sum(-1, keepdim=True) + 1e-20) * 2.5,
     {"normalize": 1e-20, "scale": 2.5}),
):  # fmt: skip
    combined = (products.gather(1, chosen[..., None].expand(-1, -1, 3)) * factors[..., None]).sum(1)
    inputs = {"logits": logits, "x": x, "weights": weights}
    if score == "sigmoid":
        inputs["correction"] = correction
    outputs = {"experts": chosen.float(), "weights": factors, "combined": combined}
    case("route", {"score": score, "top_k": top_k} | parameters, inputs, outputs)


# Recurrent layers.

tokens, channels, kernel = 7, 10, 4
x, weight = random(tokens, channels), random(channels, kernel)
padded = F.pad(x.double().T[None], (kernel - 1, 0))
result = F.silu(F.conv1d(padded, weight.double()[:, None], groups=channels))[0].T
case("causal_conv", {}, {"x": x, "weight": weight}, {"out": result})

key_heads, value_heads, key_dim, value_dim = 2, 4, 8, 6
keys = key_heads * key_dim
qkv = random(tokens, 2 * keys + value_heads * value_dim)
qkv[2, : 2 * keys] *= 1e-3  # so short that the epsilon of the normalization shows
a, b = random(tokens, value_heads, 2.0), random(tokens, value_heads, 2.0)
a[0, 0], a[1, 1] = 60.0, -60.0
a_log, dt_bias = random(1, value_heads, 0.5), random(1, value_heads)
decay = -a_log.double().exp() * F.softplus(a.double() + dt_bias.double())
beta = b.double().sigmoid()
case("delta_gates", {}, {"a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias}, {"decay": decay, "beta": beta})
q, k, v = qkv.split([keys, keys, value_heads * value_dim], dim=-1)
result, state = modeling_qwen3_next.torch_recurrent_gated_delta_rule(
    q.reshape(1, tokens, key_heads, key_dim),
    k.reshape(1, tokens, key_heads, key_dim),
    v.reshape(1, tokens, value_heads, value_dim),
    g=decay.float()[None],
    beta=beta.float()[None],
    output_final_state=True,
    use_qk_l2norm_in_kernel=True,
)
case(
    "delta_rule",
    {"key_heads": key_heads, "value_heads": value_heads, "key_dim": key_dim, "value_dim": value_dim},
    {"qkv": qkv, "decay": decay, "beta": beta},
    {"out": result.reshape(tokens, -1), "state": state.reshape(1, -1)},
)

path = Path(sys.argv[1]) / "operations.json"
path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")
print(path, len(cases), "cases,", path.stat().st_size, "bytes")
