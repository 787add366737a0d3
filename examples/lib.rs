//! Shared by the examples: training text, the choice of a layout, what plain Burn models need, processes, and exit codes.

pub mod drawings;
pub mod machine;
mod plain;
mod text;

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use backend_dist::memory::RankAllocator;
use backend_dist::process::{Cluster, ProcessWorld};
use backend_dist::shard::stable_hash;
use burn_megatron::prelude::{CausalLm, LlamaConfig, Pretraining};

pub use plain::{Args, Dice, accuracy, loader, trained};
pub use text::Text;

#[cfg(not(feature = "cuda"))]
use std::alloc::System as Below;
// Fast where one thread gives back what another asked for, as operations and launches of kernels are.
#[cfg(feature = "cuda")]
use tikv_jemallocator::Jemalloc as Below;

/// Counts memory per CPU rank for the log.
#[global_allocator]
static ALLOCATOR: RankAllocator<Below> = RankAllocator(Below);

/// Llama 3 8B scaled down: 4 of 32 layers, 1/32 of the hidden size, the same 4 query heads per key-value head and the
/// same ratio of 3.5 between intermediate and hidden size.
pub fn small_llama() -> LlamaConfig {
    LlamaConfig {
        vocab_size: 1024,
        hidden_size: 128,
        intermediate_size: 448,
        num_hidden_layers: 4,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        head_dim: 16,
        make_vocab_size_divisible_by: 8,
        ..LlamaConfig::llama3_8b()
    }
}

/// Prints an error, if there is one, in one line, and returns the exit code.
pub fn report(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", burn_megatron::cli::describe(&error));
            ExitCode::FAILURE
        }
    }
}

/// Does the work of an example in all processes that torchrun or srun has started, and prints its error, if there is one,
/// in one line.
pub fn together(work: impl FnOnce(&Cluster) -> anyhow::Result<()>) -> ExitCode {
    let words = std::env::args().skip(1).collect::<Vec<_>>().join("\n");
    let cluster = Cluster::from_env(&[("arguments", words)]);
    report(cluster.map_err(Into::into).and_then(|cluster| cluster.run(|| work(&cluster))))
}

/// Trains, and returns in the first process what the run's `finish` returned on rank 0. A training that fails ends the
/// program: its strategy has printed the reason.
///
/// # Errors
/// If the training ended without a model.
pub fn pretrain<M: CausalLm + 'static, R: Send + 'static>(
    run: &Pretraining<M, R>,
    cluster: &Cluster,
) -> anyhow::Result<Option<R>> {
    let (training, learner) = run.supervised();
    let result = training.launch(learner);
    let failed = result.error.is_some();
    drop(result); // Gives the terminal back.
    if failed {
        std::process::exit(1);
    }
    let finished = || run.finished().context("the training ended without a model");
    cluster.is_first().then(finished).transpose()
}

/// Prints a line, in the first process only.
pub fn tell(line: impl Display) {
    // Variables that make no sense have been refused by then.
    if ProcessWorld::from_env().ok().flatten().is_none_or(|world| world.process == 0) {
        println!("{line}");
    }
}

/// The number of a flag that must not be 0.
///
/// # Errors
/// What is legal.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|number| *number > 0).ok_or_else(|| "it is a whole number of at least 1".into())
}

/// Folders without text of the repository's own.
const SKIPPED: [&str; 3] = ["target", "runs", "golden"];

/// The repository's own sources and documents (`.rs`, `.md`, `.toml`).
///
/// The order of the files looks random but is the same everywhere, so that held-out files are of the same kind as the
/// rest.
///
/// # Errors
/// If the repository that the example was built from is not there any more.
pub fn repository_text() -> Result<Vec<PathBuf>, String> {
    // `cargo run` names the checkout it runs in; the folder of the build may be another one's when checkouts share a
    // target folder.
    let package =
        std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    let root = package.parent().expect("the crate lies in the repository");
    let mut files = Vec::new();
    walk(root, &mut files).map_err(|error| {
        format!("cannot read the repository at {} ({error}): name a text with --data FILE", root.display())
    })?;
    files.sort_by_key(|file| stable_hash(&file.strip_prefix(root).unwrap_or(file).to_string_lossy()));
    Ok(files)
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if entry.file_type()?.is_dir() {
            if !name.starts_with('.') && !SKIPPED.contains(&name.as_str()) {
                walk(&path, files)?;
            }
        } else if ["rs", "md", "toml"].iter().any(|kind| path.extension().is_some_and(|extension| extension == *kind)) {
            files.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_step_is_refused_as_a_flag() {
        assert!(at_least_one("0").is_err() && at_least_one("-1").is_err());
        assert_eq!(at_least_one("7"), Ok(7));
    }

    #[test]
    fn finds_this_file_once_and_nothing_built() {
        let files = repository_text().unwrap();
        assert_eq!(files.iter().filter(|file| file.ends_with("examples/lib.rs")).count(), 1);
        assert!(!files.iter().any(|file| file.components().any(|part| part.as_os_str() == "target")));
    }
}
