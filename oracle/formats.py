"""Writes the fixtures of consort-compute's format tests: stored bytes and the values that other implementations read from
them, or write for given values.

    pip install numpy ml_dtypes gguf 'mlx[cpu]'
    python oracle/formats.py crates/consort-compute/tests/data

Every file is a list of cases, one a line. Bytes and little-endian f32 values are hexadecimal, so that nothing is lost.
"""

import json
import sys
from pathlib import Path

import gguf
import ml_dtypes
import mlx.core as mx
import numpy as np

random = np.random.default_rng(20)


def hexadecimal(values):
    return np.ascontiguousarray(values).tobytes().hex()


def write(path, cases):
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")
    print(path, len(cases), "cases,", path.stat().st_size, "bytes")


# Every code of the small floating point formats, by ml_dtypes.


def codes(name, dtype, count):
    values = np.arange(count, dtype=np.uint8).view(dtype).astype(np.float32)
    return {"format": name, "values": hexadecimal(values)}


code_cases = [
    codes("E4M3", ml_dtypes.float8_e4m3fn, 256),
    codes("E2M1", ml_dtypes.float4_e2m1fn, 16),
    codes("E8M0", ml_dtypes.float8_e8m0fnu, 256),
]


# GGUF blocks, by the gguf package.

GGUF_FORMATS = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS".split()
# Where the half precision factors of a block are.
GGUF_FACTORS = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
}  # fmt: skip


def gguf_case(name):
    kind = gguf.GGMLQuantizationType[name]
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (8 if values == 32 else 3, size), dtype=np.uint8)
    # All codes at their ends, and factors that are large, tiny (subnormal), negative and zero.
    blocks[-1] = 0xFF
    blocks[-2] = 0x00
    factors = np.array([0.0371, -1.25, 6e-8, 0.0, 1023.5, -0.004, 2.5, -60000.0], np.float16)
    for i, block in enumerate(blocks):
        for j, place in enumerate(GGUF_FACTORS[name]):
            block[place : place + 2] = factors[(i + 3 * j) % len(factors) :][:1].view(np.uint8)
    decoded = gguf.quants.dequantize(blocks.reshape(1, -1), kind)
    return {"format": name, "bytes": hexadecimal(blocks), "values": hexadecimal(decoded.astype(np.float32))}


# Affine and microscaling blocks, by mlx. A block is its scales, then its codes.


