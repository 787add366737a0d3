//! The GPUs of this machine, and the model and layout that the planner chooses for them.

use std::path::Path;

use anyhow::{Context, Result, bail};
use backend_dist::gpu::{self, GpuError, GpuInfo};
use burn::tensor::Device;
use burn_megatron::cli::layout::LayoutArgs;
use burn_megatron::config::decoder_of;
use burn_megatron::flops::AttentionCount;
use burn_megatron::metrics::{FlopsPerToken, peak};
use burn_megatron::plan::gpus::Hardware;
use burn_megatron::plan::{Candidate, Job, SearchRequest, bytes, describe, ladder, search};
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

/// A training task.
pub struct Task<'a> {
    /// Models by name, the preferred one first.
    pub models: Vec<(&'static str, LlamaConfig)>,
    /// Sizes that the command line fixes.
    pub layout: &'a LayoutArgs,
    /// Number of GPUs.
    pub gpus: usize,
    /// Sequence length.
    pub seq_length: usize,
    /// Sequences of a micro-batch, if the command line fixes it.
    pub micro_batch: Option<usize>,
    /// Sequences of a step.
    pub global_batch: Option<usize>,
}

/// The model and the layout that were chosen.
pub struct Choice {
    /// Name of the model.
    pub name: &'static str,
    /// Its sizes.
    pub config: LlamaConfig,
    /// The parallel layout.
    pub layout: ParallelLayout,
    /// The pipeline schedule and stages.
    pub pipeline: PipelineConfig,
    /// The recomputation.
    pub recompute: Recompute,
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    /// Sequences of a step.
    pub global_batch: usize,
    /// The choice and its reason, in one line.
    pub why: String,
}

/// Sequences of a step if the number of GPUs divides it, so that a run may resume on more or fewer GPUs.
const SEQUENCES: usize = 8;

/// The first of the models that fits on the GPUs by plan, in the layout that the planner finds fastest: over all sizes
/// of tensor, sequence, pipeline, context and data parallelism, ZeRO stages, recomputations and micro-batches that the
/// command line leaves open.
///
/// # Errors
/// If no model fits, or the sizes on the command line do not go together.
pub fn choose(gpus: &[GpuInfo], task: &Task) -> Result<Choice> {
    let first = gpus.first().context("there is no GPU")?;
    let memory = gpus.iter().map(|gpu| gpu.total).min().unwrap_or_default();
    let sheet = first.model();
    let hardware = Hardware { memory: ladder::usable(memory), ..Hardware::of(&sheet, 2) };
    let global_batch = check(task)?;
    let mut too_large = Vec::new();
    for (name, config) in &task.models {
        let dims = config.dims();
        let mut asked = job(config, task.seq_length, global_batch);
        asked.layout.zero_group = task.layout.zero_group;
        let legal = |layout: &ParallelLayout| {
            agrees(task.layout, layout) && layout.check().is_ok() && dims.check(layout, task.seq_length).is_ok()
        };
        let found = search(&SearchRequest {
            job: &asked,
            gpus: task.gpus,
            hardware: &hardware,
            legal: &legal,
            zero: task.layout.zero,
            micro_batch: task.micro_batch,
        });
        if found.legal == 0 {
            bail!(
                "{name} cannot be divided like this over {} GPUs, {global_batch} sequences of {} tokens per step: change the \
                 layout flags, --gpus or --global-batch",
                task.gpus,
                task.seq_length
            );
        }
        let Some(best) = found.best.first() else {
            too_large.push(format!("{name} does not fit"));
            continue;
        };
        let mut why: String = too_large.iter().map(|line| format!("{line}; ")).collect();
        why += &format!(
            "{name}, {:.2} billion parameters, on {} x {} of {}: {}, {global_batch} sequences of {} tokens per step, the \
             fastest of {} layouts by plan ({}{})\n",
            config.parameter_count() as f64 / 1e9,
            task.gpus,
            first.name,
            bytes(memory),
            describe(&best.job),
            task.seq_length,
            found.legal,
            cost(best),
            found.best.get(1).map_or(String::new(), |next| format!("; next {}, {}", describe(&next.job), cost(next))),
        );
        let Job { layout, recompute, micro_batch, schedule, stages, .. } = best.job.clone();
        let pipeline = match layout.pp {
            1 => PipelineConfig::default(),
            _ => PipelineConfig {
                schedule: Some(schedule.kind),
                layout: Some(stages.to_string()),
                ..PipelineConfig::default()
            },
        };
        return Ok(Choice {
            name,
            config: config.clone(),
            layout,
            pipeline,
            recompute,
            micro_batch,
            global_batch,
            why,
        });
    }
    bail!(
        "{} on {} x {} of {}: use a smaller --seq-length or more GPUs",
        too_large.join(", "),
        task.gpus,
        first.name,
        bytes(memory)
    )
}

/// Seconds of a step and bytes of the fullest rank.
fn cost(candidate: &Candidate) -> String {
    format!("{:.2} s per step, {}", candidate.time.step, bytes(candidate.memory.peak()))
}

/// What a token costs in bf16, and what a GPU can do.
pub fn flops(config: &LlamaConfig, seq_length: usize, devices: &[Device]) -> FlopsPerToken {
    let shape = decoder_of(&FamilyConfig::Llama(config.clone())).flop_shape(seq_length);
    let [causal, full] = [AttentionCount::Causal, AttentionCount::Full].map(|count| shape.per_token(count));
    FlopsPerToken { causal, full, peak: devices.first().and_then(|device| peak(device, 2)) }
}

