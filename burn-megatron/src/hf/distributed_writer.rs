//! The weights of a model as a PyTorch DCP checkpoint, or as Megatron-Core's `torch_dist`; the states of AdamW with them.

use std::path::Path;

use serde_json::json;

use super::error::HfFolderError;
use super::optimizer::recipe::Recipe;
use super::optimizer::writer::{States, write_common, write_torch};
use super::outputs::{Output, TensorReader, write_tensor};
use super::torch_dist::{self, Stacks};
use crate::dcp::{DcpWriter, Pickler};

/// What is written.
pub(super) struct Tensors<'a> {
    pub weights: &'a [Output<'a>],
    pub source: &'a dyn TensorReader,
    /// The name of a tied weight's copy, which modules of PyTorch have, and of the weight.
    pub tied: Option<[&'a str; 2]>,
    /// The optimizer's.
    pub states: &'a [States<'a>],
    pub recipe: Option<&'a Recipe>,
}

/// Writes all tensors and gives the number of files. For Megatron-Core, whose iteration and expert-parallel size it then is,
/// layers and experts are stacked.
pub(super) fn write(
    folder: &Path,
    tensors: &Tensors,
    most: u64,
    megatron: Option<(u64, usize)>,
) -> Result<usize, HfFolderError> {
    let io = || HfFolderError::io("write", folder);
    let iteration = megatron.map(|(iteration, _)| iteration);
    let stacks = iteration.map(|_| Stacks::of(tensors.weights.iter().map(|output| output.name)));
    let place = |name: &str| match &stacks {
        Some(stacks) => stacks.place(name),
        None => (name.to_string(), Vec::new()),
    };
    let mut writer = DcpWriter::new(folder, most);
    for output in tensors.weights {
        let (name, at) = place(output.name);
        write_one(&mut writer, folder, (&name, &at), output, tensors.source)?;
        if iteration.is_some() {
            let none = |name| writer.write_object(name, |pickler| pickler.list(Pickler::none));
            stateless(&name, &at).into_iter().try_for_each(none).map_err(io())?;
        }
    }
    if let (Some([copy, weight]), None) = (tensors.tied, iteration) {
        writer.tie(copy, weight);
    }
    for states in tensors.states {
        for output in &states.outputs {
            let (name, at) = place(output.name);
            let name = states.name(&name, iteration.is_some());
            write_one(&mut writer, folder, (&name, &at), output, &states.source)?;
        }
    }
    if let (Some(recipe), Some(states), None) = (tensors.recipe, tensors.states.first(), iteration) {
        write_torch(&mut writer, &states.outputs, recipe).map_err(io())?;
    }
    let files = writer.finish().map_err(io())?;
    if let Some((iteration, expert_parallel)) = megatron {
        let experts: Vec<&Output> =
            tensors.weights.iter().filter(|output| torch_dist::is_of_expert(output.name)).collect();
        let vectors = experts.iter().any(|output| output.shape.len() < 2);
        let apart = (expert_parallel > 1 && !experts.is_empty()).then_some(vectors);
        let common = |pickler: &mut Pickler| write_common(pickler, iteration, tensors.recipe, apart);
        DcpWriter::save(&folder.join("common.pt"), common).map_err(io())?;
        // `CheckpointingConfig` of `megatron/core/dist_checkpointing/core.py`.
        let about = json!({"sharded_backend": "torch_dist", "sharded_backend_version": 1,
            "common_backend": "torch", "common_backend_version": 1});
        let path = folder.join("metadata.json");
        std::fs::write(&path, about.to_string()).map_err(HfFolderError::io("write", &path))?;
    }
    Ok(files)
}

/// Writes a tensor under a name, where it is in a stack.
fn write_one(
    writer: &mut DcpWriter,
    folder: &Path,
    (name, at): (&str, &[(usize, usize)]),
    output: &Output,
    source: &dyn TensorReader,
) -> Result<(), HfFolderError> {
    let shape: Vec<usize> = at.iter().map(|(_, count)| *count).chain(output.shape.iter().copied()).collect();
    let row = output.shape[1..].iter().product::<usize>() * output.element.size();
    let mut first = 0;
    write_tensor(output, source, |bytes| {
        let rows = first..first + bytes.len() / row.max(1);
        first = rows.end;
        let stack = at.iter().map(|(index, _)| *index..index + 1);
        let ranges = stack.chain([rows]).chain(output.shape[1..].iter().map(|size| 0..*size)).collect();
        let written = writer.write(name, (output.element.dtype(), &shape), ranges, bytes);
        written.map_err(HfFolderError::io("write", folder))
    })
}

/// The names of objects that Megatron-Core looks for next to a weight: the states of modules of TransformerEngine, which
/// are none without FP8 (`ShardedObject.unique_key`).
fn stateless(weight: &str, at: &[(usize, usize)]) -> Vec<String> {
    let Some(module) = weight.strip_suffix(".weight") else { return Vec::new() };
    let is_linear = |last: &str| last.starts_with("linear_") || last == "eh_proj";
    let Some((before, last)) = module.rsplit_once('.').filter(|(_, last)| is_linear(last)) else { return Vec::new() };
    let at = if at.is_empty() { &[(0, 1)] } else { at };
    let joined = |of: fn(&(usize, usize)) -> usize| {
        at.iter().map(|place| of(place).to_string()).collect::<Vec<String>>().join(".")
    };
    let key =
        |module: &str| format!("{before}.{module}._extra_state/shard_{}_{}", joined(|at| at.0), joined(|at| at.1));
    let attention = ["linear_qkv", "linear_kv_up_proj"].contains(&last).then(|| key("core_attention"));
    [key(last)].into_iter().chain(attention).collect()
}
