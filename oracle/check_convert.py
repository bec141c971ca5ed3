"""Converts fixtures to every format with the built program, loads the results in mlx_lm, and compares the logits.

Run by hand: `python check_convert.py PROGRAM [FIXTURE ...]`, once in the virtual environment that has mlx_lm and once in the one
that has torch (see README.md): FP8, which mlx_lm reads for few architectures, goes to transformers and its own dequantization.

Prints a table: fixture, format, quantized weights, and two differences, the largest over all logits relative to the largest
logit: between the other program and `consort logits` on the converted directory, and between the converted and the original
model in Consort. All compute in float32, Consort with a cache of f32: mlx_lm's parameters are widened after loading, which changes no
value.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

FIXTURES = Path(__file__).parent / "fixtures"
MLX_FORMATS = ["bf16", "nvfp4", "mxfp4", "mxfp8", "affine4", "affine8"]
TORCH_FORMATS = ["bf16", "fp8"]
DEFAULT = ["llama-llama3-bias", "llama-gguf", "ministral3", "qwen2", "qwen3", "qwen3_moe", "gemma3_text"]
TORCH_DEFAULT = [*DEFAULT, "mistral"]  # mlx_lm knows no model whose layers all have a window
TOLERANCE = 5e-3


def program(*arguments) -> dict:
    done = subprocess.run([*map(str, arguments), "--json"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout)


def mlx_logits(directory: Path, tokens: list[int]) -> np.ndarray:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    model, _ = load_model(directory)
    model.set_dtype(mx.float32)
    return np.array(model(mx.array([tokens]))[0])


def transformers_logits(directory: Path, tokens: list[int]) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    quantized = "quantization_config" in json.loads((directory / "config.json").read_text())
    settings = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if quantized else {}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **settings)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def source(fixture: Path) -> Path:
    models = sorted(fixture.glob("*.gguf"))
    return models[0] if models else fixture


if __name__ == "__main__":
    consort = sys.argv[1]
    mlx = find_spec("mlx") is not None
    formats, load = (MLX_FORMATS, mlx_logits) if mlx else (TORCH_FORMATS, transformers_logits)
    names = sys.argv[2:] or (DEFAULT if mlx else TORCH_DEFAULT)
    failed = False
    for name in names:
        expected = json.loads((FIXTURES / name / "expected.json").read_text())
        tokens = expected["prompt"] + expected["continuation"][:-1]
        ids = ",".join(map(str, tokens))
        exact = ["--tokens", ids, "--activations", "exact", "--kv-format", "f32"]
        original = program(consort, "logits", "-m", source(FIXTURES / name), *exact)
        for to in formats:
            with TemporaryDirectory() as parent:
                output = Path(parent) / "converted"
                try:
                    report = program(consort, "convert", "-m", source(FIXTURES / name), "--to", to, "--output", output)
                    answer = program(consort, "logits", "-m", output, *exact)
                    ours = np.array(answer["logits"])
                    theirs = load(output, tokens)
                except Exception as error:
                    failed = True
                    message = str(error).splitlines()
                    print(f"| {name} | {to} | {type(error).__name__}: {message[0][:150] if message else ''} |", flush=True)
                    continue
            largest = np.abs(ours).max()
            difference = np.abs(ours - theirs).max() / largest
            change = np.abs(ours - np.array(original["logits"])).max() / largest
            failed |= not difference < TOLERANCE
            quantized = sum(tensor["to"] != "BF16" for tensor in report["tensors"])
            print(f"| {name} | {to} | {quantized} | {difference:.0e} | {change:.0e} |", flush=True)
    sys.exit(failed)
