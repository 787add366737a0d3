//! DeepSeek-V3: latent attention and multi-token prediction in every layout.

mod plain;

use std::sync::Arc;

use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::Mesh;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Device, FloatDType, Gradients, Tensor, TensorData};
use models::lora::LoraConfig;
use models::{CausalLm, DeepSeekV3, DeepSeekV3Config, DeepSeekVariant, MicroBatch, ModelConfig, ParamBuilder};

use crate::cache::{assert_cache_changes_nothing, assert_cache_changes_nothing_in};
use crate::harness::{BATCH, Batch, Noise, Outcome, SEQ, assert_close, host, initial_weights, largest, run};
use crate::{assert_layouts_agree, assert_same};
use plain::Plain;

const LAYOUTS: [&str; 6] = ["TP2", "TP4", "TP2 SP", "TP4 SP", "TP8", "TP8 SP"];

/// Without experts and without multi-token prediction; a vocabulary that no rank count divides, no two sizes of a head alike.
fn dense() -> DeepSeekV3Config {
    models::sized! { DeepSeekV3Config::tiny();
        vocab_size: 99, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, first_k_dense_replace: 9,
        q_lora_rank: Some(20), kv_lora_rank: 12, qk_nope_head_dim: 6, qk_rope_head_dim: 4, v_head_dim: 5,
        num_nextn_predict_layers: 0
    }
}

/// As ROCm/TransformerEngine#715 had not: its gradients of the projections to the latents were off by half under tensor
/// parallelism. Those weights are whole on every rank; under sequence parallelism each has the gradient of its
/// positions.
#[test]
fn latent_attention() {
    assert_layouts_agree::<DeepSeekV3>(&dense(), &LAYOUTS, None);
    let gradients = run::<DeepSeekV3>(&dense(), "TP2", None).gradients;
    for part in ["q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"]
    {
        assert!(largest(&gradients[&format!("layers.1.attention.{part}.weight")].data) > 1e-4, "{part}");
    }
}

#[test]
fn latent_attention_whose_queries_have_no_latent() {
    assert_layouts_agree::<DeepSeekV3>(&DeepSeekV3Config { q_lora_rank: None, ..dense() }, &LAYOUTS, None);
}

/// Single tokens attend to latents, with the matrices of keys and values in the query and the output; chunks to heads.
#[test]
fn latent_attention_with_a_cache() {
    assert_cache_changes_nothing::<DeepSeekV3>(&dense(), &["TP1", "TP2", "TP2 SP", "TP4 SP"]);
    let direct = DeepSeekV3Config { q_lora_rank: None, ..dense() };
    assert_cache_changes_nothing::<DeepSeekV3>(&direct, &["TP1", "TP2 SP"]);
    let v2 =
        DeepSeekV3Config { variant: DeepSeekVariant::DeepseekV2, norm_topk_prob: false, ..DeepSeekV3Config::tiny() };
    let v2 = DeepSeekV3Config { vocab_size: 99, num_nextn_predict_layers: 0, ..v2 };
    assert_cache_changes_nothing::<DeepSeekV3>(&v2, &["TP1", "TP2", "TP4 SP EP2 ETP2"]);
}

/// The matrices that are absorbed have their adapters with them.
#[test]
fn adapted_latent_attention_with_a_cache() {
    for dora in [false, true] {
        let config = LoraConfig { dora, target_modules: vec!["kv_b_proj".into()], ..LoraConfig::default() };
        let plan = Arc::new(config.plan(&dense().hf_names()).unwrap());
        assert_cache_changes_nothing_in::<DeepSeekV3>(&dense(), &["TP1", "TP2", "TP2 SP"], |params| {
            params.with_lora(&plan, Some(&Noise))
        });
    }
}

#[test]
fn initial_weights_do_not_depend_on_the_layout() {
    let expected = initial_weights::<DeepSeekV3>(&dense(), "TP1", 7);
    assert!(initial_weights::<DeepSeekV3>(&dense(), "TP4 SP", 7) == expected);
}

/// Whoever builds a model without asking the layout first is told as well.
#[test]
fn experts_that_the_ranks_cannot_divide_are_refused() {
    let mesh = Mesh::new("DP3 EP3".parse().unwrap()).unwrap();
    let built = launch(&mesh, &[Device::flex()], |rank| {
        let params = ParamBuilder::new(&rank, FloatDType::F64, 0);
        Ok(DeepSeekV3::build(&DeepSeekV3Config::tiny(), params).err().map(|error| error.to_string()))
    });
    let refused = "expert-parallel 3 does not divide the model's experts (8); nearest legal: 1";
    assert_eq!(built.unwrap(), vec![Some(refused.to_string()); 3]);
}

/// The modules' losses have the weight 0.3 / 2 each.
fn further_tokens() -> DeepSeekV3Config {
    DeepSeekV3Config { num_nextn_predict_layers: 2, mtp_loss_scaling_factor: 0.3, ..dense() }
}

#[test]
fn multi_token_prediction() {
    assert_layouts_agree::<DeepSeekV3>(&further_tokens(), &LAYOUTS, None);
}

