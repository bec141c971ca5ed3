//! The same answer, whatever the plan and the transport: as the program gives it.

mod support;

use serde_json::Value;
use support::{consort, expected, fixture, ids, run, run_json};

const PLANS: [&[&str]; 5] = [
    &[],
    &["-n", "2", "--plan", "pipeline:2", "--transport", "shm"],
    &["-n", "2", "--plan", "pipeline:2", "--transport", "tcp"],
    &["-n", "2", "--plan", "tensor:2", "--transport", "shm"],
    &["-n", "2", "--plan", "tensor:2", "--transport", "tcp"],
];

fn numbers(values: &Value) -> Vec<f64> {
    values.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
}

#[test]
fn every_plan_continues_as_the_reference_does() {
    let expected = expected("llama");
    let directory = fixture("llama");
    let prompt = ids(&expected["prompt"]);
    let length = expected["continuation"].as_array().unwrap().len().to_string();
    for plan in PLANS {
        let flags = ["generate", "-m", directory.to_str().unwrap(), "--tokens", &prompt, "--max-tokens", &length];
        let answer = run_json(&[&flags[..], &["--ignore-eos", "--activations", "exact"], plan].concat());
        assert_eq!(answer["prompt_tokens"], expected["prompt"], "{plan:?}");
        assert_eq!(answer["tokens"], expected["continuation"], "{plan:?}");
        assert_eq!(answer["finish_reason"], "length");
        let ranks = answer["ranks"].as_array().unwrap();
        assert_eq!(ranks.len(), if plan.is_empty() { 1 } else { 2 });
        for rank in ranks {
            assert_eq!(rank["transport"], if plan.is_empty() { "none" } else { plan[5] }, "{plan:?}");
            assert!(rank["weight_bytes"].as_u64().unwrap() > 0);
        }
        assert_eq!(answer["plan"], if plan.is_empty() { "tensor:1" } else { plan[3] });
        for name in ["load_s", "ttft_s", "prefill_tps", "decode_tps"] {
            assert!(answer["timings"][name].as_f64().unwrap() > 0.0, "{name}: {answer}");
        }
    }
}

#[test]
fn a_pipeline_gives_the_same_bits_and_shards_nearly() {
    let expected = expected("llama");
    let directory = fixture("llama");
    let prompt = ids(&expected["prompt"]);
    let logits = |plan: &[&str]| -> Vec<Vec<f64>> {
        let flags = ["logits", "-m", directory.to_str().unwrap(), "--tokens", &prompt, "--activations", "exact"];
        run_json(&[&flags[..], plan].concat())["logits"].as_array().unwrap().iter().map(numbers).collect()
    };
    let single = logits(PLANS[0]);
    assert_eq!(single.len(), expected["prompt"].as_array().unwrap().len());
    assert_eq!(logits(PLANS[1]), single);
    assert_eq!(logits(PLANS[2]), single);
    let largest = single.iter().flatten().fold(0.0, |largest: f64, value| largest.max(value.abs()));
    for plan in [PLANS[3], PLANS[4]] {
        for (row, reference) in logits(plan).iter().zip(&single) {
            for (value, reference) in row.iter().zip(reference) {
                assert!((value - reference).abs() <= 2e-3 * largest, "{plan:?}: {value} for {reference}");
            }
        }
    }
}

#[test]
fn the_top_logits_are_the_largest_of_all_logits() {
    let directory = fixture("llama");
    let flags = ["logits", "-m", directory.to_str().unwrap(), "--tokens", "5,6,7"];
    let all = run_json(&flags);
    let top = run_json(&[&flags[..], &["--top", "4"]].concat());
    for (row, pairs) in all["logits"].as_array().unwrap().iter().zip(top["logits"].as_array().unwrap()) {
        let mut values = numbers(row);
        for pair in pairs.as_array().unwrap() {
            assert_eq!(values[pair[0].as_u64().unwrap() as usize], pair[1].as_f64().unwrap());
        }
        values.sort_by(|a, b| b.total_cmp(a));
        let pairs: Vec<f64> = pairs.as_array().unwrap().iter().map(|pair| pair[1].as_f64().unwrap()).collect();
        assert_eq!(pairs, values[..4]);
    }
}

