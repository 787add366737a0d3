//! The reference model of GRPO is the model that a run starts from.

use std::fs;

use burn::tensor::Device;
use burn_megatron::grpo::Completion;
use burn_megatron::train::{Plan, train};

use super::golden;
use super::grpo::{config, number, prepared, rewarded, steps};

/// A model of a folder is its own reference, wherever its end of text is.
#[test]
fn a_model_of_a_folder_starts_at_its_reference() {
    let folder = tempfile::tempdir().unwrap();
    super::eval::model(folder.path());
    fs::write(folder.path().join("prompts.jsonl"), "{\"prompt\": \"w10 w20 w30\", \"answer\": \"w40\"}\n").unwrap();
    let base = golden("lora/base").display().to_string();
    let own = [("model.hf", base.as_str()), ("lora.rank", "4"), ("lora.dora", "true"), ("training.steps", "2")];
    let random = |completion: &Completion| completion.text.len() as f64;
    let plan = Plan::new(&config(folder.path(), "dora", &own), &[]).unwrap().with_reward(random);
    train(&plan, vec![Device::flex()], &mut |_| ()).unwrap();
    let run = steps(folder.path(), "dora");
    assert!(number(&run[0], "kl").abs() < 1e-12 && number(&run[1], "kl") > 0.0, "{run:?}");
}

/// The reference has the policy's frozen weights, also those that are stored in few bits.
#[test]
fn adapters_of_weights_in_few_bits_start_at_their_reference() {
    let folder = tempfile::tempdir().unwrap();
    prepared(folder.path(), (0..10).map(|digit| (format!("{digit}="), digit)));
    for dora in ["false", "true"] {
        let own = [
            ("model.hidden-size", "64"),
            ("model.intermediate-size", "64"),
            ("model.head-dim", "16"),
            ("training.dtype", "f32"),
            ("training.steps", "2"),
            ("lora.rank", "4"),
            ("lora.dora", dora),
            ("lora.base", "nf4"),
        ];
        let run = rewarded(folder.path(), &format!("dora-{dora}"), &own);
        assert!(number(&run[0], "kl").abs() < 1e-10 && number(&run[1], "kl") > 0.0, "{dora}: {run:?}");
    }
}
