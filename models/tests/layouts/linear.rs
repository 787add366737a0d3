//! Linear recurrences, Gated DeltaNet and Mamba-2, next to attention too: layouts, packed documents, decoding with states.

use std::collections::BTreeMap;

use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::Mesh;
use backend_dist::ops::context::Documents;
use backend_dist::shard::HostTensor;
use burn::tensor::{Device, FloatDType, Int, Tensor};
use models::{
    CausalLm, Mamba2, Mamba2Config, MicroBatch, Mixtral, MixtralConfig, ModelConfig, NemotronH, NemotronHConfig,
    ParamBuilder,
};

use crate::assert_layouts_agree;
use crate::cache::assert_cache_changes_nothing;
use crate::harness::{BATCH, Batch, Noise, SEQ, assert_close, host, initial_weights, run};

/// Two value heads for each key head, heads wider than `hidden / heads`.
fn qwen3_next() -> MixtralConfig {
    models::sized! { MixtralConfig::qwen3_next_tiny();
        vocab_size: 99, hidden_size: 32, intermediate_size: 48, moe_intermediate_size: Some(24), num_experts: 4,
        linear_value_head_dim: Some(12), mlp_only_layers: vec![2]
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

/// Two groups of four heads; TP4 and TP8 have more ranks than groups. Step sizes reach their limits.
fn mamba2() -> Mamba2Config {
    let (time_step_limit_min, time_step_limit_max) = (0.3, Some(2.0));
    let of =
        Mamba2Config { vocab_size: 99, hidden_size: 32, num_hidden_layers: 3, head_dim: 6, ..Mamba2Config::tiny() };
    Mamba2Config { state_size: 5, use_bias: true, time_step_limit_min, time_step_limit_max, ..of }
}

#[test]
fn mamba2_in_all_layouts() {
    let layouts = ["TP2", "TP4", "TP8", "TP2 SP", "TP4 SP"];
    assert_layouts_agree::<Mamba2>(&mamba2(), &layouts, None);
    let one_group = Mamba2Config { n_groups: 1, use_bias: false, use_conv_bias: false, ..mamba2() };
    assert_layouts_agree::<Mamba2>(&one_group, &layouts, None);
    let gradients = run::<Mamba2>(&mamba2(), "TP4", None).gradients;
    for part in ["A_log", "dt_bias", "D", "b_conv", "c_conv_bias", "norm.weight", "dt_proj.bias"] {
        assert!(gradients[&format!("layers.0.mamba.{part}")].data.iter().any(|value| value.abs() > 1e-4), "{part}");
    }
}

#[test]
fn mamba2_with_states() {
    assert_cache_changes_nothing::<Mamba2>(&mamba2(), &["TP1", "TP2", "TP4 SP"]);
}

/// Of its two groups and four key-value heads TP8 has several ranks each.
fn nemotron_h() -> NemotronHConfig {
    let of = models::sized! { NemotronHConfig::tiny();
        vocab_size: 99, hidden_size: 32, mamba_head_dim: 6, ssm_state_size: 5
    };
    NemotronHConfig { hybrid_override_pattern: "M-*-M".into(), head_dim: 5, use_bias: true, mlp_bias: true, ..of }
}

#[test]
fn nemotron_h_in_all_layouts() {
    assert_layouts_agree::<NemotronH>(&nemotron_h(), &["TP2", "TP4", "TP8", "TP2 SP", "TP4 SP"], None);
    let gradients = run::<NemotronH>(&nemotron_h(), "TP4", None).gradients;
    for part in
        ["0.mamba.A_log", "1.mlp.up_proj.bias", "2.attention.k_proj.weight", "3.post_attention_layernorm.weight"]
    {
        assert!(gradients[&format!("layers.{part}")].data.iter().any(|value| value.abs() > 1e-4), "{part}");
    }
}

#[test]
fn nemotron_h_with_states_keys_and_values() {
    assert_cache_changes_nothing::<NemotronH>(&nemotron_h(), &["TP1", "TP2", "TP4 SP"]);
}

/// Every kind of layer, experts in groups of which a token uses some, chosen by scores and a bias.
fn nemotron_3() -> NemotronHConfig {
    let of = models::sized! { nemotron_h();
        moe_intermediate_size: 16, moe_shared_expert_intermediate_size: 24, router_aux_loss_coef: 0.02
    };
    NemotronHConfig { hybrid_override_pattern: "ME*-E".into(), mlp_bias: false, initializer_range: 0.2, ..of }
}

#[test]
fn nemotron_3_in_all_layouts() {
    let experts = ["TP2 EP2 ETP1", "TP4 SP EP2 ETP2", "TP4 EP4 ETP1", "TP8 EP8 ETP1"];
    let layouts = [&["TP2", "TP4", "TP8", "TP2 SP", "TP4 SP"][..], &experts].concat();
    assert_layouts_agree::<NemotronH>(&nemotron_3(), &layouts, None);
    let gradients = run::<NemotronH>(&nemotron_3(), "TP4 EP2 ETP2", None).gradients;
    for part in
        ["router.weight", "experts.5.up_proj.weight", "experts.0.down_proj.weight", "shared_experts.up_proj.weight"]
    {
        assert!(gradients[&format!("layers.1.mlp.{part}")].data.iter().any(|value| value.abs() > 1e-4), "{part}");
    }
    assert!(gradients.keys().all(|name| !name.contains("gate_proj")), "squared ReLU has no gate");
}

#[test]
fn nemotron_3_with_states_keys_and_values() {
    assert_cache_changes_nothing::<NemotronH>(&nemotron_3(), &["TP1", "TP2", "TP4 SP", "TP2 EP2 ETP1"]);
}

/// Taps have the shape of PyTorch's depthwise convolutions, so Muon leaves them to AdamW, as in Megatron-LM.
#[test]
fn taps_of_convolutions_are_no_matrices() {
    fn taps<M: CausalLm>(config: &M::Config) -> Vec<Vec<usize>> {
        let of = |rank: Rank| {
            let model = M::build(config, ParamBuilder::new(&rank, FloatDType::F32, 1))?;
            let sections = model.registry().iter().flat_map(|spec| spec.sections.clone());
            let taps = sections.filter(|section| section.name.ends_with("_conv"));
            Ok(taps.map(|section| section.global_shape).collect::<Vec<_>>())
        };
        launch(&Mesh::new("TP1".parse().unwrap()).unwrap(), &[Device::flex()], of).unwrap().remove(0)
    }
    for shapes in [taps::<Mixtral>(&qwen3_next()), taps::<Mamba2>(&mamba2())] {
        assert!(shapes.len() >= 3 && shapes.iter().all(|shape| shape.len() == 3 && shape[1..] == [1, 4]), "{shapes:?}");
    }
}

/// State, convolution and attention begin anew with each document.
#[test]
fn packed_documents_are_each_document_alone() {
    assert_documents_are_alone::<Mixtral>(&qwen3_next());
    assert_documents_are_alone::<Mamba2>(&mamba2());
    assert_documents_are_alone::<NemotronH>(&nemotron_h());
}

fn assert_documents_are_alone<M: CausalLm>(config: &M::Config) {
    let starts = [vec![0, 3, 9], vec![0], vec![0, 1, 15]];
    let documents = Documents::new(starts.to_vec());
    for layout in ["TP1", "TP2 SP"] {
        let logits = |of: &Batch, documents: Option<Documents>, seq: usize| {
            let mesh = Mesh::new(if seq == SEQ { layout } else { "TP1" }.parse().unwrap()).unwrap();
            let all = launch(&mesh, &[Device::flex()], |rank: Rank| {
                let params = ParamBuilder::new(&rank, FloatDType::F64, 0).with_source(&Noise).without_autodiff();
                let model = M::build(config, params)?;
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
    fn refused(config: &impl ModelConfig, layout: &str) -> String {
        config.dims().check(&layout.parse().unwrap(), 96).unwrap_err().to_string()
    }
    let next = qwen3_next();
    assert_eq!(
        refused(&next, "TP8"),
        "tensor-parallel 8 does not divide the model's linear attention heads (4); nearest legal: 4"
    );
    assert_eq!(
        refused(&next, "TP2 CP3"),
        "context-parallel 3: the ranks of a sequence cannot share the 4 states of linear attention heads (2 groups) of a \
         tensor-parallel rank; nearest legal: 2, 4"
    );
    assert!(refused(&next, "CP16").contains("the 8 states of linear attention heads (4 groups) of"));
    assert_eq!(
        refused(&mamba2(), "TP16"),
        "tensor-parallel 16 does not divide the model's Mamba-2 heads (8); nearest legal: 8"
    );
    assert!(
        refused(&mamba2(), "TP4 CP4")
            .ends_with("the 2 states of Mamba-2 heads (1 groups) of a tensor-parallel rank; nearest legal: 2")
    );
    let three_groups = Mamba2Config { num_heads: 12, n_groups: 3, ..mamba2() };
    assert_eq!(
        refused(&three_groups, "TP2"),
        "tensor-parallel 2 and 3 groups of Mamba-2 heads: one must divide the other; nearest legal tensor-parallel: 1, 3"
    );
    assert!(
        refused(&three_groups, "CP2")
            .ends_with("12 states of Mamba-2 heads (3 groups) of a tensor-parallel rank; nearest legal: 1, 3")
    );
    for (layout, legal) in
        [("CP8", next.dims()), ("TP4 CP2", next.dims()), ("TP4 CP2", mamba2().dims()), ("CP8", mamba2().dims())]
    {
        assert_eq!(legal.check(&layout.parse().unwrap(), 96), Ok(()), "{layout}");
    }
}

/// Quartiles of 1,024 heads, within four standard errors: rates of forgetting and step sizes begin as in transformers
/// (Qwen3-Next) and mamba_ssm (Mamba-2).
#[test]
fn heads_begin_with_the_published_rates_and_steps() {
    let next = MixtralConfig {
        linear_num_key_heads: Some(4),
        linear_num_value_heads: Some(1024),
        linear_key_head_dim: Some(2),
        linear_value_head_dim: Some(1),
        ..qwen3_next()
    };
    let next = initial_weights::<Mixtral>(&next, "TP1", 7);
    let mamba = Mamba2Config { num_heads: 1024, head_dim: 1, n_groups: 1, state_size: 1, ..mamba2() };
    let mamba = initial_weights::<Mamba2>(&mamba, "TP2", 7);
    let check = |weights: &BTreeMap<String, HostTensor>, part: &str, share_below: fn(f64) -> f64| {
        let (_, tensor) = weights.iter().find(|(name, _)| name.ends_with(part)).unwrap();
        let mut values = tensor.data.clone();
        values.sort_by(f64::total_cmp);
        assert_eq!(values.len(), 1024);
        for quarter in 1..4 {
            let (share, value) = (quarter as f64 / 4.0, values[256 * quarter]);
            assert!((share_below(value) - share).abs() < 0.0625, "{part}: {share} of the values are below {value}");
        }
    };
    check(&next, ".A_log", |log| (log.exp() - 0.01) / (16.0 - 0.01));
    assert!(next["layers.0.linear_attention.dt_bias"].data.iter().all(|value| *value == 1.0));
    check(&mamba, ".A_log", |log| (log.exp() - 1.0) / (16.0 - 1.0));
    check(&mamba, ".dt_bias", |bias| (bias.exp().ln_1p() / 0.001).log10() / 2.0);
}
