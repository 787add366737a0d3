//! Writes the states of AdamW of a checkpoint next to its weights, as PyTorch's or Megatron-Core's.

use std::collections::HashSet;
use std::io;
use std::ops::Range;

use backend_dist::launch::BoxError;
use models::names::{Foreign, NameMap};
use safetensors::Dtype;

use super::recipe::Recipe;
use crate::checkpoint::{Checkpoint, Kind};
use crate::dcp::{DcpWriter, Pickler};
use crate::element::Element;
use crate::hf::error::HfFolderError;
use crate::hf::outputs::{Output, TensorReader, outputs};
use crate::hf::torch_dist::Stacks;

/// What is before PyTorch's names, as torchtitan has it.
const TORCH: &str = "optimizer.";

/// A kind of states as a model of such weights.
pub(in crate::hf) struct States<'a> {
    kind: Kind,
    pub outputs: Vec<Output<'a>>,
    pub source: Floats<'a>,
}

impl States<'_> {
    /// The name of a state; Megatron-Core's where the names are its own.
    pub fn name(&self, weight: &str, megatron: bool) -> String {
        let state = if self.kind == Kind::Master { "param" } else { self.kind.name() };
        if megatron { format!("optimizer.state.{state}.{weight}") } else { format!("{TORCH}state.{weight}.{state}") }
    }
}

/// All states of a checkpoint, for a model of these names. Megatron-Core's are fp32. Fails if a state cannot be read.
pub(in crate::hf) fn states<'a>(
    checkpoint: &'a Checkpoint,
    names: &'a NameMap,
    megatron: bool,
) -> Result<Vec<States<'a>>, HfFolderError> {
    let kinds = [Kind::FirstMoment, Kind::SecondMoment].into_iter().chain(megatron.then_some(Kind::Master));
    let element = megatron.then_some(Element::F32);
    let stacks = megatron.then(|| Stacks::of(names.iter().map(|(_, of)| of.name.as_str())));
    let stack = |of: &Foreign| stacks.as_ref().map_or_else(|| of.name.clone(), |stacks| stacks.place(&of.name).0);
    // Frozen weights have no states, unless others of their stack have: a stack is whole.
    let trained = names.iter().filter(|(ours, _)| checkpoint.holds(Kind::FirstMoment, ours));
    let trained: HashSet<String> = trained.map(|(_, of)| stack(of)).collect();
    let of_kind = |kind: Kind| {
        let source = Floats { checkpoint, kind };
        let some = names.iter().filter(|(_, of)| trained.contains(&stack(of)));
        Ok(States { kind, outputs: outputs(some, element, &source)?, source })
    };
    kinds.map(of_kind).collect()
}

/// The floats of a kind, whatever bits a checkpoint has them in: fp32, or fp64. Moments of frozen weights are zeros; a run in
/// fp32 has no other weights than the model's.
pub(in crate::hf) struct Floats<'a> {
    checkpoint: &'a Checkpoint,
    kind: Kind,
}

impl Floats<'_> {
    fn kind(&self, name: &str) -> Kind {
        if self.checkpoint.holds(self.kind, name) { self.kind } else { Kind::Weight }
    }
}

impl TensorReader for Floats<'_> {
    fn element(&self, name: &str, shape: &[usize]) -> Result<Element, BoxError> {
        let none: Vec<Range<usize>> = shape.iter().map(|_| 0..0).collect();
        let (dtype, _) = self.checkpoint.read(self.kind(name), name, shape, &none)?;
        Ok(if dtype == Dtype::F64 { Element::F64 } else { Element::F32 })
    }

    fn read_bytes(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<u8>, BoxError> {
        let element = self.element(name, shape)?;
        if self.kind != Kind::Master && !self.checkpoint.holds(self.kind, name) {
            return Ok(vec![0; ranges.iter().map(ExactSizeIterator::len).product::<usize>() * element.size()]);
        }
        let values = self.checkpoint.read_f64(self.kind(name), name, shape, ranges)?;
        let mut bytes = Vec::new();
        element.encode(&values, &mut bytes);
        Ok(bytes)
    }
}

