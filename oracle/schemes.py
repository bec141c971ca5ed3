"""How checkpoints spell quantized weights: an encoder and an independent decoder for each spelling.

`encode` takes a matrix `[..., outputs, inputs]` and returns the tensors that a checkpoint stores, by the ending that
replaces `weight` in the tensor's name. `decode` gets the same tensors and follows the format's definition only; the
expected logits come from what it returns.

Sources: OCP Microscaling Formats 1.0 (E2M1, E4M3, E8M0), NVIDIA ModelOpt and compressed-tensors checkpoints (NVFP4),
MLX (`mx.quantize`), AutoGPTQ and AutoAWQ checkpoints, the gpt-oss model card (MXFP4).
"""

from dataclasses import dataclass

import numpy as np
import torch

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1_VALUES, -E2M1_VALUES])  # by code; bit 3 is the sign
E2M1_MAX, E4M3_MAX = 6.0, 448.0


def e4m3(codes: np.ndarray) -> np.ndarray:
    """E4M3 without infinities: one sign bit, four of exponent (bias 7), three of mantissa."""
    exponent, mantissa = (codes >> 3 & 15).astype(np.float32), (codes & 7).astype(np.float32)
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.where(codes & 128, -magnitude, magnitude).astype(np.float32)


def e8m0(codes: np.ndarray) -> np.ndarray:
    """A power of two with bias 127."""
    return (2.0 ** (codes.astype(np.float64) - 127)).astype(np.float32)


def to_e4m3(values: np.ndarray) -> np.ndarray:
    values = np.clip(values, -E4M3_MAX, E4M3_MAX).astype(np.float32)
    return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def to_e2m1(values: np.ndarray) -> np.ndarray:
    distances = np.abs(np.abs(values)[..., None] - E2M1_VALUES)
    return distances.argmin(-1).astype(np.uint8) | (np.signbit(values) << 3).astype(np.uint8)


def to_e8m0(values: np.ndarray) -> np.ndarray:
    """The smallest power of two that is not below the value."""
    return (np.ceil(np.log2(values)) + 127).astype(np.uint8)


def nibbles(codes: np.ndarray) -> np.ndarray:
    """Two codes per byte, the first in the low half."""
    return np.ascontiguousarray(codes[..., 0::2] | codes[..., 1::2] << 4)


