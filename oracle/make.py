"""Makes the fixtures: `python make.py [name ...]` (all of them without a name)."""

import json
import logging
import shutil
import sys
from pathlib import Path

import torch
import transformers

from draw import redraw, round_to_bf16
from families import FAMILIES, Family
from reference import difference_without_cache, find_run, write_expected

FIXTURES = Path(__file__).parent / "fixtures"
SEEDS = range(100)


def make(name: str, family: Family) -> None:
    model_class = getattr(transformers, family.model_class)
    config = model_class.config_class(**family.config)
    for seed in SEEDS:
        directory = write_checkpoint(FIXTURES / name, model_class, config, seed)
        model = model_class.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
        if run := find_run(model, family.prompt_tokens, seed):
            break
    else:
        raise RuntimeError(f"{name}: every continuation comes near a tie")
    without_cache = difference_without_cache(model, run)
    edit_config(directory / "config.json", family)
    write_expected(directory, run, weights="BF16", seed=seed, difference_without_cache=float(f"{without_cache:.1e}"))
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(
        f"{name:24} seed {seed:2} margin {run.margins.min():.3f} distinct {len(set(run.continuation)):2} "
        f"largest logit {run.largest_logit:5.1f} without cache {without_cache:.1e} {size / 1000:4.0f} kB",
        flush=True,
    )


def write_checkpoint(directory: Path, model_class, config, seed: int) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    torch.manual_seed(seed)
    model = model_class(config)
    redraw(model, seed)
    round_to_bf16(model)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    return directory


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
    transformers.utils.logging.disable_progress_bar()
    for name in sys.argv[1:] or FAMILIES:
        make(name, FAMILIES[name])
