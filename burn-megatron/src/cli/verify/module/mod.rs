//! `verify` of BERT, T5, ViT and LLaVA, which are plain Burn modules: each layout trains under the learner of `train`.

use std::collections::BTreeSet;
use std::ops::Range;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use backend_dist::mesh::ParallelLayout;
use backend_dist::parallelize::Plan;
use backend_dist::process::Cluster;
use burn::module::ModuleDisplay;
use burn::tensor::{Device, FloatDType};
use models::hf::HfModule;
use models::lora::{LoraConfig, with_adapters};
use models::recompute::Granularity;

use super::flags::Words;
use super::{Adapters, Args};
use crate::cli::device::DeviceKind;
use crate::config::Precision;
use crate::console::say;
use crate::learner::{Stages, TrainBatch, for_any_module, for_stages};
use crate::schedule::{PipelineConfig, ScheduleKind};
use crate::verify::{Candidate, Line, TOLERANCE, candidates};
use crate::verify_module::{ModuleError, ON_GPUS, Proof, verify_module_as, verify_stages_as};

mod batches;
mod families;

/// Sequences of a step at least; layouts with more parts take more.
const SEQUENCES: usize = 8;

struct Sizes {
    layers: usize,
    hidden: usize,
    ffn: usize,
    heads: usize,
    kv_heads: usize,
    vocab: usize,
    seq: usize,
}

/// What is compared.
struct Compared {
    /// What a pipeline divides.
    blocks: usize,
    /// Sizes that tensor-parallel ranks divide.
    shared: Vec<usize>,
    /// In words.
    model: String,
    /// What a step has, in words.
    items: String,
}

impl Compared {
    fn of_texts(sizes: &Sizes, blocks: usize) -> Self {
        let Sizes { heads, vocab, ffn, seq, .. } = *sizes;
        Self {
            blocks,
            shared: vec![heads, vocab, ffn, seq],
            model: format!("{blocks} blocks of {heads} heads, vocabulary {vocab}"),
            items: format!("sequences of {seq} tokens"),
        }
    }
}

/// Prints a line per layout, as for other models.
pub(super) fn run(args: &Args, cluster: &Cluster) -> Result<ExitCode> {
    check(args, cluster)?;
    let heads = args.heads.unwrap_or(4);
    let sizes = Sizes {
        layers: args.layers.unwrap_or(2),
        hidden: args.hidden.unwrap_or(32),
        ffn: args.ffn.unwrap_or(64),
        heads,
        kv_heads: args.kv_heads.unwrap_or(heads),
        vocab: args.vocab.unwrap_or(24),
        seq: args.seq_length.unwrap_or(8),
    };
    let Sizes { layers, hidden, ffn, heads, kv_heads, vocab, seq } = sizes;
    let least = [
        ("layers", layers, 1),
        ("ffn", ffn, 1),
        ("heads", heads, 1),
        ("kv-heads", kv_heads, 1),
        ("vocab", vocab, 4),
        ("seq-length", seq, 4),
    ];
    for (flag, value, least) in least {
        if value < least {
            bail!("nothing to verify: --{flag} {value}; nearest legal: {least}");
        }
    }
    if !hidden.is_multiple_of(heads) || hidden == 0 {
        bail!(
            "--hidden {hidden} is no multiple of --heads {heads}; nearest legal: {}",
            hidden.next_multiple_of(heads).max(heads)
        );
    }
    match args.model.as_str() {
        "bert" => families::bert(args, &sizes),
        "t5" => families::t5(args, &sizes),
        "vit" => families::vit(args, &sizes),
        _ => families::llava(args, &sizes),
    }
}

