//! Every two options of a layout together, for every family: the numbers are those of one device.

use backend_dist::mesh::ParallelLayout;
use backend_dist::ops::fp8::{Fp8Format, Fp8Recipe, Fp8Scaling};
use burn_megatron::config::decoder_of;
use burn_megatron::engine::ContextConfig;
use burn_megatron::verify::{Candidate, Settings, different_in_fp8, pairwise};
use models::layers::{BalanceOver, LayerPattern};
use models::{
    CausalLm, DeepSeekV3Config, FamilyConfig, Llama, LlamaConfig, LlamaVariant, Mamba2Config, MixtralConfig,
    MixtralVariant, ModelConfig, NemotronHConfig, WithModel,
};
use tests::{SETTINGS, equal_one_device, gpt, layouts, llama, moe, verified};

struct EveryPair<'a>(&'a FamilyConfig, Settings);

impl WithModel for EveryPair<'_> {
    type Output = ();

    fn with<M: CausalLm + 'static>(self, config: &M::Config) {
        let Self(family, settings) = self;
        let (dims, decoder) = (config.dims(), decoder_of(family));
        let fits = |layout: &ParallelLayout, context: &ContextConfig| {
            dims.check(layout, settings.seq).is_ok() && context.check(layout, &dims).is_ok()
        };
        let batch = [settings.global_batch, settings.seq];
        let legal = |candidate: &Candidate| {
            settings.fp8.is_none_or(|recipe| different_in_fp8(&decoder, candidate, batch, &recipe).is_none())
        };
        let layouts = pairwise(4, settings.global_batch, dims.layers, dims.experts.is_some(), fits, legal);
        assert!((20..100).contains(&layouts.len()), "{}", layouts.len());
        verified::<M>(config, &settings, &layouts);
    }
}

/// One step: what the others add is in the other tests.
fn every_pair(family: &FamilyConfig) {
    family.visit(EveryPair(family, Settings { steps: 1, ..SETTINGS }));
}

/// Llama and GPT are in `parity.rs` in all their layouts, of which these are some.
#[test]
fn dense_families() {
    let qwen3 = LlamaConfig { variant: LlamaVariant::Qwen3, num_hidden_layers: 2, ..llama() };
    let mistral = LlamaConfig { variant: LlamaVariant::Mistral, sliding_window: Some(5), ..qwen3.clone() };
    for config in [FamilyConfig::Llama(qwen3), FamilyConfig::Llama(mistral), FamilyConfig::Gpt(gpt())] {
        every_pair(&config);
    }
}

/// Together they have every mechanism of Llama's relatives.
#[test]
fn relatives_of_llama() {
    let of = |variant| LlamaConfig { variant, num_hidden_layers: 2, ..llama() };
    let gemma2 = models::sized! { of(LlamaVariant::Gemma2);
        sliding_window: Some(5), sliding_window_pattern: Some(LayerPattern::Every(2)), query_pre_attn_scalar: Some(10.0),
        attn_logit_softcapping: Some(2.0), final_logit_softcapping: Some(1.0), tie_word_embeddings: true
    };
    let gemma3 = models::sized! { gemma2.clone();
        variant: LlamaVariant::Gemma3, rope_local_base_freq: Some(100.0), attn_logit_softcapping: None,
        final_logit_softcapping: None
    };
    let glm4 = LlamaConfig { partial_rotary_factor: Some(0.5), attention_bias: true, ..of(LlamaVariant::Glm4) };
    let smollm3 = LlamaConfig { no_rope_layer_interval: Some(LayerPattern::Every(2)), ..of(LlamaVariant::SmolLm3) };
    let granite = models::sized! { of(LlamaVariant::Granite);
        embedding_multiplier: Some(12.0), attention_multiplier: Some(0.2), residual_multiplier: Some(0.5),
        logits_scaling: Some(4.0)
    };
    for config in [of(LlamaVariant::Olmo2), smollm3, gemma2, gemma3, glm4, granite] {
        every_pair(&FamilyConfig::Llama(config));
    }
}

