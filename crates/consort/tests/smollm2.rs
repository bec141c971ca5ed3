//! The default model, where it has been pulled (`consort pull smollm2`): continuations and logits that other
//! implementations give for it.

mod support;

use consort_checkpoint::pull::{self, Options};
use support::run_json;

const PLANS: [&[&str]; 5] = [
    &[],
    &["--plan", "pipeline:2", "--transport", "shm"],
    &["--plan", "pipeline:2", "--transport", "tcp"],
    &["--plan", "tensor:2", "--transport", "shm"],
    &["--plan", "tensor:2", "--transport", "tcp"],
];

/// Prompts and their greedy continuations by transformers 5.24 in f32 over the dequantized file. Each ends before the first
/// step whose two best logits lie within 0.01 of each other.
const CONTINUATIONS: [(&str, &[u64]); 3] = [
    ("504,3575,282,4649,314", &[7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33]),
    ("6403,1980,253,655,28,281,253,1165,6560,411,260,3426,28", &[665, 436, 253, 9357, 1573]),
    ("1604,3987,46477,24,94,727", &[472, 585, 304, 1758, 216, 32, 42, 448, 1003, 216, 33, 472]),
];

/// How many of these the default, int8 activations, must share: up to the first step that its rounding can turn, where the
/// best logits lie within 0.3.
const SURE: [usize; 3] = [5, 5, 12];

/// The largest logits after these tokens, by transformers in f32.
const TIE: &str = "6403,1980,253,655,28,281,253,1165,6560,411,260,3426,28,665,436,253,9357,1573,267,19341,3365,17644";
const TIE_LOGITS: [(u64, f64); 4] = [(793, 16.6411), (254, 16.3915), (30, 16.2061), (951, 15.6486)];

/// Skips by name where the model is not there, because tests fetch nothing; with `CONSORT_TEST_SMOLLM2` set it must be there.
fn pulled() -> bool {
    let found = Options::from_environment().is_ok_and(|options| pull::find("smollm2", &options).is_some());
    assert!(found || std::env::var_os("CONSORT_TEST_SMOLLM2").is_none(), "smollm2 has been pulled, but is not found");
    if !found {
        eprintln!("skipped: smollm2 has not been pulled");
    }
    found
}

/// The first `count` tokens after `prompt`.
fn continuation(prompt: &str, count: usize, flags: &[&str]) -> Vec<u64> {
    let count = count.to_string();
    let generate = ["generate", "-m", "smollm2", "--tokens", prompt, "--max-tokens", &count];
    let answer = run_json(&[&generate[..], flags].concat());
    answer["tokens"].as_array().unwrap().iter().map(|token| token.as_u64().unwrap()).collect()
}

#[test]
fn prompts_continue_as_the_reference_does_on_every_plan() {
    if !pulled() {
        return;
    }
    for plan in PLANS {
        for ((prompt, expected), sure) in CONTINUATIONS.into_iter().zip(SURE) {
            let exact = [plan, &["--activations", "exact"]].concat();
            assert_eq!(continuation(prompt, expected.len(), &exact), expected, "exact, {plan:?}");
            assert_eq!(continuation(prompt, sure, plan), expected[..sure], "int8, {plan:?}");
        }
    }
}

#[test]
fn exact_logits_are_those_of_the_reference() {
    if !pulled() {
        return;
    }
    for plan in [PLANS[0], PLANS[3]] {
        let logits = ["logits", "-m", "smollm2", "--tokens", TIE, "--top", "4", "--activations", "exact"];
        let answer = run_json(&[&logits[..], plan].concat());
        let last = answer["logits"].as_array().unwrap().last().unwrap();
        for (found, (token, logit)) in last.as_array().unwrap().iter().zip(TIE_LOGITS) {
            assert_eq!(found[0], token, "{plan:?}");
            assert!((found[1].as_f64().unwrap() - logit).abs() < 1e-2, "{plan:?}: {token}: {}", found[1]);
        }
    }
}
