//! Runs a fixture on any plan, one thread per rank, over the real fabric.

// Every test file is a crate of its own and uses its own part of this module.
#![allow(dead_code)]

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use consort_checkpoint::Checkpoint;
use consort_compute::{Format, KvFormat, Portable};
use consort_engine::{Driver, Rank, RankOptions, RankReport, Request, Sampling, agreement};
use consort_fabric::{Fabric, FabricOptions, ReservedPort, TransportChoice};
use consort_models::{LoadHooks, Outline, Plan};
use serde_json::Value;

/// A checkpoint with what the reference says of it.
pub struct Fixture {
    pub name: String,
    pub directory: PathBuf,
}

/// What a test varies.
#[derive(Clone, Copy)]
pub struct Settings {
    pub chunk: usize,
    pub transport: TransportChoice,
    pub sequences: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { chunk: 16, transport: TransportChoice::Shm, sequences: 1 }
    }
}

/// What the reference says.
pub struct Expected {
    pub prompt: Vec<u32>,
    pub continuation: Vec<u32>,
    pub positions: Vec<usize>,
    pub logits: Vec<Vec<f32>>,
    pub largest_logit: f32,
}

/// All fixtures with expected values.
pub fn fixtures() -> Vec<Fixture> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../oracle/fixtures");
    let entries = fs::read_dir(&root).unwrap_or_else(|e| panic!("{}: {e}", root.display()));
    let mut found: Vec<Fixture> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("expected.json").exists())
        .map(|directory| Fixture { name: directory.file_name().unwrap().to_string_lossy().into_owned(), directory })
        .collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

impl Expected {
    pub fn read(fixture: &Fixture) -> Self {
        let text = fs::read_to_string(fixture.directory.join("expected.json")).unwrap();
        let json: Value = serde_json::from_str(&text).unwrap();
        let list =
            |key: &str| -> Vec<u64> { json[key].as_array().unwrap().iter().map(|v| v.as_u64().unwrap()).collect() };
        let positions: Vec<usize> = list("logit_positions").into_iter().map(|p| p as usize).collect();
        let values = tensor(&fixture.directory.join("expected.safetensors"), "logits");
        let logits = values.chunks_exact(values.len() / positions.len()).map(<[f32]>::to_vec).collect();
        Self {
            prompt: list("prompt").into_iter().map(|t| t as u32).collect(),
            continuation: list("continuation").into_iter().map(|t| t as u32).collect(),
            positions,
            logits,
            largest_logit: json["largest_logit"].as_f64().unwrap() as f32,
        }
    }

    /// Prompt and continuation: the tokens whose logits the reference stored.
    pub fn sequence(&self) -> Vec<u32> {
        [&self.prompt[..], &self.continuation[..]].concat()
    }
}

/// An f32 tensor of a safetensors file, read without the code under test.
fn tensor(path: &Path, name: &str) -> Vec<f32> {
    let bytes = fs::read(path).unwrap();
    let header_bytes = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_bytes]).unwrap();
    let offset = |i: usize| 8 + header_bytes + header[name]["data_offsets"][i].as_u64().unwrap() as usize;
    bytes[offset(0)..offset(1)].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

pub fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |most, d| if d > most || d.is_nan() { d } else { most })
}

