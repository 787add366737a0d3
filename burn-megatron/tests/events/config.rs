//! The configuration of a run, drawn.

use burn_megatron::config::{Precision, RunConfig};
use burn_megatron::lr::{LrConfig, LrDecay, Span, WsdDecay};
use burn_megatron::optim::{LionConfig, MuonConfig, OptimizerConfig, SgdConfig};
use models::layers::BalanceOver;
use models::layers::moe::Dispatcher;
use models::{DeepSeekV3Config, FamilyConfig, GptConfig, LlamaConfig, LlamaVariant, MixtralConfig, MixtralVariant};

use super::draw::Draw;

pub const VOCABULARY: usize = 61;
pub const END_OF_DOCUMENT: i64 = 60;
pub const SEQ: usize = 16;

/// In f64, or `narrow` for other precisions.
pub fn config(draw: &mut Draw, narrow: bool) -> RunConfig {
    let mut config = RunConfig::parse("events.toml", "", &[]).unwrap();
    let steps = 4 + draw.below(4);
    let training = &mut config.training;
    (training.steps, training.global_batch, training.seq_length) = (steps, 8, SEQ);
    training.dtype = Precision::F64;
    training.seed = draw.next() >> 12;
    training.clip = draw.of(&[None, Some(0.1), Some(1.0)]);
    config.lr = lr(draw, steps);
    let documents_apart = draw.percent(35);
    config.model.config = family(draw, documents_apart);
    let biased = format!("{:?}", config.model.config).contains("bias: true");
    config.optimizer = optimizer(draw, biased);
    // Scales are those of micro-batches, so that only one layout has the same.
    if narrow && draw.percent(40) {
        let (format, recipe) =
            (draw.of(&["hybrid", "e4m3"]), draw.of(&["tensorwise", "delayed", "delayed\"\namax-history-len = 3\n#\""]));
        let text = format!("[fp8]\nformat = \"{format}\"\nrecipe = \"{recipe}\"");
        config.fp8 = RunConfig::parse("fp8.toml", &text, &[]).unwrap().fp8;
    }
    let data = &mut config.data;
    data.text.clear();
    data.tokenizer = None;
    data.seed = draw.next() as u32;
    data.split = draw.of(&["70,30,0", "60,20,20", "50,50"]).parse().unwrap();
    data.samples = draw.of(&[steps * 8, steps * 8, 17, 300]);
    (data.reset_attention_mask, data.reset_position_ids) = (documents_apart, documents_apart || draw.percent(10));
    data.eod_mask_loss = draw.percent(30);
    data.eod_id = Some(END_OF_DOCUMENT);
    data.keep_partial_validation = draw.percent(50);
    data.cache = draw.percent(40).then(Default::default);
    config.evaluation.final_batches = draw.below(4);
    config.checkpoint.keep_last = None;
    config
}

fn lr(draw: &mut Draw, steps: usize) -> LrConfig {
    let span =
        |draw: &mut Draw, steps: u64| if draw.percent(50) { Span::Steps(steps) } else { Span::Samples(steps * 8 + 3) };
    let form = match draw.below(5) {
        0 => LrDecay::Constant,
        1 => LrDecay::Linear,
        2 => LrDecay::Cosine,
        3 => LrDecay::InverseSquareRoot,
        _ => {
            let form = draw.of(&[WsdDecay::Linear, WsdDecay::Cosine, WsdDecay::Exponential, WsdDecay::MinusSqrt]);
            LrDecay::Wsd { tail: span(draw, 2), form }
        }
    };
    let warmup = if draw.percent(50) { span(draw, 2) } else { Span::Steps(0) };
    LrConfig {
        max: 1e-2,
        min: draw.of(&[0.0, 1e-3]),
        init: draw.of(&[0.0, 1e-3]),
        warmup,
        decay: Span::Steps(steps as u64 + 2),
        form,
    }
}