/// Refuses flags that have no meaning.
fn check(args: &Args, cluster: &Cluster) -> Result<()> {
    let kind = &args.model;
    let refused = [
        ("--dtype", args.dtype != Precision::F64, "f64"),
        ("--fp8", args.fp8.is_some(), "without it"),
        ("--lora-base", args.lora_base.is_some(), "without it"),
        ("--size", args.size.is_some(), "without it, or the sizes themselves"),
        ("--kv-heads", args.kv_heads.is_some() && kind != "llava", "without it"),
        ("--vocab", args.vocab.is_some() && kind == "vit", "without it"),
        ("--seq-length", args.seq_length.is_some() && kind == "vit", "without it"),
        ("--dropout", args.dropout != 0.1, "without it, there is none"),
        ("--global-batch", args.global_batch != SEQUENCES, "8"),
        ("--steps", args.steps.is_some_and(|steps| steps != 3), "3"),
        ("--curve", args.curve.is_some(), "without it"),
        ("--pairwise", args.pairwise, "without it"),
        ("--tolerance", args.tolerance.is_some_and(|bound| bound != TOLERANCE), "1e-10"),
        ("--seed", args.seed != 1234, "1234"),
    ];
    if let Some((flag, _, legal)) = refused.into_iter().find(|(_, given, _)| *given) {
        bail!("{flag} has no meaning with --model {kind}, a plain Burn module; nearest legal: {legal}");
    }
    if cluster.count() > 1 {
        bail!("--model {kind} in {} processes: it is verified in one; nearest legal: 1", cluster.count());
    }
    Ok(())
}

/// The model with adapters, if they are asked for.
fn adapted<M: HfModule>(model: M, kind: Option<Adapters>) -> Result<M> {
    let Some(kind) = kind else { return Ok(model) };
    let (rslora, dora) = (kind == Adapters::Rslora, kind == Adapters::Dora);
    let plan = LoraConfig { rank: 16, rslora, dora, ..LoraConfig::default() }.module_plan(&model).context("--lora")?;
    Ok(with_adapters(model, &plan, None)?)
}

