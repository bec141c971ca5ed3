//! What fraction of its machine's limits a run reaches: reading weights bounds decode, multiplying bounds prefill.

use consort_cpu::Cpu;
use consort_cpu::roofline::Prober;
use consort_engine::Timings;
use consort_models::Held;
use serde::Serialize;

use crate::report::percent;

/// Measurements of each limit; the best counts.
const ROUNDS: usize = 5;

/// Rank 0's machine, with the threads of rank 0, and how near the run came.
#[derive(Serialize)]
pub struct RooflineReport {
    /// Bytes per second read from memory.
    read_bytes_per_second: f64,
    /// Multiplications and additions per second.
    f32_operations_per_second: f64,
    int8_operations_per_second: f64,
    /// In vectors, where the instruction set has them.
    bf16_operations_per_second: Option<f64>,
    /// In matrix tiles, where the machine has them and may use them.
    tile_int8_operations_per_second: Option<f64>,
    tile_bf16_operations_per_second: Option<f64>,
    /// What a generated token reads of rank 0's weights, and a token of a prompt multiplies; unknown where a router chooses among
    /// experts.
    weight_bytes_per_token: Option<u64>,
    operations_per_prompt_token: Option<u64>,
    /// Of the reading limit; the cache of keys and values is not counted.
    decode_fraction_of_read: Option<f64>,
    prefill_fraction_of_f32: Option<f64>,
    prefill_fraction_of_int8: Option<f64>,
}

impl RooflineReport {
    /// Measures the limits, when the run is over, and compares. `held` is rank 0's part of the model.
    pub fn measure(cpu: &Cpu, held: &[Held], timings: &Timings) -> Self {
        let limits = Prober::new(cpu).measure(ROUNDS);
        let work = TokenWork::of(held);
        let operations_per_second = work.as_ref().map(|work| work.operations as f64 * timings.prefill_tps);
        Self {
            read_bytes_per_second: limits.read_bytes_per_second,
            f32_operations_per_second: limits.f32_operations_per_second,
            int8_operations_per_second: limits.int8_operations_per_second,
            bf16_operations_per_second: limits.bf16_operations_per_second,
            tile_int8_operations_per_second: limits.tiles.map(|tiles| tiles.int8_operations_per_second),
            tile_bf16_operations_per_second: limits.tiles.map(|tiles| tiles.bf16_operations_per_second),
            weight_bytes_per_token: work.as_ref().map(|work| work.read_bytes),
            operations_per_prompt_token: work.as_ref().map(|work| work.operations),
            decode_fraction_of_read: (work.as_ref().zip(timings.decode_tps))
                .map(|(work, decode_tps)| work.read_bytes as f64 * decode_tps / limits.read_bytes_per_second),
            prefill_fraction_of_f32: operations_per_second.map(|rate| rate / limits.f32_operations_per_second),
            prefill_fraction_of_int8: operations_per_second.map(|rate| rate / limits.int8_operations_per_second),
        }
    }

    /// Two lines for people.
    pub fn lines(&self) -> String {
        let giga = |rate: f64| format!("{:.0}", rate / 1e9);
        let tiles = match (self.tile_int8_operations_per_second, self.tile_bf16_operations_per_second) {
            (Some(int8), Some(bf16)) => format!(", in tiles int8 {} and bf16 {} Gop/s", giga(int8), giga(bf16)),
            _ => String::new(),
        };
        let bf16 =
            self.bf16_operations_per_second.map_or_else(String::new, |rate| format!(", bf16 {} Gop/s", giga(rate)));
        let limits = format!(
            "limits of rank 0's machine: read {:.1} GB/s, f32 {} Gop/s, int8 {} Gop/s{bf16}{tiles}",
            self.read_bytes_per_second / 1e9,
            giga(self.f32_operations_per_second),
            giga(self.int8_operations_per_second),
        );
        let part = |value: Option<f64>| value.map_or_else(|| "an unknown part".to_owned(), percent);
        format!(
            "{limits}\nrank 0 reached: decode {} of the reading limit, prefill {} of f32 and {} of int8 arithmetic",
            part(self.decode_fraction_of_read),
            part(self.prefill_fraction_of_f32),
            part(self.prefill_fraction_of_int8),
        )
    }
}

/// What one token makes rank 0 do.
struct TokenWork {
    read_bytes: u64,
    operations: u64,
}

impl TokenWork {
    /// Every matrix once, save an embedding that is only looked up, and for prompts the head, which only the last token needs.
    fn of(held: &[Held]) -> Option<Self> {
        if held.iter().any(|weight| weight.name.contains("experts")) {
            return None;
        }
        let named = |weight: &Held, part: &str| weight.name.contains(part);
        let has_head = held.iter().any(|weight| named(weight, "lm_head"));
        let read = held.iter().filter(|weight| !(has_head && named(weight, "embed_tokens")));
        let multiplied = held.iter().filter(|weight| !named(weight, "embed_tokens") && !named(weight, "lm_head"));
        Some(Self {
            read_bytes: read.map(|weight| weight.bytes).sum(),
            operations: multiplied.map(|weight| 2 * weight.rows as u64 * weight.columns as u64).sum(),
        })
    }
}

#[cfg(test)]
mod tests {
    use consort_compute::Format;

    use super::*;

    fn held(name: &str, rows: usize, columns: usize) -> Held {
        Held {
            name: name.into(),
            format: Format::F32,
            rows,
            columns,
            bytes: (4 * rows * columns) as u64,
            replicated: false,
        }
    }

    #[test]
    fn a_token_reads_the_head_and_not_the_embedding_beside_it() {
        let layer = held("model.layers.0.mlp.up_proj.weight", 8, 4);
        let (embedding, head) = (held("model.embed_tokens.weight", 16, 4), held("lm_head.weight", 16, 4));
        let tied = TokenWork::of(&[embedding.clone(), layer.clone()]).unwrap();
        let untied = TokenWork::of(&[embedding, layer.clone(), head]).unwrap();
        for work in [tied, untied] {
            assert_eq!((work.read_bytes, work.operations), (4 * (32 + 64), 2 * 32));
        }
        assert!(TokenWork::of(&[layer, held("model.layers.0.mlp.experts.0.up_proj.weight", 8, 4)]).is_none());
    }
}
