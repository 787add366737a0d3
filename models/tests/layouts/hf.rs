//! Tiny Hugging Face checkpoints give transformers' loss, logits and gradients; see `golden/README.md`.

use std::collections::BTreeMap;

use backend_dist::shard::HostTensor;
use models::{CausalLm, Gpt, GptConfig, Llama, LlamaConfig, ModelConfig};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::harness::{Batch, assert_close, assert_within, run_on};

const SAMPLES: usize = 2;
const SEQ: usize = 40;
const VOCAB: usize = 256;

/// transformers computes the rotation angles in fp32, and the oracle keeps gradients and loss in fp32.
const LIMIT: f64 = 2e-6;

fn tensors(bytes: &[u8]) -> BTreeMap<String, HostTensor> {
    let file = SafeTensors::deserialize(bytes).unwrap();
    let read = |view: safetensors::tensor::TensorView| {
        let data = view.data();
        let data = match view.dtype() {
            Dtype::F32 => data.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect(),
            Dtype::F64 => data.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect(),
            Dtype::I64 => data.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as f64).collect(),
            other => panic!("{other:?}"),
        };
        HostTensor { shape: view.shape().to_vec(), data }
    };
    file.iter().map(|(name, view)| (name.to_string(), read(view))).collect()
}

fn assert_transformers<M: CausalLm>(config: &M::Config, bytes: &[u8]) {
    let oracle = tensors(bytes);
    let with_prefix = |prefix: &str| -> BTreeMap<String, HostTensor> {
        oracle.iter().filter_map(|(name, t)| Some((name.strip_prefix(prefix)?.to_string(), t.clone()))).collect()
    };
    let weights = config.hf_names().import(&with_prefix("model:")).unwrap();
    let ids: Vec<i64> = oracle["input_ids"].data.iter().map(|id| *id as i64).collect();
    // The last position predicts nothing: its weight is zero.
    let next = |index: usize| if index % SEQ == SEQ - 1 { 0 } else { ids[index + 1] };
    let weight = |index: usize| if index % SEQ == SEQ - 1 { 0.0 } else { 1.0 / (SAMPLES * (SEQ - 1)) as f64 };
    let batch = Batch {
        samples: SAMPLES,
        tokens: ids.clone(),
        labels: (0..SAMPLES * SEQ).map(next).collect(),
        weights: (0..SAMPLES * SEQ).map(weight).collect(),
    };
    for layout in ["TP1", "TP4", "TP4 SP"] {
        let outcome = run_on::<M>(config, layout, &weights, &batch, None);
        let loss: f64 = outcome.losses.iter().zip(&batch.weights).map(|(loss, weight)| loss * weight).sum();
        assert_close(&format!("{layout}: loss"), &[loss], &oracle["loss"].data, LIMIT);
        let last = |sample: usize| &outcome.logits[((sample + 1) * SEQ - 4) * VOCAB..(sample + 1) * SEQ * VOCAB];
        assert_close(&format!("{layout}: logits"), &[last(0), last(1)].concat(), &oracle["logits_last4"].data, LIMIT);
        let gradients = config.hf_names().export(&outcome.gradients).unwrap();
        let expected = with_prefix("grad.");
        assert!(expected.len() > 5);
        for (name, expected) in expected {
            let what = format!("{layout}: gradient of {name}");
            // Far below this the oracle's fp32 has nothing to say: key biases have no gradient at all.
            assert_within(&what, &gradients[&name].data, &expected.data, LIMIT, 1e-6);
        }
    }
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

const LLAMA3: &str = include_str!("../golden/hf/llama3.json");
const GPT2: &str = include_str!("../golden/hf/gpt2.json");

#[test]
fn llama3_is_transformers() {
    let config = LlamaConfig::from_hf(&json(LLAMA3)).unwrap();
    assert_transformers::<Llama>(&config, include_bytes!("../golden/hf/llama3.safetensors"));
}

#[test]
fn gpt2_is_transformers() {
    let config = GptConfig::from_hf(&json(GPT2)).unwrap();
    assert_transformers::<Gpt>(&config, include_bytes!("../golden/hf/gpt2.safetensors"));
}
