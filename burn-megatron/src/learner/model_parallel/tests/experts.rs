//! A MoE with a bias that balances them: any layout resumes from any other, and a run says how full its
//! experts are.

use models::{DeepSeekV3, DeepSeekV3Config};
use serde_json::Value;

use super::*;
use crate::checkpoint::Kind;
use crate::engine::ParamGroups;

/// A bias that moves fast enough to send tokens elsewhere.
pub(super) fn config() -> DeepSeekV3Config {
    models::sized! { DeepSeekV3Config::tiny();
        vocab_size: 33, hidden_size: 32, intermediate_size: 32, moe_intermediate_size: 16, num_hidden_layers: 2,
        moe_router_bias_update_rate: 0.05
    }
}

fn pretraining(layout: &str, folder: &Path, every: Option<u64>) -> Pretraining<DeepSeekV3> {
    let (mesh, data) = (Mesh::new(layout.parse().unwrap()).unwrap(), (data(900, 1), data(200, 2)));
    Pretraining::new(mesh, engine(), 5, data, config().dims(), builder(&config(), FloatDType::F64))
        .evaluate(3, 1)
        .directory(folder.join("run"))
        .checkpoints(saving(folder, every, false))
}

#[test]
fn any_layout_resumes_with_the_experts_and_biases_of_any_other() {
    let whole = tempfile::tempdir().unwrap();
    let logs = LogOptions { trace: Some(whole.path().join("trace.json")), ..LogOptions::default() };
    let first = pretraining("TP2 SP DP2 EP2 ETP1 ZeRO1", whole.path(), Some(3)).logs(logs);
    succeeds(&first, "the first");
    let lines = trained_after(whole.path(), 0);
    for line in &lines {
        let experts = line["experts"].as_array().unwrap();
        let layers: Vec<u64> = experts.iter().map(|layer| layer["layer"].as_u64().unwrap()).collect();
        assert_eq!(layers, [1, 2], "the layer of multi-token prediction comes last");
        for layer in &experts[..1] {
            let tokens = layer["tokens"].as_array().unwrap().iter().map(|count| count.as_u64().unwrap());
            assert_eq!(tokens.sum::<u64>(), 2 * 8 * SEQ as u64, "two experts for each token of the batch");
            let entropy = layer["entropy"].as_f64().unwrap();
            assert!(entropy > 1.0 && entropy <= 8f64.ln() + 1e-9, "{entropy}");
        }
        assert!(line["expert_balance"].as_f64().unwrap() >= 1.0 && line["dropped_tokens"].as_f64() == Some(0.0));
    }
    let picture = std::fs::read_to_string(whole.path().join("trace.json.experts.svg")).unwrap();
    assert_eq!(picture.matches("<rect").count(), 2 * 8 + 5, "{picture}");

    let from = saved_at(whole.path(), 3);
    let saved = Checkpoint::open(&from).unwrap();
    let bias = saved.tensor(Kind::Weight, "layers.1.mlp.router.expert_bias").expect("it is saved");
    assert_eq!(bias.global_shape, [8]);
    let values = saved.read_f64(Kind::Weight, &bias.name, &[8], &[0..8]).unwrap();
    // Three steps of 0.05 up or down, or none.
    let is_sum = |value: &f64| (value / 0.05 - (value / 0.05).round()).abs() < 1e-9 && value.abs() < 0.16;
    assert!(values.iter().all(is_sum) && values.iter().any(|value| *value != 0.0), "{values:?}");
    assert!(saved.tensor(Kind::FirstMoment, &bias.name).is_none(), "no gradient, no moments");

    for layout in ["TP1", "DP4 EP4 ZeRO3", "TP2 EP2 ETP1", "PP2 DP2 EP2"] {
        let folder = tempfile::tempdir().unwrap();
        let run = pretraining(layout, folder.path(), None).resume(Resume::From(from.clone()));
        succeeds(&run, layout);
        let again = trained_after(folder.path(), 0);
        assert_eq!(again.len(), 2);
        for (line, expected) in again.iter().zip(&lines[3..]) {
            let (loss, expected_loss) = (line["loss"].as_f64().unwrap(), expected["loss"].as_f64().unwrap());
            assert!((loss - expected_loss).abs() < 1e-10 * expected_loss, "{layout}: {loss}, not {expected_loss}");
            let tokens = |line: &Value| line["experts"][0]["tokens"].clone();
            assert_eq!(tokens(line), tokens(expected), "{layout}");
        }
        saves_what_it_read::<DeepSeekV3>(&saved, layout, &config(), FloatDType::F64, &engine());
    }
}

/// They were taken for none: their loads were not counted, and the weights at the end were those of one rank.
#[test]
fn frozen_experts_are_experts() {
    let trained = |layout: &str| {
        let folder = tempfile::tempdir().unwrap();
        let groups = ParamGroups { frozen: vec!["*.experts.*".into()], ..ParamGroups::default() };
        let (frozen, engine) = (groups.frozen.clone(), EngineConfig { groups, ..engine() });
        let build = move |rank: &Rank, part| {
            let params = ParamBuilder::new(rank, FloatDType::F64, 7).with_part(part).with_frozen(&frozen);
            Ok(DeepSeekV3::build(&config(), params)?)
        };
        let (mesh, data) = (Mesh::new(layout.parse().unwrap()).unwrap(), (data(900, 1), data(200, 2)));
        let run = Pretraining::new(mesh, engine, 2, data, config().dims(), build).directory(folder.path().join("run"));
        let run = run.finish(global_weights);
        succeeds(&run, layout);
        for line in trained_after(folder.path(), 0) {
            assert_eq!(line["experts"].as_array().map(Vec::len), Some(2), "{layout}");
            assert!(line["expert_balance"].as_f64().is_some_and(|balance| balance >= 1.0), "{layout}: {line}");
        }
        run.finished().unwrap().expect("rank 0 has the weights")
    };
    let (single, over_two) = (trained("TP1"), trained("DP2 EP2"));
    let experts = over_two.keys().filter(|name| name.contains(".experts.")).count();
    // Two layers with them, that of multi-token prediction is one.
    assert_eq!((over_two.len(), experts), (single.len(), 2 * 8 * 3));
    for (name, weight) in &over_two {
        let pairs = weight.data.iter().zip(&single[name].data);
        let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(worst < 1e-10, "{name}: {worst}");
    }
}