/// What a run on GPUs does only if it is asked to. `made` is the number of entries of a tokenizer that was trained on the
/// text, for a model that has `entries`.
pub fn hints(made: Option<usize>, entries: usize, saves: bool) -> String {
    let mut hints = String::new();
    if let Some(made) = made {
        hints += &format!(
            "  the tokenizer was trained on this text and uses the first {made} of the model's {entries} entries; --tokenizer \
             FILE uses another\n"
        );
    }
    if !saves {
        hints += "  no checkpoints, which take 14 bytes a parameter each; --checkpoint-every N saves them\n";
    }
    hints
}

/// Refuses sizes that do not go together; gives the sequences of a step.
fn check(task: &Task) -> Result<usize> {
    let given = task.layout;
    let model: usize =
        [given.tensor_parallel, given.pipeline_parallel, given.context_parallel].into_iter().flatten().product();
    if !task.gpus.is_multiple_of(model.max(1)) {
        bail!("{} GPUs are not a multiple of the {model} that hold the model: change --gpus or the layout", task.gpus);
    }
    given.over(ParallelLayout { dp: task.gpus / model.max(1), ..Default::default() })?;
    let unit = given.data_parallel_size().unwrap_or(1) * task.micro_batch.unwrap_or(1).max(1);
    let sequences =
        task.global_batch.unwrap_or_else(|| SEQUENCES.next_multiple_of(task.gpus.max(1)).next_multiple_of(unit.max(1)));
    if !sequences.is_multiple_of(unit.max(1)) {
        bail!("--global-batch {sequences} is not a multiple of {unit}, a micro-batch of every data-parallel rank");
    }
    Ok(sequences)
}

/// Whether a layout has the sizes that the command line fixes.
fn agrees(given: &LayoutArgs, layout: &ParallelLayout) -> bool {
    let sizes = [
        (given.tensor_parallel, layout.tp),
        (given.pipeline_parallel, layout.pp),
        (given.virtual_pipeline, layout.vpp),
        (given.context_parallel, layout.cp),
        (given.data_parallel_size(), layout.dp),
        (given.expert_parallel, layout.ep),
        (given.expert_tensor_parallel, layout.expert_tp()),
    ];
    let sequence_parallel = given.sequence_parallel.is_none_or(|given| given == layout.sp);
    sequence_parallel && sizes.into_iter().all(|(given, size)| given.is_none_or(|given| given == size))
}

/// The model and its batch, as yet on one GPU.
fn job(config: &LlamaConfig, seq: usize, sequences: usize) -> Job {
    let layout = ParallelLayout::default();
    let (schedule, stages) = PipelineConfig::default()
        .resolve(&layout, config.num_hidden_layers, sequences)
        .expect("one GPU holds all layers");
    let decoder = decoder_of(&FamilyConfig::Llama(config.clone()));
    Job { expert_chunks: Some(1), ..Job::new(decoder, layout, schedule, stages, seq) }
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
        let task = Task { models, layout: &line.layout, gpus, seq_length, micro_batch: None, global_batch: None };
        choose(&(0..gpus).map(info).collect::<Vec<_>>(), &task)
    }

    #[test]
    fn the_largest_model_that_fits_is_chosen_in_the_fastest_layout() {
        let eight = chosen("", 8, 139, 8192).unwrap();
        assert_eq!((eight.name, eight.layout.world_size(), eight.global_batch), ("8B", 8, 8));
        assert!(eight.recompute == Recompute::default() && eight.layout.cp == 1, "{}", eight.why);
        assert!(eight.why.contains("the fastest of ") && eight.why.lines().count() == 1, "{}", eight.why);
        let four = chosen("", 4, 139, 8192).unwrap();
        assert_eq!((four.name, four.layout.world_size(), four.global_batch), ("8B", 4, eight.global_batch));
        let one = chosen("", 1, 80, 8192).unwrap();
        assert!(one.name == "1B" && one.why.starts_with("8B does not fit; 1B"), "{}", one.why);
    }

    #[test]
    fn long_sequences_are_split_over_ranks() {
        let long = chosen("--tensor-parallel 1", 4, 139, 131_072).unwrap();
        assert!(long.name == "8B" && long.layout.cp > 1, "{}", long.why);
        assert!(long.pipeline.resolve(&long.layout, 32, long.global_batch / long.micro_batch / long.layout.dp).is_ok());
    }

    #[test]
    fn flags_are_obeyed_and_what_cannot_be_is_refused() {
        let fixed = chosen("--tensor-parallel 2 --pipeline-parallel 2 --zero 0", 8, 139, 8192).unwrap();
        let ParallelLayout { tp, pp, zero, .. } = fixed.layout;
        assert_eq!((tp, pp, zero, fixed.layout.world_size()), (2, 2, 0, 8), "{}", fixed.why);
        let refused = |flags, gpus, gib, seq| chosen(flags, gpus, gib, seq).err().unwrap().to_string();
        assert!(refused("--tensor-parallel 4", 6, 139, 8192).contains("6 GPUs are not a multiple of the 4"));
        assert!(refused("--tensor-parallel 5", 5, 139, 8192).contains("cannot be divided like this over 5 GPUs"));
        assert!(refused("", 1, 8, 8192).contains("1B does not fit on 1 x NVIDIA H200 of 8.0 GiB"));
    }
}
