//! Replays the fuzzers' corpora, and damaged copies of them: nothing may panic, loop, or take much memory.

#[path = "../../../fuzz/drive.rs"]
mod drive;

use std::path::Path;

use proptest::prelude::*;

fn inputs(target: &str) -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let inputs: Vec<_> = entries.map(|path| std::fs::read(path).unwrap()).collect();
    assert!(!inputs.is_empty(), "no corpus for {target}");
    inputs
}

const TARGETS: &[(&str, fn(&[u8]))] = &[
    ("safetensors", drive::safetensors),
    ("gguf", drive::gguf),
    ("config", drive::config),
    ("template", drive::template),
    ("tokenizer", drive::tokenizer),
];

#[test]
fn corpora_are_replayed() {
    for (target, run) in TARGETS {
        inputs(target).iter().for_each(|input| run(input));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn damaged_files_are_harmless(place in 0.0..1.0f64, value: u8, length in 1..9usize, cut in 0.0..2.0f64) {
        for (target, run) in TARGETS {
            for mut input in inputs(target) {
                let at = (place * input.len() as f64) as usize;
                let end = (at + length).min(input.len());
                input[at..end].fill(value);
                input.truncate((cut * input.len() as f64) as usize);
                run(&input);
            }
        }
    }
}
