"""Asks mlx_lm for the logits of every fixture that it can read, and prints how far they are from the reference.

Needs its own virtual environment (see README.md): `python second_opinion.py [name ...]`.
The difference is the largest over all kept logits, relative to the largest logit, in float32 on the CPU. mlx_lm gets a
copy in float32, because it would round norm weights again after adding one, and with the config keys that it knows.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

FIXTURES = Path(__file__).parent / "fixtures"


def copy_for_mlx(directory: Path, copy: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    for level in (config, config.get("text_config", {})):
        if "rope_parameters" in level and "sliding_attention" not in level["rope_parameters"]:
            parameters = level["rope_parameters"]
            level.setdefault("rope_theta", parameters["rope_theta"])
            level.setdefault("rope_scaling", parameters if parameters["rope_type"] != "default" else None)
            if "partial_rotary_factor" in parameters:
                level.setdefault("partial_rotary_factor", parameters["partial_rotary_factor"])
    (copy / "config.json").write_text(json.dumps(config))
    tensors = mx.load(str(directory / "model.safetensors"))
    tensors = {
        name: x.astype(mx.float32) if x.dtype in (mx.bfloat16, mx.float16) else x
        for name, x in tensors.items()
        if not name.endswith(".g_idx")  # refused even where it changes nothing, as here
    }
    mx.save_safetensors(str(copy / "model.safetensors"), tensors)


def difference(directory: Path) -> float:
    expected = json.loads((directory / "expected.json").read_text())
    reference = np.array(mx.load(str(directory / "expected.safetensors"))["logits"])
    with TemporaryDirectory() as copy:
        copy_for_mlx(directory, Path(copy))
        model, _ = load_model(Path(copy), strict=False)
    cache = make_prompt_cache(model)
    prefill = model(mx.array([expected["prompt"]]), cache=cache)
    steps = [model(mx.array([[token]]), cache=cache) for token in expected["continuation"][:-1]]
    logits = np.array(mx.concatenate([prefill, *steps], axis=1)[0])[expected["logit_positions"]]
    return np.abs(logits - reference).max() / expected["largest_logit"]


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    for name in sys.argv[1:] or sorted(path.name for path in FIXTURES.iterdir()):
        try:
            print(f"| {name} | {difference(FIXTURES / name):.0e} |", flush=True)
        except Exception as error:
            print(f"| {name} | {type(error).__name__}: {str(error).splitlines()[0][:100]} |", flush=True)
