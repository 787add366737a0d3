//! FLOPs against the matrices of models that are really built, and the planner's published models.

use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::{Mesh, ParallelLayout};
use burn::tensor::{Device, FloatDType};
use models::layers::GatedDeltaConfig;
use models::{
    CausalLm, DeepSeekV3Config, FamilyConfig, GptConfig, LlamaConfig, LlamaVariant, Mamba2Config, MixtralConfig,
    MixtralVariant, ModelConfig, NemotronHConfig, ParamBuilder, WithModel,
};

use super::*;
use crate::flops::AttentionCount;
use crate::plan::known;

/// Names and shapes of the parameters of a model on one rank.
struct Shapes;

impl WithModel for Shapes {
    type Output = Vec<(String, Vec<usize>)>;

    fn with<M: CausalLm + 'static>(self, config: &M::Config) -> Self::Output {
        let shapes = |rank: Rank| {
            let model = M::build(config, ParamBuilder::new(&rank, FloatDType::F32, 1))?;
            let sections = model.registry().iter().filter(|spec| spec.trained).flat_map(|spec| spec.sections.clone());
            Ok(sections.map(|section| (section.name, section.global_shape)).collect::<Vec<_>>())
        };
        launch(&Mesh::new(ParallelLayout::default()).unwrap(), &[Device::flex()], shapes).unwrap().remove(0)
    }
}

/// Multiplications of a token by matrices: each element once, an expert's as often as a token uses it, the table of a
/// tied or a second prediction's head as often as there are logits.
fn multiplied(config: &FamilyConfig, used: f64, heads: usize) -> f64 {
    let (mut sum, mut tables) = (0.0, 0);
    for (name, shape) in config.visit(Shapes) {
        // Taps of convolutions are matrices with one position more.
        if shape.len() < 2 {
            continue;
        }
        let is_table = name.contains("embed_tokens") || name.contains("lm_head");
        let is_looked_up = name.contains("embed_positions");
        let is_router = name.contains("router") || name.contains("shared_experts.gate.");
        tables += usize::from(is_table);
        if !(is_table || is_looked_up || is_router) {
            sum += shape.iter().product::<usize>() as f64 * if name.contains(".experts.") { used } else { 1.0 };
        }
    }
    assert!((1..=2).contains(&tables), "{tables} tables");
    let dims = config.dims();
    sum + (heads * dims.hidden * decoder_of(config).flop_shape(1).padded_vocab) as f64
}

