//! The adapters of a run as the planner sees them.

use models::lora::{BaseFormat, LoraPlan};

use super::decoder::decoder_of;
use super::post_training::LoraSection;
use super::problem::{ConfigErrors, Problem};
use super::run::RunConfig;
use crate::plan::{Adapters, Decoder};

/// Places of linear layers that may have adapters: of attention four, of recurrent layers seven, of MLPs and of experts three.
const ATTENTION: usize = 0;
const RECURRENT: usize = 4;
const MLP: usize = 11;
const EXPERTS: usize = 14;
const PLACES: usize = 17;

impl RunConfig {
    /// The adapters of a run as the planner sees them: the same in all layers of a kind.
    pub(super) fn adapters(&self) -> Result<Option<Adapters>, ConfigErrors> {
        let problem = |what: String| ConfigErrors(vec![Problem::new(what)]);
        let model = &self.model.config;
        let plan = self.lora.plan(model).map_err(|error| problem(LoraSection::problem(&error)))?;
        let Some(plan) = plan else { return Ok(None) };
        let (decoder, rank) = (decoder_of(model), plan.config().rank);
        let refused = |what: &str| {
            Err(problem(format!(
                "lora.rank = {rank}: memory and time of adapters {what} cannot be predicted; nearest legal: --lora.rank none, which \
                 needs more of both"
            )))
        };
        let has_own = |own: &(usize, f64)| *own != (rank, plan.config().alpha);
        if plan.modules().values().any(has_own) {
            return refused("with other ranks or scales (rank-pattern, alpha-pattern)");
        }
        if decoder.latent.is_some() || decoder.mtp > 0 {
            return refused("in a model with latent attention or multi-token prediction");
        }
        let Some(read) = read(&plan, &decoder) else { return refused("of some layers only") };
        let read = read.map(Option::flatten);
        Ok(Some(Adapters {
            rank: rank as u64,
            dora: plan.config().dora,
            qkv: from(&read, ATTENTION),
            out: read[ATTENTION + 3].is_some(),
            recurrent: from(&read, RECURRENT),
            recurrent_out: read[RECURRENT + 6].is_some(),
            up: from(&read, MLP),
            down: read[MLP + 2].is_some(),
            expert_up: from(&read, EXPERTS),
            expert_down: read[EXPERTS + 2].is_some(),
            base: self.lora.base.map(BaseFormat::format),
        }))
    }
}

fn from<const N: usize>(read: &[Option<usize>; PLACES], first: usize) -> [Option<usize>; N] {
    std::array::from_fn(|at| read[first + at])
}

/// At each place, if a layer has it, the A that it reads, if it has an adapter: the place of the first that reads the same.
/// `None` unless all layers that have a place agree, and adapters are nowhere else.
fn read(plan: &LoraPlan, decoder: &Decoder) -> Option<[Option<Option<usize>>; PLACES]> {
    let (mut found, mut counted) = ([None; PLACES], 0);
    for layer in 0..decoder.layers {
        let parts = parts(decoder, layer);
        let module = |part: &str| plan.module_of(&format!("layers.{layer}.{part}"));
        for (place, part, count) in &parts {
            let own = module(part);
            counted += if own.is_some() { *count } else { 0 };
            let first = own.and_then(|own| parts.iter().find(|(_, part, _)| module(part) == Some(own)));
            let first = first.map(|(place, ..)| *place);
            if *found[*place].get_or_insert(first) != first {
                return None;
            }
        }
    }
    (counted == plan.targets().count()).then_some(found)
}

/// The linear layers of a layer: place, name, and how many of them there are. The experts of a layer have adapters all or
/// none.
fn parts(decoder: &Decoder, layer: usize) -> Vec<(usize, String, usize)> {
    let named = |first: usize, module: &str, parts: &[&str], count: usize| {
        let part = |(at, part): (usize, &&str)| (first + at, format!("{module}.{part}_proj"), count);
        parts.iter().enumerate().map(part).collect::<Vec<_>>()
    };
    let mixer = if decoder.mamba_of(layer).is_some() {
        let of = named(RECURRENT, "mamba", &["z", "x", "b", "c", "dt"], 1);
        [of, vec![(RECURRENT + 6, "mamba.out_proj".into(), 1)]].concat()
    } else if decoder.linear_of(layer).is_some() {
        named(RECURRENT, "linear_attention", &["q", "k", "v", "z", "b", "a", "o"], 1)
    } else if decoder.has_keys(layer) {
        // The gate of the output is a part of the queries' module.
        let gate = decoder.output_gate.then(|| (ATTENTION, "attention.gate_proj".to_string(), 1));
        named(ATTENTION, "attention", &["q", "k", "v", "o"], 1).into_iter().chain(gate).collect()
    } else {
        Vec::new()
    };
    let parts = ["gate", "up", "down"];
    let mlp = match decoder.experts_of(layer) {
        Some(experts) => {
            let shared = if experts.shared > 0 { named(MLP, "mlp.shared_experts", &parts, 1) } else { Vec::new() };
            [shared, named(EXPERTS, "mlp.experts.0", &parts, experts.count)].concat()
        }
        None if decoder.has_mlp(layer) => named(MLP, "mlp", &parts, 1),
        None => Vec::new(),
    };
    [mixer, mlp].concat()
}
