//! Plans: which rank holds what.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use crate::partition::split;

/// How ranks divide a model: `tensor:2`, `pipeline:2`, `pipeline:2,tensor:2`, with `expert` or `gather` as options of
/// MoE layers.
///
/// A list of numbers in place of a count sets uneven shares: `pipeline:10/5/2` gives three stages 10, 5 and 2 layers,
/// `tensor:2/1` gives the first shard twice what the second holds, as near as whole units allow.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    /// Layers of each stage, or one entry of zero per stage for an even split.
    stages: Vec<usize>,
    /// Relative weight of each shard.
    shards: Vec<usize>,
    /// How MoE layers are divided.
    pub experts: ExpertDivision,
}

/// How the shards of a stage divide a mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExpertDivision {
    /// Every shard holds a slice of each expert's width; expert outputs are sums over the shards.
    Width,
    /// Every shard holds whole experts.
    Whole,
    /// Every shard holds a slice of the width of each expert's first half and of the outputs of its second half; what lies
    /// between the halves is gathered. For architectures that norm each expert's output.
    Gather,
}

/// Why a text is no plan.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "plan {text:?}: {reason}; a plan looks like tensor:2, pipeline:2, pipeline:2,tensor:2, tensor:2,expert or tensor:2,gather"
)]
pub struct PlanError {
    text: String,
    reason: String,
}

/// One rank's place in a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// This rank.
    pub rank: usize,
    /// Its stage.
    pub stage: usize,
    /// Stages in all.
    pub stages: usize,
    /// Its shard within the stage.
    pub shard: usize,
    /// Relative weight of each shard of the stage.
    pub shares: Vec<usize>,
    /// The layers of its stage.
    pub layers: Range<usize>,
    /// How MoE layers are divided.
    pub experts: ExpertDivision,
}

impl Plan {
    /// The plan of one rank.
    pub fn single() -> Self {
        Self::new(1, 1)
    }

    /// Even stages of even shards.
    pub fn new(pipeline: usize, tensor: usize) -> Self {
        Self { stages: vec![0; pipeline], shards: vec![1; tensor], experts: ExpertDivision::Width }
    }

    /// Ranks that the plan needs.
    pub fn ranks(&self) -> usize {
        self.stages.len() * self.shards.len()
    }

    /// Stages.
    pub fn pipeline(&self) -> usize {
        self.stages.len()
    }

    /// Shards of a stage.
    pub fn tensor(&self) -> usize {
        self.shards.len()
    }

    /// The place of `rank`, for a model of `layers` layers. Ranks are numbered stage by stage.
    pub fn place(&self, rank: usize, layers: usize) -> Result<Placement, String> {
        let (stage, shard) = (rank / self.tensor(), rank % self.tensor());
        let counts = if self.stages.iter().all(|&n| n == 0) {
            if self.pipeline() > layers {
                return Err(format!("{} stages for {layers} layers; use at most {layers} stages", self.pipeline()));
            }
            split(layers, &vec![1; self.pipeline()]).iter().map(|r| r.len()).collect()
        } else {
            self.stages.clone()
        };
        if counts.iter().sum::<usize>() != layers {
            let sum: usize = counts.iter().sum();
            return Err(format!("its stages hold {sum} layers, the model has {layers}"));
        }
        let first = counts[..stage].iter().sum();
        Ok(Placement {
            rank,
            stage,
            stages: self.pipeline(),
            shard,
            shares: self.shards.clone(),
            layers: first..first + counts[stage],
            experts: self.experts,
        })
    }
}

impl Placement {
    /// The place of the only rank.
    pub fn single(layers: usize) -> Self {
        Plan::single().place(0, layers).expect("one stage fits any model")
    }

    /// Shards of this rank's stage.
    pub fn shards(&self) -> usize {
        self.shares.len()
    }

    /// Whether this stage embeds tokens.
    pub fn is_first(&self) -> bool {
        self.stage == 0
    }

    /// Whether this stage makes logits.
    pub fn is_last(&self) -> bool {
        self.stage + 1 == self.stages
    }
}

