"""The model families: what is unusual about each is in its config, and its config is all there is to a fixture.

Sizes are small but never trivial: several KV heads, head widths that differ from hidden / heads, windows shorter than
the prompt, prompts longer than the original context, layer counts that three pipeline stages share unevenly.
"""

from dataclasses import dataclass, field

VOCABULARY = 256

SMALL = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=8,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


@dataclass
class Family:
    """A tiny model: a class of transformers and its config."""

    model_class: str
    config: dict
    prompt_tokens: int = 40
    legacy_rope_keys: bool = False  # publish `rope_theta` and `rope_scaling` as checkpoints before 2026 do
    drop_keys: list[str] = field(default_factory=list)  # config keys that the published checkpoints leave out


def rope(rope_type: str, **parameters) -> dict:
    return dict(rope_type=rope_type, **({"rope_theta": 10000.0} | parameters))


FAMILIES = {
    # The heads of SmolLM2: nine of them over three KV heads, hidden = heads * head_dim, embeddings tied.
    "llama": Family(
        "LlamaForCausalLM",
        SMALL
        | dict(
            hidden_size=72,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        ),
        legacy_rope_keys=True,
        drop_keys=["head_dim"],
    ),
    "llama-llama3-bias": Family(
        "LlamaForCausalLM",
        SMALL
        | dict(
            intermediate_size=64,
            num_attention_heads=8,
            num_key_value_heads=4,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters=rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
                rope_theta=500.0,
            ),
        ),
        legacy_rope_keys=True,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        SMALL | dict(hidden_size=48, tie_word_embeddings=True, rope_parameters=rope("default", rope_theta=1e6)),
        legacy_rope_keys=True,
        drop_keys=["head_dim"],
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        SMALL
        | dict(num_hidden_layers=3, head_dim=16, intermediate_size=64, rope_parameters=rope("default", rope_theta=1e6)),
    ),
    "mistral": Family(
        "MistralForCausalLM",
        SMALL | dict(num_hidden_layers=3, sliding_window=12),
        legacy_rope_keys=True,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        SMALL
        | dict(
            num_hidden_layers=5,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=12,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            rope_parameters={
                "sliding_attention": rope("default", rope_theta=100.0),
                "full_attention": rope("linear", rope_theta=1e4, factor=8.0),
            },
        ),
    ),
}
