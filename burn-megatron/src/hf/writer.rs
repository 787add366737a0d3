//! Writes a folder that transformers and we can read: tensor by tensor, never a whole model in memory.

use std::fs::{File, Permissions};
use std::io::{BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use models::hf::HfError;
use models::{FamilyConfig, ModelConfig};
use serde_json::{Map, Value, json};

use super::companions::Companions;
use super::distributed_writer::Tensors;
use super::error::HfFolderError;
use super::optimizer::recipe::Recipe;
use super::optimizer::writer::states;
use super::outputs::{Output, TensorReader, outputs, write_tensor};
use super::shards::{divide, name as shard_name};
use super::tensors::INDEX;
use super::{distributed_writer, torch_dist};
use crate::checkpoint::Checkpoint;
use crate::data::tokenizer_json;
use crate::element::Element;

/// In which form weights are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Safetensors files with Hugging Face's names.
    Safetensors,
    /// A PyTorch DCP checkpoint with Hugging Face's names.
    Dcp,
    /// Megatron-Core's `torch_dist`, as the checkpoint of an iteration.
    TorchDist {
        /// Its number.
        iteration: u64,
        /// Expert-parallel size of the run that continues from the states of the optimizer: above 1 Megatron-Core has an
        /// optimizer of their own for experts.
        expert_parallel: usize,
    },
}

/// What is to be written.
#[derive(Debug)]
pub struct Export<'a> {
    /// The model.
    pub config: &'a FamilyConfig,
    /// Files that came with it.
    pub companions: &'a Companions,
    /// A tokenizer to copy to `tokenizer.json`.
    pub tokenizer: Option<&'a Path>,
    /// Type of the elements; `None` leaves every tensor as it is stored.
    pub element: Option<Element>,
    /// Most bytes of tensors in a file.
    pub shard_bytes: u64,
    /// Form of the weights.
    pub format: Format,
}

/// Writes `folder`, which must not exist or be empty: into a folder next to it, which is renamed when it is complete.
/// Gives the number of files of weights and their bytes.
///
/// # Errors
/// If a weight cannot be read, the model cannot be said in Hugging Face's words, or the disk says no.
pub fn export(folder: &Path, what: &Export, source: &dyn TensorReader) -> Result<(usize, u64), HfFolderError> {
    write(folder, what, source, None)
}

/// The same with the states of AdamW that `checkpoint` has of these weights, to a format that holds them.
///
/// # Errors
/// As [`export`]; also if the checkpoint has none, or those of another optimizer, or the format has no place for them.
pub fn export_states(
    folder: &Path,
    what: &Export,
    source: &dyn TensorReader,
    checkpoint: &Checkpoint,
) -> Result<(usize, u64), HfFolderError> {
    write(folder, what, source, Some(checkpoint))
}

fn write(
    folder: &Path,
    what: &Export,
    source: &dyn TensorReader,
    optimizer: Option<&Checkpoint>,
) -> Result<(usize, u64), HfFolderError> {
    refuse_full(folder)?;
    let names = match what.format {
        Format::Safetensors | Format::Dcp => what.config.hf_names(),
        Format::TorchDist { .. } => what.config.megatron_names(),
    };
    let stored: Vec<&str> = names.iter().map(|(_, of)| of.name.as_str()).collect();
    if matches!(what.format, Format::TorchDist { .. })
        && let Some(why) = torch_dist::unknown(&stored).or_else(|| torch_dist::without_layers(what.config))
    {
        return Err(HfFolderError::file(folder, format!("{why}; nearest legal: --dcp")));
    }
    let megatron = matches!(what.format, Format::TorchDist { .. });
    let dims = what.config.dims();
    let recipe = optimizer
        .map(|checkpoint| Recipe::of(checkpoint, &dims).map_err(|what| HfFolderError::file(checkpoint.path(), what)));
    let recipe = recipe.transpose()?;
    let states = optimizer.map(|checkpoint| states(checkpoint, &names, megatron)).transpose()?.unwrap_or_default();
    let outputs = outputs(names.iter(), what.element, source)?;
    let config = config_json(folder, what, &outputs)?;
    new_folder(folder, |partial| {
        let tied = what.config.hf_tied_copy();
        let tensors = Tensors { weights: &outputs, source, tied, states: &states, recipe: recipe.as_ref() };
        let files = match what.format {
            Format::Safetensors => write_safetensors(partial, what.shard_bytes, &outputs, source)?,
            Format::Dcp => distributed_writer::write(partial, &tensors, what.shard_bytes, None)?,
            Format::TorchDist { iteration, expert_parallel } => {
                distributed_writer::write(partial, &tensors, what.shard_bytes, Some((iteration, expert_parallel)))?
            }
        };
        write_small_files(partial, what, &config)?;
        let all = outputs.iter().chain(states.iter().flat_map(|states| &states.outputs));
        Ok((files, all.map(Output::bytes).sum()))
    })
}

