"""Runs the reference implementation and writes down what it says.

A fixture is a checkpoint directory as it would be published, plus

* `expected.json`: the prompt, the greedy continuation, the positions whose logits were kept, and the conditions;
* `expected.safetensors`: `logits`, f32 `[positions, vocabulary]`, in the order of `logit_positions`.

Position p of the sequence prompt + continuation holds the logits that choose token p + 1.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import DynamicCache

CONTINUATION_TOKENS = 32
SMALLEST_MARGIN = 2e-2  # of the top two logits, relative to the largest absolute logit
PROMPTS_PER_SEED = 256
FIRST_ORDINARY_TOKEN = 4  # smaller ids are kept free for BOS, EOS, padding and image placeholders


@dataclass
class Run:
    """A greedy continuation of one prompt, with every logit on the way."""

    prompt: list[int]
    continuation: list[int]
    logits: torch.Tensor  # [prompt + CONTINUATION_TOKENS - 1, vocabulary]

    @property
    def largest_logit(self) -> float:
        return self.logits.abs().max().item()

    @property
    def margins(self) -> torch.Tensor:
        """Distance between the best and the second token at every step, relative to the largest logit."""
        best = self.logits[len(self.prompt) - 1 :].topk(2, dim=-1).values
        return (best[:, 0] - best[:, 1]) / self.largest_logit

    @property
    def variety(self) -> int:
        """How many different tokens the continuation has."""
        return len(set(self.continuation))


@torch.no_grad()
def greedy(model, prompts: torch.Tensor) -> list[Run]:
    """Prefills the prompts `[batch, tokens]` at once and then decodes token by token from the cache."""
    cache = DynamicCache(config=model.config.get_text_config())
    output = model(input_ids=prompts, cache=cache, use_cache=True)
    logits, tokens = [output.logits], [output.logits[:, -1:].argmax(-1)]
    while len(tokens) < CONTINUATION_TOKENS:
        output = model(input_ids=tokens[-1], cache=cache, use_cache=True)
        logits.append(output.logits)
        tokens.append(output.logits[:, -1:].argmax(-1))
    logits, tokens = torch.cat(logits, dim=1), torch.cat(tokens, dim=1)
    return [Run(prompts[i].tolist(), tokens[i].tolist(), logits[i]) for i in range(len(prompts))]


@torch.no_grad()
def difference_without_cache(model, run: Run) -> float:
    """Largest change of a decoding logit, relative to the largest logit, when the whole sequence is run in one pass."""
    sequence = torch.tensor([run.prompt + run.continuation[:-1]])
    logits = model(input_ids=sequence, use_cache=False).logits[0]
    return (logits - run.logits).abs().max().item() / run.largest_logit


def find_prompt(model, prompt_tokens: int, seed: int) -> list[int] | None:
    """The prompt with the liveliest clear-cut continuation among many, or None if every one comes near a tie."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config().vocab_size
    shape = (PROMPTS_PER_SEED, prompt_tokens)
    prompts = torch.randint(FIRST_ORDINARY_TOKEN, vocabulary, shape, generator=generator)
    candidates = [run for run in greedy(model, prompts) if run.margins.min() > SMALLEST_MARGIN and run.variety >= 8]
    return max(candidates, key=lambda run: run.variety).prompt if candidates else None


def write_expected(directory: Path, run: Run, **conditions) -> None:
    """Stores the run next to the checkpoint."""
    prompt_tokens = len(run.prompt)
    last = prompt_tokens + CONTINUATION_TOKENS - 2
    positions = [0, 1, 7, prompt_tokens // 2, prompt_tokens - 1, prompt_tokens + 7, last]
    expected = {
        "prompt": run.prompt,
        "continuation": run.continuation,
        "logit_positions": positions,
        "largest_logit": round(run.largest_logit, 4),
        "smallest_margin": round(run.margins.min().item(), 4),
        "reference": f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, CPU, float32",
        **conditions,
    }
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in expected.items())
    (directory / "expected.json").write_text("{\n" + lines + "\n}\n")
    save_file({"logits": run.logits[positions].contiguous()}, directory / "expected.safetensors")
