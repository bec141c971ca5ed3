//! GGUF tensor names and what Hugging Face calls the same tensors.

use super::config::ROPE_FACTORS;
use crate::TensorName;

/// Names outside the layers.
const MODEL_NAMES: &[(&str, &str)] =
    &[("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

/// Names inside a layer, after `blk.N.` and `model.layers.N.`, that all architectures share.
const LAYER_NAMES: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_exps", "mlp.experts.gate_proj"),
    ("ffn_up_exps", "mlp.experts.up_proj"),
    ("ffn_down_exps", "mlp.experts.down_proj"),
    ("ffn_gate_up_exps", "mlp.experts.gate_up_proj"),
];

/// Where one architecture departs from [`LAYER_NAMES`].
pub(super) type LayerNames = &'static [(&'static str, &'static str)];

/// Gemma normalises before and after both halves of a layer.
pub(super) const GEMMA_NAMES: LayerNames = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

/// Qwen 3.5 and 3 Next: three of four layers are delta nets, which GGUF files share names with state space models.
pub(super) const DELTA_NAMES: LayerNames = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_in", "linear_attn.in_proj_qkvz"),
    ("ssm_ba", "linear_attn.in_proj_ba"),
    ("ssm_alpha", "linear_attn.in_proj_a"),
    ("ssm_beta", "linear_attn.in_proj_b"),
    ("ssm_conv1d", "linear_attn.conv1d"),
    ("ssm_a", "linear_attn.A_log"),
    ("ssm_dt.bias", "linear_attn.dt_bias"),
    ("ssm_norm", "linear_attn.norm"),
    ("ssm_out", "linear_attn.out_proj"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
];

/// gpt-oss: a learned logit per head, and the router under its own name.
pub(super) const GPT_OSS_NAMES: LayerNames = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("attn_sinks.weight", "self_attn.sinks"),
    ("ffn_gate_inp", "mlp.router"),
];

/// Towers of images and sounds, and their projections into the language model: how the names begin.
const OTHER_TOWERS: &[&str] = &["v.", "a.", "mm.", "resampler."];

/// Factors of activations, which are not quantized by a stored scale: NVFP4.
const ACTIVATION_SCALE: &str = ".input_scale";

/// What a GGUF tensor is called. One of a layer that no table lists keeps its name: a model that does not ask for it is refused, but for
/// layers that predict further tokens (`nextn`).
pub(super) fn translated(name: &str, own: LayerNames) -> TensorName {
    let is_of_tower = OTHER_TOWERS.iter().any(|start| name.starts_with(start));
    if name == ROPE_FACTORS || is_of_tower || name.ends_with(ACTIVATION_SCALE) {
        return TensorName::PassedOver;
    }
    match canonical(name, own) {
        Some(canonical) => TensorName::Weight(canonical),
        None if name.starts_with("blk.") => TensorName::Weight(name.into()),
        None => TensorName::Unknown,
    }
}

/// The canonical name of a tensor that a table lists.
fn canonical(name: &str, own: LayerNames) -> Option<String> {
    let find = |tables: [LayerNames; 2], wanted: &str| {
        tables.into_iter().flatten().find(|(gguf, _)| *gguf == wanted).map(|(_, canonical)| *canonical)
    };
    let of_module = |tables: [LayerNames; 2], local: &str| {
        let (module, parameter) = local.rsplit_once('.')?;
        Some(format!("{}.{parameter}", find(tables, module)?))
    };
    let in_layer = || {
        let (layer, local) = name.strip_prefix("blk.")?.split_once('.')?;
        let tables = [own, LAYER_NAMES];
        let local = find(tables, local).map(str::to_string).or_else(|| of_module(tables, local))?;
        Some(format!("model.layers.{layer}.{local}"))
    };
    in_layer().or_else(|| of_module([MODEL_NAMES, &[]], name))
}

/// The name of a GGUF tensor with this canonical one; `None` for names that no table lists.
pub(super) fn stored(canonical: &str, own: LayerNames) -> Option<String> {
    let translate = |tables: [LayerNames; 2], local: &str| {
        let mut known = tables.into_iter().flatten();
        known.find_map(|(gguf, ours)| match local.strip_prefix(ours)? {
            "" => Some(gguf.to_string()),
            parameter if parameter.starts_with('.') && !parameter[1..].contains('.') => {
                Some(format!("{gguf}{parameter}"))
            }
            _ => None,
        })
    };
    match canonical.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')) {
        Some((layer, local)) => Some(format!("blk.{layer}.{}", translate([own, LAYER_NAMES], local)?)),
        None => translate([MODEL_NAMES, &[]], canonical),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_translate_by_table() {
        let cases = [
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("output.weight", "lm_head.weight"),
            ("output_norm.weight", "model.norm.weight"),
            ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
            ("blk.11.attn_k.bias", "model.layers.11.self_attn.k_proj.bias"),
            ("blk.3.ffn_down_exps.weight", "model.layers.3.mlp.experts.down_proj.weight"),
            ("blk.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
            ("blk.3.nextn.eh_proj.weight", "blk.3.nextn.eh_proj.weight"),
            ("blk.3.never_seen.weight", "blk.3.never_seen.weight"),
        ];
        let assert_translated = |gguf, own, expected: &str| {
            assert_eq!(translated(gguf, own), TensorName::Weight(expected.into()), "{gguf}");
        };
        for (gguf, expected) in cases {
            assert_translated(gguf, &[], expected);
            assert_eq!(stored(expected, &[]).as_deref(), (gguf != expected).then_some(gguf));
        }
        assert_translated("blk.2.ffn_norm.weight", GEMMA_NAMES, "model.layers.2.pre_feedforward_layernorm.weight");
        for (gguf, expected) in [
            ("blk.2.ssm_a", "model.layers.2.linear_attn.A_log"),
            ("blk.2.ssm_dt.bias", "model.layers.2.linear_attn.dt_bias"),
            ("blk.2.attn_qkv.weight", "model.layers.2.linear_attn.in_proj_qkv.weight"),
            ("blk.2.attn_q.weight", "model.layers.2.self_attn.q_proj.weight"),
            ("blk.2.ffn_gate_inp_shexp.weight", "model.layers.2.mlp.shared_expert_gate.weight"),
        ] {
            assert_translated(gguf, DELTA_NAMES, expected);
            assert_eq!(stored(expected, DELTA_NAMES).as_deref(), Some(gguf));
        }
        assert_translated("blk.2.attn_sinks.weight", GPT_OSS_NAMES, "model.layers.2.self_attn.sinks");
        assert_translated("blk.2.ffn_gate_inp.bias", GPT_OSS_NAMES, "model.layers.2.mlp.router.bias");
        for name in ["rope_freqs.weight", "v.blk.0.attn_q.weight", "mm.0.weight", "blk.0.ffn_up.input_scale"] {
            assert_eq!(translated(name, &[]), TensorName::PassedOver, "{name}");
        }
        for name in ["ouptut.weight", "output", "token_embed.weight", "rope_factors_long.weight", "vision.weight", ""] {
            assert_eq!(translated(name, &[]), TensorName::Unknown, "{name}");
        }
    }
}