def affine_case(bits, group, scale_type):
    groups = 3
    packed = random.integers(0, 2**32, (1, groups * group * bits // 32), dtype=np.uint32)
    packed[0, :4] = [0, 0xFFFFFFFF, 0xAAAAAAAA, 0x0000FFFF]
    scales = mx.array(random.normal(0, 0.02, (1, groups)).astype(np.float32)).astype(scale_type)
    biases = mx.array(random.normal(0, 0.3, (1, groups)).astype(np.float32)).astype(scale_type)
    decoded = mx.dequantize(
        mx.array(packed), scales.astype(mx.float32), biases.astype(mx.float32), group_size=group, bits=bits
    )
    return {
        "format": f"AFFINE{bits}_G{group}",
        "scale": {mx.float16: "F16", mx.bfloat16: "BF16", mx.float32: "F32"}[scale_type],
        "bytes": hexadecimal(affine_blocks(packed, scales, biases, groups)),
        "values": hexadecimal(np.array(decoded)),
    }


def raw(array):
    """The bytes of an mlx array of any type, [..., bytes]."""
    return np.array(array.view(mx.uint8))


def affine_blocks(packed, scales, biases, groups):
    parts = [raw(scales).reshape(groups, -1), raw(biases).reshape(groups, -1)]
    return np.concatenate([*parts, np.asarray(packed).view(np.uint8).reshape(groups, -1)], axis=1)


MICROSCALING = {"mxfp8": ("MXFP8", 32, 8), "mxfp4": ("MXFP4", 32, 4), "nvfp4": ("NVFP4", 16, 4)}


def microscaling_case(mode):
    name, group, bits = MICROSCALING[mode]
    groups = 8
    # mlx reads neither NaN codes nor the ends of E8M0 as the specification does; the table of codes covers those.
    packed = random.integers(0, 256, (groups, group * bits // 8), dtype=np.uint8)
    if bits == 8:
        packed[packed & 0x7F == 0x7F] = 0x7E
    scales = random.integers(100, 150, (groups, 1), dtype=np.uint8) if group == 32 else np.array(
        [[0x00], [0x01], [0x07], [0x08], [0x38], [0x41], [0x7D], [0x7E]], np.uint8
    )
    decoded = mx.dequantize(
        mx.array(packed.view(np.uint32).reshape(1, -1)), mx.array(scales.reshape(1, -1)), mode=mode, dtype=mx.float32
    )
    return {
        "format": name,
        "bytes": hexadecimal(np.concatenate([scales, packed], axis=1)),
        "values": hexadecimal(np.array(decoded)),
    }


decode_cases = [gguf_case(name) for name in GGUF_FORMATS]
decode_cases += [microscaling_case(mode) for mode in MICROSCALING]
decode_cases += [affine_case(bits, 64, mx.bfloat16) for bits in (2, 3, 4, 5, 6, 8)]
decode_cases += [affine_case(4, group, mx.float16) for group in (32, 128)]
decode_cases += [affine_case(6, 32, mx.float32)]


# What mlx and gguf write. The values have no exact ties, about which mlx's CPU and Metal kernels differ.


def weights(rows, cols):
    values = random.normal(0, 0.02, (rows, cols)).astype(np.float32)
    values[:, 5] *= 20  # an outlier in most models' style
    return values


def encode_affine_case(bits, group):
    values = weights(1, 3 * group)
    values[0, group : 2 * group] = np.abs(values[0, group : 2 * group])
    packed, scales, biases = mx.quantize(mx.array(values), group_size=group, bits=bits)
    return {
        "format": f"AFFINE{bits}_G{group}",
        "scale": "F32",
        "values": hexadecimal(values),
        "bytes": hexadecimal(affine_blocks(packed, scales, biases, 3)),
    }


def encode_microscaling_case(mode):
    name, group, bits = MICROSCALING[mode]
    groups = 6
    values = weights(1, groups * group)
    values[0, group : 2 * group] *= 1000
    values[0, 2 * group : 3 * group] *= 1e-3
    packed, scales = mx.quantize(mx.array(values), mode=mode)
    scales = np.array(scales).reshape(-1)[:groups].reshape(groups, 1)
    codes = np.array(packed).view(np.uint8).reshape(groups, -1)
    if bits == 4:
        # mlx's CPU kernel drops the sign of what it rounds to zero; its Metal kernel keeps it.
        negative = (values < 0).reshape(groups, -1, 2)
        for place, sign in ((0, 0x08), (1, 0x80)):
            zero = codes & (0x0F << 4 * place) == 0
            codes[zero & negative[:, :, place]] |= sign
    blocks = np.concatenate([scales, codes], axis=1)
    return {"format": name, "values": hexadecimal(values), "bytes": hexadecimal(blocks)}


def encode_gguf_case(name):
    values = weights(1, 256)
    return {
        "format": name,
        "values": hexadecimal(values),
        "bytes": hexadecimal(gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])),
    }


def encode_plain_case(name, dtype):
    values = np.concatenate([weights(1, 64)[0], [0, -0.0, 1e-9, 440]]).astype(np.float32)
    return {"format": name, "values": hexadecimal(values), "bytes": hexadecimal(values.astype(dtype))}


encode_cases = [encode_plain_case("F16", np.float16), encode_plain_case("BF16", ml_dtypes.bfloat16)]
encode_cases += [encode_plain_case("FP8_E4M3", ml_dtypes.float8_e4m3fn)]
encode_cases += [encode_affine_case(bits, group) for bits, group in ((4, 64), (8, 64), (4, 32), (8, 128))]
encode_cases += [encode_microscaling_case(mode) for mode in MICROSCALING]
encode_cases += [encode_gguf_case("Q8_0")]

data = Path(sys.argv[1])
write(data / "codes.json", code_cases)
write(data / "decode.json", decode_cases)
write(data / "encode.json", encode_cases)