def from_nibbles(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def bits_to_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """A row of codes as one little-endian stream of bits in 32-bit words."""
    stream = (codes[..., None] >> np.arange(bits, dtype=codes.dtype)) & 1
    stream = stream.reshape(*codes.shape[:-1], -1).astype(np.uint8)
    return np.packbits(stream, axis=-1, bitorder="little").view(np.uint32)


def words_to_bits(words: np.ndarray, bits: int) -> np.ndarray:
    stream = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    codes = stream.reshape(*words.shape[:-1], -1, bits).astype(np.uint32)
    return (codes << np.arange(bits, dtype=np.uint32)).sum(-1)


def stored(array: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor for the checkpoint; `dtype` names what the bytes are where numpy has no word for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if dtype is None else tensor.view(dtype)


def raw(tensor: torch.Tensor) -> np.ndarray:
    """The numbers of a tensor, or its bytes as codes if they are 8-bit floats."""
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        tensor = tensor.view(torch.uint8)
    return tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy()


def bf16(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.float32)).bfloat16()


def grouped(values: np.ndarray, group: int) -> np.ndarray:
    return values.reshape(*values.shape[:-1], -1, group)


def flat(values: np.ndarray) -> np.ndarray:
    return values.reshape(*values.shape[:-2], -1)


class Fp8Tensor:
    """E4M3 with one scale for the whole matrix, as Mistral publishes it; the activation scale plays no part."""

    def __init__(self, scale_shape: list[int]):
        self.scale_shape = scale_shape

    def encode(self, weight):
        scale = bf16(np.abs(weight).max() / E4M3_MAX)
        return {
            "weight": stored(to_e4m3(weight / raw(scale)), torch.float8_e4m3fn),
            "weight_scale_inv": scale.reshape(self.scale_shape),
            "activation_scale": bf16(0.375).reshape(self.scale_shape),
        }

    def decode(self, tensors):
        return e4m3(raw(tensors["weight"])) * raw(tensors["weight_scale_inv"]).item()


class Fp8Channel:
    """E4M3 with one scale per output, compressed-tensors `float-quantized`."""

    def encode(self, weight):
        scale = bf16(np.abs(weight).max(-1, keepdims=True) / E4M3_MAX)
        codes = to_e4m3(weight / raw(scale))
        return {"weight": stored(codes, torch.float8_e4m3fn), "weight_scale": scale}

    def decode(self, tensors):
        return e4m3(raw(tensors["weight"])) * raw(tensors["weight_scale"])


@dataclass
class Fp8Block:
    """E4M3 with one scale per square block; blocks at the lower and right edges may be smaller."""

    block: int
    scales_are_powers_of_two: bool = False

    def _spread(self, scales, shape):
        return scales.repeat(self.block, 0).repeat(self.block, 1)[: shape[0], : shape[1]]

    def encode(self, weight):
        padding = [(0, -size % self.block) for size in weight.shape]
        rows, columns = (-(-size // self.block) for size in weight.shape)
        blocks = np.pad(np.abs(weight), padding).reshape(rows, self.block, columns, self.block)
        scales = (blocks.max((1, 3)) / E4M3_MAX).astype(np.float32)
        if self.scales_are_powers_of_two:
            scale_tensor = stored(to_e8m0(scales), torch.float8_e8m0fnu)
            scales = e8m0(raw(scale_tensor))
        else:
            scale_tensor = stored(scales)
        codes = to_e4m3(weight / self._spread(scales, weight.shape))
        return {"weight": stored(codes, torch.float8_e4m3fn), "weight_scale_inv": scale_tensor}

    def decode(self, tensors):
        codes, scales = raw(tensors["weight"]), raw(tensors["weight_scale_inv"])
        if self.scales_are_powers_of_two:
            scales = e8m0(scales)
        return e4m3(codes) * self._spread(scales, codes.shape)


def encode_nvfp4(weight: np.ndarray, tensor_scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes `[..., inputs]` and E4M3 block scales `[..., inputs / 16]`, given a scale for the whole tensor."""
    blocks = grouped(weight / tensor_scale, 16)
    scales = np.maximum(to_e4m3(np.abs(blocks).max(-1) / E2M1_MAX), 1)  # never a zero scale
    return to_e2m1(flat(blocks / e4m3(scales)[..., None])), scales


def decode_nvfp4(codes: np.ndarray, scales: np.ndarray, tensor_scale) -> np.ndarray:
    return flat(grouped(E2M1[codes], 16) * e4m3(scales)[..., None]) * tensor_scale


class Nvfp4ModelOpt:
    """NVFP4 as ModelOpt writes it: the scale of the tensor multiplies."""

    def encode(self, weight):
        tensor_scale = np.float32(np.abs(weight).max() / (E2M1_MAX * E4M3_MAX))
        codes, scales = encode_nvfp4(weight, tensor_scale)
        return {
            "weight": stored(nibbles(codes)),
            "weight_scale": stored(scales, torch.float8_e4m3fn),
            "weight_scale_2": torch.tensor(tensor_scale),
            "input_scale": torch.tensor(0.01),
        }

    def decode(self, tensors):
        codes, scales = from_nibbles(raw(tensors["weight"])), raw(tensors["weight_scale"])
        return decode_nvfp4(codes, scales, raw(tensors["weight_scale_2"]))


class Nvfp4CompressedTensors:
    """NVFP4 as compressed-tensors writes it: the scale of the tensor divides."""

    def encode(self, weight):
        divisor = np.float32(E2M1_MAX * E4M3_MAX / np.abs(weight).max())
        codes, scales = encode_nvfp4(weight, 1 / divisor)
        return {
            "weight_packed": stored(nibbles(codes)),
            "weight_scale": stored(scales, torch.float8_e4m3fn),
            "weight_global_scale": torch.tensor([divisor]),
            "input_global_scale": torch.tensor([100.0]),
        }

    def decode(self, tensors):
        codes, scales = from_nibbles(raw(tensors["weight_packed"])), raw(tensors["weight_scale"])
        return decode_nvfp4(codes, scales, 1 / raw(tensors["weight_global_scale"]))


@dataclass
class Nvfp4FusedExperts:
    """NVFP4 experts of Muse Spark, `[experts, outputs, inputs]`; the fused gate and up halves have a scale each."""

    halves: int

    def _spread(self, tensor_scales, outputs):
        """One scale per expert and half -> one per expert and output."""
        return tensor_scales.reshape(-1, self.halves).repeat(outputs // self.halves, 1)[..., None]

    def encode(self, weight):
        experts, outputs, _ = weight.shape
        largest = np.abs(weight).reshape(experts, self.halves, -1).max(-1)
        tensor_scales = (largest / (E2M1_MAX * E4M3_MAX)).astype(np.float32)
        codes, scales = encode_nvfp4(weight, self._spread(tensor_scales, outputs))
        return {
            "": stored(nibbles(codes)),
            "_weight_scale": stored(scales, torch.float8_e4m3fn),
            "_weight_scale_2": stored(tensor_scales if self.halves > 1 else tensor_scales[:, 0]),
            "_input_scale": torch.tensor(0.01),
        }

    def decode(self, tensors):
        codes, scales = from_nibbles(raw(tensors[""])), raw(tensors["_weight_scale"])
        return decode_nvfp4(codes, scales, self._spread(raw(tensors["_weight_scale_2"]), codes.shape[1]))


@dataclass
class Nvfp4Mlx:
    """NVFP4 as MLX writes it, eight codes per word; a global scale, if any, is 6 * 448 times what multiplies."""

    with_global_scale: bool

    def encode(self, weight):
        largest = np.float32(np.abs(weight).max())
        tensor_scale = largest / np.float32(E2M1_MAX * E4M3_MAX) if self.with_global_scale else np.float32(1)
        codes, scales = encode_nvfp4(weight, tensor_scale)
        tensors = {"weight": stored(nibbles(codes).view(np.uint32)), "scales": stored(scales)}
        return tensors | ({"global_scale": torch.tensor(largest)} if self.with_global_scale else {})

    def decode(self, tensors):
        codes, scales = from_nibbles(raw(tensors["weight"]).view(np.uint8)), raw(tensors["scales"])
        global_scale = raw(tensors["global_scale"]) / (E2M1_MAX * E4M3_MAX) if self.with_global_scale else 1
        return decode_nvfp4(codes, scales, np.float32(global_scale))


class Mxfp4Mlx:
    """32 E2M1 codes under a power of two, eight codes per word."""

    def encode(self, weight):
        blocks = grouped(weight, 32)
        scales = to_e8m0(np.abs(blocks).max(-1) / E2M1_MAX)
        codes = to_e2m1(flat(blocks / e8m0(scales)[..., None]))
        return {"weight": stored(nibbles(codes).view(np.uint32)), "scales": stored(scales)}

    def decode(self, tensors):
        codes, scales = from_nibbles(raw(tensors["weight"]).view(np.uint8)), raw(tensors["scales"])
        return flat(grouped(E2M1[codes], 32) * e8m0(scales)[..., None])


class Mxfp8Mlx:
    """32 E4M3 codes under a power of two, four codes per word."""

    def encode(self, weight):
        blocks = grouped(weight, 32)
        scales = to_e8m0(np.abs(blocks).max(-1) / E4M3_MAX)
        codes = to_e4m3(flat(blocks / e8m0(scales)[..., None]))
        return {"weight": stored(codes.view(np.uint32)), "scales": stored(scales)}

    def decode(self, tensors):
        codes, scales = raw(tensors["weight"]).view(np.uint8), raw(tensors["scales"])
        return flat(grouped(e4m3(codes), 32) * e8m0(scales)[..., None])


class Mxfp4GptOss:
    """MXFP4 experts of gpt-oss: `[experts, inputs, outputs]` in BF16, but inputs last here, in blocks of 16 bytes."""

    def encode(self, weight):
        blocks = grouped(weight.swapaxes(-1, -2), 32)
        scales = to_e8m0(np.abs(blocks).max(-1) / E2M1_MAX)
        codes = to_e2m1(blocks / e8m0(scales)[..., None])
        return {"_blocks": stored(nibbles(codes)), "_scales": stored(scales)}

    def decode(self, tensors):
        codes, scales = from_nibbles(raw(tensors["_blocks"])), raw(tensors["_scales"])
        return flat(E2M1[codes] * e8m0(scales)[..., None]).swapaxes(-1, -2)


@dataclass
class AffineMlx:
    """MLX affine: code * scale + bias in groups of inputs, codes as one stream of bits."""

    bits: int
    group_size: int

    def encode(self, weight):
        groups = grouped(weight, self.group_size)
        biases = bf16(groups.min(-1))
        scales = bf16((groups.max(-1) - raw(biases)) / (2**self.bits - 1))
        codes = np.rint((groups - raw(biases)[..., None]) / raw(scales)[..., None])
        codes = flat(np.clip(codes, 0, 2**self.bits - 1).astype(np.uint32))
        return {"weight": stored(bits_to_words(codes, self.bits)), "scales": scales, "biases": biases}

    def decode(self, tensors):
        codes = grouped(words_to_bits(raw(tensors["weight"]), self.bits).astype(np.float32), self.group_size)
        return flat(codes * raw(tensors["scales"])[..., None] + raw(tensors["biases"])[..., None])


def _int4_with_zeros(weight: np.ndarray, group_size: int, smallest_zero: int):
    """Codes `[outputs, groups, group_size]`, zero points and F16 scales `[outputs, groups]`."""
    groups = grouped(weight, group_size)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    scales = ((high - low) / 15).astype(np.float16).astype(np.float32)
    zeros = np.clip(np.rint(-low / scales), smallest_zero, 15)
    codes = np.clip(np.rint(groups / scales[..., None]) + zeros[..., None], 0, 15)
    return codes.astype(np.uint8), zeros.astype(np.uint8), scales


@dataclass
class Gptq4:
    """GPTQ: inputs run down, eight codes of one output per word; stored zero points are one too small."""

    group_size: int

    def encode(self, weight):
        codes, zeros, scales = _int4_with_zeros(weight, self.group_size, smallest_zero=1)
        inputs = weight.shape[1]
        return {
            "qweight": stored(bits_to_words(flat(codes), 4).T.view(np.int32)),  # [inputs / 8, outputs]
            "qzeros": stored(nibbles((zeros - 1).T).view(np.int32)),  # [groups, outputs / 8]
            "scales": stored(scales.T.astype(np.float16)),  # [groups, outputs]
            "g_idx": stored(np.arange(inputs, dtype=np.int32) // self.group_size),
        }

    def decode(self, tensors):
        words = np.ascontiguousarray(raw(tensors["qweight"]).T).view(np.uint32)
        codes = words_to_bits(words, 4).T.astype(np.float32)  # [inputs, outputs]
        zeros = from_nibbles(raw(tensors["qzeros"]).view(np.uint8)).astype(np.float32) + 1
        group_of_input = raw(tensors["g_idx"])
        return ((codes - zeros[group_of_input]) * raw(tensors["scales"])[group_of_input]).T


@dataclass
class Awq4:
    """AWQ: eight outputs per word, interleaved; zero points are stored as they are."""

    group_size: int
    ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # nibble i of a word, from the lowest, holds output ORDER[i]

    def _pack(self, codes):
        codes = grouped(codes, 8)[..., self.ORDER]
        return stored(nibbles(flat(codes)).view(np.int32))

    def _unpack(self, tensor):
        codes = grouped(from_nibbles(raw(tensor).view(np.uint8)), 8)
        return flat(codes[..., np.argsort(self.ORDER)]).astype(np.float32)

    def encode(self, weight):
        codes, zeros, scales = _int4_with_zeros(weight, self.group_size, smallest_zero=0)
        return {
            "qweight": self._pack(flat(codes).T),  # [inputs, outputs / 8]
            "qzeros": self._pack(zeros.T),  # [groups, outputs / 8]
            "scales": stored(scales.T.astype(np.float16)),
        }

    def decode(self, tensors):
        zeros, scales = self._unpack(tensors["qzeros"]), raw(tensors["scales"])
        codes = self._unpack(tensors["qweight"])
        return ((codes - zeros.repeat(self.group_size, 0)) * scales.repeat(self.group_size, 0)).T


class GainMlx:
    """A zero-centred norm as MLX converts it: the 1 is already in the stored weight, and rounded with it."""

    def encode(self, weight):
        return {"weight": bf16(1 + weight)}

    def decode(self, tensors):
        return raw(tensors["weight"]) - 1


class ConvolutionMlx:
    """A depthwise convolution as MLX converts it: `[channels, taps, 1]`."""

    def encode(self, weight):
        return {"weight": bf16(weight.swapaxes(1, 2))}

    def decode(self, tensors):
        return raw(tensors["weight"]).swapaxes(1, 2)