#[test]
fn families_with_experts() {
    let mixtral = models::sized! { MixtralConfig::tiny();
        vocab_size: 101, hidden_size: 32, intermediate_size: 16, num_hidden_layers: 2, num_attention_heads: 4,
        num_key_value_heads: 2, router_balance: BalanceOver::Sequence, router_z_loss_coef: 0.01
    };
    let qwen2 = models::sized! { mixtral.clone();
        variant: MixtralVariant::Qwen2Moe, shared_expert_intermediate_size: Some(48), norm_topk_prob: false,
        mlp_only_layers: vec![0]
    };
    let gpt_oss = models::sized! { mixtral.clone();
        variant: MixtralVariant::GptOss, attention_bias: true, sliding_window: Some(5),
        sliding_window_pattern: Some(LayerPattern::Every(2)), swiglu_limit: Some(0.1), initializer_range: 0.2
    };
    let qwen3_next = models::sized! { MixtralConfig::qwen3_next_tiny();
        moe_intermediate_size: Some(16), shared_expert_intermediate_size: Some(48), initializer_range: 0.2,
        vocab_size: 101, hidden_size: 32, num_hidden_layers: 2, router_balance: BalanceOver::Sequence
    };
    let glm4_moe = models::sized! { mixtral.clone();
        variant: MixtralVariant::Glm4Moe, shared_expert_intermediate_size: Some(48), first_k_dense_replace: 1,
        n_group: 2, routed_scaling_factor: 2.5, attention_bias: true, use_qk_norm: true, router_z_loss_coef: 0.0
    };
    let olmoe = MixtralConfig { variant: MixtralVariant::Olmoe, norm_topk_prob: false, ..mixtral.clone() };
    let others = [MixtralConfig { num_hidden_layers: 2, ..moe() }, qwen2, gpt_oss, qwen3_next, glm4_moe, olmoe];
    for config in [mixtral].into_iter().chain(others) {
        every_pair(&FamilyConfig::Mixtral(config));
    }
}

/// Blocks without an MLP, whose heads context-parallel ranks share.
#[test]
fn mamba2() {
    let of = Mamba2Config { vocab_size: 101, hidden_size: 32, initializer_range: 0.2, ..Mamba2Config::tiny() };
    every_pair(&FamilyConfig::Mamba2(Mamba2Config { num_heads: 4, use_bias: true, ..of }));
}

/// Layers of one part each, of which three kinds are in every stage.
#[test]
fn nemotron_h() {
    every_pair(&FamilyConfig::NemotronH(NemotronHConfig {
        vocab_size: 101,
        hidden_size: 32,
        hybrid_override_pattern: "M*--M*".into(),
        num_attention_heads: 4,
        num_key_value_heads: 2,
        intermediate_size: 48,
        mamba_num_heads: 4,
        initializer_range: 0.2,
        ..NemotronHConfig::tiny()
    }));
}

/// The same with experts, of which each stage has a layer.
#[test]
fn nemotron_3() {
    every_pair(&FamilyConfig::NemotronH(NemotronHConfig {
        vocab_size: 101,
        hidden_size: 32,
        hybrid_override_pattern: "ME*M-E".into(),
        num_attention_heads: 4,
        num_key_value_heads: 2,
        intermediate_size: 48,
        moe_intermediate_size: 16,
        moe_shared_expert_intermediate_size: 48,
        mamba_num_heads: 4,
        initializer_range: 0.2,
        ..NemotronHConfig::tiny()
    }));
}

/// ZeRO 3 and full recomputation with saved attention among them, with two modules of multi-token prediction.
#[test]
fn deepseek() {
    let config = models::sized! { DeepSeekV3Config::tiny();
        vocab_size: 101, hidden_size: 32, intermediate_size: 48, moe_intermediate_size: 16, num_hidden_layers: 2,
        num_attention_heads: 4, num_nextn_predict_layers: 2, mtp_loss_scaling_factor: 0.5, initializer_range: 0.1
    };
    every_pair(&FamilyConfig::DeepSeekV3(config));
}

/// FP8 with every other option, where it computes what one device does.
#[test]
fn fp8() {
    let config = models::sized! { llama();
        hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 8, num_key_value_heads: 4,
        head_dim: 8
    };
    let family = FamilyConfig::Llama(config);
    let settings = Settings { steps: 1, seq: 64, fp8: Some(Fp8Recipe::tensorwise(Fp8Format::Hybrid)), ..SETTINGS };
    family.visit(EveryPair(&family, settings));
}

/// FP8 with a scale for each block: of features and of tokens, which ranks gather, of whole and of half batches.
#[test]
fn fp8_by_blocks() {
    let config = models::sized! { llama();
        hidden_size: 256, intermediate_size: 256, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 4,
        head_dim: 64
    };
    let recipe = Fp8Recipe { scaling: Fp8Scaling::Blockwise, ..Fp8Recipe::tensorwise(Fp8Format::E4m3) };
    let settings = Settings { steps: 1, seq: 512, global_batch: 4, fp8: Some(recipe), ..SETTINGS };
    let layouts =
        layouts! { "TP2" "TP2 SP x2" "CP2 DP2" "TP2 SP PP2 x2" "DP2 ZeRO3 selective" "TP2 SP DP2 ZeRO1 uniform1" };
    equal_one_device::<Llama>(&config, &settings, &layouts);
}
