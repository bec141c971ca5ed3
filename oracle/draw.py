"""Random weights that hide nothing.

With the usual initialization a forgotten norm weight, a missing `1 +` or two swapped gates leave no trace: gains are
one, biases are zero and attention is nearly uniform. Here every such tensor is drawn away from its neutral value, and
matrices are scaled so that attention is peaked and logits spread over several units.

The first pattern that matches a parameter's name decides; a family may put its own rules in front.
"""

import math
import re

import torch

# Bounds of a uniform distribution.
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
    (r"", 1.5),
]


def redraw(model, seed: int, ranges=(), gains=()) -> None:
    """Draws every parameter and persistent buffer anew."""
    generator = torch.Generator().manual_seed(seed)
    ranges, gains = [*ranges, *RANGES], [*gains, *GAINS]
    tied = model.config.get_text_config().tie_word_embeddings
    for name, tensor in sorted(model.state_dict().items()):
        if tied and name.startswith("lm_head"):
            continue  # the same storage as the embedding
        bounds = next((bounds for pattern, bounds in ranges if re.search(pattern, name)), _bounds_around(tensor))
        if bounds is not None:
            low, high = bounds
            tensor.copy_(low + (high - low) * torch.rand(tensor.shape, generator=generator))
            continue
        gain = next(gain for pattern, gain in gains if re.search(pattern, name))
        matrix = gain / math.sqrt(tensor.shape[-1]) * torch.randn(tensor.shape, generator=generator)
        is_embedding = name.endswith("embed_tokens.weight")
        if is_embedding and not tied:
            matrix *= math.sqrt(tensor.shape[-1]) / gain
        elif is_embedding or name.startswith("lm_head"):
            # Some tokens are louder than others, so that few compete for a place and near ties are rare.
            matrix *= torch.exp(0.6 * torch.randn(len(matrix), 1, generator=generator))
        tensor.copy_(matrix)


def round_to_bf16(model) -> None:
    """Turns parameters into BF16, but for those that the architecture keeps in float32."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and not any(pattern in name for pattern in kept):
            tensor.data = tensor.data.bfloat16()


def _bounds_around(tensor: torch.Tensor) -> tuple[float, float] | None:
    """Bounds for a gain that starts at one, or for a bias or a shift that starts at zero; None for a matrix."""
    first = tensor.flatten()[0].item()
    if tensor.numel() == 1 or (tensor != first).any():
        return None
    half_width = 0.5 if first == 1 else 0.3
    return first - half_width, first + half_width
