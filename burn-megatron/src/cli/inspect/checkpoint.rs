//! What is in a checkpoint.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::Path;
use std::thread;
use std::time::Instant;

use indicatif::{HumanBytes, HumanCount};

use super::super::{open_checkpoint, print};
use crate::checkpoint::{Checkpoint, CheckpointError, SavedTensor};

/// Describes a checkpoint, or the latest one in a folder, and compares its hashes if asked to.
pub(super) fn run(path: &Path, verify: bool) -> anyhow::Result<()> {
    let checkpoint = open_checkpoint(path)?;
    print(&describe(&checkpoint)?)?;
    if checkpoint.path() != path {
        let others = Checkpoint::list(path)?;
        let others: Vec<String> =
            others.keys().filter(|step| **step != checkpoint.state().step).map(u64::to_string).collect();
        if !others.is_empty() {
            print(&format!("  also there, complete: step {}\n", others.join(", ")))?;
        }
    }
    if verify {
        let start = Instant::now();
        let bytes = hash(&checkpoint)?;
        let rate = HumanBytes((bytes as f64 / start.elapsed().as_secs_f64()) as u64);
        print(&format!("  every file has its sha256: {} read, {rate}/s\n", HumanBytes(bytes)))?;
    }
    Ok(())
}

fn describe(checkpoint: &Checkpoint) -> serde_json::Result<String> {
    let state = checkpoint.state();
    let files = checkpoint.files();
    let bytes = HumanBytes(files.iter().map(|file| file.bytes).sum());
    let ranks = if state.world_size == 1 { "rank" } else { "ranks" };
    let mut lines = vec![checkpoint.path().display().to_string()];
    let mut line = |words: String| lines.push(format!("  {words}"));
    if let Some(warning) = checkpoint.warning() {
        line(format!("warning: {warning}"));
    }
    line(format!(
        "step {}, {} samples consumed, {} updates; saved by {} {ranks} in {}",
        HumanCount(state.step),
        HumanCount(state.consumed_samples),
        HumanCount(state.updates),
        state.world_size,
        state.layout,
    ));
    line(format!("model {}", serde_json::to_string(&state.model)?));
    if let Some(tokenizer) = checkpoint.tokenizer() {
        line(format!("tokenizer {}", tokenizer.display()));
    }
    line(format!("{bytes} in {} file{}", files.len(), if files.len() == 1 { "" } else { "s" }));
    let mut names: BTreeMap<&str, Vec<&SavedTensor>> = BTreeMap::new();
    let mut kinds: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for tensor in checkpoint.tensors() {
        names.entry(&tensor.name).or_default().push(tensor);
        let (count, bytes) = kinds.entry(tensor.kind.name()).or_default();
        (*count, *bytes) = (*count + 1, *bytes + tensor.bytes());
    }
    for (kind, (count, bytes)) in kinds {
        let tensors = if count == 1 { "tensor" } else { "tensors" };
        line(format!("{kind}: {count} {tensors}, {}", HumanBytes(bytes)));
    }
    for (name, tensors) in names {
        let kinds: Vec<String> = tensors.iter().map(|tensor| in_slices(tensor)).collect();
        line(format!("  {name} {:?}: {}", tensors[0].global_shape, kinds.join(", ")));
    }
    Ok(lines.join("\n") + "\n")
}

/// `exp_avg F32 in 4 slices`
fn in_slices(tensor: &SavedTensor) -> String {
    match tensor.slices.len() {
        1 => format!("{} {}", tensor.kind, tensor.dtype),
        slices => format!("{} {} in {slices} slices", tensor.kind, tensor.dtype),
    }
}

/// Hashes all files on all cores.
fn hash(checkpoint: &Checkpoint) -> Result<u64, CheckpointError> {
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    thread::scope(|scope| {
        let shares: Vec<_> = (0..threads).map(|share| scope.spawn(move || checkpoint.verify(share, threads))).collect();
        let read = |share: thread::ScopedJoinHandle<'_, _>| {
            share.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        shares.into_iter().map(read).sum()
    })
}
