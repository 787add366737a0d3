//! Small models, and training them in a layout; the repository's text and what its modules name.

pub mod repository;
pub mod sources;

use backend_dist::launch::Rank;
use backend_dist::mesh::Mesh;
use backend_dist::shard::HostTensor;
use burn::tensor::{Device, FloatDType};
use burn_megatron::optim::OptimizerConfig;
use burn_megatron::verify::{
    Bounds, Candidate, Job, Line, LocalTensor, RankTrace, Reference, Settings, assemble, compare, first_copies, trace,
    verify,
};
use models::layers::BalanceOver;
use models::{CausalLm, GptConfig, LlamaConfig, MixtralConfig, MixtralVariant, ModelConfig, ParamBuilder};
use std::collections::BTreeMap;

pub const SETTINGS: Settings = Settings {
    steps: 3,
    global_batch: 8,
    seq: 16,
    seed: 1234,
    dtype: FloatDType::F64,
    tolerance: None,
    fp8: None,
    lora: None,
    base: None,
};

/// Fewer key-value heads than ranks, and a vocabulary that two ranks do not divide.
pub fn llama() -> LlamaConfig {
    models::sized! { LlamaConfig::tiny();
        vocab_size: 101, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 4, num_attention_heads: 4,
        num_key_value_heads: 2
    }
}

/// Three layers with experts and one without, and a loss that balances the tokens of each sequence by itself, so that
/// it does not matter how the batch is divided into micro-batches.
pub fn moe() -> MixtralConfig {
    models::sized! { MixtralConfig::tiny();
        variant: MixtralVariant::Qwen3Moe, vocab_size: 101, hidden_size: 32, intermediate_size: 64,
        moe_intermediate_size: Some(16), num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2,
        mlp_only_layers: vec![1], router_balance: BalanceOver::Sequence
    }
}

/// Tied embeddings and dropout, also of attention weights.
pub fn gpt() -> GptConfig {
    models::sized! { GptConfig::tiny();
        vocab_size: 101, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 3, num_attention_heads: 4,
        hidden_dropout: 0.1, attention_dropout: 0.2
    }
}

/// A list of layouts, as many to a line as it takes.
#[macro_export]
macro_rules! layouts {
    ($($layout:literal)*) => { [$($layout),*] };
}

/// Every layout trains as one device does; what was compared.
pub fn verified<M: CausalLm>(config: &M::Config, settings: &Settings, layouts: &[Candidate]) -> Vec<Line> {
    let lines = verify::<M>(config, settings, &[Device::flex()].into(), layouts, |_| {}).unwrap();
    let table: Vec<String> = lines.iter().map(ToString::to_string).collect();
    let passes = lines.len() == layouts.len() && lines.iter().all(Line::passes);
    assert!(passes, "{:?}\n{}", settings.dtype, table.join("\n"));
    lines
}

/// Every layout, as one writes it, trains as one device does.
pub fn equal_one_device<M: CausalLm>(config: &M::Config, settings: &Settings, layouts: &[&str]) {
    let layouts: Vec<Candidate> = layouts.iter().map(|text| text.parse().unwrap()).collect();
    verified::<M>(config, settings, &layouts);
}

/// The traces of a layout's ranks, with AdamW or another optimizer.
pub fn train<M: CausalLm>(config: &M::Config, layout: &str, optimizer: Option<&OptimizerConfig>) -> Vec<RankTrace> {
    let mut job = SETTINGS.job(config.vocab_size());
    if let Some(optimizer) = optimizer {
        job.engine.optimizer = *optimizer;
    }
    train_on::<M>(config, layout, &job)
}

/// The traces of a layout's ranks for other batches, or with another engine.
pub fn train_on<M: CausalLm>(config: &M::Config, layout: &str, job: &Job) -> Vec<RankTrace> {
    let candidate: Candidate = layout.parse().unwrap();
    let build = |rank: &Rank, part| {
        let params = ParamBuilder::new(rank, FloatDType::F64, SETTINGS.seed);
        Ok(M::build(config, params.with_part(part).with_recompute(&candidate.recompute))?)
    };
    trace(&candidate, job, &[Device::flex()].into(), &config.dims(), build).unwrap()
}

/// The whole model at the end. Slices that several ranks hold are taken from one data-parallel rank.
pub fn weights(layout: &str, ranks: &[RankTrace]) -> BTreeMap<String, HostTensor> {
    whole(layout, ranks, |rank| &rank.parameters)
}

/// The gradients of a step, likewise.
pub fn gradients(layout: &str, ranks: &[RankTrace], step: usize) -> BTreeMap<String, HostTensor> {
    whole(layout, ranks, |rank| &rank.gradients[step])
}

fn whole(
    layout: &str,
    ranks: &[RankTrace],
    of: impl Fn(&RankTrace) -> &Vec<LocalTensor>,
) -> BTreeMap<String, HostTensor> {
    let mesh = Mesh::new(layout.parse::<Candidate>().unwrap().layout).unwrap();
    let copies = |(rank, trace): (usize, &RankTrace)| first_copies(&mesh, rank, of(trace).clone());
    let locals: Vec<LocalTensor> = ranks.iter().enumerate().flat_map(copies).collect();
    assemble(&locals).unwrap()
}

/// Panics unless the traces of a layout's ranks are those of one device.
pub fn assert_equals_one_device(one: &[RankTrace], layout: &str, ranks: &[RankTrace]) {
    let found = compare(&Reference::new(&one[0]).unwrap(), ranks, &Bounds::new(FloatDType::F64, None, 1));
    assert!(found.pass(), "{layout}: {found:?}");
}
