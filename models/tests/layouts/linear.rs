//! Linear attention next to attention: layouts, packed documents, decoding with states.

use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::Mesh;
use backend_dist::ops::context::Documents;
use burn::tensor::{Device, FloatDType, Int, Tensor};
use models::{CausalLm, MicroBatch, Mixtral, MixtralConfig, ModelConfig, ParamBuilder};

use crate::assert_layouts_agree;
use crate::cache::assert_cache_changes_nothing;
use crate::harness::{BATCH, Batch, Noise, SEQ, assert_close, host, run};

/// Two value heads for each key head, heads wider than `hidden / heads`.
fn qwen3_next() -> MixtralConfig {
    MixtralConfig {
        vocab_size: 99,
        hidden_size: 32,
        intermediate_size: 48,
        moe_intermediate_size: Some(24),
        num_experts: 4,
        linear_value_head_dim: Some(12),
        mlp_only_layers: vec![2],
        ..MixtralConfig::qwen3_next_tiny()
    }
}

#[test]
fn qwen3_next_in_all_layouts() {
    let layouts = ["TP2", "TP4", "TP2 SP", "TP4 SP", "TP2 SP EP2 ETP1", "TP4 SP EP2 ETP2"];
    assert_layouts_agree::<Mixtral>(&qwen3_next(), &layouts, None);
    let gradients = run::<Mixtral>(&qwen3_next(), "TP2", None).gradients;
    for part in ["linear_attention.A_log", "linear_attention.dt_bias", "linear_attention.k_conv"] {
        assert!(gradients[&format!("layers.0.{part}")].data.iter().any(|value| value.abs() > 1e-4), "{part}");
    }
    assert!(gradients["layers.1.attention.gate_proj.weight"].data.iter().any(|value| value.abs() > 1e-4));
}

#[test]
fn qwen3_next_with_states() {
    assert_cache_changes_nothing::<Mixtral>(&qwen3_next(), &["TP1", "TP2", "TP4 SP"]);
}

/// State, convolution and attention begin anew with each document.
#[test]
fn packed_documents_are_each_document_alone() {
    let starts = [vec![0, 3, 9], vec![0], vec![0, 1, 15]];
    let documents = Documents::new(starts.to_vec());
    for layout in ["TP1", "TP2 SP"] {
        let config = qwen3_next();
        let logits = |of: &Batch, documents: Option<Documents>, seq: usize| {
            let mesh = Mesh::new(if seq == SEQ { layout } else { "TP1" }.parse().unwrap()).unwrap();
            let all = launch(&mesh, &[Device::flex()], |rank: Rank| {
                let params = ParamBuilder::new(&rank, FloatDType::F64, 0).with_source(&Noise).without_autodiff();
                let model = Mixtral::build(&config, params)?;
                let (documents, restarts) = (documents.clone(), documents.clone());
                let batch = MicroBatch { documents, restarts, ..MicroBatch::default() };
                let tokens: Tensor<2, Int> = of.ids(&of.tokens, &rank.device);
                Ok(host(model.head_logits(model.hidden_states(tokens, &batch))))
            });
            all.unwrap().remove(0)
        };
        let batch = Batch::synthetic(config.vocab_size());
        let (packed, vocab) = (logits(&batch, Some(documents.clone()), SEQ), config.vocab_size());
        for sample in 0..BATCH {
            for (index, &start) in starts[sample].iter().enumerate() {
                let end = starts[sample].get(index + 1).copied().unwrap_or(SEQ);
                let tokens = batch.tokens[sample * SEQ..][start..end].to_vec();
                let alone = Batch { samples: 1, tokens, labels: Vec::new(), weights: Vec::new(), routing: None };
                let found = &packed[(sample * SEQ + start) * vocab..(sample * SEQ + end) * vocab];
                let expected = logits(&alone, None, end - start);
                assert_close(&format!("{layout}: {sample}, {start}..{end}"), found, &expected, 1e-10);
            }
        }
    }
}

#[test]
fn layouts_that_would_divide_states_are_refused() {
    let dims = qwen3_next().dims();
    let refused = |layout: &str| dims.check(&layout.parse().unwrap(), 64).unwrap_err().to_string();
    assert_eq!(
        refused("CP2"),
        "context-parallel 2: the model's layers with linear attention do not pass their states between ranks; nearest legal: 1"
    );
    assert_eq!(
        refused("TP8"),
        "tensor-parallel 8 does not divide the model's linear attention heads (4); nearest legal: 4"
    );
}
