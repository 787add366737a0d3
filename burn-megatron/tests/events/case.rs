//! A run, and what happens to it.

use std::fmt;
use std::path::Path;

use backend_dist::mesh::ParallelLayout;
use burn_megatron::config::{Precision, RunConfig};
use burn_megatron::data::indexed::{Dtype, IndexedWriter};
use burn_megatron::engine::ContextConfig;
use burn_megatron::lr::{LrConfig, LrDecay, Span, WsdDecay};
use burn_megatron::optim::{LionConfig, MuonConfig, OptimizerConfig, SgdConfig};
use burn_megatron::verify::{Candidate, candidates};
use models::layers::BalanceOver;
use models::layers::moe::Dispatcher;
use models::{
    DeepSeekV3Config, FamilyConfig, GptConfig, LlamaConfig, LlamaVariant, MixtralConfig, MixtralVariant, ModelConfig,
};

use super::draw::Draw;
use super::run;

const VOCABULARY: usize = 61;
const END_OF_DOCUMENT: i64 = 60;
const SEQ: usize = 16;

/// One stretch of a run.
#[derive(Clone, Debug)]
pub struct Stretch {
    pub layout: Candidate,
    /// It goes on from the checkpoint of this step.
    pub from: usize,
    /// Its last step.
    pub to: usize,
    pub evaluate: (usize, usize),
    /// Steps between two checkpoints.
    pub save: Option<u64>,
    pub vocabulary_divisible_by: usize,
    /// Rows per step from here on; of the run that nothing happens to as well.
    pub global_batch: usize,
    pub background: bool,
}

/// A run in stretches.
pub struct Case {
    pub config: RunConfig,
    pub documents: Vec<Vec<usize>>,
    pub stretches: Vec<Stretch>,
    /// Nothing may differ at all.
    pub exact: bool,
}

impl Case {
    /// In f64, in layouts that have nothing to do with each other.
    pub fn draw(draw: &mut Draw) -> Self {
        let (config, documents) = (config(draw, false), documents(draw));
        let stretches = stretches(draw, &config, false);
        Self { config, documents, stretches, exact: false }
    }

    /// In another precision, in one layout.
    pub fn draw_narrow(draw: &mut Draw) -> Self {
        let (mut config, documents) = (config(draw, true), documents(draw));
        config.training.dtype =
            draw.of(&[Precision::F32, Precision::Bf16, Precision::Bf16, Precision::F16, Precision::F16]);
        config.loss_scale.initial_scale = draw.of(&[1024.0, 1e6, 1e9]);
        config.loss_scale.growth_interval = draw.of(&[1, 2, 1000]);
        config.loss_scale.hysteresis = draw.of(&[1, 2]);
        let stretches = stretches(draw, &config, true);
        Self { config, documents, stretches, exact: true }
    }

    /// Does the run twice and compares.
    pub fn check(&self) -> Result<(), String> {
        run::check(self)
    }

    /// Writes the run's data into a folder, and says so in its configuration.
    pub fn write_data(&self, folder: &Path) -> RunConfig {
        let mut config = self.config.clone();
        config.data.cache = config.data.cache.map(|_| folder.join("cache"));
        for (index, lengths) in self.documents.iter().enumerate() {
            let prefix = folder.join(format!("part{index}"));
            let mut writer = IndexedWriter::create(&prefix, Dtype::for_vocabulary(VOCABULARY)).unwrap();
            let mut token = Draw::new(index as u64 + 77);
            for &length in lengths {
                let mut tokens: Vec<i64> = (1..length).map(|_| token.below(END_OF_DOCUMENT as usize) as i64).collect();
                tokens.extend((length > 0).then_some(END_OF_DOCUMENT));
                writer.push_sequence(&tokens).unwrap();
                writer.end_document();
            }
            writer.finish().unwrap();
            config.data.prefixes.push(prefix);
        }
        config
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, stretches, .. } = self;
        for Stretch { layout, from, to, evaluate, save, vocabulary_divisible_by, global_batch, .. } in stretches {
            write!(
                f,
                "[{from}..{to} {layout} batch {global_batch} eval {evaluate:?} save {save:?} vocab/{vocabulary_divisible_by}] "
            )?;
        }
        write!(f, "{:?} {:?} {:?} {:?}", config.training, config.lr, config.optimizer, config.data)?;
        write!(f, " {:?} {:?}", config.model.config, config.fp8)
    }
}

