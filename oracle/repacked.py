"""The GPTQ fixture in another spelling of integers: the same values, so that its expected logits hold.

Run by hand: `python oracle/repacked.py`, in a virtual environment with numpy.

* llama-int4-compressed: `pack-quantized` of compressed-tensors, with zero points, rows as they are.
"""

import json
import shutil
from pathlib import Path

import numpy as np

FIXTURES = Path(__file__).parent / "fixtures"
SOURCE = FIXTURES / "llama-gptq"


def unpack(words: np.ndarray, axis: int) -> np.ndarray:
    words = np.moveaxis(words.view(np.uint32), axis, -1)
    codes = (words[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15).reshape(*words.shape[:-1], -1)
    return np.moveaxis(codes, -1, axis)


def pack(codes: np.ndarray, axis: int) -> np.ndarray:
    codes = np.moveaxis(codes, axis, -1).astype(np.uint32)
    codes = codes.reshape(*codes.shape[:-1], -1, 8)
    words = np.bitwise_or.reduce(codes << (4 * np.arange(8, dtype=np.uint32)), -1)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def compressed(module: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    codes, zeros = unpack(module["qweight"], 0), unpack(module["qzeros"], 1) + 1  # GPTQ stores them less one
    assert zeros.max() < 16
    shape = np.array([codes.shape[1], codes.shape[0]])
    return {"weight_packed": pack(codes.T, 1), "weight_scale": np.ascontiguousarray(module["scales"].T),
            "weight_zero_point": pack(zeros.T, 0), "weight_shape": shape}


def write(name: str, convert, settings: dict) -> None:
    directory = FIXTURES / name
    directory.mkdir(exist_ok=True)
    config = json.loads((SOURCE / "config.json").read_text())
    config["quantization_config"] = settings
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    # numpy has no BF16: tensors of that type are copied as bytes.
    data = (SOURCE / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    modules, tensors = {}, []
    kinds = {"I32": np.int32, "F16": np.float16, "BF16": np.uint16, "F32": np.float32, "I64": np.int64}
    for tensor, entry in json.loads(data[8 : 8 + length]).items():
        if tensor == "__metadata__":
            continue
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        values = np.frombuffer(data[start:end], kinds[entry["dtype"]]).reshape(entry["shape"])
        module, parameter = tensor.rsplit(".", 1)
        if parameter in ("qweight", "qzeros", "scales", "g_idx"):
            modules.setdefault(module, {})[parameter] = values
        else:
            tensors.append((tensor, entry["dtype"], values))
    names = {np.dtype(np.int32): "I32", np.dtype(np.float16): "F16", np.dtype(np.int64): "I64"}
    for module, parameters in modules.items():
        tensors += [(f"{module}.{key}", names[values.dtype], values) for key, values in convert(parameters).items()]
    header, body = {}, b""
    for tensor, dtype, values in sorted(tensors, key=lambda item: -item[2].itemsize):
        raw = np.ascontiguousarray(values).tobytes()
        header[tensor] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    for file in ["expected.json", "expected.safetensors"]:
        shutil.copy(SOURCE / file, directory / file)


gptq = json.loads((SOURCE / "config.json").read_text())["quantization_config"]
weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": gptq["group_size"]}
write("llama-int4-compressed", compressed, {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
})
