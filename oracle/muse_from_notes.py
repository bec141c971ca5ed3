"""Muse Spark computed once more, from NOTES.md alone, because mlx_lm runs it only on Metal.

`python muse_from_notes.py` prints the largest difference from the kept logits, relative to the largest logit.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import silu

FIXTURE = Path(__file__).parent / "fixtures" / "muse_spark"


def rms(x, eps):
    return x * (x.pow(2).mean(-1, keepdim=True) + eps) ** -0.5


def rotate(x, theta):
    """x is [tokens, heads, width]; pairs are (i, i + width / 2)."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(len(x)), theta ** (-torch.arange(half) / half))[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def attend(q, k, v, window):
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * q.shape[-1] ** -0.5
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    hidden = (distance < 0) | (distance >= window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))


class Layer:
    def __init__(self, config, tensors, number):
        self.config, self.number = config, number
        prefix = f"model.language_model.layers.{number}."
        self.tensors = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}

    def weight(self, name):
        return self.tensors[name + ".weight"]

    def centred(self, x, norm):
        return rms(x, self.config["rms_norm_eps"]) * (1 + self.weight(norm))

    def __call__(self, x):
        branch = self.attention(self.centred(x, "input_layernorm"))
        x = self.mix(x, rms(branch, self.config["post_norm_eps"]), "post_attention_residual_gate")
        branch = self.mlp(self.centred(x, "pre_feedforward_layernorm"))
        branch = rms(branch * (1 + self.weight("post_feedforward_layernorm")), self.config["post_norm_eps"])
        return self.mix(x, branch, "post_feedforward_residual_gate")

    def mix(self, stream, branch, gate):
        w = self.tensors[gate + ".gate"] / self.config["residual_gate_temperature"]
        beta = torch.sigmoid(w)
        alpha = (torch.sigmoid(-w) * (1 + beta)).clamp(min=1e-3).sqrt()
        return alpha * stream + beta * branch

    def attention(self, x):
        config, eps = self.config, self.config["rms_norm_eps"]
        q, k, v, gate = (x @ self.weight(f"self_attn.{part}_proj").T for part in ("q", "k", "v", "gate"))
        q, k, v = (part.view(len(x), -1, config["head_dim"]) for part in (q, k, v))
        q, k = rms(q, eps) * config["qk_scale_factor"], rms(k, eps)
        if config["layer_rope_theta"][self.number]:
            q, k = (rotate(part, config["rope_parameters"]["rope_theta"]) for part in (q, k))
        slides = config["layer_types"][self.number] == "sliding_attention"
        heads = rms(attend(q, k, v, config["sliding_window"] if slides else len(x)), eps)
        return (heads.reshape(len(x), -1) * torch.sigmoid(gate)) @ self.weight("self_attn.o_proj").T

    def mlp(self, x):
        config = self.config
        if config["mlp_layer_types"][self.number] == "dense":
            gate, up, down = (self.weight(f"mlp.{part}_proj") for part in ("gate", "up", "down"))
            return (silu(x @ gate.T) * (x @ up.T)) @ down.T
        scores = torch.sigmoid(config["output_multiplier"] * (x @ self.weight("mlp.gate").T))
        biased = scores + self.tensors["mlp.gate.e_score_correction_bias"]
        chosen = biased.topk(config["num_experts_per_tok"], -1).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-15) * config["routed_scaling_factor"]
        h = self.centred(x @ self.weight("mlp.pre_expert_proj").T, "mlp.pre_expert_norm")
        gain = 1 + self.weight("mlp.experts.post_expert_norm")
        gate_up, down = self.tensors["mlp.experts.gate_up_proj"][chosen], self.tensors["mlp.experts.down_proj"][chosen]
        gate, up = torch.einsum("tkoi,ti->tko", gate_up, h).chunk(2, -1)
        outputs = torch.einsum("tkoi,tki->tko", down, silu(gate) * up)
        outputs = rms(outputs * gain, config["post_norm_eps"]) * weights[..., None]
        return outputs.sum(1) @ self.weight("mlp.post_expert_proj").T


def logits(config, tensors, tokens):
    x = rms(tensors["model.language_model.embed_tokens.weight"][tokens], config["rms_norm_eps"])
    for number in range(config["num_hidden_layers"]):
        x = Layer(config, tensors, number)(x)
    x = rms(x, config["rms_norm_eps"]) * tensors["model.language_model.norm.weight"]
    cap = config["final_logit_softcapping"]
    return cap * torch.tanh(config["output_multiplier"] * (x @ tensors["lm_head.weight"].T) / cap)


if __name__ == "__main__":
    expected = json.loads((FIXTURE / "expected.json").read_text())
    config = json.loads((FIXTURE / "config.json").read_text())["text_config"]
    tensors = {name: x.float() for name, x in load_file(FIXTURE / "model.safetensors").items()}
    computed = logits(config, tensors, torch.tensor(expected["prompt"] + expected["continuation"][:-1]))
    kept = load_file(FIXTURE / "expected.safetensors")["logits"]
    difference = (computed[expected["logit_positions"]] - kept).abs().max().item()
    print(f"{difference / expected['largest_logit']:.0e}")
