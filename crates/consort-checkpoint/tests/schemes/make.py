"""Writes one small checkpoint for each quantization scheme, with the values that it must decode to.

    python make.py torch     # needs torch, safetensors, numpy
    python make.py mlx       # needs mlx, numpy
    python make.py gguf      # needs gguf, safetensors, numpy
    python make.py numpy     # needs safetensors, numpy

Each directory holds config.json, model.safetensors and expected.safetensors (f32, by canonical name). The expected values
are computed here with numpy and torch alone, from the definitions of the schemes, by mlx.core.dequantize, or by gguf.dequantize.
"""

import json
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).parent
ROWS, COLS = 24, 256
Q, EXPERTS = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def write(name, quantization, save, tensors, expected, model_type="llama", key="quantization_config"):
    directory = HERE / name
    directory.mkdir(exist_ok=True)
    config = {"model_type": model_type}
    if quantization is not None:
        config[key] = quantization
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save(tensors, str(directory / "model.safetensors"))
    save(expected, str(directory / "expected.safetensors"))


def with_torch():
    import torch
    from safetensors.torch import save_file

    random = np.random.default_rng(7)

    def save(tensors, path):
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)

    def codes(*shape):  # every E4M3 code but the two NaN
        bytes_ = random.integers(0, 256, shape, dtype=np.uint8)
        bytes_[(bytes_ & 0x7F) == 0x7F] = 0x38
        return torch.from_numpy(bytes_).view(torch.float8_e4m3fn)

    def scales(*shape):
        return torch.from_numpy(random.uniform(0.01, 2.0, shape).astype(np.float32))

    def nibbles(packed):  # low nibble first
        packed = packed.numpy()
        return torch.from_numpy(E2M1[np.stack([packed & 15, packed >> 4], -1)].reshape(*packed.shape[:-1], -1))

    def byte(*shape):
        return torch.from_numpy(random.integers(0, 256, shape, dtype=np.uint8))

    def repeat(scale, rows, cols, block_rows, block_cols):
        return scale.repeat_interleave(block_rows, -2)[..., :rows, :].repeat_interleave(block_cols, -1)[..., :cols]

    fp8 = {"quant_method": "fp8", "activation_scheme": "static"}
    weight, scale = codes(ROWS, COLS), scales()
    write("fp8-per-tensor", fp8, save,
          {Q + ".weight": weight, Q + ".weight_scale_inv": scale, Q + ".activation_scale": scales()},
          {Q + ".weight": weight.float() * scale})
    weight, scale = codes(ROWS, COLS), scales(ROWS, 1).bfloat16()
    write("fp8-per-channel", {"quant_method": "compressed-tensors", "format": "float-quantized",
          "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}}, save,
          {Q + ".weight": weight, Q + ".weight_scale": scale}, {Q + ".weight": weight.float() * scale.float()})
    weight, scale = codes(192, 130), scales(2, 2)
    write("fp8-block128", fp8 | {"weight_block_size": [128, 128]}, save,
          {Q + ".weight": weight, Q + ".weight_scale_inv": scale},
          {Q + ".weight": weight.float() * repeat(scale, 192, 130, 128, 128)})
    weight, scale = codes(2, 130, 132), scales(2, 2, 2).bfloat16()
    write("fp8-block128-experts", fp8 | {"weight_block_size": [128, 128]}, save,
          {EXPERTS + ".down_proj": weight, EXPERTS + ".down_proj_scale_inv": scale},
          {EXPERTS + ".down_proj.weight": weight.float() * repeat(scale.float(), 130, 132, 128, 128)})
    weight, scale = codes(40, 80), torch.from_numpy(random.integers(110, 140, (2, 3), dtype=np.uint8))
    power = torch.from_numpy(np.exp2(scale.numpy().astype(np.float32) - 127))
    write("fp8-ue8m0-32", fp8 | {"weight_block_size": [32, 32], "scale_fmt": "ue8m0"}, save,
          {Q + ".weight": weight, Q + ".weight_scale_inv": scale.view(torch.float8_e8m0fnu)},
          {Q + ".weight": weight.float() * repeat(power, 40, 80, 32, 32)})

    block = codes(ROWS, COLS // 16).abs()
    packed, factor = byte(ROWS, COLS // 2), torch.tensor(0.37)
    values = nibbles(packed) * block.float().repeat_interleave(16, -1)
    write("nvfp4-modelopt", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, save,
          {Q + ".weight": packed, Q + ".weight_scale": block, Q + ".weight_scale_2": factor, Q + ".input_scale": factor},
          {Q + ".weight": values * factor})
    write("nvfp4-compressed-tensors", {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, save,
          {Q + ".weight_packed": packed, Q + ".weight_scale": block, Q + ".weight_global_scale": torch.tensor([2.5])},
          {Q + ".weight": values / 2.5})
    block = codes(2, 8, COLS // 16).abs()
    packed, halves = byte(2, 8, COLS // 2), scales(2, 2)
    write("nvfp4-fused-experts", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, save,
          {EXPERTS + ".gate_up_proj": packed, EXPERTS + ".gate_up_proj_weight_scale": block,
           EXPERTS + ".gate_up_proj_weight_scale_2": halves, EXPERTS + ".gate_up_proj_input_scale": scales(2)},
          {EXPERTS + ".gate_up_proj.weight":
           nibbles(packed) * block.float().repeat_interleave(16, -1) * halves.repeat_interleave(4, -1)[..., None]},
          model_type="muse_spark")

    blocks = byte(2, 6, 4, 16)
    exponents = torch.from_numpy(random.integers(110, 140, (2, 6, 4), dtype=np.uint8))
    power = torch.from_numpy(np.exp2(exponents.numpy().astype(np.float32) - 127))
    write("mxfp4-gpt-oss", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, save,
          {EXPERTS + ".gate_up_proj_blocks": blocks, EXPERTS + ".gate_up_proj_scales": exponents,
           EXPERTS + ".gate_up_proj_bias": scales(2, 6)},
          {EXPERTS + ".gate_up_proj.weight": (nibbles(blocks) * power[..., None]).reshape(2, 6, 128)},
          model_type="gpt_oss")
    plain = scales(2, 24, 10).bfloat16()
    write("plain-gpt-oss", None, save, {EXPERTS + ".down_proj": plain},
          {EXPERTS + ".down_proj.weight": plain.float().transpose(1, 2)}, model_type="gpt_oss")

    integers = random.integers(0, 16, (COLS, ROWS))
    zeros = random.integers(1, 16, (COLS // 64, ROWS))
    group_scales = scales(COLS // 64, ROWS).half()
    values = (integers - zeros.repeat(64, 0)) * group_scales.float().numpy().repeat(64, 0)
    expected = {Q + ".weight": torch.from_numpy(values.T.astype(np.float32).copy())}

    def pack(matrix, axis, order):
        matrix = np.moveaxis(matrix, axis, -1).reshape(*np.moveaxis(matrix, axis, -1).shape[:-1], -1, 8)
        words = sum(matrix[..., source].astype(np.uint32) << np.uint32(4 * place) for place, source in enumerate(order))
        return torch.from_numpy(np.moveaxis(words, -1, axis).astype(np.uint32).view(np.int32).copy())

    order, awq_order = range(8), [0, 2, 4, 6, 1, 3, 5, 7]
    settings = {"bits": 4, "group_size": 64}
    index = torch.arange(COLS, dtype=torch.int32) // 64
    gptq = {Q + ".qweight": pack(integers, 0, order), Q + ".scales": group_scales, Q + ".g_idx": index}
    write("gptq", settings | {"quant_method": "gptq", "desc_act": False}, save,
          gptq | {Q + ".qzeros": pack(zeros - 1, 1, order)}, expected)
    write("awq", settings | {"quant_method": "awq", "version": "gemm", "zero_point": True}, save,
          {Q + ".qweight": pack(integers, 1, awq_order), Q + ".scales": group_scales,
           Q + ".qzeros": pack(zeros, 1, awq_order)}, expected)


def with_numpy():
    """Integers of compressed-tensors, and what GPTQ writes with `desc_act` or one group for all."""
    from safetensors.numpy import save_file

    random = np.random.default_rng(11)

    def save(tensors, path):
        save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path)

    def pack(codes, axis, bits=4):  # neighbours along `axis`, low bits first, the last word filled up with zeros
        codes = np.moveaxis(codes, axis, -1).astype(np.uint32)
        count = 32 // bits
        codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % count)])
        codes = codes.reshape(*codes.shape[:-1], -1, count)
        words = np.bitwise_or.reduce(codes << (bits * np.arange(count, dtype=np.uint32)), -1)
        return np.moveaxis(words, -1, axis).view(np.int32).copy()

    def compressed(name, bits, groups, symmetric, any_order=False, rows=20):
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
        integers = random.integers(low, high, (rows, COLS))
        scales = random.uniform(0.01, 2.0, (rows, groups)).astype(np.float16)
        zeros = np.zeros((rows, groups), np.int64) if symmetric else random.integers(low, high, (rows, groups))
        index = np.arange(COLS, dtype=np.int32) // (COLS // groups)
        if any_order:
            index = random.permutation(index).astype(np.int32)
        values = (integers - zeros[:, index]) * scales[:, index].astype(np.float32)
        tensors = {Q + ".weight_packed": pack(integers - low, 1, bits), Q + ".weight_scale": scales,
                   Q + ".weight_shape": np.array([rows, COLS])}
        if not symmetric:
            tensors[Q + ".weight_zero_point"] = pack(zeros - low, 0, bits)
        if any_order:
            tensors[Q + ".weight_g_idx"] = index
            values = values.astype(np.float16)  # what the library's own kernel multiplies by
        weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if groups > 1 else "channel",
                   "group_size": COLS // groups if groups > 1 else None, "actorder": "group" if any_order else None}
        write(name, {"quant_method": "compressed-tensors", "format": "pack-quantized",
              "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}, save, tensors,
              {Q + ".weight": values.astype(np.float32)})

    compressed("int4-compressed-tensors", 4, COLS // 32, True)
    compressed("int4-compressed-tensors-zeros", 4, COLS // 128, False)
    compressed("int4-compressed-tensors-order", 4, COLS // 64, False, any_order=True)
    compressed("int8-compressed-tensors", 8, 1, True)

    def gptq(name, groups, any_order):
        integers = random.integers(0, 16, (COLS, ROWS))
        zeros = random.integers(1, 17, (groups, ROWS))
        scales = random.uniform(0.01, 2.0, (groups, ROWS)).astype(np.float16)
        index = np.arange(COLS, dtype=np.int32) // (COLS // groups)
        if any_order:
            index = random.permutation(index).astype(np.int32)
        values = (integers - zeros[index]) * scales[index].astype(np.float32)
        if any_order:
            values = values.astype(np.float16)  # the kernels of AutoGPTQ dequantize in half precision
        write(name, {"quant_method": "gptq", "bits": 4, "group_size": COLS // groups if groups > 1 else -1,
                     "desc_act": any_order}, save,
              {Q + ".qweight": pack(integers, 0), Q + ".qzeros": pack((zeros - 1) % 16, 1), Q + ".scales": scales,
               Q + ".g_idx": index}, {Q + ".weight": values.T.astype(np.float32)})

    gptq("gptq-order", COLS // 64, True)
    gptq("gptq-one-group", 1, False)


def with_mlx():
    import mlx.core as mx

    mx.random.seed(7)
    save = lambda tensors, path: mx.save_safetensors(path, tensors)

    def settings(mode, bits, group):
        return {"group_size": group, "bits": bits, "mode": mode}

    def scheme(name, mode, bits, group, dtype=mx.float32, shape=(ROWS, COLS), module=Q, **more):
        weight = mx.random.normal(shape).astype(dtype)
        parts = mx.quantize(weight, group, bits, mode=mode, **more)
        tensors = dict(zip([module + ".weight", module + ".scales", module + ".biases"], parts))
        # Decoded in f32, so that the reference does not round to the width of the scales.
        wide = [part.astype(mx.float32) if part.dtype == dtype else part for part in parts]
        values = mx.dequantize(*wide, group_size=group, bits=bits, mode=mode, dtype=mx.float32, **more)
        if "global_scale" in more:
            tensors[module + ".global_scale"] = more["global_scale"]
        return name, settings(mode, bits, group), tensors, {module + ".weight": values}

    def put(name, quantization, tensors, expected):
        write(name, quantization, save, tensors, expected, key="quantization")

    for bits, group, dtype in [(2, 32, mx.float16), (3, 64, mx.bfloat16), (4, 64, mx.bfloat16), (5, 32, mx.float16),
                               (6, 128, mx.float32), (8, 128, mx.bfloat16)]:
        put(*scheme(f"mlx-affine{bits}", "affine", bits, group, dtype))
    put(*scheme("mlx-mxfp4", "mxfp4", 4, 32))
    put(*scheme("mlx-mxfp8", "mxfp8", 8, 32))
    put(*scheme("mlx-nvfp4", "nvfp4", 4, 16))
    # Overrides under the names of a wrapper.
    _, quantization, tensors, expected = scheme("", "affine", 4, 64, mx.bfloat16, module="language_model." + Q)
    up = "language_model.model.layers.0.mlp.up_proj"
    _, override, more, values = scheme("", "affine", 6, 64, mx.bfloat16, module=up)
    head = "language_model.lm_head"
    plain = mx.random.normal((8, COLS)).astype(mx.bfloat16)
    write("mlx-overrides", quantization | {up: {"group_size": 64, "bits": 6}, head: False}, save,
          tensors | more | {head + ".weight": plain},
          {name.removeprefix("language_model."): value
           for name, value in (expected | values | {head + ".weight": plain.astype(mx.float32)}).items()},
          key="quantization")


def with_gguf():
    import gguf
    from gguf import GGMLQuantizationType as Type
    from safetensors.numpy import save_file

    random = np.random.default_rng(7)
    # Where a block keeps its half-precision scales: random bytes there would be infinities.
    halves = {Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0], Type.Q2_K: [80, 82],
              Type.Q3_K: [108], Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208], Type.IQ4_NL: [0], Type.IQ4_XS: [0]}
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
             "ffn_down": "mlp.down_proj"}
    types = [Type.MXFP4, Type.NVFP4, *halves, Type.BF16, Type.F16, Type.F32]

    def stored(quantization):
        values, size = gguf.GGML_QUANT_SIZES[quantization]
        blocks = random.integers(0, 256, (4, 256 // values, size), dtype=np.uint8)
        for offset in halves.get(quantization, []):
            scale = random.uniform(-1, 1, blocks.shape[:2]).astype(np.float16)
            blocks[..., offset:offset + 2] = scale[..., None].view(np.uint8)
        if quantization == Type.MXFP4:
            blocks[..., 0] = random.integers(110, 140, blocks.shape[:2])
        if quantization == Type.NVFP4:
            blocks[..., :4] &= 0x7F
        if quantization in (Type.BF16, Type.F16, Type.F32):
            plain = random.normal(size=(4, 256)).astype(np.float32)
            return gguf.quantize(plain, quantization)
        return blocks.reshape(4, -1)

    tensors, expected = [], {}
    for place, quantization in enumerate(types):
        layer, (short, long) = place // len(names), list(names.items())[place % len(names)]
        data = stored(quantization)
        values = gguf.dequantize(data, quantization).astype(np.float32)
        tensors.append((f"blk.{layer}.{short}.weight", data, quantization))
        if quantization == Type.NVFP4:
            tensors.append((f"blk.{layer}.{short}.scale", np.array([0.75], np.float32), None))
            values = values * np.float32(0.75)
        expected[f"model.layers.{layer}.{long}.weight"] = values
    for name, more in [("gguf", {}), ("gguf-split", {"split_max_tensors": 6})]:
        directory = HERE / name
        directory.mkdir(exist_ok=True)
        writer = gguf.GGUFWriter(directory / "model.gguf", "llama", **more)
        writer.add_block_count(3), writer.add_embedding_length(256), writer.add_context_length(512)
        writer.add_feed_forward_length(4), writer.add_head_count(4), writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-5), writer.add_rope_freq_base(5e5), writer.add_vocab_size(3)
        writer.add_token_list(["a", "b", "\u00e9"]), writer.add_eos_token_id(2), writer.add_eot_token_id(1)
        for tensor, data, quantization in tensors:
            writer.add_tensor(tensor, data, raw_dtype=quantization)
        writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
        writer.close()
        save_file(expected, str(directory / "expected.safetensors"))


{"torch": with_torch, "mlx": with_mlx, "gguf": with_gguf, "numpy": with_numpy}[sys.argv[1]]()
