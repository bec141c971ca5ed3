"""Fills corpus/ with the small files that fuzzing starts from, and writes weights.safetensors: `python seeds.py`."""

import json
import pathlib
import shutil
import struct

HERE = pathlib.Path(__file__).parent
SCHEMES = HERE.parent / "crates/consort-checkpoint/tests/schemes"


def safetensors(tensors):
    header, data = {}, b""
    for name, dtype, shape, size in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + size]}
        data += bytes(i * 37 & 0x77 for i in range(size))
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + data


MODULES = {
    "fp8": [("weight", "F8_E4M3", [4, 64], 256), ("weight_scale", "F32", [], 4)],
    "nvfp4": [("weight", "U8", [4, 16], 64), ("weight_scale", "F8_E4M3", [4, 2], 8), ("weight_scale_2", "F32", [], 4)],
    "mlx": [("weight", "U32", [4, 4], 64), ("scales", "F16", [4, 1], 8), ("biases", "F16", [4, 1], 8)],
    "gptq": [("qweight", "I32", [4, 8], 128), ("qzeros", "I32", [1, 1], 4), ("scales", "F16", [1, 8], 16)],
    "plain": [("weight", "BF16", [4, 8], 64)],
}


def module(name):
    return [(f"model.{name}.{parameter}", *rest) for parameter, *rest in MODULES[name]]


corpus = HERE / "corpus"
for target in ["safetensors", "gguf", "config"]:
    (corpus / target).mkdir(parents=True, exist_ok=True)
for name in MODULES:
    (corpus / "safetensors" / name).write_bytes(safetensors(module(name)))
blocks = [("model.mlp.experts.down_proj_blocks", "U8", [2, 2, 1, 16], 64),
          ("model.mlp.experts.down_proj_scales", "U8", [2, 2, 1], 4)]
(corpus / "safetensors" / "oss").write_bytes(safetensors(blocks))
(HERE / "weights.safetensors").write_bytes(safetensors(module("plain") + module("fp8")))
for name in ["gguf-split/model-00001-of-00003.gguf", "gguf/model.gguf"]:
    data = (SCHEMES / name).read_bytes()
    (corpus / "gguf" / name.split("/")[0]).write_bytes(data)
for directory in SCHEMES.iterdir():
    if (directory / "config.json").exists():
        shutil.copy(directory / "config.json", corpus / "config" / directory.name)
(corpus / "config" / "floats").write_text('{"model_type": "x", "a": {"__float__": "Infinity"}, "b": [NaN, -Infinity]}')
(corpus / "config" / "index").write_text('{"weight_map": {"model.plain.weight": "model.safetensors"}}')
