//! Which weights the output holds, from which rows of the source, and stored how.

use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::Value as Json;

use super::encode::Stored;
use super::{ConvertError, Target};
use crate::{Checkpoint, TensorInfo};

/// A part of a checkpoint, as [`Checkpoint::read`] takes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Selection {
    /// Weights, stacked along their rows.
    pub names: Vec<String>,
    /// Rows of the stack, in order.
    pub rows: Vec<Range<usize>>,
    /// Columns; `None` is all of them.
    pub columns: Option<Vec<Range<usize>>>,
}

/// One weight of the output.
pub(super) struct Planned {
    /// Its name, with `.weight`, in the output.
    pub name: String,
    pub source: Selection,
    /// Shape, outermost first.
    pub shape: Vec<usize>,
    pub stored: Stored,
    /// Why a matrix stays in BF16 though the target is another format.
    pub kept: Option<String>,
}

impl Planned {
    /// Rows of the matrix: all dimensions but the last.
    pub fn rows(&self) -> usize {
        self.shape.split_last().map_or(1, |(_, outer)| outer.iter().product())
    }

    /// The module that holds the weight.
    pub fn module(&self) -> &str {
        self.name.strip_suffix(".weight").unwrap_or(&self.name)
    }
}

/// Modules that transformers never quantizes to FP8.
const FP8_PLAIN: &[&str] = &["embed_tokens", "lm_head"];
/// Parts of a name that mark a router: an error there sends a token to the wrong experts.
const ROUTERS: &[&str] = &["gate", "router", "shared_expert_gate"];
const EXPERTS: &str = ".mlp.experts.";

/// The weights of the output, in the order of the source.
///
/// # Errors
/// [`ConvertError::Tensor`] for a tensor that has no place in the output.
pub(super) fn plan(checkpoint: &Checkpoint, target: Target, keep: &[String]) -> Result<Vec<Planned>, ConvertError> {
    let heads = RotaryHeads::of(checkpoint.config());
    let mut planned = Vec::new();
    let mut banks: BTreeMap<(String, &str), Bank> = BTreeMap::new();
    for info in checkpoint.tensors() {
        if let Some((layer, rest)) = info.name.split_once(EXPERTS) {
            gather_experts(&mut banks, layer, rest, info)?;
        } else if info.name.starts_with("model.") || info.name.starts_with("lm_head.") {
            planned.push((info.name.clone(), heads.select(info)?, info.shape.clone()));
        } else {
            return Err(ConvertError::tensor(&info.name, "has no place in the converted model"));
        }
    }
    for ((layer, projection), bank) in banks {
        planned.extend(bank.weights(&layer, projection, target)?);
    }
    Ok(planned
        .into_iter()
        .map(|(name, source, shape)| {
            let (stored, kept) = storage(&name, &shape, target, keep);
            Planned { name, source, shape, stored, kept }
        })
        .collect())
}

/// How a weight is stored, and why not as the target says.
fn storage(name: &str, shape: &[usize], target: Target, keep: &[String]) -> (Stored, Option<String>) {
    let plain = Target::Bf16.stored();
    let (Some(module), Some((&cols, outer))) = (name.strip_suffix(".weight"), shape.split_last()) else {
        return (plain, None);
    };
    if outer.is_empty() || target == Target::Bf16 {
        return (plain, None);
    }
    let has = |parts: &[&str]| module.split('.').any(|part| parts.contains(&part));
    let reason = if let Some(pattern) = keep.iter().find(|pattern| matches(pattern, module)) {
        Some(format!("--keep {pattern}"))
    } else if has(ROUTERS) {
        Some("a router".into())
    } else if target == Target::Fp8 && has(FP8_PLAIN) {
        Some("transformers reads no FP8 here".into())
    } else if outer.len() > 1 && !module.contains(".switch_mlp.") {
        Some("not a matrix".into())
    } else {
        target.stored().refuses(outer.iter().product(), cols)
    };
    match reason {
        Some(reason) => (plain, Some(reason)),
        None => (target.stored(), None),
    }
}

/// Whether the parts of `pattern` stand next to each other in `name`. `embed` also finds `embed_tokens`.
pub(super) fn matches(pattern: &str, name: &str) -> bool {
    let wanted: Vec<&str> = pattern.split('.').collect();
    let parts: Vec<&str> = name.split('.').collect();
    let fits = |(part, wanted): (&&str, &&str)| {
        part.strip_prefix(*wanted).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
    };
    parts.windows(wanted.len()).any(|window| window.iter().zip(&wanted).all(fits))
}

/// Heads of a model whose q and k rows pair neighbours, as GGUF files of some architectures have them. The rest of the world
/// pairs row `i` of a head with row `i + width / 2`.
struct RotaryHeads {
    interleaved: bool,
    query: usize,
    key: usize,
}

impl RotaryHeads {
    fn of(config: &Json) -> Self {
        let count = |key: &str| config[key].as_u64().unwrap_or(0) as usize;
        let interleaved = config["consort_rope_pairs"] == "interleaved";
        Self { interleaved, query: count("num_attention_heads"), key: count("num_key_value_heads") }
    }

