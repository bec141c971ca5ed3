//! Every checkpoint of the oracle through the program, with each instruction set that this machine has.

mod support;

use serde_json::Value;
use support::{Finished, consort, expected, fixture, ids};

/// Those that `CONSORT_ISA` may name; what the processor lacks is refused by name.
const INSTRUCTION_SETS: [&str; 7] = ["portable", "avx2", "avx512", "avx512-bf16", "amx", "neon", "neon-dot"];

/// Longer than what its model was made for: the reference's case for dynamic scaling.
const TOO_LONG: &str = "llama-dynamic";

/// Relative to the largest logit.
const TOLERANCE: f64 = 1e-4;

/// The same with keys and values in smaller formats.
const KV_TOLERANCES: [(&str, f64); 4] = [("f16", 1e-3), ("bf16", 6e-3), ("q8", 1.5e-2), ("fp8", 1.1e-1)];

fn fixtures() -> Vec<String> {
    let directory = fixture("llama").parent().unwrap().to_owned();
    let names = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| fixture(name).join("expected.json").exists()).collect();
    names.sort();
    names
}

/// The object that the program prints under an instruction set, or its complaint.
fn run(isa: &str, arguments: &[&str]) -> Result<Value, String> {
    let finished: Finished = consort(arguments).env("CONSORT_ISA", isa).output().unwrap().into();
    match finished.code {
        Some(0) => Ok(serde_json::from_str(&finished.stdout).unwrap()),
        _ => Err(finished.stderr),
    }
}

#[test]
fn every_instruction_set_gives_the_reference_s_tokens() {
    let mut ran = Vec::new();
    for isa in INSTRUCTION_SETS {
        for name in fixtures() {
            let (path, expected) = (fixture(&name), expected(&name));
            let (path, prompt) = (path.to_str().unwrap(), ids(&expected["prompt"]));
            let generate = ["generate", "-m", path, "--tokens", &prompt, "--max-tokens", "32", "--ignore-eos"];
            let answer = match run(
                isa,
                &[&generate[..], &["--activations", "exact", "--kv-format", "f32", "--json"]].concat(),
            ) {
                Ok(answer) => answer,
                Err(complaint) if name == TOO_LONG && complaint.contains("context") => continue,
                Err(complaint) if complaint.contains("CONSORT_ISA") => {
                    eprintln!("skipped: {isa}: {complaint}");
                    break;
                }
                Err(complaint) => panic!("{isa}: {name}: {complaint}"),
            };
            assert_eq!(answer["tokens"], expected["continuation"], "{isa}: {name}");
            ran.push(isa);
        }
    }
    assert!(ran.contains(&"portable"), "nothing ran");
}

/// Where the processor multiplies pairs of bfloat16, activations rounded to it give the tokens that f32 products of the same
/// activations give.
#[test]
fn products_of_bfloat16_give_the_tokens_of_f32() {
    for name in fixtures() {
        let (path, expected) = (fixture(&name), expected(&name));
        let (path, prompt) = (path.to_str().unwrap(), ids(&expected["prompt"]));
        let generate = ["generate", "-m", path, "--tokens", &prompt, "--max-tokens", "32", "--ignore-eos", "--json"];
        let generate = [&generate[..], &["--activations", "bf16"]].concat();
        let tokens = |isa| run(isa, &generate).map(|answer| answer["tokens"].clone());
        match tokens("avx512-bf16") {
            Ok(got) => assert_eq!(Ok(got), tokens("avx512"), "{name}"),
            Err(complaint) if name == TOO_LONG && complaint.contains("context") => {}
            Err(complaint) if complaint.contains("CONSORT_ISA") => return eprintln!("skipped: {complaint}"),
            Err(complaint) => panic!("{name}: {complaint}"),
        }
    }
}

/// The largest difference between the program's logits and the reference's, relative to the largest logit. `None` for the
/// fixture that is too long.
fn largest_difference(name: &str, kv_format: &str) -> Option<f64> {
    let (path, expected) = (fixture(name), expected(name));
    let prompt = ids(&expected["prompt"]);
    let flags = ["logits", "-m", path.to_str().unwrap(), "--tokens", &prompt, "--json"];
    let flags = [&flags[..], &["--activations", "exact", "--kv-format", kv_format]].concat();
    let default_isa = consort(&flags).output().unwrap();
    if !default_isa.status.success() {
        let complaint = String::from_utf8_lossy(&default_isa.stderr).into_owned();
        assert!(name == TOO_LONG && complaint.contains("context"), "{name}: {complaint}");
        return None;
    }
    let answer: Value = serde_json::from_slice(&default_isa.stdout).unwrap();
    let positions = expected["logit_positions"].as_array().unwrap();
    let reference = support::expected_logits(name, positions.len());
    let largest = expected["largest_logit"].as_f64().unwrap();
    let differences = positions.iter().zip(&reference).flat_map(|(position, reference)| {
        // Positions past the prompt belong to the continuation.
        let found = answer["logits"].get(position.as_u64().unwrap() as usize).and_then(Value::as_array);
        let pairs = found.into_iter().flatten().zip(reference);
        pairs.map(|(found, reference)| (found.as_f64().unwrap() - f64::from(*reference)).abs() / largest)
    });
    Some(differences.fold(0.0, |largest, x| if x > largest || x.is_nan() { x } else { largest }))
}

#[test]
fn logits_are_those_of_the_reference() {
    for name in fixtures() {
        if let Some(difference) = largest_difference(&name, "f32") {
            assert!(difference < TOLERANCE, "{name}: off by {difference}");
        }
    }
}

/// What the rounding of keys and values may change: about twice what it does. Far less would mean that it does not happen.
#[test]
fn smaller_cache_formats_stay_close_to_the_reference() {
    for (format, tolerance) in KV_TOLERANCES {
        for name in ["llama", "qwen3"] {
            let difference = largest_difference(name, format).expect("a fixture of ordinary length");
            eprintln!("{name} {format}: {difference:e}");
            assert!((tolerance / 50.0..tolerance).contains(&difference), "{name} {format}: off by {difference}");
        }
    }
}
