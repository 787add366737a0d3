//! Every layout gives the losses, logits and gradients of one rank, to rounding in `f64`.

mod cache;
mod deepseek;
mod fp8;
mod half;
mod harness;
mod hf;
mod linear;
mod lora;
mod moe;
mod mtp;
mod paged;
mod recompute;

use burn::tensor::FloatDType;
use harness::{Batch, Noise, Outcome, assert_close, assert_within, initial_weights, largest, run, run_on};
use models::layers::{DropoutKey, LayerPattern, Llama3Scaling, RopeScaling};
use models::{CausalLm, DeepSeekV3, DeepSeekV3Config, Gpt, GptConfig, Llama, LlamaConfig, LlamaVariant, ModelConfig};

const LIMIT: f64 = 1e-10;

/// Eight query heads over two key-value heads, heads wider than `hidden / heads`, a vocabulary that no rank count
/// divides.
fn llama() -> LlamaConfig {
    LlamaConfig {
        vocab_size: 99,
        hidden_size: 32,
        intermediate_size: 48,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        head_dim: 6,
        rope_scaling: Some(RopeScaling::Llama3(Llama3Scaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 64,
        })),
        ..LlamaConfig::tiny()
    }
}

fn gpt() -> GptConfig {
    models::sized! { GptConfig::tiny();
        vocab_size: 99, max_position_embeddings: 20, hidden_size: 32, intermediate_size: 48, num_attention_heads: 4
    }
}

fn assert_same(layout: &str, found: &Outcome, expected: &Outcome) {
    assert_close(&format!("{layout}: losses"), &found.losses, &expected.losses, LIMIT);
    assert_close(&format!("{layout}: logits"), &found.logits, &expected.logits, LIMIT);
    assert!(found.gradients.keys().eq(expected.gradients.keys()), "{layout}: tensors");
    // A key bias moves all scores of a query alike, so without rotation its gradient is zero but for rounding.
    let floor = 1e-5 * expected.gradients.values().map(|gradient| largest(&gradient.data)).fold(0.0, f64::max);
    for (name, gradient) in &found.gradients {
        let expected = &expected.gradients[name].data;
        assert_within(&format!("{layout}: gradient of {name}"), &gradient.data, expected, LIMIT, floor);
    }
}

fn assert_layouts_agree<M: CausalLm>(config: &M::Config, layouts: &[&str], dropout: Option<DropoutKey>) {
    let expected = run::<M>(config, "TP1", dropout);
    for layout in layouts {
        assert_same(layout, &run::<M>(config, layout, dropout), &expected);
    }
}

/// TP4 and TP8 have more ranks than key-value heads.
#[test]
fn llama_untied() {
    assert_layouts_agree::<Llama>(&llama(), &["TP2", "TP4", "TP2 SP", "TP4 SP", "TP8", "TP8 SP"], None);
}

#[test]
fn llama_tied() {
    let config = LlamaConfig { tie_word_embeddings: true, make_vocab_size_divisible_by: 8, ..llama() };
    assert_layouts_agree::<Llama>(&config, &["TP2", "TP4 SP"], None);
}

/// A head that computes the logits of one to six positions at a time gives what one gives that computes all at once.
#[test]
fn heads_in_chunks() {
    fn same<M: CausalLm>(config: &M::Config, layouts: &[&str]) {
        let expected = run::<M>(config, "TP1", None);
        let batch = Batch::synthetic(config.vocab_size());
        for (layout, logits) in layouts.iter().flat_map(|layout| [1, 1000].map(|logits| (layout, logits))) {
            let found = run_on::<M>(config, layout, FloatDType::F64, &Noise, &batch, None, |params| {
                params.with_logits_at_once(logits)
            });
            assert_same(&format!("{layout}, {logits} logits at once"), &found, &expected);
        }
    }
    same::<Llama>(&llama(), &["TP1", "TP2", "TP4 SP"]);
    same::<Llama>(&LlamaConfig { tie_word_embeddings: true, make_vocab_size_divisible_by: 64, ..llama() }, &["TP2 SP"]);
    for capped in relatives().into_iter().filter(|config| config.final_logit_softcapping.is_some()) {
        same::<Llama>(&capped, &["TP1", "TP2 SP"]);
    }
    same::<Gpt>(&gpt(), &["TP1", "TP2"]);
    same::<DeepSeekV3>(&DeepSeekV3Config::tiny(), &["TP1", "TP2 SP"]);
}

#[test]
fn llama_with_biases() {
    let config = LlamaConfig { attention_bias: true, mlp_bias: true, ..llama() };
    assert_layouts_agree::<Llama>(&config, &["TP4", "TP4 SP"], None);
}

