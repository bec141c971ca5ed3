"""Random weights that hide nothing.

With the usual initialization a forgotten norm weight, a missing `1 +` or two swapped gates leave no trace: gains are
one, biases are zero and attention is nearly uniform. Here every such tensor is drawn away from its neutral value, and
matrices are scaled so that attention is peaked and logits spread over several units.
"""

import math
import re

import torch

# The first pattern that matches a parameter's name decides; (low, high) of a uniform distribution.
RANGES = [
    (r"A_log$", (-3.0, 0.5)),  # decays between almost none and almost all per token
    (r"sinks$", (-1.0, 2.0)),
    (r"residual_gate\.gate$", (-0.6, 0.6)),
]

# Standard deviation of a matrix times sqrt(inputs).
GAINS = [
    (r"router|mlp\.gate\.weight$", 2.0),
    (r"conv1d\.weight$", 1.0),
    (r"(vision|audio)_", 1.0),
    (r"lm_head", 4.0),
    (r"", 1.5),
]


def redraw(model, seed: int) -> None:
    """Draws every parameter and persistent buffer anew and rounds it to the precision that a checkpoint would keep."""
    generator = torch.Generator().manual_seed(seed)
    text = model.config.get_text_config()
    tied = text.tie_word_embeddings
    for name, tensor in sorted(model.state_dict().items()):
        if tied and name.startswith("lm_head"):
            continue  # the same storage as the embedding
        tensor.copy_(_draw(name, tensor, generator, tied))
        if not _stays_float32(model, name):
            tensor.copy_(tensor.bfloat16())


def round_to_bf16(model) -> None:
    """Turns parameters into BF16, but for those that the architecture keeps in float32."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if tensor.is_floating_point() and not _stays_float32(model, name):
            tensor.data = tensor.data.bfloat16()


def _draw(name: str, tensor: torch.Tensor, generator, tied: bool) -> torch.Tensor:
    for pattern, (low, high) in RANGES:
        if re.search(pattern, name):
            return low + (high - low) * torch.rand(tensor.shape, generator=generator)
    if tensor.numel() > 1 and tensor.min() == tensor.max():  # a gain that starts at one, a bias or a shift at zero
        half_width = 0.5 if tensor.flatten()[0] == 1 else 0.3
        return tensor + half_width * (2 * torch.rand(tensor.shape, generator=generator) - 1)
    if name.endswith("embed_tokens.weight"):
        deviation = 4.0 / math.sqrt(tensor.shape[-1]) if tied else 1.0
    else:
        gain = next(gain for pattern, gain in GAINS if re.search(pattern, name))
        deviation = gain / math.sqrt(tensor.shape[-1])
    return deviation * torch.randn(tensor.shape, generator=generator)


def _stays_float32(model, name: str) -> bool:
    patterns = [*(getattr(model, "_keep_in_fp32_modules_strict", None) or [])]
    return any(pattern in name for pattern in patterns)
