//! `consort inspect`: what a model's files hold, read from headers alone.

use anyhow::Result;
use clap::Args;
use consort_models::{Held, Plan};
use serde::Serialize;

use crate::flags::JsonFlag;
use crate::model::ModelFiles;
use crate::output;

#[derive(Args)]
pub struct Inspect {
    /// A path, a known name (smollm2) or a name on the Hugging Face Hub (ORG/NAME)
    model: String,
    /// Also show what each rank of this plan would hold
    #[arg(long)]
    plan: Option<Plan>,
    #[command(flatten)]
    json: JsonFlag,
}

/// The JSON object.
#[derive(Serialize)]
struct Answer {
    model: String,
    path: String,
    architecture: String,
    parameters: u64,
    weight_bytes: u64,
    formats: Vec<(String, u64)>,
    layers: usize,
    hidden: usize,
    vocabulary: usize,
    context: usize,
    /// Bytes of each layer, in order.
    layer_bytes: Vec<u64>,
    /// Bytes outside the layers: embedding, final norm, output head.
    other_bytes: u64,
    /// Entries of the tokenizer, or why there is none.
    tokenizer: Result<usize, String>,
    manifest_hash: String,
    plan: Option<String>,
    ranks: Option<Vec<RankBytes>>,
}

/// What one rank would hold.
#[derive(Serialize)]
struct RankBytes {
    rank: usize,
    weight_bytes: u64,
    replicated_bytes: u64,
}

impl Inspect {
    pub fn run(&self) -> Result<()> {
        let model = ModelFiles::open(&self.model, None)?;
        let answer = self.answer(&model)?;
        if !self.json.takes_stdout() {
            output::text(&answer.text())?;
        }
        output::json(&self.json, &answer)
    }

    fn answer(&self, model: &ModelFiles) -> Result<Answer> {
        let tensors = model.checkpoint.tensors();
        let mut layer_bytes = vec![0; model.outline.layers];
        let mut other_bytes = 0;
        for tensor in tensors {
            match layer_of(&tensor.name).and_then(|layer| layer_bytes.get_mut(layer)) {
                Some(bytes) => *bytes += tensor.bytes,
                None => other_bytes += tensor.bytes,
            }
        }
        let ranks = self.plan.as_ref().map(|plan| model.measure(plan)).transpose()?;
        Ok(Answer {
            model: model.name.clone(),
            path: model.path.display().to_string(),
            architecture: model.architecture().to_owned(),
            parameters: tensors.iter().map(|tensor| tensor.shape.iter().map(|&n| n as u64).product::<u64>()).sum(),
            weight_bytes: tensors.iter().map(|tensor| tensor.bytes).sum(),
            formats: model.formats(),
            layers: model.outline.layers,
            hidden: model.outline.hidden,
            vocabulary: model.outline.vocabulary,
            context: model.outline.context,
            layer_bytes,
            other_bytes,
            tokenizer: model.tokenizer().map(|it| it.vocabulary_size()).map_err(|error| error.to_string()),
            manifest_hash: model.checkpoint.manifest_hash(),
            plan: self.plan.as_ref().map(Plan::to_string),
            ranks: ranks.map(|ranks| ranks.iter().enumerate().map(|(rank, held)| rank_bytes(rank, held)).collect()),
        })
    }
}

fn rank_bytes(rank: usize, held: &[Held]) -> RankBytes {
    let replicated = held.iter().filter(|weight| weight.replicated);
    RankBytes {
        rank,
        weight_bytes: held.iter().map(|weight| weight.bytes).sum(),
        replicated_bytes: replicated.map(|weight| weight.bytes).sum(),
    }
}

/// The layer that a weight belongs to, by its name: `model.layers.3.mlp.up_proj.weight`.
fn layer_of(name: &str) -> Option<usize> {
    name.split_once("layers.")?.1.split('.').next()?.parse().ok()
}

impl Answer {
    fn text(&self) -> String {
        let formats: Vec<String> =
            self.formats.iter().map(|(format, bytes)| format!("{format} {}", output::size(*bytes))).collect();
        let tokenizer = match &self.tokenizer {
            Ok(entries) => format!("{entries} entries"),
            Err(reason) => format!("none: {reason}"),
        };
        let (least, most) = (self.layer_bytes.iter().min(), self.layer_bytes.iter().max());
        let per_layer = match (least, most) {
            (Some(least), Some(most)) if least != most => {
                format!("{} to {}", output::size(*least), output::size(*most))
            }
            (least, _) => least.map_or_else(|| "none".to_owned(), |bytes| output::size(*bytes)),
        };
        let lines = [
            ("model", format!("{} ({})", self.model, self.path)),
            ("architecture", self.architecture.clone()),
            ("parameters", format!("{:.1} million", self.parameters as f64 / 1e6)),
            ("weights", format!("{} ({})", output::size(self.weight_bytes), formats.join(", "))),
            ("layers", format!("{}, {per_layer} each; {} outside", self.layers, output::size(self.other_bytes))),
            ("hidden size", self.hidden.to_string()),
            ("vocabulary", self.vocabulary.to_string()),
            ("context", format!("{} tokens", self.context)),
            ("tokenizer", tokenizer),
            ("manifest", self.manifest_hash.clone()),
        ];
        let mut text: String = lines.iter().map(|(name, value)| format!("{name:<13} {value}\n")).collect();
        if let (Some(plan), Some(ranks)) = (&self.plan, &self.ranks) {
            let row = |rank: &RankBytes| {
                vec![rank.rank.to_string(), output::size(rank.weight_bytes), output::size(rank.replicated_bytes)]
            };
            let rows: Vec<_> = ranks.iter().map(row).collect();
            text.push_str(&format!("\n{plan}\n{}", output::table(&["rank", "weights", "of these replicated"], &rows)));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn layers_are_told_by_name() {
        assert_eq!(super::layer_of("model.layers.12.mlp.up_proj.weight"), Some(12));
        assert_eq!(super::layer_of("model.embed_tokens.weight"), None);
        assert_eq!(super::layer_of("model.layers.x.weight"), None);
    }
}