/// PyTorch's steps and parameter groups, nested and flat: a program looks for one of them. Fails if the system refuses.
pub(in crate::hf) fn write_torch(writer: &mut DcpWriter, weights: &[Output], recipe: &Recipe) -> io::Result<()> {
    let step = (recipe.updates as f32).to_le_bytes();
    let decays = |output: &Output| recipe.adamw.decay_vectors || output.shape.len() > 1;
    for output in weights {
        writer.write(&format!("{TORCH}state.{}.step", output.name), (Dtype::F32, &[]), Vec::new(), &step)?;
        write_group(writer, output.name, recipe, decays(output))?;
    }
    let groups = [true, false].map(|decayed| {
        let members = weights.iter().filter(|output| decays(output) == decayed);
        (decayed, members.map(|output| output.name).collect::<Vec<&str>>())
    });
    for (index, (decayed, names)) in groups.iter().filter(|(_, names)| !names.is_empty()).enumerate() {
        write_group(writer, &index.to_string(), recipe, *decayed)?;
        let list = |pickler: &mut Pickler| pickler.list(|pickler| names.iter().for_each(|name| pickler.text(name)));
        writer.write_object(format!("{TORCH}param_groups.{index}.params"), list)?;
    }
    Ok(())
}

fn write_group(writer: &mut DcpWriter, group: &str, recipe: &Recipe, decayed: bool) -> io::Result<()> {
    for (key, value) in settings(recipe, decayed) {
        writer.write_object(format!("{TORCH}param_groups.{group}.{key}"), |pickler| value.write(pickler))?;
    }
    // Newer versions of torch look for the one, schedulers for the other.
    let more = [("decoupled_weight_decay", Setting::Flag(true)), ("initial_lr", Setting::Number(recipe.most))];
    for (key, value) in more {
        writer.write_object(format!("{TORCH}param_groups.{group}.{key}"), |pickler| value.write(pickler))?;
    }
    Ok(())
}

/// A setting of torch's AdamW.
enum Setting {
    Number(f64),
    Pair([f64; 2]),
    Flag(bool),
    Unset,
}

impl Setting {
    fn write(&self, pickler: &mut Pickler) {
        match self {
            Self::Number(value) => pickler.float(*value),
            Self::Pair(pair) => pickler.tuple(|pickler| pair.iter().for_each(|value| pickler.float(*value))),
            Self::Flag(value) => pickler.boolean(*value),
            Self::Unset => pickler.none(),
        }
    }
}

