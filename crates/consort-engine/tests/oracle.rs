//! Every fixture of the oracle on every plan: logits and greedy tokens as the reference implementation gives them.

mod run;

use consort_engine::{Request, Sampling};
use consort_models::Plan;
use run::{Expected, Fixture, Settings, fixtures};

/// Plans of one rank to four: even, uneven in depth and in width, and mixed.
const PLANS: [&str; 7] =
    ["tensor:1", "tensor:2", "tensor:3", "tensor:4", "pipeline:2", "pipeline:3", "pipeline:2,tensor:2"];

/// Further plans for mixtures of experts.
const EXPERT_PLANS: [&str; 3] = ["tensor:2,expert", "tensor:3,expert", "pipeline:2,tensor:2,expert"];

/// Further plans for experts whose outputs are normed.
const GATHER_PLANS: [&str; 2] = ["tensor:2,gather", "tensor:3,gather"];

/// Relative to the largest logit.
const TOLERANCE: f32 = 1e-4;

/// All fixtures but the one that is longer than its model's context: dynamic RoPE scaling, which begins there, is not done.
fn runnable() -> Vec<Fixture> {
    let fits = |fixture: &Fixture| Expected::read(fixture).sequence().len() < fixture.outline().context;
    let (found, too_long): (Vec<Fixture>, Vec<Fixture>) = fixtures().into_iter().partition(fits);
    assert_eq!(too_long.iter().map(|fixture| fixture.name.as_str()).collect::<Vec<_>>(), ["llama-dynamic"]);
    found
}

/// The plans that the model can be divided by; what cannot is refused with a reason, never run.
fn plans(fixture: &Fixture) -> Vec<Plan> {
    let experts = if fixture.has_experts() { &EXPERT_PLANS[..] } else { &[] };
    let fits = |plan: &Plan| match fixture.refusal(plan) {
        None => true,
        Some(reason) => {
            assert!(reason.starts_with("plan "), "{}: {plan}: {reason}", fixture.name);
            eprintln!("{}: {reason}", fixture.name);
            false
        }
    };
    let gathers = if fixture.name.starts_with("muse_spark") { &GATHER_PLANS[..] } else { &[] };
    let asked: Vec<Plan> = PLANS.iter().chain(experts).chain(gathers).map(|plan| plan.parse().unwrap()).collect();
    let count = asked.len();
    let plans: Vec<Plan> = asked.into_iter().filter(fits).collect();
    // Blocks of a format may be too large for a small model; without blocks every plan fits.
    let least = if fixture.is_quantized() { 2 } else { count };
    assert!(plans.len() >= least, "{}: fits only {plans:?}", fixture.name);
    plans
}

/// Tells all failures at once.
fn assert_none(failures: &[String]) {
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

#[test]
fn logits_are_those_of_the_reference_on_every_plan() {
    let mut failures = Vec::new();
    for fixture in runnable() {
        let expected = Expected::read(&fixture);
        let sequence = expected.sequence();
        for plan in plans(&fixture) {
            let logits = fixture.logits(&plan, Settings::default(), &sequence);
            let differences = expected.logits.iter().zip(&expected.positions).map(|(row, &position)| {
                (run::largest_difference(&logits[position], row) / expected.largest_logit, position)
            });
            for (difference, position) in differences {
                if difference.is_nan() || difference >= TOLERANCE {
                    failures.push(format!(
                        "{}: {plan}: position {position}: off by {difference} of the largest logit",
                        fixture.name
                    ));
                }
            }
        }
    }
    assert_none(&failures);
}

#[test]
fn greedy_tokens_are_those_of_the_reference_on_every_plan() {
    let mut failures = Vec::new();
    for fixture in runnable() {
        let expected = Expected::read(&fixture);
        for plan in plans(&fixture) {
            let tokens = fixture.greedy(&plan, Settings::default(), &expected.prompt, expected.continuation.len());
            if tokens != expected.continuation {
                failures.push(format!("{}: {plan}: {tokens:?}, not {:?}", fixture.name, expected.continuation));
            }
        }
    }
    assert_none(&failures);
}

#[test]
fn chunks_of_any_size_give_the_same_logits() {
    for fixture in runnable() {
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
    for fixture in runnable() {
        let sequence = Expected::read(&fixture).sequence();
        let one = fixture.logits(&Plan::single(), Settings::default(), &sequence);
        let two = fixture.logits(&Plan::new(2, 1), Settings::default(), &sequence);
        assert!(one == two, "{}: pipeline:2 differs from one rank", fixture.name);
    }
}

/// Published files hold norm gains as an offset from one, converted ones as they are; weights that predict further tokens say
/// nothing of which is which, though readers have told them apart by these.
#[test]
fn gains_that_a_converter_has_shifted_are_not_shifted_again() {
    for name in ["qwen3_5", "qwen3_next"] {
        let published = fixtures().into_iter().find(|fixture| fixture.name == name).unwrap();
        let sequence = Expected::read(&published).sequence();
        let expected = published.logits(&Plan::single(), Settings::default(), &sequence);
        for (shifts, predicts_further) in [(false, false), (true, false), (true, true)] {
            let copy = published.copy_as_converted(shifts, predicts_further);
            let logits = copy.logits(&Plan::single(), Settings::default(), &sequence);
            std::fs::remove_dir_all(&copy.directory).unwrap();
            assert!(logits == expected, "{}: other logits", copy.name);
        }
    }
}

/// Sequences in one batch disturb one another neither through caches nor through recurrent states, whatever their lengths;
/// more than there is room for wait their turn, and what they are given was used before.
#[test]
fn sequences_that_run_together_answer_as_if_alone() {
    let mut failures = Vec::new();
    for fixture in runnable() {
        let Expected { prompt, continuation, .. } = Expected::read(&fixture);
        let settings = Settings { chunk: 24, sequences: 3, ..Settings::default() };
        let context = prompt.len() + continuation.len();
        // The reference's prompt in whole, cut short, backwards, and in whole again.
        let cut = prompt[..prompt.len() / 2].to_vec();
        let backwards: Vec<u32> = prompt.iter().rev().copied().collect();
        let prompts = [prompt.clone(), cut, backwards, prompt];
        let request = |prompt: &Vec<u32>, max_tokens: usize| Request {
            prompt: prompt.clone(),
            max_tokens: Some(max_tokens),
            end_tokens: Vec::new(),
            sampling: Sampling::default(),
        };
        let lengths = [continuation.len(), 5, 9, continuation.len()];
        for plan in [Plan::single(), Plan::new(2, 1)] {
            let together = fixture.drive(&plan, settings, context, |driver| {
                let requests = prompts.iter().zip(lengths).map(|(prompt, length)| request(prompt, length)).collect();
                driver.generate_together(requests).unwrap()
            });
            let alone: Vec<Vec<u32>> = prompts
                .iter()
                .zip(lengths)
                .map(|(prompt, length)| fixture.greedy(&plan, Settings::default(), prompt, length))
                .collect();
            if together != alone || together[0] != continuation {
                failures.push(format!("{}: {plan}: {together:?}, alone {alone:?}", fixture.name));
            }
        }
    }
    assert_none(&failures);
}