#[test]
fn mistral_with_a_sliding_window() {
    let config = LlamaConfig { variant: LlamaVariant::Mistral, sliding_window: Some(5), ..llama() };
    assert_layouts_agree::<Llama>(&config, &["TP2", "TP4", "TP2 SP", "TP8 SP"], None);
    let (windowed, full) = (run::<Llama>(&config, "TP1", None), run::<Llama>(&llama(), "TP1", None));
    let row = 99;
    assert!(windowed.logits[..5 * row] == full.logits[..5 * row], "the window reaches the first five positions");
    assert!(windowed.logits[5 * row..6 * row] != full.logits[5 * row..6 * row], "but not the sixth");
}

/// The norms' gradients are sums over all ranks, which use different query heads and, in TP4 and TP8, the same keys.
#[test]
fn qwen3_with_head_norms() {
    let config = LlamaConfig { variant: LlamaVariant::Qwen3, ..llama() };
    assert_layouts_agree::<Llama>(&config, &["TP2", "TP4", "TP2 SP", "TP4 SP", "TP8", "TP8 SP"], None);
    let gradients = run::<Llama>(&config, "TP2", None).gradients;
    assert!(largest(&gradients["layers.1.attention.k_norm.weight"].data) > 1e-4);
}

/// Every mechanism of the relatives: four query heads a key-value head, so that TP4 and TP8 copy keys; norms of
/// whole queries and keys add up squares over ranks, of which some have the same.
fn relatives() -> Vec<LlamaConfig> {
    let of = |variant| LlamaConfig { variant, num_hidden_layers: 3, ..llama() };
    let gemma2 = models::sized! { of(LlamaVariant::Gemma2);
        sliding_window: Some(5), sliding_window_pattern: Some(LayerPattern::Every(2)), query_pre_attn_scalar: Some(10.0),
        attn_logit_softcapping: Some(2.0), final_logit_softcapping: Some(3.0), tie_word_embeddings: true
    };
    let gemma3 = models::sized! { gemma2.clone();
        variant: LlamaVariant::Gemma3, rope_local_base_freq: Some(100.0), attn_logit_softcapping: None,
        final_logit_softcapping: None
    };
    vec![
        of(LlamaVariant::Qwen2),
        LlamaConfig { no_rope_layer_interval: Some(LayerPattern::Every(2)), ..of(LlamaVariant::SmolLm3) },
        of(LlamaVariant::Olmo2),
        LlamaConfig {
            sliding_window: Some(5),
            sliding_window_pattern: Some(LayerPattern::Every(2)),
            ..of(LlamaVariant::Olmo3)
        },
        LlamaConfig { tie_word_embeddings: true, ..of(LlamaVariant::Gemma) },
        LlamaConfig { attention_bias: true, ..of(LlamaVariant::SeedOss) },
        of(LlamaVariant::Ernie45),
        granite(),
        gemma2,
        gemma3,
        LlamaConfig { sliding_window: Some(7), partial_rotary_factor: Some(0.75), ..of(LlamaVariant::Phi3) },
        LlamaConfig { partial_rotary_factor: Some(0.4), attention_bias: true, ..of(LlamaVariant::Glm4) },
    ]
}

fn granite() -> LlamaConfig {
    LlamaConfig {
        variant: LlamaVariant::Granite,
        embedding_multiplier: Some(12.0),
        attention_multiplier: Some(0.2),
        residual_multiplier: Some(0.5),
        logits_scaling: Some(4.0),
        tie_word_embeddings: true,
        ..llama()
    }
}

#[test]
fn relatives_of_llama() {
    for config in relatives() {
        assert_eq!(config.check(), Ok(()));
        assert_layouts_agree::<Llama>(&config, &["TP2", "TP4", "TP2 SP", "TP4 SP", "TP8", "TP8 SP"], None);
    }
}

