//! Recomputation changes no bit: not of the losses, not of a gradient, with dropout, in any layout.

use crate::harness::{Batch, Noise, Outcome, run_on};
use crate::{gpt, llama};
use burn::tensor::FloatDType;
use models::layers::DropoutKey;
use models::recompute::Module::{self, CoreAttention, MlpActivation, Norms};
use models::{
    CausalLm, DeepSeekV3, DeepSeekV3Config, Gpt, GptConfig, Llama, LlamaConfig, LlamaVariant, ModelConfig, Recompute,
};

fn outcome<M: CausalLm>(config: &M::Config, layout: &str, modules: &[Module]) -> Outcome {
    let batch = Batch::synthetic(config.vocab_size());
    let recompute = Recompute::selective(modules);
    let dropout = Some(DropoutKey { seed: 3, first_sample: 0 });
    run_on::<M>(config, layout, FloatDType::F64, &Noise, &batch, dropout, |params| params.with_recompute(&recompute))
}

fn assert_equal_bits<M: CausalLm>(config: &M::Config, layouts: &[&str]) {
    for layout in layouts {
        let kept = outcome::<M>(config, layout, &[]);
        let choices: [&[Module]; 4] =
            [&[CoreAttention], &[MlpActivation], &[Norms], &[CoreAttention, MlpActivation, Norms]];
        for modules in choices {
            let again = outcome::<M>(config, layout, modules);
            assert_eq!(again.losses, kept.losses, "{layout} {modules:?}: losses");
            assert!(again.gradients.keys().eq(kept.gradients.keys()), "{layout} {modules:?}: tensors");
            for (name, gradient) in &again.gradients {
                assert!(gradient.data == kept.gradients[name].data, "{layout} {modules:?}: gradient of {name}");
            }
        }
    }
}

#[test]
fn llama_recomputes() {
    let config = LlamaConfig { hidden_dropout: 0.3, attention_dropout: 0.2, attention_bias: true, ..llama() };
    assert_equal_bits::<Llama>(&config, &["TP1", "TP2", "TP2 SP"]);
}

#[test]
fn qwen3_recomputes() {
    let config = LlamaConfig { variant: LlamaVariant::Qwen3, ..llama() };
    assert_equal_bits::<Llama>(&config, &["TP2 SP"]);
}

#[test]
fn gpt_recomputes() {
    let config = GptConfig { hidden_dropout: 0.3, attention_dropout: 0.2, ..gpt() };
    assert_equal_bits::<Gpt>(&config, &["TP1", "TP2 SP"]);
}

/// Latent attention, experts, and two modules of multi-token prediction, whose attention is recomputed too.
#[test]
fn deepseek_recomputes() {
    let config = DeepSeekV3Config { num_nextn_predict_layers: 2, ..DeepSeekV3Config::tiny() };
    assert_equal_bits::<DeepSeekV3>(&config, &["TP1", "TP2", "TP2 SP"]);
}
