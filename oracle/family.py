"""What a fixture of a family consists of, and how the published files differ from what `save_pretrained` writes."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass
class Family:
    """A tiny model: a class of transformers and its config."""

    model_class: str
    config: dict
    prompt_tokens: int = 40
    legacy_rope_keys: bool = False  # publish `rope_theta` and `rope_scaling` as checkpoints before 2026 do
    drop_keys: list[str] = field(default_factory=list)  # config keys that published checkpoints leave out
    rename_keys: dict[str, str] = field(default_factory=dict)  # config keys that published checkpoints call otherwise
    ranges: list = field(default_factory=list)  # rules for draw.py, before its own
    gains: list = field(default_factory=list)
    publish: Callable[[dict], dict] = lambda tensors: tensors  # the saved tensors -> the published ones

    @property
    def family(self) -> "Family":
        return self

    def store(self, plain: Path, directory: Path, seed: int) -> None:
        """Writes the published files, given those of `save_pretrained`."""
        shutil.copy(plain / "model.safetensors", directory)
        self.write_config(plain, directory)

    def write_config(self, plain: Path, directory: Path, **additions) -> None:
        config = json.loads((plain / "config.json").read_text())
        if self.legacy_rope_keys:
            parameters = config.pop("rope_parameters")
            if "full_attention" in parameters:
                config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
                parameters = parameters["full_attention"]
            config["rope_theta"] = parameters.pop("rope_theta")
            config["rope_scaling"] = parameters if parameters["rope_type"] != "default" else None
            config["torch_dtype"] = config.pop("dtype")
        for key in self.drop_keys:
            del config[key]
        for key, published in self.rename_keys.items():
            config[published] = config.pop(key)
        (directory / "config.json").write_text(json.dumps(config | additions, indent=2) + "\n")


def fuse_experts(tensors: dict) -> dict:
    """Stacks the experts of a layer as Qwen 3.5 publishes them: gate over up `[experts, 2 * width, hidden]`, down."""
    parts = {}
    fused = {}
    for name, tensor in sorted(tensors.items()):
        prefix, _, expert = name.partition("mlp.experts.")
        if expert:
            index, projection, _ = expert.split(".")
            parts.setdefault(f"{prefix}mlp.experts.", {}).setdefault(projection, {})[int(index)] = tensor
        else:
            fused[name] = tensor
    for prefix, projections in parts.items():
        gate, up, down = (
            torch.stack([experts[i] for i in range(len(experts))])
            for experts in (projections[name] for name in ("gate_proj", "up_proj", "down_proj"))
        )
        fused[prefix + "gate_up_proj"] = torch.cat([gate, up], dim=1)
        fused[prefix + "down_proj"] = down
    return fused


def add_token_prediction(tensors: dict) -> dict:
    """Adds some of the multi-token prediction weights that Qwen publishes along and inference leaves alone."""
    hidden = tensors["model.language_model.norm.weight"].shape[0]
    head = {
        "mtp.norm.weight": [hidden],
        "mtp.pre_fc_norm_hidden.weight": [hidden],
        "mtp.fc.weight": [hidden, 2 * hidden],
    }
    return tensors | {name: torch.full(shape, 0.25, dtype=torch.bfloat16) for name, shape in head.items()}