fn settings(recipe: &Recipe, decayed: bool) -> [(&'static str, Setting); 10] {
    let adamw = &recipe.adamw;
    [
        ("lr", Setting::Number(recipe.lr)),
        ("betas", Setting::Pair([adamw.beta1, adamw.beta2])),
        ("eps", Setting::Number(adamw.eps)),
        ("weight_decay", Setting::Number(if decayed { adamw.weight_decay } else { 0.0 })),
        ("amsgrad", Setting::Flag(false)),
        ("foreach", Setting::Unset),
        ("maximize", Setting::Flag(false)),
        ("capturable", Setting::Flag(false)),
        ("differentiable", Setting::Flag(false)),
        ("fused", Setting::Unset),
    ]
}

/// Megatron-Core's `common.pt` of an iteration, with what Megatron-LM, the distributed optimizer and the schedules look for. Experts may
/// have an optimizer of their own, which is chained to that of the others (`ChainedOptimizer`); `experts` then says whether
/// it has vectors.
pub(in crate::hf) fn write_common(
    pickler: &mut Pickler,
    iteration: u64,
    recipe: Option<&Recipe>,
    experts: Option<bool>,
) {
    pickler.dict(|pickler| {
        pickler.text("iteration");
        pickler.integer(iteration);
        let Some(recipe) = recipe else { return };
        let vectors = !recipe.adamw.decay_vectors;
        pickler.text("args");
        pickler.object("argparse", "Namespace", |pickler| arguments(pickler, recipe));
        pickler.text("checkpoint_version");
        pickler.float(3.0);
        pickler.text("optimizer");
        match experts {
            None => optimizer(pickler, recipe, false, vectors),
            Some(vectors_of_experts) => pickler.dict(|pickler| {
                pickler.integer(0);
                optimizer(pickler, recipe, false, vectors);
                pickler.integer(1);
                optimizer(pickler, recipe, true, vectors && vectors_of_experts);
            }),
        }
        pickler.text("opt_param_scheduler");
        pickler.dict(|pickler| scheduler(pickler, recipe));
        pickler.text("content_metadata");
        pickler.dict(|pickler| {
            pickler.text("distrib_optim_sharding_type");
            pickler.text(SHARDING);
            pickler.text("singleton_local_shards");
            pickler.boolean(false);
            pickler.text("chained_optim_avoid_prefix");
            pickler.boolean(true);
        });
    });
}

/// What Megatron-LM looks for in its own arguments when it continues (`load_checkpoint` and `check_checkpoint_args` of
/// `megatron/training/checkpointing.py`).
fn arguments(pickler: &mut Pickler, recipe: &Recipe) {
    pickler.dict(|pickler| {
        let [layers, hidden, heads] = recipe.model.map(|size| size as u64);
        for (key, value) in [
            ("num_layers", layers),
            ("hidden_size", hidden),
            ("num_attention_heads", heads),
            ("tensor_model_parallel_size", 1),
            ("pipeline_model_parallel_size", 1),
            ("consumed_train_samples", recipe.consumed),
            ("skipped_train_samples", recipe.consumed - recipe.scheduled),
            ("consumed_valid_samples", 0),
        ] {
            pickler.text(key);
            pickler.integer(value);
        }
        for (key, value) in [("no_save_optim", false), ("no_save_rng", true)] {
            pickler.text(key);
            pickler.boolean(value);
        }
    });
}

/// How the states are sharded: each as its weight.
const SHARDING: &str = "fully_reshardable";

/// An optimizer of dense parameters or of experts, some of which may be vectors without weight decay.
fn optimizer(pickler: &mut Pickler, recipe: &Recipe, of_experts: bool, vectors: bool) {
    pickler.dict(|pickler| {
        pickler.text("optimizer");
        pickler.dict(|pickler| {
            pickler.text("param_groups");
            pickler.list(|pickler| {
                param_group(pickler, recipe, of_experts, true);
                if vectors {
                    param_group(pickler, recipe, of_experts, false);
                }
            });
        });
        pickler.text("param_state_sharding_type");
        pickler.text(SHARDING);
    });
}

/// A group that Megatron-Core finds by its multipliers (`param_group_identifier_keys`).
fn param_group(pickler: &mut Pickler, recipe: &Recipe, of_experts: bool, decayed: bool) {
    pickler.dict(|pickler| {
        for (key, value) in settings(recipe, decayed) {
            pickler.text(key);
            value.write(pickler);
        }
        let numbers = [
            ("wd_mult", if decayed { 1.0 } else { 0.0 }),
            ("lr_mult", 1.0),
            ("max_lr", recipe.most),
            ("min_lr", recipe.min),
        ];
        for (key, value) in numbers {
            pickler.text(key);
            pickler.float(value);
        }
        for (key, value) in [
            ("is_expert_parallel", of_experts),
            ("is_decoupled_lr", false),
            ("default_config", true),
            ("bias_correction", true),
        ] {
            pickler.text(key);
            pickler.boolean(value);
        }
        pickler.text("step");
        pickler.integer(recipe.updates);
    });
}

/// `OptimizerParamScheduler.state_dict`.
fn scheduler(pickler: &mut Pickler, recipe: &Recipe) {
    let rates = [("max_lr", recipe.most), ("min_lr", recipe.min)];
    let decays = [("start_wd", recipe.decay_start), ("end_wd", recipe.adamw.weight_decay)];
    for (key, value) in rates.into_iter().chain(decays) {
        pickler.text(key);
        pickler.float(value);
    }
    let [warmup, decay] = recipe.lengths;
    let samples = [("lr_warmup_steps", warmup), ("lr_decay_steps", decay), ("num_steps", recipe.scheduled)];
    for (key, value) in samples.into_iter().chain([("wd_incr_steps", recipe.growth.1)]) {
        pickler.text(key);
        pickler.integer(value);
    }
    for (key, value) in [("lr_decay_style", recipe.form), ("wd_incr_style", recipe.growth.0)] {
        pickler.text(key);
        pickler.text(value);
    }
}