/// No key of a relative is without effect.
#[test]
fn what_relatives_add_counts() {
    let logits = |config: &LlamaConfig| run::<Llama>(config, "TP1", None).logits;
    let relatives = relatives();
    let with = |variant| relatives.iter().find(|config| config.variant == variant).unwrap().clone();
    let (gemma2, gemma3) = (with(LlamaVariant::Gemma2), with(LlamaVariant::Gemma3));
    let smollm3 = with(LlamaVariant::SmolLm3);
    let (granite, phi3) = (granite(), with(LlamaVariant::Phi3));
    for (with, without) in [
        (&gemma2, LlamaConfig { sliding_window_pattern: None, ..gemma2.clone() }),
        (&gemma2, LlamaConfig { query_pre_attn_scalar: None, ..gemma2.clone() }),
        (&gemma2, LlamaConfig { attn_logit_softcapping: None, ..gemma2.clone() }),
        (&gemma2, LlamaConfig { final_logit_softcapping: None, ..gemma2.clone() }),
        (&gemma3, LlamaConfig { rope_local_base_freq: None, ..gemma3.clone() }),
        (&smollm3, LlamaConfig { no_rope_layer_interval: None, ..smollm3.clone() }),
        (&phi3, LlamaConfig { partial_rotary_factor: None, ..phi3.clone() }),
        (&granite, LlamaConfig { embedding_multiplier: None, ..granite.clone() }),
        (&granite, LlamaConfig { attention_multiplier: None, ..granite.clone() }),
        (&granite, LlamaConfig { residual_multiplier: None, ..granite.clone() }),
        (&granite, LlamaConfig { logits_scaling: None, ..granite.clone() }),
    ] {
        assert_ne!(logits(with), logits(&without), "{without:?}");
    }
}

#[test]
fn gpt_tied() {
    assert_layouts_agree::<Gpt>(&gpt(), &["TP2", "TP4", "TP2 SP", "TP4 SP"], None);
}

#[test]
fn gpt_untied_exact_gelu() {
    let config = GptConfig { tie_word_embeddings: false, gelu_tanh: false, ..gpt() };
    assert_layouts_agree::<Gpt>(&config, &["TP2", "TP4 SP"], None);
}

#[test]
fn dropout_masks_do_not_depend_on_the_layout() {
    let config = LlamaConfig { hidden_dropout: 0.3, attention_dropout: 0.2, ..llama() };
    let key = Some(DropoutKey { seed: 11, first_sample: 6 });
    assert_layouts_agree::<Llama>(&config, &["TP2", "TP2 SP", "TP4 SP"], key);
    let with = run::<Llama>(&config, "TP1", key).losses;
    let other = run::<Llama>(&config, "TP1", Some(DropoutKey { seed: 12, first_sample: 6 })).losses;
    let without = run::<Llama>(&config, "TP1", None).losses;
    assert!(with.iter().zip(&other).zip(&without).all(|((a, b), c)| a != b && a != c && b != c));
}

/// Bit-identical, and the padding of the vocabulary is not part of any global tensor.
#[test]
fn initial_weights_do_not_depend_on_the_layout() {
    let expected = initial_weights::<Llama>(&llama(), "TP1", 42);
    assert_eq!(expected["embed_tokens.weight"].shape, [99, 32]);
    for layout in ["TP2", "TP8 SP"] {
        assert!(initial_weights::<Llama>(&llama(), layout, 42) == expected, "{layout}");
    }
    assert!(initial_weights::<Llama>(&llama(), "TP1", 43) != expected);
    let gpt_weights = initial_weights::<Gpt>(&gpt(), "TP1", 42);
    assert!(initial_weights::<Gpt>(&gpt(), "TP4 SP", 42) == gpt_weights);
}

/// A label's loss is `log Σ exp(logits) - logit`, over the vocabulary without padding.
#[test]
fn losses_are_those_of_the_logits() {
    let config = LlamaConfig { make_vocab_size_divisible_by: 64, ..llama() };
    let outcome = run::<Llama>(&config, "TP2 SP", None);
    assert_eq!(outcome.logits.len(), harness::BATCH * harness::SEQ * 99);
    let expected: Vec<f64> = (outcome.logits.chunks(99).enumerate())
        .map(|(index, row)| {
            let label = (index * 7919 + 2 * 104_729) % 99;
            row.iter().map(|logit| logit.exp()).sum::<f64>().ln() - row[label]
        })
        .collect();
    assert_close("losses", &outcome.losses, &expected, 1e-12);
}

#[test]
fn a_model_that_does_not_fit_says_what_would() {
    let mesh = backend_dist::mesh::Mesh::new("TP3".parse().unwrap()).unwrap();
    let error = backend_dist::launch::launch(&mesh, &[burn::tensor::Device::flex()], |rank| {
        let params = models::ParamBuilder::new(&rank, burn::tensor::FloatDType::F32, 0);
        Ok(Llama::build(&llama(), params).map(|_| ())?)
    });
    let message = error.unwrap_err().to_string();
    assert!(message.contains("tensor-parallel 3 does not divide the model's attention heads (8)"), "{message}");
}

/// A model in training and its copy for evaluation take turns, as the learner lets them.
#[test]
fn evaluation_without_autodiff_gives_the_same_losses() {
    let losses = harness::alternating_losses::<Llama>(&llama());
    assert!(losses.iter().all(|other| *other == losses[0]));
    let losses = harness::alternating_losses::<Gpt>(&gpt());
    assert!(losses.iter().all(|other| *other == losses[0]));
}