/// Multi-token prediction changes no reported loss, but the gradients.
#[test]
fn multi_token_prediction_only_adds_to_the_gradient() {
    let (with, without) = (run::<DeepSeekV3>(&further_tokens(), "TP1", None), run::<DeepSeekV3>(&dense(), "TP1", None));
    assert_eq!((&with.losses, &with.logits), (&without.losses, &without.logits));
    assert!(with.gradients["norm.weight"] != without.gradients["norm.weight"]);
    let unweighted = DeepSeekV3Config { mtp_loss_scaling_factor: 0.0, ..further_tokens() };
    let mut gradients = run::<DeepSeekV3>(&unweighted, "TP1", None).gradients;
    gradients.retain(|name, gradient| {
        let module = name.starts_with("layers.2") || name.starts_with("layers.3");
        assert!(!module || largest(&gradient.data) == 0.0, "{name}");
        !module
    });
    let rest = Outcome { gradients, ..run::<DeepSeekV3>(&unweighted, "TP1", None) };
    assert_same("without weight", &rest, &without);
}

/// The model on one rank, and the losses of its modules, against formulas on vectors.
#[test]
fn losses_are_those_of_the_formulas() {
    let config = further_tokens();
    let batch = Batch::synthetic(config.vocab_size);
    let rank = Rank::single(Device::flex());
    let params = ParamBuilder::new(&rank, FloatDType::F64, 0).with_source(&Noise).without_autodiff();
    let model = DeepSeekV3::build(&config, params).unwrap();
    let (tokens, labels) = (batch.ids(&batch.tokens, &rank.device), batch.ids(&batch.labels, &rank.device));
    let x = model.hidden_states(tokens, &MicroBatch::default());
    let next = host(model.head_losses(x.clone(), labels.clone(), &MicroBatch::default()));
    let modules = model.mtp_losses(x, &labels, &MicroBatch::default()).into_iter().map(host);
    let found: Vec<Vec<f64>> = std::iter::once(next).chain(modules).collect();
    assert_eq!(found.len(), 3);
    for sample in 0..BATCH {
        let ids = |ids: &[i64]| ids[sample * SEQ..(sample + 1) * SEQ].iter().map(|id| *id as usize).collect::<Vec<_>>();
        let expected = Plain { config: &config }.all_losses(&ids(&batch.tokens), &ids(&batch.labels));
        for (module, (found, expected)) in found.iter().zip(expected).enumerate() {
            let found = &found[sample * SEQ..][..expected.len()];
            assert_close(&format!("module {module}, sample {sample}"), found, &expected, 1e-12);
        }
    }
}

/// Gradients of all parameters one after the other, zeros where there is none.
struct Flat<'a>(&'a Gradients, Vec<f64>);

impl ModuleVisitor for Flat<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let param = param.val();
        let gradient = param.grad(self.0).unwrap_or_else(|| param.inner().zeros_like());
        self.1.extend(host(gradient));
    }
}

/// `Σ w_i loss_i + 0.3/2 Σ_k Σ_i w_(i+k) loss_(k, i)`: a token's weight, 0 where it is masked, counts wherever the
/// token is predicted.
#[test]
fn weights_of_tokens_count_for_all_predictions_of_them() {
    let batch = Batch::synthetic(99);
    let rank = Rank::single(Device::flex());
    let device = rank.device.clone().autodiff();
    let mut weights = batch.weights.clone();
    weights[7..11].fill(0.0);
    let weights = Tensor::<2>::from_data(TensorData::new(weights, [BATCH, SEQ]), (&device, DType::F64));
    let (tokens, labels) = (batch.ids(&batch.tokens, &device), batch.ids(&batch.labels, &device));
    let gradients = |config: &DeepSeekV3Config, total: &dyn Fn(&DeepSeekV3, Tensor<3>) -> Tensor<1>| {
        let params = ParamBuilder::new(&rank, FloatDType::F64, 0).with_source(&Noise);
        let model = DeepSeekV3::build(config, params).unwrap();
        let x = model.hidden_states(tokens.clone(), &MicroBatch::default());
        let gradients = total(&model, x).backward();
        let mut all = Flat(&gradients, Vec::new());
        model.visit(&mut all);
        all.1
    };
    let next = |model: &DeepSeekV3, x: Tensor<3>| {
        (model.head_losses(x, labels.clone(), &MicroBatch::default()) * weights.clone()).sum()
    };
    let found = gradients(&further_tokens(), &next);
    let unweighted = DeepSeekV3Config { mtp_loss_scaling_factor: 0.0, ..further_tokens() };
    let expected = gradients(&unweighted, &|model, x| {
        let modules = model.mtp_losses(x.clone(), &labels, &MicroBatch::default());
        modules.into_iter().enumerate().fold(next(model, x), |sum, (index, losses)| {
            let (by, left) = (index + 1, SEQ - index - 1);
            sum + (losses.narrow(1, 0, left) * weights.clone().narrow(1, by, left)).sum().mul_scalar(0.15)
        })
    });
    assert_close("gradients", &found, &expected, 1e-12);
}

/// Layers with experts behind one without, and a module of multi-token prediction with experts. Ranks that hold the
/// same experts, as in `TP2 ETP1`, see other tokens.
#[test]
fn experts() {
    let config = models::sized! { dense();
        num_hidden_layers: 2, first_k_dense_replace: 1, moe_intermediate_size: 12, num_nextn_predict_layers: 1
    };
    let layouts = ["TP2", "TP4 SP", "TP2 ETP1", "TP2 EP2 ETP1", "TP2 SP EP2 ETP1", "TP4 SP EP2 ETP2", "TP4 EP4 ETP1"];
    assert_layouts_agree::<DeepSeekV3>(&config, &layouts, None);
    let gradients = run::<DeepSeekV3>(&config, "TP1", None).gradients;
    for name in ["layers.1.mlp.router", "layers.2.mlp.router", "layers.2.mlp.shared_experts.up_proj"] {
        assert!(largest(&gradients[&format!("{name}.weight")].data) > 1e-4, "{name}");
    }
}