    /// The whole of a weight, with its rows (or a bias's values) in the order of the output.
    fn select(&self, info: &TensorInfo) -> Result<Selection, ConvertError> {
        let (rows, cols) = match info.shape.split_last() {
            Some((&cols, outer)) => (outer.iter().product(), cols),
            None => (1, 1),
        };
        let names = vec![info.name.clone()];
        let heads = match info.name.rsplit('.').nth(1) {
            Some("q_proj") if self.interleaved => self.query,
            Some("k_proj") if self.interleaved => self.key,
            _ => return Ok(Selection { names, rows: vec![0..rows], columns: None }),
        };
        let outputs = if info.name.ends_with(".bias") { cols } else { rows };
        if heads == 0 || !outputs.is_multiple_of(2 * heads) {
            let reason = format!("{outputs} rows don't divide into {heads} heads of rotary pairs");
            return Err(ConvertError::tensor(&info.name, reason));
        }
        let width = outputs / heads;
        let in_head =
            move |head: usize| (0..width).map(move |row| head * width + row % (width / 2) * 2 + row / (width / 2));
        let order = (0..heads).flat_map(in_head).map(|row| row..row + 1).collect();
        Ok(match outputs == cols && info.name.ends_with(".bias") {
            true => Selection { names, rows: vec![0..1], columns: Some(order) },
            false => Selection { names, rows: order, columns: None },
        })
    }
}

/// One projection of all experts of a layer.
#[derive(Default)]
struct Bank {
    /// What holds it: one stacked weight, or a weight for each expert, by its number.
    names: BTreeMap<usize, String>,
    /// The rows of each expert in the stack of all of `names`.
    experts: Vec<Range<usize>>,
    cols: usize,
}

const PROJECTIONS: &[&str] = &["gate_proj", "up_proj", "down_proj"];
/// Gate rows, then up rows, of each expert.
const FUSED: &str = "gate_up_proj";

/// Files experts in whichever way they are stored: one by one, stacked, or stacked with gate and up fused.
fn gather_experts<'t>(
    banks: &mut BTreeMap<(String, &'t str), Bank>,
    layer: &str,
    rest: &'t str,
    info: &TensorInfo,
) -> Result<(), ConvertError> {
    let parts: Vec<&'t str> = rest.split('.').collect();
    let wrong =
        || ConvertError::tensor(&info.name, format!("is no expert weight of shape {:?} that is known", info.shape));
    let key = |projection| (layer.to_string(), projection);
    match (parts.as_slice(), info.shape.as_slice()) {
        (&[number, projection, "weight"], &[rows, cols]) if PROJECTIONS.contains(&projection) => {
            let number: usize = number.parse().map_err(|_| wrong())?;
            let bank = banks.entry(key(projection)).or_default();
            let experts = bank.names.len();
            // The stack has the experts in the order of their numbers, so all must be equally long.
            if bank.experts.first().is_some_and(|first| first.len() != rows || bank.cols != cols) {
                return Err(wrong());
            }
            bank.names.insert(number, info.name.clone());
            bank.experts.push(experts * rows..(experts + 1) * rows);
            bank.cols = cols;
        }
        (&[projection, "weight"], &[experts, rows, cols]) if PROJECTIONS.contains(&projection) => {
            let ranges = (0..experts).map(|expert| expert * rows..(expert + 1) * rows).collect();
            banks.insert(key(projection), Bank { names: [(0, info.name.clone())].into(), experts: ranges, cols });
        }
        (&[FUSED, "weight"], &[experts, rows, cols]) if rows.is_multiple_of(2) => {
            for (half, projection) in ["gate_proj", "up_proj"].into_iter().enumerate() {
                let start = |expert: usize| expert * rows + half * rows / 2;
                let ranges = (0..experts).map(|expert| start(expert)..start(expert) + rows / 2).collect();
                banks.insert(key(projection), Bank { names: [(0, info.name.clone())].into(), experts: ranges, cols });
            }
        }
        _ => return Err(wrong()),
    }
    Ok(())
}

impl Bank {
    /// The weights that the output has for these experts: MLX stacks them, everyone else keeps one for each.
    fn weights(
        self,
        layer: &str,
        projection: &str,
        target: Target,
    ) -> Result<Vec<(String, Selection, Vec<usize>)>, ConvertError> {
        if let Some((&last, name)) = self.names.last_key_value()
            && last + 1 != self.names.len()
        {
            let reason = format!("is expert {last}, but there are {} experts", self.names.len());
            return Err(ConvertError::tensor(name, reason));
        }
        let names: Vec<String> = self.names.into_values().collect();
        let rows = self.experts.first().map_or(0, Range::len);
        if target.is_mlx() {
            let shape = vec![self.experts.len(), rows, self.cols];
            let source = Selection { names, rows: self.experts, columns: None };
            return Ok(vec![(format!("{layer}.mlp.switch_mlp.{projection}.weight"), source, shape)]);
        }
        let single = |(expert, range): (usize, Range<usize>)| {
            // Only the weight that holds these rows, where each expert has its own.
            let (names, range) = match names.get(expert) {
                Some(own) if names.len() > 1 => (vec![own.clone()], 0..rows),
                _ => (names.clone(), range),
            };
            let name = format!("{layer}{EXPERTS}{expert}.{projection}.weight");
            (name, Selection { names, rows: vec![range], columns: None }, vec![rows, self.cols])
        };
        Ok(self.experts.into_iter().enumerate().map(single).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn patterns_match_whole_parts_of_a_path() {
        for (pattern, name, expected) in [
            ("embed", "model.embed_tokens", true),
            ("lm_head", "lm_head", true),
            ("layers.1", "model.layers.1.mlp.up_proj", true),
            ("layers.1", "model.layers.11.mlp.up_proj", false),
            ("layers.1.mlp", "model.layers.1.mlp.up_proj", true),
            ("head", "lm_head", false),
            ("proj", "model.layers.1.mlp.up_proj", false),
            ("model.layers.1.mlp.up_proj.more", "model.layers.1.mlp.up_proj", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} in {name}");
        }
    }
}
