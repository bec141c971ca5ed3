"""Makes the fixtures: `python make.py [name ...]` (all of them without a name)."""

import logging
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from safetensors.torch import load_file, save_file

from draw import redraw, round_to_bf16
from families import FAMILIES
from family import Family
from gguf_files import GGUF
from quantized import QUANTIZED
from reference import difference_without_cache, find_prompt, greedy, write_expected

ALL = FAMILIES | QUANTIZED | GGUF
FIXTURES = Path(__file__).parent / "fixtures"
SEEDS = range(100)


def make(name: str, directory: Path, plain: Path) -> None:
    """Fills `directory`; `plain` holds the same model in plain numbers, for the reference."""
    fixture = ALL[name]
    family = fixture.family
    for seed in SEEDS:
        draw_checkpoint(family, plain, seed)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        fixture.store(plain, directory, seed)
        if prompt := find_prompt(load(family, plain), family.prompt_tokens, seed):
            break
    else:
        raise RuntimeError(f"{name}: every continuation comes near a tie")
    model = load(family, plain)  # anew, because dynamic RoPE remembers the longest sequence that it has seen
    run = greedy(model, torch.tensor([prompt]))[0]
    without_cache = difference_without_cache(model, run)
    write_expected(directory, run, seed=seed, difference_without_cache=float(f"{without_cache:.1e}"))
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(
        f"{name:24} seed {seed:2} margin {run.margins.min():.3f} variety {run.variety:2} "
        f"largest logit {run.largest_logit:5.1f} without cache {without_cache:.1e} {size / 1000:4.0f} kB",
        flush=True,
    )


def draw_checkpoint(family: Family, directory: Path, seed: int) -> None:
    model_class = getattr(transformers, family.model_class)
    model = model_class(model_class.config_class(**family.config))
    redraw(model, seed, family.ranges, family.gains)
    round_to_bf16(model)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    path = directory / "model.safetensors"
    save_file(family.publish(load_file(path)), path, metadata={"format": "pt"})


def load(family: Family, directory: Path):
    model_class = getattr(transformers, family.model_class)
    return model_class.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name in sys.argv[1:] or ALL:
        with TemporaryDirectory() as plain:
            make(name, FIXTURES / name, Path(plain))
