//! T5: two versions, and greedy decoding.

use std::fs;

use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use burn_megatron::element::Element;
use burn_megatron::forward::forward_module;
use burn_megatron::hf::{ModuleExport, ModuleFolder};
use models::encoders::t5::T5FeedForwardKind;
use models::hf::HostInput;
use models::{Activation, T5, T5Config};
use tempfile::TempDir;

use super::{Inputs, equals_transformers, logits, oracle, round_trip, run, settings};
use crate::files::{golden, read};

/// transformers rounds T5's mean squares and attention weights to fp32 whatever the model computes in.
#[test]
fn t5_is_that_of_transformers() {
    equals_transformers("t5", 1e-6);
}

/// A sequence that is all padding, and an output of one token.
#[test]
fn the_shortest_inputs_of_t5() {
    let (mut inputs, _) = oracle("t5");
    let ints = |shape: [usize; 2], data: Vec<i64>| HostInput::Ints { shape: shape.into(), data };
    inputs.insert("attention_mask".into(), ints([2, 40], (0..80).map(|at| i64::from(at < 40)).collect()));
    inputs.insert("labels".into(), ints([2, 1], vec![5, 6]));
    for layout in ["TP1", "TP2"] {
        let outputs = run("t5", &inputs, layout, true).unwrap();
        assert_eq!(logits(&outputs).shape, [2, 1, 256]);
        let gradients = outputs.gradients.values().flat_map(|gradient| &gradient.data);
        assert!(gradients.chain(&logits(&outputs).data).chain(&outputs.loss).all(|value| value.is_finite()));
    }
    inputs.insert("decoder_attention_mask".into(), ints([2, 1], vec![1, 1]));
    let error = run("t5", &inputs, "TP1", false).unwrap_err().to_string();
    says!(error, "`decoder_attention_mask` is none that this model takes; legal: input_ids");
}

#[test]
fn t5_is_written_as_it_was_read() {
    round_trip::<T5>("t5");
}

/// Version 1.1: gated networks and a head of its own, which transformers 5 calls tied.
#[test]
fn t5_with_gates_and_a_head() {
    let mut gated = T5Config::small();
    gated = T5Config { vocab_size: 40, d_model: 16, d_kv: 8, d_ff: 24, num_layers: 2, num_decoder_layers: 1, ..gated };
    gated = T5Config { num_heads: 2, scale_decoder_outputs: false, tie_word_embeddings: false, ..gated };
    gated.feed_forward_proj = T5FeedForwardKind::Gated(Activation::GeluNew);
    let (folder, again) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let what = ModuleExport { element: Element::F64, ..ModuleExport::default() };
    what.write(folder.path(), &T5::new(&gated, &Device::flex()), &gated).unwrap();
    let config = folder.path().join("config.json");
    let text =
        fs::read_to_string(&config).unwrap().replace("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    fs::write(config, text).unwrap();
    let opened = ModuleFolder::open(folder.path()).unwrap();
    assert_eq!(opened.config::<T5>().unwrap(), gated);
    let module: T5 = opened.read(&gated, FloatDType::F64, &Device::flex()).unwrap();
    what.write(again.path(), &module, &gated).unwrap();
    let weights = |folder: &TempDir| read(&folder.path().join("model.safetensors"));
    assert!(weights(&folder) == weights(&again));
    assert!(weights(&folder).contains_key("encoder.block.1.layer.1.DenseReluDense.wi_1.weight"));
    let ints = |shape: &[usize]| HostInput::Ints {
        shape: shape.into(),
        data: (0..shape.iter().product::<usize>()).map(|at| (at * 7 % 40) as i64).collect(),
    };
    let inputs = Inputs::from([("input_ids".into(), ints(&[2, 7])), ("labels".into(), ints(&[2, 5]))]);
    let losses = ["TP1", "TP2", "TP2 SP"]
        .map(|layout| forward_module(&opened, &inputs, &settings(layout, true)).unwrap().loss.unwrap());
    assert!(losses.iter().all(|loss| (loss - losses[0]).abs() < 1e-12), "{losses:?}");
}

/// One token at a time with what was kept is all tokens at once, and a sequence may have padding.
#[test]
fn t5_generates_as_without_a_cache() {
    let folder = ModuleFolder::open(golden("t5")).unwrap();
    let config = folder.config::<T5>().unwrap();
    let device = Device::flex();
    let model: T5 = folder.read(&config, FloatDType::F64, &device).unwrap();
    let ids: Vec<i64> = (0..24).map(|at| 2 + at * 13 % 250).collect();
    let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [2, 12]), &device);
    let padding = Tensor::<2, Int>::from_data([[0; 12], [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]], &device).equal_elem(1);
    let cached = model.generate(ids.clone(), Some(padding.clone()), 20, config.eos_token_id);
    let mut output = vec![vec![config.decoder_start_token_id as i64]; 2];
    for step in 0..20 {
        let so_far = Tensor::<2, Int>::from_data(TensorData::new(output.concat(), [2, step + 1]), &device);
        let logits = model.forward(ids.clone(), Some(padding.clone()), so_far);
        let next = logits.narrow(1, step, 1).argmax(2).into_data();
        for (output, token) in output.iter_mut().zip(next.iter::<i64>()) {
            output.push(token);
        }
    }
    for (cached, whole) in cached.iter().zip(&output) {
        let end = whole.iter().position(|token| *token == config.eos_token_id as i64).map_or(21, |end| end + 1);
        assert_eq!(cached, &whole[1..end]);
    }
    // A sequence alone gives the same as with another that is longer.
    let alone = model.generate(ids.narrow(0, 1, 1).narrow(1, 0, 7), None, 20, config.eos_token_id);
    assert_eq!(alone[0], cached[1]);
}
