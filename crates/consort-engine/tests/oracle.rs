//! Every fixture of the oracle on every plan: logits and greedy tokens as the reference implementation gives them.

mod run;

use consort_models::{Plan, architectures};
use run::{Expected, Fixture, Settings, fixtures};

/// Plans of one rank to four: even, uneven in depth and in width, and mixed.
const PLANS: [&str; 7] =
    ["tensor:1", "tensor:2", "tensor:3", "tensor:4", "pipeline:2", "pipeline:3", "pipeline:2,tensor:2"];

/// Relative to the largest logit.
const TOLERANCE: f32 = 5e-3;

fn supported() -> Vec<Fixture> {
    let known = architectures();
    let found: Vec<Fixture> = fixtures().into_iter().filter(|f| known.contains(&f.architecture().as_str())).collect();
    assert!(!found.is_empty(), "oracle/fixtures holds nothing that is supported");
    found
}

/// Whether the model can be divided like this; what cannot is refused with a reason, never run.
fn fits(fixture: &Fixture, plan: &Plan) -> bool {
    match fixture.refusal(plan) {
        None => true,
        Some(reason) => {
            assert!(reason.starts_with("plan "), "{}: {plan}: {reason}", fixture.name);
            eprintln!("{}: {reason}", fixture.name);
            false
        }
    }
}

#[test]
fn logits_are_those_of_the_reference_on_every_plan() {
    for fixture in supported() {
        let expected = Expected::read(&fixture);
        let sequence = expected.sequence();
        for plan in PLANS.map(|p| p.parse::<Plan>().unwrap()) {
            if !fits(&fixture, &plan) {
                continue;
            }
            let logits = fixture.logits(&plan, Settings::default(), &sequence);
            for (row, &position) in expected.logits.iter().zip(&expected.positions) {
                let difference = run::largest_difference(&logits[position], row) / expected.largest_logit;
                assert!(
                    difference < TOLERANCE,
                    "{}: {plan}: position {position}: off by {difference} of the largest logit",
                    fixture.name
                );
            }
        }
    }
}

#[test]
fn greedy_tokens_are_those_of_the_reference_on_every_plan() {
    for fixture in supported() {
        let expected = Expected::read(&fixture);
        for plan in PLANS.map(|p| p.parse::<Plan>().unwrap()) {
            if fits(&fixture, &plan) {
                let tokens = fixture.greedy(&plan, Settings::default(), &expected.prompt, expected.continuation.len());
                assert_eq!(tokens, expected.continuation, "{}: {plan}", fixture.name);
            }
        }
    }
}

#[test]
fn chunks_of_any_size_give_the_same_logits() {
    for fixture in supported() {
        let expected = Expected::read(&fixture);
        let sequence = expected.sequence();
        let whole = fixture.logits(&Plan::single(), Settings { chunk: 128, ..Settings::default() }, &sequence);
        for chunk in [1, 7, 64] {
            let parts = fixture.logits(&Plan::single(), Settings { chunk, ..Settings::default() }, &sequence);
            for (position, (a, b)) in whole.iter().zip(&parts).enumerate() {
                let difference = run::largest_difference(a, b) / expected.largest_logit;
                assert!(difference < 1e-4, "{}: chunk {chunk}, position {position}: {difference}", fixture.name);
            }
        }
    }
}

#[test]
fn a_pipeline_gives_the_bits_of_one_rank() {
    for fixture in supported() {
        let sequence = Expected::read(&fixture).sequence();
        let one = fixture.logits(&Plan::single(), Settings::default(), &sequence);
        let two = fixture.logits(&Plan::new(2, 1), Settings::default(), &sequence);
        assert!(one == two, "{}: pipeline:2 differs from one rank", fixture.name);
    }
}
