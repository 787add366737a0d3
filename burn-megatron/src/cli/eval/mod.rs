//! `burn-megatron eval`: multiple choice, log-likelihoods, perplexity and exact match of a Hugging Face folder.

mod model;

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use backend_dist::mesh::ParallelLayout;
use backend_dist::process::Cluster;
use host::partial_file::partial;
use tempfile::NamedTempFile;

use super::device::DeviceKind;
use super::forward::Precision;
use super::layout::LayoutArgs;
use super::refused;
use crate::console::warn;
use crate::eval::{
    Encoder, EvalSettings, ExactMatch, Limits, TaskResult, Work, read_documents, read_task, results, table,
};
use crate::forward::{Settings, check_layout};
use crate::refusal::Access;
use model::Model;
pub(super) use model::causal_length;

/// Arguments of `eval`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder with config.json, the weights and the tokenizer
    #[arg(long, value_name = "DIR")]
    hf: PathBuf,
    /// Folder with adapter_config.json and adapter_model.safetensors, as peft writes them
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// JSON lines with `context` and `continuations` and `answer` (multiple choice: acc, acc_norm by characters, acc_bytes),
    /// or `continuation` (log-likelihood: acc, perplexity), or `target` (generation: exact_match). T5's encoder reads the
    /// context, its decoder the continuation
    #[arg(long, value_name = "FILE", num_args = 1..)]
    task: Vec<PathBuf>,
    /// Texts, or JSON lines with `text`, whose perplexity per token, word and byte and bits per byte are wanted
    #[arg(long, value_name = "FILE", num_args = 1..)]
    perplexity: Vec<PathBuf>,
    /// JSON lines to write, one for each sample
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Take the first N samples of every file only
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Render every context with the tokenizer's chat template, as what a user says
    #[arg(long)]
    apply_chat_template: bool,
    /// Sequences that a data-parallel rank scores at once; of answers that it writes, 8 times as many
    #[arg(long, value_name = "N", default_value_t = 8)]
    batch_size: usize,
    /// Most tokens that the model sees at once, T5's encoder and decoder each; of longer samples the last ones. Default:
    /// the model's max_position_embeddings; T5's n_positions, or 512
    #[arg(long, value_name = "N")]
    max_length: Option<usize>,
    /// Most tokens of a generated answer whose row has no `max_new_tokens`
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_new_tokens: usize,
    /// Generated answers are compared in lower case
    #[arg(long)]
    ignore_case: bool,
    /// Generated answers are compared without ASCII punctuation
    #[arg(long)]
    ignore_punctuation: bool,
    /// Type of weights and activations
    #[arg(long, value_enum, default_value = "f32")]
    dtype: Precision,
    /// Where the ranks run
    #[arg(long, value_enum, default_value = "cpu")]
    pub(super) device: DeviceKind,
    #[command(flatten)]
    layout: LayoutArgs,
}

/// Prints a table of metrics and writes the samples. Fails if a file, the model or the layout cannot be used; a wrong
/// row before the model is loaded.
pub fn run(args: Args, cluster: &Cluster) -> Result<ExitCode> {
    if args.task.is_empty() && args.perplexity.is_empty() {
        bail!("--task FILE or --perplexity FILE says what to evaluate: give one of them, or both");
    }
    let layout = args.layout.over(ParallelLayout::default())?;
    check_layout(&layout)?;
    for (key, value) in [
        ("--limit", args.limit.unwrap_or(1)),
        ("--batch-size", args.batch_size),
        ("--max-new-tokens", args.max_new_tokens),
    ] {
        if value == 0 {
            bail!("{key} 0 leaves nothing to do; nearest legal: 1");
        }
    }
    let limit = args.limit.unwrap_or(usize::MAX);
    if let Some(output) = &args.output {
        let folders = args.adapter.iter().chain([&args.hf]);
        let inputs: Vec<_> = args.task.iter().chain(&args.perplexity).chain(folders).collect();
        super::is_no_input("--output", output, &inputs)?;
    }
    let mut tasks = Vec::new();
    for path in &args.task {
        tasks.push(read_task(path, limit)?);
    }
    for path in &args.perplexity {
        tasks.push(read_documents(path, limit)?);
    }
    let model = Model::open(&args, cluster)?;
    let generation = model.generation(&args.hf)?;
    let encoder = Encoder::open(&args.hf, &generation.prefixes(), args.apply_chat_template)?;
    let encoder = if let Model::T5(..) = &model { encoder.apart() } else { encoder };
    let limits = Limits {
        max_length: model.max_length(&layout, args.max_length)?,
        max_new_tokens: args.max_new_tokens,
        vocab_size: model.vocab_size(),
    };
    let work = Work::new(&tasks, &encoder, &limits)?;
    let output = args.output.as_deref().filter(|_| cluster.is_first());
    let output = output.map(|path| Ok::<_, anyhow::Error>((path, create(path)?))).transpose()?;
    if work.truncated > 0 && cluster.is_first() {
        let most = limits.max_length;
        warn(format_args!("{} samples are longer than {most} tokens: their first tokens are left out", work.truncated));
    }
    let settings = EvalSettings {
        forward: Settings::new(args.device.of_cluster(&layout, cluster)?, layout, args.dtype),
        batch_size: args.batch_size,
        stop_tokens: generation.stop_tokens(&args.hf, encoder.tokenizer())?,
    };
    let answers = model.answers(&work, encoder.tokenizer(), settings)?;
    let compare = ExactMatch { ignore_case: args.ignore_case, ignore_punctuation: args.ignore_punctuation };
    let results = results(&tasks, &work, &answers, compare);
    if let Some((path, file)) = output {
        write(file, path, &results).map_err(refused(Access::Write, path))?;
    }
    if cluster.is_first() {
        super::print(&table(&results))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn create(path: &Path) -> Result<NamedTempFile> {
    partial(path).map_err(refused(Access::Write, path))
}

/// Gives the file its name when all is in it: an evaluation that fails leaves the last one's.
fn write(file: NamedTempFile, path: &Path, results: &[TaskResult]) -> std::io::Result<()> {
    let mut lines = BufWriter::new(file);
    for line in results.iter().flat_map(|result| &result.lines) {
        writeln!(lines, "{line}")?;
    }
    lines.into_inner()?.persist(path)?;
    Ok(())
}
