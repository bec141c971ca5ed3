//! What a plan sends, from counters: the three divisions of Muse Spark's experts.

mod run;

use consort_engine::RankReport;
use consort_models::Plan;
use run::{Expected, Settings, fixtures};

/// Bytes and hops of one more generated token, on rank 0.
struct PerToken {
    bytes: u64,
    hops: u64,
}

fn spent(reports: &[RankReport]) -> PerToken {
    let collectives = reports[0].communication.iter().filter(|c| c.operation.starts_with("all_"));
    collectives.fold(PerToken { bytes: 0, hops: 0 }, |sum, c| PerToken {
        bytes: sum.bytes + c.bytes_sent,
        hops: sum.hops + c.hops,
    })
}

/// The same prompt continued by one token and by two: the difference is one token's.
fn per_token(plan: &str) -> PerToken {
    let fixture = fixtures().into_iter().find(|f| f.name == "muse_spark").unwrap();
    let plan: Plan = plan.parse().unwrap();
    let prompt = Expected::read(&fixture).prompt;
    let run = |count: usize| {
        let (tokens, reports) = fixture.greedy_with_reports(&plan, Settings::default(), &prompt, count);
        assert_eq!(tokens.len(), count);
        spent(&reports)
    };
    let (one, two) = (run(1), run(2));
    PerToken { bytes: two.bytes - one.bytes, hops: two.hops - one.hops }
}

#[test]
fn the_divisions_of_muse_sparks_experts_send_what_they_should() {
    // The fixture's sizes; two shards, so a rank sends each vector once and half of what is gathered.
    let config: serde_json::Value = {
        let fixture = fixtures().into_iter().find(|f| f.name == "muse_spark").unwrap();
        let text = std::fs::read_to_string(fixture.directory.join("config.json")).unwrap();
        let whole: serde_json::Value = serde_json::from_str(&text).unwrap();
        whole.get("text_config").cloned().unwrap_or(whole)
    };
    let size = |key: &str| config[key].as_u64().unwrap();
    let (hidden, pooled, width) = (size("hidden_size"), size("moe_hidden_size"), size("moe_intermediate_size"));
    let (top_k, layers, vocabulary) = (size("num_experts_per_tok"), size("num_hidden_layers"), size("vocab_size"));
    let sparse = config["mlp_layer_types"].as_array().unwrap().iter().filter(|kind| *kind == "sparse").count() as u64;
    // The embedding, each layer's attention, the dense layers' other halves, and the logits.
    let common = 4 * (hidden + layers * hidden + (layers - sparse) * hidden + vocabulary / 2);

    // One collective for the embedding, one for the logits, one for each half layer; to gather takes three in place of one.
    let collectives = 2 + 2 * layers;
    for (plan, experts, expected_hops) in [
        ("tensor:2", top_k * pooled, collectives),
        ("tensor:2,expert", pooled, collectives),
        ("tensor:2,gather", top_k * width / 2 + top_k + hidden, collectives + 2 * sparse),
    ] {
        let PerToken { bytes, hops } = per_token(plan);
        println!("{plan}: {bytes} bytes and {hops} hops per token");
        assert_eq!(bytes, common + 4 * sparse * experts, "{plan}");
        assert_eq!(hops, expected_hops, "{plan}");
    }
}
