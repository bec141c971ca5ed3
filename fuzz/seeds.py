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
    "compressed": [("weight_packed", "I32", [8, 8], 256), ("weight_scale", "F16", [8, 2], 32),
                   ("weight_zero_point", "I32", [1, 2], 8), ("weight_g_idx", "I32", [64], 256)],
    "plain": [("weight", "BF16", [4, 8], 64)],
}


def module(name):
    return [(f"model.{name}.{parameter}", *rest) for parameter, *rest in MODULES[name]]


corpus = HERE / "corpus"
for target in ["safetensors", "gguf", "config", "template", "tokenizer"]:
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
(corpus / "config" / "lists").write_text(
    '{"model_type": "x", "quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore":'
    ' ["lm_head", "re:^(?!.*fp8).*plain", "*vision*"], "config_groups": {"g": {"targets": ["Linear", "re:.*fp8"], "weights":'
    ' {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": true}}}}}')
(corpus / "config" / "params").write_text(
    '{"dim": 64, "n_layers": 1, "n_heads": 4, "hidden_dim": 64, "norm_eps": 1e-5, "vocab_size": 9, "yarn": {"factor": 2, "alpha": 1,'
    ' "beta": 4, "original_max_position_embeddings": 16}, "llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 16}}')
(corpus / "config" / "index").write_text('{"weight_map": {"model.plain.weight": "model.safetensors"}}')

TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}",
    "tools": "{% if tools %}{{ tools|tojson(indent=2) }}{% endif %}{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments|items %}{{ k ~ '=' ~ v }}{% endfor %}{% endfor %}{% endfor %}",
    "methods": "{% set ns = namespace(s='x') %}{{ ns.s.split('x')[-1].strip() }}{{ ','.join(['a', 'b']) }}"
    "{{ '%s {}'|format(1) }}{{ '{0:>5}'.format('x') }}{{ messages[::-1]|length }}{{ strftime_now('%Y') }}",
    "macros": "{% macro f(x) %}{{ x|upper }}{% endmacro %}{{ f('a') }}{% generation %}x{% endgeneration %}"
    "{{ raise_exception('no') if messages|length > 9 else '' }}",
}
for name, source in TEMPLATES.items():
    (corpus / "template" / name).write_text(source)

TOKEN = {"single_word": False, "lstrip": False, "rstrip": True, "normalized": False, "special": True}
MODEL = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
         "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": {"a": 0, "b": 1, "ab": 2},
         "merges": [["a", "b"]]}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
BEGIN = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
         "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [3], "tokens": ["<s>"]}}}
for name, step, after in [("bytes", BYTE_LEVEL, None), ("pieces", METASPACE, None), ("begin", BYTE_LEVEL, BEGIN)]:
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [TOKEN | {"id": 3, "content": "<s>"}],
                 "normalizer": {"type": "NFC"}, "pre_tokenizer": step, "post_processor": after, "decoder": step, "model": MODEL}
    (corpus / "tokenizer" / name).write_text(json.dumps(tokenizer))