impl FromStr for Plan {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Self, PlanError> {
        let error = |reason: String| PlanError { text: text.to_string(), reason };
        let mut plan = Plan::single();
        let mut seen = Vec::new();
        for part in text.split(',').map(str::trim) {
            let (key, value) = part.split_once(':').unwrap_or((part, ""));
            // Two ways to divide experts exclude each other like two numbers of stages.
            let what = if key == "gather" { "expert" } else { key };
            if seen.contains(&what) {
                return Err(error(format!("{key:?} is said twice, or beside its opposite")));
            }
            seen.push(what);
            match key {
                "pipeline" => plan.stages = parse_shares(value, 0).map_err(|e| error(format!("{key}: {e}")))?,
                "tensor" => plan.shards = parse_shares(value, 1).map_err(|e| error(format!("{key}: {e}")))?,
                "expert" if value.is_empty() => plan.experts = ExpertDivision::Whole,
                "gather" if value.is_empty() => plan.experts = ExpertDivision::Gather,
                _ => return Err(error(format!("{part:?} is not known"))),
            }
        }
        Ok(plan)
    }
}

/// `3` is three equal parts, each written as `even`; `2/1` is two parts with these shares.
fn parse_shares(text: &str, even: usize) -> Result<Vec<usize>, String> {
    const MOST_RANKS: usize = 1024;
    const MOST_SHARE: usize = 1 << 20;
    let share = |n: &str| {
        let valid = n.parse().ok().filter(|n| (1..=MOST_SHARE).contains(n));
        valid.ok_or_else(|| format!("{n:?} is not a whole number from 1 to {MOST_SHARE}"))
    };
    let parts: Vec<usize> = text.split('/').map(share).collect::<Result<_, _>>()?;
    let ranks = if let [count] = parts[..] { count } else { parts.len() };
    match parts[..] {
        _ if ranks > MOST_RANKS => Err(format!("{ranks} is more than {MOST_RANKS}")),
        [count] => Ok(vec![even; count]),
        _ => Ok(parts),
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |shares: &[usize]| match shares.iter().all(|&n| n == shares[0] && n <= 1) {
            true => shares.len().to_string(),
            false => shares.iter().map(ToString::to_string).collect::<Vec<_>>().join("/"),
        };
        let mut parts = Vec::new();
        if self.pipeline() > 1 {
            parts.push(format!("pipeline:{}", list(&self.stages)));
        }
        if self.tensor() > 1 || parts.is_empty() {
            parts.push(format!("tensor:{}", list(&self.shards)));
        }
        parts.extend(match self.experts {
            ExpertDivision::Width => None,
            ExpertDivision::Whole => Some("expert".to_string()),
            ExpertDivision::Gather => Some("gather".to_string()),
        });
        f.write_str(&parts.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_round_trip_through_text() {
        for text in [
            "tensor:1",
            "tensor:2",
            "pipeline:2",
            "pipeline:2,tensor:2",
            "pipeline:10/5/2",
            "tensor:2/1,expert",
            "tensor:2,gather",
        ] {
            assert_eq!(text.parse::<Plan>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (text, part) in [
            ("tensor:0", "\"0\""),
            ("tensor:", "\"\""),
            ("rows:2", "rows:2"),
            ("tensor:2,tensor:2", "twice"),
            ("tensor:2,expert,gather", "opposite"),
            ("tensor:18446744073709551615/1", "from 1 to"),
        ] {
            let message = text.parse::<Plan>().unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn stages_cover_all_layers_once() {
        for (plan, layers) in
            [("pipeline:3", 17), ("pipeline:2,tensor:2", 30), ("pipeline:10/5/2", 17), ("tensor:4", 1)]
        {
            let plan: Plan = plan.parse().unwrap();
            let mut next = 0;
            for stage in 0..plan.pipeline() {
                let place = plan.place(stage * plan.tensor(), layers).unwrap();
                assert_eq!(place.layers.start, next);
                assert!(!place.layers.is_empty());
                next = place.layers.end;
            }
            assert_eq!(next, layers);
        }
    }

    #[test]
    fn a_plan_with_more_stages_than_layers_is_refused() {
        assert!(Plan::new(4, 1).place(0, 3).unwrap_err().contains("4 stages for 3 layers"));
        assert!("pipeline:10/5/2".parse::<Plan>().unwrap().place(0, 18).unwrap_err().contains("17 layers"));
    }
}