fn config(draw: &mut Draw, narrow: bool) -> RunConfig {
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
    if draw.percent(if narrow { 40 } else { 20 }) {
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

/// Lengths of the documents of each file; some are empty, or nothing but their end.
fn documents(draw: &mut Draw) -> Vec<Vec<usize>> {
    let files = draw.of(&[1, 2, 3]);
    let lengths = |draw: &mut Draw| (0..40 + draw.below(40)).map(|_| draw.of(&[0, 1, 2, 5, 9, 14, 30, 60])).collect();
    (0..files).map(|_| lengths(draw)).collect()
}

fn layouts(config: &RunConfig, ranks: usize, batch: usize) -> Vec<Candidate> {
    let (dims, data) = (config.model.config.dims(), &config.data);
    let fits = |layout: &ParallelLayout, context: &ContextConfig| {
        dims.check(layout, SEQ).is_ok() && context.check(layout, &dims).is_ok()
    };
    let mut list = candidates(ranks, batch, dims.layers, dims.experts.is_some(), fits);
    // Documents that are told apart can be dealt out anew; routers balance each of them alone then, not whole rows.
    let balanced = match &config.model.config {
        FamilyConfig::Mixtral(sizes) => sizes.router_aux_loss_coef > 0.0 || sizes.router_z_loss_coef > 0.0,
        FamilyConfig::DeepSeekV3(sizes) => sizes.router_aux_loss_coef > 0.0,
        _ => false,
    };
    if data.reset_attention_mask && data.reset_position_ids && config.training.dtype == Precision::F64 && !balanced {
        let dynamic = |candidate: &Candidate| {
            let mut dynamic = candidate.clone();
            dynamic.context.dynamic = true;
            dynamic.context.max_tokens_per_rank = Some([16, 24, 40][list.len() % 3]);
            dynamic
        };
        let more: Vec<Candidate> =
            list.iter().map(dynamic).filter(|c| c.context.check(&c.layout, &dims).is_ok()).collect();
        list.extend(more);
    }
    list
}

fn stretches(draw: &mut Draw, config: &RunConfig, one_layout: bool) -> Vec<Stretch> {
    let steps = config.training.steps;
    let changes_batch = draw.percent(20);
    let mut list: Vec<Stretch> = Vec::new();
    let (mut done, mut batch) = (0, config.training.global_batch);
    let fixed = one_layout.then(|| draw.of(&layouts(config, 4, batch)));
    while done < steps {
        let back = if list.is_empty() { 0 } else { draw.below(3) };
        let saved = list.last().map_or(0, |last| {
            let saved = |step: &usize| {
                *step == last.to
                    || *step > last.from && last.save.is_some_and(|every| step.is_multiple_of(every as usize))
            };
            (0..=done - back.min(done)).rev().find(|step| saved(step)).unwrap_or(done)
        });
        let to = if list.len() == 3 { steps } else { (saved + 1 + draw.below(steps)).min(steps) };
        if changes_batch && !one_layout && saved == done && !list.is_empty() {
            batch = draw.of(&[4, 8, 16]);
        }
        let ranks = draw.of(&[1, 2, 4, 6, 8]);
        let layout = fixed.clone().unwrap_or_else(|| match ranks {
            1 => Candidate { accumulation: draw.of(&[1, 2, 4]), ..Default::default() },
            _ => draw.of(&layouts(config, ranks, batch)),
        });
        list.push(Stretch {
            layout,
            from: saved,
            to,
            evaluate: (1 + draw.below(3), draw.below(3)),
            save: draw.of(&[None, Some(1), Some(2)]),
            vocabulary_divisible_by: if one_layout { 1 } else { draw.of(&[1, 1, 8, 16]) },
            global_batch: batch,
            background: draw.percent(50),
        });
        done = to;
    }
    list
}
