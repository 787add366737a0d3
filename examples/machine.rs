//! What a program trains on: the GPUs of this machine, and the model and layout that suit them.

use std::path::Path;

use anyhow::{Context, Result, bail};
use backend_dist::gpu::{self, GpuError, GpuInfo};
use backend_dist::ops::LOGITS_AT_ONCE;
use burn::tensor::Device;
use burn_megatron::cli::layout::LayoutArgs;
use burn_megatron::flops::AttentionCount;
use burn_megatron::metrics::{FlopsPerToken, peak};
use burn_megatron::plan::gpus::{Gpu, Hardware};
use burn_megatron::plan::{Decoder, Job, Moments, Plan, Wish, bytes, describe, ladder, search};
use burn_megatron::prelude::*;
use burn_megatron::schedule::PipelineConfig;

/// The GPUs to train on.
///
/// # Errors
/// Why there are none, in words for the screen.
pub fn gpus() -> Result<Vec<GpuInfo>, String> {
    match gpu::gpus() {
        Err(GpuError::NotBuilt) if Path::new("/dev/nvidia0").exists() => {
            Err("there is a GPU, which this program does not use: build it with --features cuda".into())
        }
        Err(GpuError::NotBuilt) => Err("no GPU found".into()),
        result => result.map_err(|error| error.to_string()),
    }
}

/// What is to be trained.
pub struct Task<'a> {
    /// Models by name, the one that is preferred first.
    pub models: Vec<(&'static str, LlamaConfig)>,
    /// What the command line says of the layout.
    pub layout: &'a LayoutArgs,
    /// GPUs.
    pub gpus: usize,
    /// Tokens of a row.
    pub seq_length: usize,
    /// Rows of a micro-batch.
    pub micro_batch: usize,
    /// Rows of a step.
    pub global_batch: Option<usize>,
}

/// The model and the layout that were chosen.
pub struct Choice {
    /// What the model is called.
    pub name: &'static str,
    /// Its sizes.
    pub config: LlamaConfig,
    /// How it is cut.
    pub layout: ParallelLayout,
    /// What is computed again.
    pub recompute: Recompute,
    /// Rows of a step.
    pub global_batch: usize,
    /// The choice in words.
    pub why: String,
}

/// Rows of a step, whatever the number of GPUs, so that a run may go on with more or fewer of them.
const ROWS: usize = 8;

/// The first of the models that fits into the GPUs' memory by plan, with the fastest ZeRO stage and recomputation with
/// which it does.
///
/// # Errors
/// If no model fits, or the layout is none.
pub fn choose(gpus: &[GpuInfo], task: &Task) -> Result<Choice> {
    let first = gpus.first().context("there is no GPU")?;
    let memory = gpus.iter().map(|gpu| gpu.total).min().unwrap_or_default();
    let mut too_large = Vec::new();
    for (name, config) in &task.models {
        let Some(job) = ladder::first_that_fits(&job(config, task)?, task.layout.zero, memory) else {
            too_large.push(format!("{name} does not fit"));
            continue;
        };
        let peak = ladder::peak(&job).unwrap_or_default();
        let global_batch = job.global_batch();
        let mut why = format!(
            "{name}, {:.2} billion parameters, on {} x {} of {}: {}, {} rows of {} tokens a step\n",
            config.parameter_count() as f64 / 1e9,
            job.layout.world_size(),
            first.name,
            bytes(memory),
            describe(&job),
            global_batch,
            task.seq_length,
        );
        too_large.iter().for_each(|line| why += &format!("  {line} into {} GPUs\n", task.gpus));
        why += &reasons(&job, peak);
        why += &others(&job, config, task, first, memory);
        let (layout, recompute) = (job.layout, job.recompute);
        return Ok(Choice { name, config: config.clone(), layout, recompute, global_batch, why });
    }
    bail!(
        "{} into {} x {} of {}: give fewer tokens (--seq-length), or take more GPUs",
        too_large.join(", "),
        task.gpus,
        first.name,
        bytes(memory)
    )
}

/// What a token costs in bf16, and what a GPU can do.
pub fn flops(config: &LlamaConfig, seq_length: usize, devices: &[Device]) -> FlopsPerToken {
    let shape = Decoder::from(&FamilyConfig::Llama(config.clone())).flop_shape(seq_length);
    let [causal, full] = [AttentionCount::Causal, AttentionCount::Full].map(|count| shape.per_token(count));
    FlopsPerToken { causal, full, peak: devices.first().and_then(|device| peak(device, 2)) }
}

/// What a run on GPUs does not do unless it is asked to. `made` are the entries of a tokenizer that was made of the
/// text, for a model that has `entries`.
pub fn hints(made: Option<usize>, entries: usize, saves: bool) -> String {
    let mut hints = String::new();
    if let Some(made) = made {
        hints += &format!(
            "  the tokenizer was made of this text and uses the first {made} of the model's {entries} entries; --tokenizer \
             FILE brings another\n"
        );
    }
    if !saves {
        hints += "  no checkpoints, which take 14 bytes a parameter each; --checkpoint-every N saves them\n";
    }
    hints
}