/// Compares the layouts of the flags, or all that fit the model.
fn layouts<T: Stages + ModuleDisplay + 'static>(
    args: &Args,
    compared: &Compared,
    make: &impl Fn(&Device) -> Result<T>,
    batch: impl Fn(Range<usize>, &Device) -> TrainBatch<T> + Clone + Send + Sync + 'static,
    plan: &Plan,
) -> Result<ExitCode> {
    // The first tensor decides which floats the process has. Adapters that cannot be are refused before any proof.
    let mut device = Device::flex();
    let _ = device.configure(FloatDType::F64);
    make(&device)?;
    let list = listed(args, compared)?;
    let devices = list.iter().map(|candidate| devices(args, &candidate.layout)).collect::<Result<Vec<_>>>()?;
    let Compared { model, items, .. } = compared;
    say(format_args!(
        "{}: {model}{}; 3 steps of at least {SEQUENCES} {items} in f64; worst relative difference to one CPU device in f64",
        args.model,
        args.lora.map_or(String::new(), |kind| format!(", adapters ({})", Words(kind)))
    ));
    say(Line::heading());
    let (start, mut lines) = (Instant::now(), Vec::new());
    for (candidate, devices) in list.iter().zip(devices) {
        let proof = Proof::default().plan(plan.clone()).devices(devices).double_throughout();
        let line = line(candidate, |device| make(device).expect("it was made before"), batch.clone(), proof)
            .with_context(|| format!("--layout \"{candidate}\""))?;
        say(&line);
        lines.push(line);
    }
    let equal = lines.iter().filter(|line| line.passes()).count();
    let (all, seconds) = (lines.len(), start.elapsed().as_secs_f64());
    let bound = if args.device == DeviceKind::Cpu { TOLERANCE } else { ON_GPUS };
    say(format_args!("{equal} of {all} layouts equal one device within {bound:e} ({seconds:.1} s)"));
    Ok(if equal == all { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A device for each rank of a layout, or those that the ranks share.
fn devices(args: &Args, layout: &ParallelLayout) -> Result<Vec<Device>> {
    if args.share_gpus { args.device.all() } else { args.device.devices(layout) }
}

fn line<T: Stages + ModuleDisplay + 'static>(
    candidate: &Candidate,
    make: impl FnOnce(&Device) -> T,
    batch: impl Fn(Range<usize>, &Device) -> TrainBatch<T> + Send + Sync + 'static,
    proof: Proof,
) -> Result<Line> {
    let layout = std::slice::from_ref(&candidate.layout);
    let result = if candidate.layout.pp == 1 {
        let loss = move |model: &T, items: Range<usize>, device: &Device| model.run(&batch(items, device)).0;
        verify_module_as(make, loss, layout, &proof)
    } else {
        let proof = proof.micro_batches(candidate.accumulation).recompute(candidate.recompute.clone());
        let scheduled = candidate.pipeline.schedule.map(|schedule| proof.clone().schedule(schedule));
        verify_stages_as(make, batch, layout, &scheduled.unwrap_or(proof))
    };
    match result {
        Ok(report) | Err(ModuleError::Different(report)) => {
            Ok(report.lines.into_iter().next().context("a layout has a line")?)
        }
        Err(error) => Err(error.into()),
    }
}

/// The layouts of the flags, or all that fit.
fn listed(args: &Args, compared: &Compared) -> Result<Vec<Candidate>> {
    let blocks = compared.blocks;
    if !args.layouts.is_empty() {
        return args.layouts.iter().map(|text| given(text)).collect();
    }
    if args.sample == Some(0) {
        bail!("nothing to verify: --sample 0; nearest legal: 1");
    }
    let fits = |layout: &ParallelLayout| {
        let divides = compared.shared.iter().all(|size| size.is_multiple_of(layout.tp));
        layout.cp == 1 && layout.pp * layout.vpp <= blocks && divides
    };
    let mut seen = BTreeSet::new();
    let all = candidates(args.ranks, SEQUENCES, blocks, false, |layout, _| fits(layout)).into_iter();
    let is_cpu = args.device == DeviceKind::Cpu;
    let all = all.filter_map(|candidate| plain(candidate, is_cpu));
    let all: Vec<Candidate> = all.filter(|candidate| seen.insert(candidate.to_string())).collect();
    if all.is_empty() {
        bail!("nothing to verify: no layout of up to {} ranks fits", args.ranks);
    }
    Ok(super::layouts::spread(all, args.sample.unwrap_or(usize::MAX)))
}

/// A layout of a flag. The proof refuses what no such model can have.
fn given(text: &str) -> Result<Candidate> {
    let named = || format!("--layout \"{text}\"");
    let candidate: Candidate = text.parse().with_context(named)?;
    candidate.layout.check().with_context(named)?;
    let legal = if candidate.layout.pp > 1 { for_stages } else { for_any_module };
    legal(&candidate.layout).map_err(anyhow::Error::msg)?;
    let Candidate { layout, pipeline, .. } = &candidate;
    let schedule = PipelineConfig { schedule: pipeline.schedule, ..PipelineConfig::default() };
    let kept = Candidate { layout: layout.clone(), pipeline: schedule, ..candidate.clone() };
    let kept = Candidate { context: Default::default(), moe_overlap: false, ..kept };
    let kept = match layout.pp {
        1 => Candidate { layout: layout.clone(), ..Candidate::default() },
        _ => kept,
    };
    if kept != candidate {
        bail!("{} has what a plain Burn module has not; nearest legal: --layout \"{kept}\"", named());
    }
    Ok(candidate)
}

/// What of a layout such a model can have: schedules, micro-batches and recomputed blocks in pipelines; `None` if it is
/// the one device, which is a CPU.
fn plain(candidate: Candidate, is_cpu: bool) -> Option<Candidate> {
    let (layout, schedule) = (candidate.layout.clone(), candidate.pipeline.schedule);
    if layout.pp == 1 {
        return (layout.world_size() > 1 || !is_cpu).then(|| Candidate { layout, ..Candidate::default() });
    }
    let splits = [ScheduleKind::ZbH1, ScheduleKind::ZbV].iter().any(|kind| Some(*kind) == schedule);
    let recompute =
        Some(candidate.recompute).filter(|again| again.granularity == Granularity::Full && !again.keep_attention);
    (!splits).then(|| Candidate {
        layout,
        accumulation: candidate.accumulation,
        pipeline: PipelineConfig { schedule, ..PipelineConfig::default() },
        recompute: recompute.unwrap_or_default(),
        ..Candidate::default()
    })
}
