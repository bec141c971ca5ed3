"""The model families: what is unusual about each is in its config, and its config is all there is to a fixture.

Sizes are small but never trivial: several KV heads, head widths that differ from hidden / heads, windows shorter than
the prompt, prompts longer than the original context, layer counts that three pipeline stages share unevenly.
"""

from family import Family, add_token_prediction, fuse_experts

SMALL = dict(
    vocab_size=256,
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


def rope(rope_type: str, **parameters) -> dict:
    return dict(rope_type=rope_type, **({"rope_theta": 10000.0} | parameters))


ROPE_TEST = SMALL | dict(num_hidden_layers=3, tie_word_embeddings=True, hidden_size=48, intermediate_size=96)

MUSE_VISION = dict(
    patch_size=2,
    pos_emb_height=2,
    pos_emb_width=2,
    num_attention_heads=1,
    num_hidden_layers=1,
    hidden_size=8,
    intermediate_size=8,
    patch_temporal=1,
)

QWEN_VISION = dict(
    depth=1,
    hidden_size=8,
    intermediate_size=8,
    num_heads=1,
    patch_size=2,
    temporal_patch_size=1,
    out_hidden_size=64,
    num_position_embeddings=4,
)

# Three layers of gated delta net, then one of gated attention with rotation of half the head.
QWEN_HYBRID = dict(
    vocab_size=144,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    rope_parameters=rope("default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[2, 1, 1]),
)

SHARED_EXPERT_MOE = dict(
    vocab_size=64,
    hidden_size=48,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    norm_topk_prob=True,
    linear_value_head_dim=4,
)

GPT_OSS = dict(
    vocab_size=96,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=3,
    num_experts_per_tok=2,
    sliding_window=12,
    rope_parameters=rope(
        "yarn",
        rope_theta=100.0,
        factor=8.0,
        beta_fast=4.0,
        beta_slow=0.25,
        truncate=False,
        original_max_position_embeddings=16,
    ),
)

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
            sliding_window_pattern=2,
            rope_parameters={
                "sliding_attention": rope("default", rope_theta=100.0),
                "full_attention": rope("linear", rope_theta=1e4, factor=8.0),
            },
        ),
        legacy_rope_keys=True,
        # Embeddings are tied and grow by sqrt(hidden): large ones would drown the layers and only repeat a token.
        ranges=[(r"post_feedforward_layernorm", (0.5, 2.5)), (r"^model\.norm", (3.0, 7.0))],
        gains=[(r"embed_tokens", 0.2)],
    ),
    # The text model of Mistral Medium 3.5: YaRN whose two mscales do not cancel, queries scaled by position.
    "ministral3": Family(
        "Mistral3ForConditionalGeneration",
        dict(
            text_config=SMALL
            | dict(
                model_type="ministral3",
                num_hidden_layers=3,
                head_dim=16,
                intermediate_size=64,
                rope_parameters=rope(
                    "yarn",
                    rope_theta=1000.0,
                    factor=8.0,
                    original_max_position_embeddings=16,
                    max_position_embeddings=128,
                    beta_fast=2.0,
                    beta_slow=0.1,
                    mscale=1.5,
                    mscale_all_dim=1.0,
                    llama_4_scaling_beta=0.5,
                ),
            ),
            vision_config=dict(
                model_type="pixtral",
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                image_size=8,
                patch_size=4,
            ),
            tie_word_embeddings=False,
        ),
    ),
    # One dense layer, three sparse ones; two windows of 12 and two layers without positions.
    "muse_spark": Family(
        "MuseSparkForConditionalGeneration",
        dict(
            text_config=SMALL
            | dict(
                vocab_size=96,
                intermediate_size=24,
                num_attention_heads=8,
                num_key_value_heads=4,
                sliding_window=12,
                layer_types=["sliding_attention", "full_attention"] * 2,
                layer_rope_theta=[5000.0, 0, 5000.0, 0],
                rope_parameters=rope("default", rope_theta=5000.0),
                mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
                num_local_experts=8,
                num_experts_per_tok=3,
                moe_hidden_size=32,
                moe_intermediate_size=16,
                routed_scaling_factor=1.5,
                output_multiplier=0.5,
                final_logit_softcapping=20.0,
            ),
            vision_config=MUSE_VISION,
            audio_config=dict(
                patch_sizes=[2, 2],
                hidden_sizes=[4, 4],
                depths=[1, 1],
                num_hidden_layers=2,
                mlp_ratio=1.0,
                conv_kernel_size=3,
                out_hidden_size=64,
            ),
            out_hidden_size=8,
            projector_hidden_size=8,
        ),
    ),
    "muse_glimmer": Family(
        "MuseGlimmerForConditionalGeneration",
        dict(
            text_config=SMALL
            | dict(
                intermediate_size=32,
                num_attention_heads=8,
                num_key_value_heads=4,
                sliding_window=12,
                layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
                layer_rope_theta=[5000.0, 5000.0, 5000.0, 0],
                rope_parameters=rope("default", rope_theta=5000.0),
                output_multiplier=0.5,
                final_logit_softcapping=20.0,
            ),
            vision_config=MUSE_VISION,
            out_hidden_size=8,
            projector_hidden_size=8,
        ),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        SMALL
        | dict(
            vocab_size=160,
            num_hidden_layers=3,
            intermediate_size=64,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            rope_parameters=rope("default", rope_theta=1e6),
        ),
        legacy_rope_keys=True,
        rename_keys={"num_local_experts": "num_experts"},
    ),
    "qwen3_5": Family(
        "Qwen3_5ForConditionalGeneration",
        dict(
            text_config=SMALL | QWEN_HYBRID | dict(intermediate_size=64, tie_word_embeddings=True),
            vision_config=QWEN_VISION,
            tie_word_embeddings=True,
        ),
        publish=add_token_prediction,
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForConditionalGeneration",
        dict(
            text_config=SMALL | QWEN_HYBRID | SHARED_EXPERT_MOE,
            vision_config=QWEN_VISION | dict(out_hidden_size=48),
        ),
        publish=fuse_experts,
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        SMALL
        | QWEN_HYBRID
        | SHARED_EXPERT_MOE
        | dict(linear_key_head_dim=4),
    ),
    # Queries, keys, values, outputs and the router have biases; every other layer slides.
    "gpt_oss": Family(
        "GptOssForCausalLM",
        SMALL | GPT_OSS | dict(intermediate_size=32, num_local_experts=5),
        legacy_rope_keys=True,
    ),
    "llama-linear": Family("LlamaForCausalLM", ROPE_TEST | dict(rope_parameters=rope("linear", factor=4.0))),
    "llama-yarn": Family(
        "LlamaForCausalLM",
        ROPE_TEST
        | dict(rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=100.0)),
    ),
    "llama-dynamic": Family(
        "LlamaForCausalLM",
        ROPE_TEST | dict(max_position_embeddings=16, rope_parameters=rope("dynamic", factor=4.0)),
    ),
}