fn optimizer(draw: &mut Draw, biased: bool) -> OptimizerConfig {
    match draw.below(5) {
        0 | 1 => OptimizerConfig::Muon(MuonConfig {
            nesterov: draw.percent(50),
            decay_vectors: draw.percent(30),
            ..Default::default()
        }),
        2 => OptimizerConfig::Sgd(SgdConfig {
            nesterov: draw.percent(50),
            momentum: draw.of(&[0.0, 0.9]),
            ..Default::default()
        }),
        // The gradient of a key's bias is nothing but rounding, and the sign of that is anything.
        3 if !biased => OptimizerConfig::Lion(LionConfig::default()),
        _ => OptimizerConfig::default(),
    }
}

fn family(draw: &mut Draw, documents: bool) -> FamilyConfig {
    let (tie_word_embeddings, num_hidden_layers) = (draw.percent(50), draw.of(&[2, 3, 4]));
    let dropout = if documents || draw.percent(60) { 0.0 } else { 0.2 };
    match draw.below(5) {
        0 => {
            let variant = draw.of(&[LlamaVariant::Llama, LlamaVariant::Mistral, LlamaVariant::Qwen3]);
            FamilyConfig::Llama(LlamaConfig {
                variant,
                vocab_size: VOCABULARY,
                hidden_size: 32,
                intermediate_size: 48,
                num_attention_heads: 4,
                num_key_value_heads: draw.of(&[1, 2, 4]),
                head_dim: 8,
                num_hidden_layers,
                sliding_window: (variant == LlamaVariant::Mistral && draw.percent(60)).then_some(5),
                tie_word_embeddings,
                hidden_dropout: dropout,
                attention_dropout: dropout,
                ..LlamaConfig::tiny()
            })
        }
        1 => FamilyConfig::Gpt(GptConfig {
            vocab_size: VOCABULARY,
            hidden_size: 32,
            intermediate_size: 64,
            num_attention_heads: 4,
            num_hidden_layers,
            tie_word_embeddings,
            bias: draw.percent(60),
            hidden_dropout: dropout,
            attention_dropout: dropout,
            ..GptConfig::tiny()
        }),
        2 | 3 => {
            let variant = draw.of(&[MixtralVariant::Mixtral, MixtralVariant::Qwen3Moe]);
            let qwen = variant == MixtralVariant::Qwen3Moe;
            FamilyConfig::Mixtral(MixtralConfig {
                variant,
                vocab_size: VOCABULARY,
                hidden_size: 32,
                intermediate_size: 48,
                moe_intermediate_size: qwen.then_some(16),
                num_attention_heads: 4,
                num_key_value_heads: 2,
                head_dim: 8,
                num_hidden_layers,
                num_experts: draw.of(&[4, 8]),
                num_experts_per_tok: draw.of(&[1, 2]),
                mlp_only_layers: if qwen && draw.percent(50) { vec![1] } else { vec![] },
                router_aux_loss_coef: draw.of(&[0.0, 0.1]),
                router_z_loss_coef: draw.of(&[0.0, 0.01]),
                router_balance: BalanceOver::Sequence,
                norm_topk_prob: true,
                moe_dispatcher: draw.of(&[Dispatcher::AllToAll, Dispatcher::AllGather]),
                tie_word_embeddings,
                hidden_dropout: dropout,
                attention_dropout: dropout,
                ..MixtralConfig::tiny()
            })
        }
        _ => FamilyConfig::DeepSeekV3(DeepSeekV3Config {
            vocab_size: VOCABULARY,
            hidden_size: 32,
            intermediate_size: 48,
            moe_intermediate_size: 16,
            num_hidden_layers,
            num_attention_heads: 4,
            q_lora_rank: draw.of(&[None, Some(12)]),
            num_nextn_predict_layers: draw.of(&[0, 1, 2]),
            moe_router_bias_update_rate: draw.of(&[1e-3, 0.05]),
            router_aux_loss_coef: draw.of(&[0.0, 0.1]),
            initializer_range: 0.1,
            ..DeepSeekV3Config::tiny()
        }),
    }
}
