//! Mixture of experts: the choice of experts and the products with them.

use std::{cmp::Ordering, ops::Range};

use crate::{Matrix, RouteScore, RouteSpec};

use super::{HostBuffer, attention::softmax_with_sink, product::dot, rows::sigmoid};

/// Which experts the tokens of a step go to. Pair `t · top_k + i` is token `t` with its `i`-th expert, best first.
#[derive(Clone, Debug, Default)]
pub struct HostRouting {
    top_k: usize,
    local: Range<usize>,
    /// Global expert of each pair.
    experts: Vec<u32>,
    /// Factor of each pair's output.
    weights: Vec<f32>,
    /// The pairs with a local expert, by expert and then by token.
    order: Vec<u32>,
    /// Scores of one token's experts, before and after the correction.
    scores: Vec<f32>,
    choice: Vec<f32>,
}

impl HostRouting {
    /// An empty routing with room for `tokens` tokens of `top_k` experts.
    pub fn with_capacity(tokens: usize, top_k: usize) -> Self {
        let pairs = tokens * top_k;
        Self {
            top_k,
            experts: Vec::with_capacity(pairs),
            weights: Vec::with_capacity(pairs),
            order: Vec::with_capacity(pairs),
            ..Self::default()
        }
    }

    /// Experts per token.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// Pairs of the step, those of other ranks included.
    pub fn pairs(&self) -> usize {
        self.experts.len()
    }

    /// The global expert of each pair.
    pub fn experts(&self) -> &[u32] {
        &self.experts
    }

    /// The factor of each pair's output.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// Experts that this rank holds.
    pub fn local_experts(&self) -> usize {
        self.local.len()
    }

    /// The local expert of a pair: its part of a stacked weight. `None` if another rank holds it.
    pub fn local_expert(&self, pair: usize) -> Option<usize> {
        let expert = self.experts[pair] as usize;
        self.local.contains(&expert).then(|| expert - self.local.start)
    }

    /// The work of this rank: each local expert that has any, with its pairs in token order.
    pub fn groups(&self) -> impl Iterator<Item = (usize, &[u32])> {
        let expert = |pair: u32| self.experts[pair as usize] as usize;
        let same = move |a: &u32, b: &u32| expert(*a) == expert(*b);
        self.order.chunk_by(same).map(move |pairs| (expert(pairs[0]) - self.local.start, pairs))
    }

    /// Chooses experts from router logits `[n, experts]`.
    ///
    /// A NaN ranks above every number: it is chosen, and so shows in the output instead of vanishing.
    pub fn route(&mut self, logits: &HostBuffer, spec: &RouteSpec<'_, HostBuffer>) {
        assert!(spec.top_k <= logits.cols(), "no more experts per token than there are");
        self.top_k = spec.top_k;
        self.local = spec.local.clone();
        self.experts.clear();
        self.weights.clear();
        for token in 0..logits.rows() {
            self.route_token(logits.row(token), spec);
        }
        let Self { order, experts, local, .. } = self;
        order.clear();
        order.extend((0..experts.len() as u32).filter(|&pair| local.contains(&(experts[pair as usize] as usize))));
        order.sort_unstable_by_key(|&pair| (experts[pair as usize], pair));
    }

    fn route_token(&mut self, logits: &[f32], spec: &RouteSpec<'_, HostBuffer>) {
        let Self { scores, choice, experts, weights, .. } = self;
        scores.clear();
        scores.extend_from_slice(logits);
        match spec.score {
            RouteScore::Softmax => softmax_with_sink(scores, None),
            RouteScore::Sigmoid => scores.iter_mut().for_each(|score| *score = sigmoid(*score)),
            RouteScore::SoftmaxOfTop => {}
        }
        choice.clear();
        choice.extend_from_slice(scores);
        if let Some(correction) = spec.correction {
            choice.iter_mut().zip(correction.values()).for_each(|(choice, correction)| *choice += correction);
        }

        // The best so far, in order. One that is only as good as another comes after it, so ties go to the lower expert.
        let first = experts.len();
        let better = |a: u32, b: u32| nan_first(choice[a as usize], choice[b as usize]) == Ordering::Greater;
        for expert in 0..choice.len() as u32 {
            if experts.len() - first < spec.top_k {
                experts.push(expert);
            } else if experts[first..].last().is_some_and(|&last| better(expert, last)) {
                *experts.last_mut().expect("as was just seen") = expert;
            } else {
                continue;
            }
            let mut place = experts.len() - 1;
            while place > first && better(experts[place], experts[place - 1]) {
                experts.swap(place, place - 1);
                place -= 1;
            }
        }
        weights.extend(experts[first..].iter().map(|&expert| scores[expert as usize]));

        let weights = &mut weights[first..];
        if spec.score == RouteScore::SoftmaxOfTop {
            softmax_with_sink(weights, None);
        }
        let divisor = spec.normalize_epsilon.map_or(1.0, |epsilon| weights.iter().sum::<f32>() + epsilon);
        weights.iter_mut().for_each(|weight| *weight = *weight / divisor * spec.scale);
    }
}

/// Numbers by value, both zeros equal, and any NaN above them.
fn nan_first(a: f32, b: f32) -> Ordering {
    a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

/// The product of each pair with its expert's part of `w`, which stacks `local_experts` along its rows; pairs of other
/// ranks become zero rows. `x` has a row per token or a row per pair.
pub fn expert_matmul(out: &mut HostBuffer, x: &HostBuffer, w: &Matrix<'_>, routing: &HostRouting) {
    let local_experts = routing.local.len();
    assert_eq!(x.cols(), w.cols, "input features");
    assert_eq!(w.rows % local_experts.max(1), 0, "experts of one size");
    let rows_of_expert = w.rows / local_experts.max(1);
    let pairs_of_row = if x.rows() == routing.pairs() { 1 } else { routing.top_k };
    assert_eq!(x.rows() * pairs_of_row, routing.pairs(), "a row per token or a row per pair");

    out.reshape(routing.pairs(), rows_of_expert);
    out.values_mut().fill(0.0);
    let mut weights = vec![0.0; w.cols];
    for (expert, pairs) in routing.groups() {
        for feature in 0..rows_of_expert {
            w.decode_row(expert * rows_of_expert + feature, &mut weights);
            for &pair in pairs {
                let pair = pair as usize;
                out.row_mut(pair)[feature] = dot(x.row(pair / pairs_of_row), &weights);
            }
        }
    }
}

/// Adds each local pair's row of `bias` `[local experts, cols]`.
pub fn expert_add(x: &mut HostBuffer, bias: &HostBuffer, routing: &HostRouting) {
    assert_eq!((x.rows(), x.cols()), (routing.pairs(), bias.cols()), "a row per pair");
    for pair in 0..routing.pairs() {
        if let Some(expert) = routing.local_expert(pair) {
            x.row_mut(pair).iter_mut().zip(bias.row(expert)).for_each(|(x, bias)| *x += bias);
        }
    }
}

/// `out[t] = Σ weight · x[pair]` over token `t`'s local pairs.
pub fn expert_combine(out: &mut HostBuffer, x: &HostBuffer, routing: &HostRouting) {
    assert_eq!(x.rows(), routing.pairs(), "a row per pair");
    out.reshape(x.rows() / routing.top_k, x.cols());
    out.values_mut().fill(0.0);
    for pair in (0..x.rows()).filter(|&pair| routing.local_expert(pair).is_some()) {
        let weight = routing.weights[pair];
        let row = out.row_mut(pair / routing.top_k);
        row.iter_mut().zip(x.row(pair)).for_each(|(out, x)| *out += weight * x);
    }
}
