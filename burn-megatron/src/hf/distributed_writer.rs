//! The weights of a model as a PyTorch DCP checkpoint, or as Megatron-Core's `torch_dist`.

use std::path::Path;

use serde_json::json;

use super::error::HfFolderError;
use super::outputs::{Output, TensorReader, write_tensor};
use super::torch_dist::Stacks;
use crate::dcp::DcpWriter;

/// Writes all tensors and gives the number of files. For Megatron-Core, whose `iteration` it then is, layers and experts
/// are stacked.
pub(super) fn write(
    folder: &Path,
    outputs: &[Output],
    most: u64,
    iteration: Option<u64>,
    source: &dyn TensorReader,
) -> Result<usize, HfFolderError> {
    let io = || HfFolderError::io("write", folder);
    let stacks = iteration.map(|_| Stacks::of(outputs.iter().map(|output| output.name)));
    let mut writer = DcpWriter::new(folder, most);
    for output in outputs {
        let (name, at) = match &stacks {
            Some(stacks) => stacks.place(output.name),
            None => (output.name.to_string(), Vec::new()),
        };
        let shape: Vec<usize> = at.iter().map(|(_, count)| *count).chain(output.shape.iter().copied()).collect();
        let row = output.shape[1..].iter().product::<usize>() * output.element.size();
        let mut first = 0;
        write_tensor(output, source, |bytes| {
            let rows = first..first + bytes.len() / row.max(1);
            first = rows.end;
            let stack = at.iter().map(|(index, _)| *index..index + 1);
            let ranges = stack.chain([rows]).chain(output.shape[1..].iter().map(|size| 0..*size)).collect();
            writer.write(&name, (output.element.dtype(), &shape), ranges, bytes).map_err(io())
        })?;
        if iteration.is_some() {
            stateless(&name, &at).into_iter().try_for_each(|name| writer.write_none(name)).map_err(io())?;
        }
    }
    let files = writer.finish().map_err(io())?;
    if let Some(iteration) = iteration {
        DcpWriter::save_numbers(&folder.join("common.pt"), &[("iteration", iteration)]).map_err(io())?;
        // `CheckpointingConfig` of `megatron/core/dist_checkpointing/core.py`.
        let about = json!({"sharded_backend": "torch_dist", "sharded_backend_version": 1,
            "common_backend": "torch", "common_backend_version": 1});
        let path = folder.join("metadata.json");
        std::fs::write(&path, about.to_string()).map_err(HfFolderError::io("write", &path))?;
    }
    Ok(files)
}

/// The names of objects that Megatron-Core looks for next to a weight: the states of modules of TransformerEngine, which
/// are none without FP8 (`ShardedObject.unique_key`).
fn stateless(weight: &str, at: &[(usize, usize)]) -> Vec<String> {
    let Some(module) = weight.strip_suffix(".weight") else { return Vec::new() };
    let Some((before, last)) = module.rsplit_once('.').filter(|(_, last)| last.starts_with("linear_")) else {
        return Vec::new();
    };
    let at = if at.is_empty() { &[(0, 1)] } else { at };
    let joined = |of: fn(&(usize, usize)) -> usize| {
        at.iter().map(|place| of(place).to_string()).collect::<Vec<String>>().join(".")
    };
    let key =
        |module: &str| format!("{before}.{module}._extra_state/shard_{}_{}", joined(|at| at.0), joined(|at| at.1));
    let attention = (last == "linear_qkv").then(|| key("core_attention"));
    [key(last)].into_iter().chain(attention).collect()
}