/// Megatron leaves out routers, gates of shared experts, norms and biases; a causal score counts half, in the other convention whole.
#[test]
fn flops_are_those_of_the_matrices_of_all_families() {
    let (llama, mixtral, deepseek) = (LlamaConfig::tiny(), MixtralConfig::tiny(), DeepSeekV3Config::tiny());
    let of_llama =
        |variant| FamilyConfig::Llama(LlamaConfig { variant, make_vocab_size_divisible_by: 96, ..llama.clone() });
    let qwen = MixtralConfig {
        variant: MixtralVariant::Qwen3Moe,
        mlp_only_layers: vec![1],
        moe_intermediate_size: Some(32),
        ..mixtral.clone()
    };
    let latent = |config: &DeepSeekV3Config| {
        let scores = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim;
        config.num_attention_heads * scores * (config.num_hidden_layers + config.num_nextn_predict_layers)
    };
    let whole = |heads: usize, head_dim: usize, layers: usize| heads * 2 * head_dim * layers;
    let of_experts = |used: usize, all: usize| used as f64 / all as f64;
    let llama_scores = whole(llama.num_attention_heads, llama.head_dim, llama.num_hidden_layers);
    let mixtral_scores = whole(mixtral.num_attention_heads, mixtral.head_dim, mixtral.num_hidden_layers);
    let mixtral_used = of_experts(mixtral.num_experts_per_tok, mixtral.num_experts);
    let next = MixtralConfig::qwen3_next_tiny();
    // One layer of three has attention.
    let next_scores = whole(next.num_attention_heads, next.head_dim, 1);
    let nemotron = NemotronHConfig::tiny();
    let experts = NemotronHConfig::nemotron_3_tiny();
    let experts_used = of_experts(experts.num_experts_per_tok, experts.n_routed_experts);
    let gpt = GptConfig::tiny();
    let gpt_scores = whole(gpt.num_attention_heads, gpt.head_dim(), gpt.num_hidden_layers);
    let deepseek_used = of_experts(deepseek.num_experts_per_tok, deepseek.n_routed_experts);
    let without_latent = DeepSeekV3Config { q_lora_rank: None, num_nextn_predict_layers: 2, ..deepseek.clone() };
    let families = [
        (of_llama(LlamaVariant::Llama), 1.0, 1, llama_scores),
        (of_llama(LlamaVariant::Mistral), 1.0, 1, llama_scores),
        (of_llama(LlamaVariant::Qwen3), 1.0, 1, llama_scores),
        (FamilyConfig::Llama(LlamaConfig { tie_word_embeddings: true, ..llama.clone() }), 1.0, 1, llama_scores),
        (FamilyConfig::Gpt(gpt), 1.0, 1, gpt_scores),
        (FamilyConfig::Mamba2(Mamba2Config::tiny()), 1.0, 1, 0),
        // One layer of six has attention.
        (FamilyConfig::NemotronH(nemotron.clone()), 1.0, 1, whole(nemotron.num_attention_heads, nemotron.head_dim, 1)),
        (
            FamilyConfig::NemotronH(experts.clone()),
            experts_used,
            1,
            whole(experts.num_attention_heads, experts.head_dim, 1),
        ),
        (FamilyConfig::Mixtral(mixtral.clone()), mixtral_used, 1, mixtral_scores),
        (FamilyConfig::Mixtral(qwen), mixtral_used, 1, mixtral_scores),
        (FamilyConfig::Mixtral(next), mixtral_used, 1, next_scores),
        (
            FamilyConfig::DeepSeekV3(deepseek.clone()),
            deepseek_used,
            1 + deepseek.num_nextn_predict_layers,
            latent(&deepseek),
        ),
        (FamilyConfig::DeepSeekV3(without_latent.clone()), deepseek_used, 3, latent(&without_latent)),
    ];
    for (config, used, heads, scores) in families {
        assert_eq!(config.check(), Ok(()));
        let (seq, matrices) = (48, multiplied(&config, used, heads));
        let shape = decoder_of(&config).flop_shape(seq);
        // Of a layer with a state, by Megatron's count: 7 for each element of Mamba-2's, 8 for one of the delta rule's.
        let states = match &config {
            FamilyConfig::Mamba2(of) => 7 * of.num_heads * of.head_dim * of.state_size * of.num_hidden_layers,
            // Three layers of six.
            FamilyConfig::NemotronH(of) => 7 * of.mamba_num_heads * of.mamba_head_dim * of.ssm_state_size * 3,
            FamilyConfig::Mixtral(of) if of.variant == MixtralVariant::Qwen3Next => {
                let GatedDeltaConfig { value_heads, key_dim, value_dim, .. } = of.linear_attention();
                8 * value_heads * key_dim * value_dim * 2
            }
            _ => 0,
        };
        let states = states as f64 / 2.0;
        for (count, local) in [(AttentionCount::Causal, 0.5), (AttentionCount::Full, 1.0)] {
            let expected = 6.0 * (matrices + states + local * (scores * seq) as f64);
            let counted = shape.per_token(count);
            assert!((counted / expected - 1.0).abs() < 1e-12, "{config:?}, {count:?}: {counted} against {expected}");
        }
    }
}

#[test]
fn published_models_are_the_presets() {
    for (preset, known) in [
        (FamilyConfig::Llama(LlamaConfig::llama3_8b()), known::llama3_8b()),
        (FamilyConfig::Llama(LlamaConfig::llama3_1b()), known::llama3_1b()),
        (FamilyConfig::Mixtral(MixtralConfig::mixtral_8x7b()), known::mixtral_8x7b()),
        (FamilyConfig::Mixtral(MixtralConfig::qwen3_30b_a3b()), known::qwen3_30b_a3b()),
        (FamilyConfig::DeepSeekV3(DeepSeekV3Config::deepseek_v3()), known::deepseek_v3()),
        (FamilyConfig::Mamba2(Mamba2Config::mamba2_130m()), known::mamba2_130m()),
    ] {
        assert_eq!(decoder_of(&preset), known);
    }
}