/// Makes `folder`, which must not exist or be empty: `write` writes into a folder next to it, which is renamed. One that is
/// there may be a mount point, a link or where the user is: it is filled in place of being replaced.
pub(super) fn new_folder<T>(
    folder: &Path,
    write: impl FnOnce(&Path) -> Result<T, HfFolderError>,
) -> Result<T, HfFolderError> {
    let is_there = folder.exists();
    let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let parent = if is_there { folder } else { parent };
    let name = folder.file_name().unwrap_or_default();
    std::fs::create_dir_all(parent).map_err(HfFolderError::io("create", parent))?;
    // A new folder of its own name; it is removed again unless it becomes the folder that is asked for.
    let partial = tempfile::Builder::new()
        .permissions(Permissions::from_mode(0o777))
        .prefix(&format!(".{}.", name.to_string_lossy()))
        .suffix(".partial")
        .tempdir_in(parent)
        .map_err(HfFolderError::io("create a folder in", parent))?;
    let written = write(partial.path())?;
    if is_there {
        fill(folder, partial.path()).map_err(HfFolderError::io("move files to", folder))?;
        return Ok(written);
    }
    std::fs::rename(partial.path(), folder).map_err(HfFolderError::io("create", folder))?;
    let _renamed = partial.keep();
    Ok(written)
}

/// Moves all files to `folder`, last the one by which it counts as a model's.
fn fill(folder: &Path, from: &Path) -> std::io::Result<()> {
    let names = std::fs::read_dir(from)?.map(|entry| Ok(entry?.file_name()));
    let mut names = names.collect::<std::io::Result<Vec<_>>>()?;
    names.sort_by_key(|name| name == "config.json");
    names.iter().try_for_each(|name| std::fs::rename(from.join(name), folder.join(name)))
}

/// Refuses a folder that is there and not empty.
///
/// # Errors
/// If it is so, or cannot be looked at.
pub fn refuse_full(folder: &Path) -> Result<(), HfFolderError> {
    match std::fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(HfFolderError::io("list", folder)(error)),
        Ok(mut entries) => match entries.next() {
            None => Ok(()),
            Some(_) => Err(HfFolderError::file(folder, "is not empty; give a folder that does not exist yet")),
        },
    }
}

/// The configuration, with the type of the weights that are written.
pub(super) fn config_json(folder: &Path, what: &Export, outputs: &[Output]) -> Result<Value, HfFolderError> {
    let original = what.companions.config();
    let config = if let Some(original) = &original { what.config.to_hf_like(original) } else { what.config.to_hf() };
    let mut config = config.map_err(|source| match source {
        HfError::NotWritable(_) => HfFolderError::NotWritable(source),
        source => HfFolderError::Config { folder: folder.into(), source },
    })?;
    let mut elements: Vec<Element> = outputs.iter().map(|output| output.element).collect();
    elements.dedup();
    let key = if config.get("torch_dtype").is_some() { "torch_dtype" } else { "dtype" };
    let said = config.get(key).is_some() || original.is_none() || what.element.is_some();
    if let ([element], true) = (elements.as_slice(), said) {
        config[key] = json!(element.torch_name());
    }
    Ok(config)
}

