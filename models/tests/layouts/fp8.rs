//! FP8 layers compute with the same numbers in every layout: scales are those of whole tensors. Only where ranks hold
//! the same key-value head, each quantises its share of that head's gradient, not their sum.
//!
//! In f64 a rounding difference between layouts, some 1e-16 of a value, moves a value over the border between two FP8
//! numbers about once in 1e13 casts, so the bound is that of layers without FP8. In f32 it is once in 1e5, and one such
//! cast is off by a sixteenth: there is no test of layouts in f32.

use crate::harness::{Batch, Noise, Outcome, largest, run_on};
use crate::{assert_same, gpt, llama};
use backend_dist::ops::fp8::Fp8Format;
use burn::tensor::FloatDType;
use models::recompute::Module::{CoreAttention, MlpActivation, Norms};
use models::{CausalLm, Fp8Config, Gpt, GptConfig, Llama, LlamaConfig, Mixtral, MixtralConfig, ModelConfig, Recompute};

/// Parts of four ranks are multiples of 16, and no two of them hold the same key-value head.
pub fn wide_llama() -> LlamaConfig {
    let llama = LlamaConfig { hidden_size: 64, intermediate_size: 128, num_key_value_heads: 4, ..llama() };
    LlamaConfig { head_dim: 8, attention_bias: true, ..llama }
}

fn outcome<M: CausalLm>(config: &M::Config, layout: &str, fp8: &Fp8Config, recompute: &Recompute) -> Outcome {
    let (batch, layers) = (Batch::synthetic(config.vocab_size()), config.dims().layers);
    run_on::<M>(config, layout, FloatDType::F64, &Noise, &batch, None, |params| {
        params.with_fp8(fp8, layers).with_recompute(recompute)
    })
}

/// `‖found - expected‖ / ‖expected‖` over all gradients.
fn distance(found: &Outcome, expected: &Outcome) -> f64 {
    let pairs = found.gradients.iter().flat_map(|(name, found)| found.data.iter().zip(&expected.gradients[name].data));
    let (off, size) = pairs.fold((0.0, 0.0), |(off, size), (a, b)| (off + (a - b).powi(2), size + b * b));
    f64::sqrt(off / size)
}

fn assert_layouts_agree<M: CausalLm>(config: &M::Config, layouts: &[&str]) {
    let nothing = Recompute::default();
    let exact = outcome::<M>(config, "TP1", &Fp8Config::default(), &nothing);
    for format in [Fp8Format::E4m3, Fp8Format::Hybrid] {
        let fp8 = Fp8Config { format: Some(format), ..Fp8Config::default() };
        let expected = outcome::<M>(config, "TP1", &fp8, &nothing);
        let off = distance(&expected, &exact);
        assert!((1e-3..0.3).contains(&off), "{format:?}: gradients are off by {off} of their norm");
        let part = Fp8Config { first_last_layers_bf16: true, ..fp8.clone() };
        assert_eq!(outcome::<M>(config, "TP1", &part, &nothing).losses, exact.losses, "two layers, both left out");
        for layout in layouts {
            let found = outcome::<M>(config, layout, &fp8, &nothing);
            assert_same(&format!("{layout} {format:?}"), &found, &expected);
            let again =
                outcome::<M>(config, layout, &fp8, &Recompute::selective(&[CoreAttention, MlpActivation, Norms]));
            assert_eq!(again.losses, found.losses);
            for (name, gradient) in &again.gradients {
                assert!(gradient.data == found.gradients[name].data, "{layout} {format:?}: {name}, recomputed");
                assert!(largest(&gradient.data) > 0.0, "{name}");
            }
        }
    }
}

#[test]
fn llama_in_fp8() {
    assert_layouts_agree::<Llama>(&wide_llama(), &["TP2", "TP2 SP", "TP4 SP"]);
}

#[test]
fn gpt_in_fp8() {
    let config = GptConfig { hidden_size: 64, intermediate_size: 96, ..gpt() };
    assert_layouts_agree::<Gpt>(&config, &["TP2", "TP2 SP"]);
}

fn wide_mixtral() -> MixtralConfig {
    models::sized! { MixtralConfig::tiny();
        vocab_size: 99, hidden_size: 64, intermediate_size: 64, num_attention_heads: 8, num_key_value_heads: 4,
        head_dim: 8, num_experts: 4
    }
}

/// Experts divided, sharded, both, and on two ranks each while four share a micro-batch.
#[test]
fn mixtral_in_fp8() {
    let layouts = ["TP2", "TP2 SP EP2 ETP1", "TP4 SP EP2 ETP2", "TP4 EP2 ETP1"];
    assert_layouts_agree::<Mixtral>(&wide_mixtral(), &layouts);
}

#[test]
fn experts_may_stay_out_of_fp8() {
    let outcome =
        |layout: &str, fp8: &Fp8Config| outcome::<Mixtral>(&wide_mixtral(), layout, fp8, &Recompute::default());
    let all = Fp8Config { format: Some(Fp8Format::Hybrid), ..Fp8Config::default() };
    let but_experts = Fp8Config { experts: false, ..all.clone() };
    let [exact, all, found] = [&Fp8Config::default(), &all, &but_experts].map(|fp8| outcome("TP1", fp8));
    assert!(found.losses != exact.losses && found.losses != all.losses);
    assert!(distance(&found, &exact) < distance(&all, &exact));
    assert_same("TP2 SP EP2 ETP1", &outcome("TP2 SP EP2 ETP1", &but_experts), &found);
}
