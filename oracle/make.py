"""Makes the fixtures: `python make.py [name ...]` (all of them without a name)."""

import json
import logging
import shutil
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from draw import redraw, round_to_bf16
from families import FAMILIES, Family
from reference import difference_without_cache, find_prompt, greedy, write_expected

FIXTURES = Path(__file__).parent / "fixtures"
SEEDS = range(100)


def make(name: str, family: Family) -> None:
    model_class = getattr(transformers, family.model_class)
    config = model_class.config_class(**family.config)
    directory = FIXTURES / name
    for seed in SEEDS:
        write_checkpoint(directory, family, config, seed)
        if prompt := find_prompt(load(model_class, directory), family.prompt_tokens, seed):
            break
    else:
        raise RuntimeError(f"{name}: every continuation comes near a tie")
    model = load(model_class, directory)  # anew, because dynamic RoPE remembers the longest sequence that it has seen
    run = greedy(model, torch.tensor([prompt]))[0]
    without_cache = difference_without_cache(model, run)
    edit_config(directory / "config.json", family)
    write_expected(directory, run, weights="BF16", seed=seed, difference_without_cache=float(f"{without_cache:.1e}"))
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(
        f"{name:24} seed {seed:2} margin {run.margins.min():.3f} variety {run.variety:2} "
        f"largest logit {run.largest_logit:5.1f} without cache {without_cache:.1e} {size / 1000:4.0f} kB",
        flush=True,
    )


def load(model_class, directory: Path):
    return model_class.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def write_checkpoint(directory: Path, family: Family, config, seed: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    model = getattr(transformers, family.model_class)(config)
    redraw(model, seed, family.ranges, family.gains)
    round_to_bf16(model)
    model.save_pretrained(directory)
    if family.publish:
        path = directory / "model.safetensors"
        save_file(family.publish(load_file(path)), path, metadata={"format": "pt"})
    (directory / "generation_config.json").unlink(missing_ok=True)


def edit_config(path: Path, family: Family) -> None:
    """Makes config.json look as the published ones do."""
    config = json.loads(path.read_text())
    if family.legacy_rope_keys:
        parameters = config.pop("rope_parameters")
        config["rope_theta"] = parameters.pop("rope_theta")
        config["rope_scaling"] = parameters if parameters["rope_type"] != "default" else None
        config["torch_dtype"] = config.pop("dtype")
    for key in family.drop_keys:
        del config[key]
    path.write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name in sys.argv[1:] or FAMILIES:
        make(name, FAMILIES[name])