#[test]
fn shards_hold_uneven_head_groups_and_what_inspect_foretold() {
    let directory = fixture("llama");
    let directory = directory.to_str().unwrap();
    let bench = ["bench", "-m", directory, "-n", "2", "--plan", "tensor:2", "--repetitions", "1"];
    let measured = run_json(&[&bench[..], &["--prompt-tokens", "20", "--generation-tokens", "5"]].concat());
    let foretold = run_json(&["inspect", directory, "--plan", "tensor:2"]);
    let bytes = |answer: &Value, name: &str| -> Vec<u64> {
        answer["ranks"].as_array().unwrap().iter().map(|rank| rank[name].as_u64().unwrap()).collect()
    };
    for name in ["weight_bytes", "replicated_bytes"] {
        assert_eq!(bytes(&measured, name), bytes(&foretold, name), "{name}");
    }
    let held = bytes(&measured, "weight_bytes");
    assert!(held[0] > held[1], "two head groups and one: {held:?}");
    for name in
        ["model", "formats", "context", "batch", "plan", "transport", "rails", "threads", "activations", "version"]
    {
        assert!(!measured["conditions"][name].is_null(), "{name}");
    }
}

#[test]
fn a_plan_is_chosen_and_named() {
    let directory = fixture("llama");
    let answer =
        run_json(&["generate", "-m", directory.to_str().unwrap(), "--tokens", "5", "--max-tokens", "2", "-n", "2"]);
    assert_eq!(answer["plan"], "tensor:2");
}

#[test]
fn sampled_tokens_depend_on_the_seed_alone() {
    let directory = fixture("llama");
    let sample = |seed: &str, plan: &[&str]| {
        let flags = ["generate", "-m", directory.to_str().unwrap(), "--tokens", "5,6,7", "--max-tokens", "12"];
        let sampling = ["--temperature", "5", "--top-p", "0.99", "--seed", seed, "--ignore-eos"];
        run_json(&[&flags[..], &sampling, plan].concat())["tokens"].clone()
    };
    assert_eq!(sample("7", PLANS[0]), sample("7", PLANS[1]));
    assert_ne!(sample("7", PLANS[0]), sample("8", PLANS[0]));
}

#[test]
fn a_hostfile_of_this_machine_works_without_ssh() {
    let scratch = tempfile::tempdir().unwrap();
    let hostfile = scratch.path().join("hosts.json");
    let weights = fixture("llama").parent().unwrap().to_owned();
    let host = format!(r#"{{"ssh": "localhost", "ips": ["127.0.0.1"], "weights": "{}"}}"#, weights.display());
    std::fs::write(&hostfile, format!(r#"{{"backend": "ring", "envs": ["A=1"], "hosts": [{host}, {host}]}}"#)).unwrap();
    // An empty path: were ssh called, it would not be found.
    let output = consort(&["launch", "--hostfile", hostfile.to_str().unwrap(), "--", "generate", "-m", "llama"])
        .args(["--tokens", "5,6,7", "--max-tokens", "3", "--json"])
        .env("PATH", "")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["plan"], "pipeline:2");
    assert_eq!(answer["ranks"][1]["host"], "localhost");
}

#[test]
fn text_and_object_can_both_be_had() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("out.json");
    let directory = fixture("llama");
    let flags = ["generate", "-m", directory.to_str().unwrap(), "--tokens", "5", "--max-tokens", "3", "--ignore-eos"];
    let finished = run(&[&flags[..], &["--json", path.to_str().unwrap()]].concat());
    let answer: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    // This checkpoint has no tokenizer, so the ids are the text.
    let printed: Vec<u64> = finished.stdout.split_whitespace().map(|id| id.parse().unwrap()).collect();
    assert_eq!(serde_json::json!(printed), answer["tokens"]);
    assert!(answer["text"].is_null());
}

#[test]
fn tensors_that_take_no_part_are_told_once() {
    let path = fixture("muse_spark");
    let flags = ["generate", "-m", path.to_str().unwrap(), "--tokens", "5,6", "--max-tokens", "1", "-n", "2"];
    let finished = run(&flags);
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    assert_eq!(finished.stderr.matches("take no part in text").count(), 1, "{}", finished.stderr);
}