fn job(config: &LlamaConfig, task: &Task) -> Result<Job> {
    let given = task.layout;
    let model: usize =
        [given.tensor_parallel, given.pipeline_parallel, given.context_parallel].into_iter().flatten().product();
    if !task.gpus.is_multiple_of(model.max(1)) {
        bail!("{} GPUs are not a multiple of the {model} that hold the model: change --gpus or the layout", task.gpus);
    }
    let layout = given.over(ParallelLayout { dp: task.gpus / model.max(1), ..Default::default() })?;
    config.dims().check(&layout, task.seq_length)?;
    let unit = layout.dp * task.micro_batch.max(1);
    let rows = task.global_batch.unwrap_or_else(|| ROWS.next_multiple_of(unit));
    if !rows.is_multiple_of(unit) {
        bail!("--global-batch {rows} is not a multiple of {unit}, the rows of a micro-batch on all replicas");
    }
    let (schedule, stages) = PipelineConfig::default().resolve(&layout, config.num_hidden_layers, rows / unit)?;
    Ok(Job {
        decoder: Decoder::from(&FamilyConfig::Llama(config.clone())),
        layout,
        schedule,
        stages,
        micro_batch: task.micro_batch,
        seq: task.seq_length,
        element: 2,
        moments: Moments { matrices: 2, others: 2 },
        fp8: 0..0,
        fp8_weights: true,
        fp8_experts: true,
        recompute: Recompute::default(),
        gpu: true,
        overlap: true,
        documents: None,
        expert_pieces: Some(1),
        dynamic: None,
        logits_at_once: LOGITS_AT_ONCE,
    })
}

/// Why this ZeRO stage and this recomputation.
fn reasons(job: &Job, peak: u64) -> String {
    let layout = &job.layout;
    let mut why = Vec::new();
    if layout.tp == 1 && layout.pp == 1 && layout.dp > 1 {
        why.push("replicas exchange only gradients and weights, beside the computation".to_string());
    }
    if layout.zero > 0 {
        let cut =
            ["", "optimizer states", "optimizer states and gradients", "everything"][usize::from(layout.zero.min(3))];
        why.push(format!("ZeRO {} cuts {cut} over them", layout.zero));
    }
    let again = if job.recompute == Recompute::default() { "nothing is" } else { "only what must is" };
    why.push(format!("{again} computed again; {} of memory by plan", bytes(peak)));
    format!("  why: {}\n", why.join("; "))
}

/// What the plan thinks of this layout and of others.
fn others(job: &Job, config: &LlamaConfig, task: &Task, gpu: &GpuInfo, memory: u64) -> String {
    let Some(sheet) = Gpu::named(&gpu.name) else { return String::new() };
    let hardware = Hardware { memory, ..Hardware::of(sheet, job.element) };
    let dims = config.dims();
    let legal = |layout: &ParallelLayout| layout.check().is_ok() && dims.check(layout, task.seq_length).is_ok();
    let found = search(&Wish { job, gpus: job.layout.world_size(), hardware: &hardware, legal: &legal });
    let own = Plan::new(job.clone(), &hardware).ok().map(|plan| format!("this {:.2} s a step", plan.time.step));
    let different =
        found.best.iter().filter(|other| (other.job.layout.tp, other.job.layout.pp) != (job.layout.tp, job.layout.pp));
    let lines = different
        .take(2)
        .map(|other| format!("{} {:.2} s and {}", describe(&other.job), other.time.step, bytes(other.memory.peak())));
    let lines: Vec<String> = own.into_iter().chain(lines).collect();
    format!("  a tuned program would take, by plan: {}\n", lines.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        layout: LayoutArgs,
    }

    fn chosen(flags: &str, gpus: usize, gib: u64, seq_length: usize) -> Result<Choice> {
        let info = |index| GpuInfo {
            index,
            name: "NVIDIA H200".into(),
            total: gib << 30,
            capability: (9, 0),
            processors: 132,
            bus: String::new(),
        };
        let line = Line::try_parse_from(["x"].into_iter().chain(flags.split_whitespace())).unwrap();
        let models = vec![("8B", LlamaConfig::llama3_8b()), ("1B", LlamaConfig::llama3_1b())];
        let task = Task { models, layout: &line.layout, gpus, seq_length, micro_batch: 1, global_batch: None };
        choose(&(0..gpus).map(info).collect::<Vec<_>>(), &task)
    }

    #[test]
    fn the_largest_model_that_fits_is_cut_as_little_as_it_can_be() {
        let eight = chosen("", 8, 139, 8192).unwrap();
        assert_eq!((eight.name, eight.layout.to_string().as_str()), ("8B", "DP8 ZeRO1"));
        assert!(eight.recompute == Recompute::default() && eight.why.contains("of memory by plan"), "{}", eight.why);
        let four = chosen("", 4, 139, 8192).unwrap();
        assert_eq!((four.name, four.layout.dp, four.global_batch), ("8B", 4, eight.global_batch));
        let one = chosen("", 1, 80, 8192).unwrap();
        assert!(one.name == "1B" && one.why.contains("8B does not fit"), "{}", one.why);
    }

    #[test]
    fn flags_are_obeyed_and_what_cannot_be_is_refused() {
        let cut = chosen("--tensor-parallel 2 --pipeline-parallel 2 --zero 0", 8, 139, 8192).unwrap();
        assert_eq!(cut.layout.to_string(), "TP2 PP2 DP2");
        let refused = |flags, gpus, gib, seq| chosen(flags, gpus, gib, seq).err().unwrap().to_string();
        assert!(refused("--tensor-parallel 4", 6, 139, 8192).contains("6 GPUs are not a multiple of the 4"));
        assert!(refused("", 1, 8, 8192).contains("1B does not fit into 1 x NVIDIA H200 of 8.0 GiB"));
    }
}