impl Fixture {
    /// A copy, as converters to MLX write it if `shifts`: one added to the gains of all norms but the delta net's, and the axes
    /// of the convolution changed from `[channels, 1, taps]` to `[channels, taps, 1]`. Without `predicts_further` the
    /// weights that predict further tokens are left out.
    pub fn copy_as_converted(&self, shifts: bool, predicts_further: bool) -> Self {
        let bytes = fs::read(self.directory.join("model.safetensors")).unwrap();
        let header_bytes = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header: Value = serde_json::from_slice(&bytes[8..8 + header_bytes]).unwrap();
        let is_kept = |name: &str| predicts_further || !name.starts_with("mtp.");
        header.as_object_mut().unwrap().retain(|name, _| is_kept(name));
        let mut data = Vec::new();
        for (name, entry) in header.as_object_mut().unwrap().iter_mut().filter(|(name, _)| *name != "__metadata__") {
            let offset = |i: usize| 8 + header_bytes + entry["data_offsets"][i].as_u64().unwrap() as usize;
            let values = &bytes[offset(0)..offset(1)];
            let start = data.len();
            if shifts && name.ends_with("norm.weight") && !name.ends_with("linear_attn.norm.weight") {
                let gains =
                    values.chunks_exact(2).map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16));
                data.extend(gains.flat_map(|gain| (1.0 + gain).to_le_bytes()));
                entry["dtype"] = "F32".into();
            } else {
                data.extend_from_slice(values);
            }
            if shifts && name.ends_with("conv1d.weight") {
                entry["shape"].as_array_mut().unwrap().swap(1, 2);
            }
            entry["data_offsets"] = [start, data.len()].into();
        }
        let directory = std::env::temp_dir().join(format!("consort-{}-{}", self.name, std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        fs::copy(self.directory.join("config.json"), directory.join("config.json")).unwrap();
        let header = serde_json::to_vec(&header).unwrap();
        let length = (header.len() as u64).to_le_bytes();
        fs::write(directory.join("model.safetensors"), [&length[..], &header, &data].concat()).unwrap();
        let name = format!("{} (shifted: {shifts}, predicts further: {predicts_further})", self.name);
        Self { name, directory }
    }

    fn checkpoint(&self) -> Checkpoint {
        Checkpoint::open(&self.directory).unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }

    pub fn outline(&self) -> Outline {
        Outline::new(&self.checkpoint()).unwrap()
    }

    pub fn has_experts(&self) -> bool {
        let checkpoint = self.checkpoint();
        ["num_experts", "num_local_experts"].iter().any(|key| checkpoint.config().get(key).is_some())
    }

    /// Whether any weight is quantized.
    pub fn is_quantized(&self) -> bool {
        self.checkpoint()
            .tensors()
            .iter()
            .any(|tensor| !matches!(tensor.format, Format::F32 | Format::F16 | Format::BF16))
    }

    /// Why the model cannot be divided by this plan, if it cannot.
    pub fn refusal(&self, plan: &Plan) -> Option<String> {
        let (checkpoint, outline) = (self.checkpoint(), self.outline());
        (0..plan.ranks()).find_map(|rank| {
            let placed = outline.place(plan, rank).and_then(|p| consort_models::measure(&checkpoint, &p));
            placed.err().map(|e| e.to_string())
        })
    }

    pub fn logits(&self, plan: &Plan, settings: Settings, tokens: &[u32]) -> Vec<Vec<f32>> {
        self.drive(plan, settings, tokens.len() + 1, |driver| driver.logits(tokens).unwrap())
    }

    pub fn greedy(&self, plan: &Plan, settings: Settings, prompt: &[u32], count: usize) -> Vec<u32> {
        self.greedy_with_reports(plan, settings, prompt, count).0
    }

    pub fn greedy_with_reports(
        &self,
        plan: &Plan,
        settings: Settings,
        prompt: &[u32],
        count: usize,
    ) -> (Vec<u32>, Vec<RankReport>) {
        let request = Request {
            prompt: prompt.to_vec(),
            max_tokens: Some(count),
            end_tokens: Vec::new(),
            sampling: Sampling::default(),
        };
        self.drive(plan, settings, prompt.len() + count, |driver| {
            let tokens = driver.generate(request, |_| ControlFlow::Continue(())).unwrap().tokens;
            (tokens, driver.reports().unwrap())
        })
    }

    /// Starts all ranks, lets `act` drive rank 0, and waits for the others to end.
    pub fn drive<T>(
        &self,
        plan: &Plan,
        settings: Settings,
        context: usize,
        act: impl FnOnce(&mut Driver<Portable>) -> T,
    ) -> T {
        let options = RankOptions {
            context,
            step_tokens: settings.chunk,
            sequences: settings.sequences,
            logit_rows: settings.chunk,
            block_tokens: 8,
            kv_format: KvFormat::F32,
        };
        static RUNS: AtomicU64 = AtomicU64::new(0);
        let run_id = format!("oracle-{}-{}", std::process::id(), RUNS.fetch_add(1, Ordering::Relaxed));
        let port = ReservedPort::of([127, 0, 0, 1].into()).unwrap();
        let rendezvous = port.address().to_string();
        let start = |rank: usize| {
            let checkpoint = self.checkpoint();
            let fabric = (plan.ranks() > 1).then(|| {
                let fabric = FabricOptions {
                    rank,
                    size: plan.ranks(),
                    rendezvous: rendezvous.clone(),
                    host: "localhost".to_string(),
                    run_id: run_id.clone(),
                    transport: settings.transport,
                    hang_timeout: Duration::from_secs(60),
                    agreement: agreement(plan, Vec::new()),
                    ..FabricOptions::default()
                };
                Fabric::connect(fabric).unwrap_or_else(|e| panic!("rank {rank}: {e}"))
            });
            let hooks = LoadHooks { progress: &mut |_| (), warn: &mut |_| (), repacked: None };
            let rank = Rank::start(Portable, &checkpoint, plan, fabric.as_ref(), "localhost", options, hooks);
            (rank.unwrap_or_else(|e| panic!("{}: {plan}: {e}", self.name)), fabric)
        };
        std::thread::scope(|scope| {
            for rank in 1..plan.ranks() {
                scope.spawn(move || {
                    let (rank, _fabric) = start(rank);
                    rank.follow().unwrap();
                });
            }
            let (rank, _fabric) = start(0);
            let mut driver = Driver::new(rank);
            let outcome = act(&mut driver);
            driver.end().unwrap();
            outcome
        })
    }
}