/// Everything but weights.
pub(super) fn write_small_files(folder: &Path, what: &Export, config: &Value) -> Result<(), HfFolderError> {
    for (name, text) in what.companions.others() {
        write_text(&folder.join(name), text)?;
    }
    write_text(&folder.join("config.json"), &pretty(config))?;
    if let Some(tokenizer) = what.tokenizer {
        let to = folder.join("tokenizer.json");
        let text = tokenizer_json(tokenizer).map_err(|error| HfFolderError::file(tokenizer, error.to_string()))?;
        std::fs::write(&to, text).map_err(HfFolderError::io("write the tokenizer to", &to))?;
    }
    Ok(())
}

/// Gives the number of files.
pub(super) fn write_safetensors(
    folder: &Path,
    shard_bytes: u64,
    outputs: &[Output],
    source: &dyn TensorReader,
) -> Result<usize, HfFolderError> {
    let sizes: Vec<u64> = outputs.iter().map(Output::bytes).collect();
    let files = divide(&sizes, shard_bytes);
    let mut shard_of = Map::new();
    for (index, file) in files.iter().enumerate() {
        let name = shard_name(index, files.len());
        let outputs = &outputs[file.clone()];
        shard_of.extend(outputs.iter().map(|output| (output.name.to_string(), json!(name))));
        write_shard(&folder.join(name), outputs, source)?;
    }
    if files.len() > 1 {
        write_index(folder, sizes.iter().sum(), shard_of)?;
    }
    Ok(files.len())
}

/// Says which file holds which tensor.
pub(super) fn write_index(folder: &Path, total: u64, shard_of: Map<String, Value>) -> Result<(), HfFolderError> {
    let index = json!({"metadata": {"total_size": total}, "weight_map": shard_of});
    write_text(&folder.join(INDEX), &pretty(&index))
}

pub(super) fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

pub(super) fn write_text(path: &Path, text: &str) -> Result<(), HfFolderError> {
    std::fs::write(path, text).map_err(HfFolderError::io("write", path))
}

/// One safetensors file: the tensors of larger elements first, as the format wants them aligned, then by name.
fn write_shard(path: &Path, outputs: &[Output], source: &dyn TensorReader) -> Result<(), HfFolderError> {
    let mut sorted: Vec<&Output> = outputs.iter().collect();
    sorted.sort_by_key(|output| (output.element, output.name));
    let mut header = Map::from_iter([("__metadata__".to_string(), json!({"format": "pt"}))]);
    let mut end = 0;
    for output in &sorted {
        let (start, dtype) = (end, output.element.dtype());
        end += output.bytes();
        let entry = json!({"dtype": dtype, "shape": output.shape, "data_offsets": [start, end]});
        header.insert(output.name.to_string(), entry);
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');

    let io = || HfFolderError::io("write", path);
    let mut file = BufWriter::new(File::create(path).map_err(io())?);
    file.write_all(&(header.len() as u64).to_le_bytes()).map_err(io())?;
    file.write_all(&header).map_err(io())?;
    for output in sorted {
        write_tensor(output, source, |bytes| file.write_all(bytes).map_err(io()))?;
    }
    file.into_inner().map_err(|error| io()(error.into_error()))?.sync_all().map_err(io())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A link, a mount point and where the user is cannot be replaced.
    #[test]
    fn an_empty_folder_is_filled_where_it_is() {
        let root = tempfile::tempdir().unwrap();
        let [folder, link] = ["folder", "link"].map(|name| root.path().join(name));
        std::fs::create_dir(&folder).unwrap();
        std::os::unix::fs::symlink(&folder, &link).unwrap();
        let write =
            |partial: &Path| ["config.json", "a"].iter().try_for_each(|name| write_text(&partial.join(name), name));
        let failed = new_folder(&link, |_| Err::<(), _>(HfFolderError::file(&link, "it fails")));
        assert!(failed.is_err() && refuse_full(&link).is_ok());
        new_folder(&link, write).unwrap();
        let names = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.collect();
        names.sort();
        assert_eq!(names, ["a", "config.json"]);
        assert!(link.is_symlink() && std::fs::read_dir(root.path()).unwrap().count() == 2);
    }
}
