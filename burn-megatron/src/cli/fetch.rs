//! `burn-megatron fetch`: a checkpoint from where a run's copies are.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use crate::checkpoint::{fetch, open_storage};

/// Arguments of `fetch`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What checkpoint.storage was: s3://BUCKET/FOLDER, gs://…, az://… or an absolute path
    #[arg(value_name = "URL")]
    storage: String,
    /// Step of the checkpoint; by default the newest
    #[arg(long, value_name = "N")]
    step: Option<u64>,
    /// Folder of checkpoints to put it into, where a run with this checkpoint.directory resumes from it
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
}

/// Copies the checkpoint and compares its hashes. Fails if there is none, it is damaged, or storage or disk refuse.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    let path = fetch(&*open_storage(&args.storage)?.0, args.step, &args.output)?;
    super::print(&format!(
        "{} in {:.1} s, every file has its sha256\n",
        path.display(),
        start.elapsed().as_secs_f64()
    ))?;
    Ok(ExitCode::SUCCESS)
}
