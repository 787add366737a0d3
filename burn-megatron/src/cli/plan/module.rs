//! Planning the training of a plain Burn module.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use backend_dist::mesh::ParallelLayout;
use models::lora::{ALL_LINEAR, LoraConfig};

use super::Args;
use crate::config::{ModuleConfig, Precision};
use crate::hf::read_config;
use crate::plan::bytes;
use crate::plan_module::{ModulePlan, ModuleRun, Subject, plan_config};
use crate::train::check_module;

/// Flags that say nothing about a plain Burn module.
const OF_OTHER_PLANS: &str = "\
    config schedule schedule_file microbatch_group_size forward_only layers first_stage_layers last_stage_layers \
    count_embedding count_loss pipeline_layout mtp_num_layers durations transfer draw svg gpus gpus_per_host link \
    network documents no_overlap all_ranks";

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Plain Burn modules")]
pub(super) struct ModuleArgs {
    /// Folder with the config.json of a BERT, T5, ViT, SigLIP or LLaVA: prints memory and arithmetic of a step under AdamW
    #[arg(long, value_name = "DIR", conflicts_with_all = OF_OTHER_PLANS.split(' '))]
    pub(super) hf: Option<PathBuf>,
    /// Sequences or images of a micro-batch [default: 1]
    #[arg(long, value_name = "N", requires = "hf")]
    micro_batch: Option<usize>,
    /// Tokens of a sequence, with image tokens; of T5's input [default: 512]
    #[arg(long, value_name = "N", requires = "hf")]
    seq_length: Option<usize>,
    /// Tokens of T5's output [default: a quarter of its input]
    #[arg(long, value_name = "N", requires = "hf")]
    target_length: Option<usize>,
    /// Classes of a ViT [default: those of config.json, which a ViTModel has not]
    #[arg(long, value_name = "N", requires = "hf")]
    num_labels: Option<usize>,
    /// Mixed precision: GEMMs in bf16, parameters in fp32
    #[arg(long, requires = "hf")]
    autocast: bool,
    /// Rank of LoRA adapters of the linear layers; everything else is frozen
    #[arg(long, value_name = "R", requires = "hf")]
    lora_rank: Option<usize>,
    /// Which linear layers have adapters [default: all-linear]
    #[arg(long, value_name = "NAME", value_delimiter = ',', requires = "lora_rank")]
    lora_target_modules: Vec<String>,
}

/// The plan of the module in a folder, as text.
pub(super) fn plan(args: &Args, folder: &Path) -> Result<String> {
    let module = &args.module;
    if let Some((key, _)) = args.overrides.0.first() {
        bail!(
            "--{key} is a key of a CONFIG, and --hf has none: leave it out; --hf has --micro-batch, --micro-batches, \
             --seq-length, --target-length, --num-labels, --autocast, --lora-rank, --lora-target-modules and the flags of the layout"
        );
    }
    let named = [
        ("micro-batch", module.micro_batch),
        ("micro-batches", args.pipeline.micro_batches),
        ("seq-length", module.seq_length),
        ("target-length", module.target_length),
        ("num-labels", module.num_labels),
        ("lora-rank", module.lora_rank),
    ];
    if let Some((key, _)) = named.into_iter().find(|(_, value)| *value == Some(0)) {
        bail!("--{key} 0 is nothing to plan; nearest legal: 1");
    }
    let config = read_config(folder)?;
    let kind = config["model_type"].as_str().unwrap_or_default();
    let meaningless: &[&str] = match kind {
        "bert" | "llava" => &["target-length", "num-labels"],
        "t5" => &["num-labels"],
        "vit" => &["seq-length", "target-length"],
        "siglip" => &["seq-length", "target-length", "num-labels"],
        _ => &[],
    };
    if let Some((key, _)) = named.into_iter().find(|(key, value)| value.is_some() && meaningless.contains(key)) {
        bail!("--{key} has no meaning with {kind}; nearest legal: without it");
    }
    let length = module.seq_length.unwrap_or(512);
    let lora = module.lora_rank.map(|rank| {
        let all = || vec![ALL_LINEAR.into()];
        let targets = Some(module.lora_target_modules.clone()).filter(|targets| !targets.is_empty());
        LoraConfig { rank, target_modules: targets.unwrap_or_else(all), ..LoraConfig::default() }
    });
    let target = module.target_length.unwrap_or((length / 4).max(1));
    let (batch, classes) = (module.micro_batch.unwrap_or(1), module.num_labels);
    let subject = Subject { batch, length, target, classes, lora };
    let run = ModuleRun {
        layout: args.layout.over(ParallelLayout::default())?,
        micro_batches: args.pipeline.micro_batches.unwrap_or(1),
        autocast: module.autocast,
        ..ModuleRun::default()
    };
    described(args, &plan_config(&config, &subject, &run).map_err(|error| anyhow!(error))?, module.autocast)
}

/// The plan of the run of a BERT or a T5; `None` if the file is that of another model.
pub(super) fn plan_run(args: &Args) -> Result<Option<String>> {
    let ranks = |_: usize| args.machine.gpus.ok_or("plan needs --gpus for it".into());
    let Some(config) = ModuleConfig::load_on(args.config.as_deref(), &args.overrides(), &ranks)? else {
        return Ok(None);
    };
    let (kind, training) = (config.model.model_type(), &config.training);
    let others = [
        ("--draw", args.draw),
        ("--svg", args.svg.is_some()),
        ("--documents", args.machine.documents.is_some()),
        ("--all-ranks", args.machine.all_ranks),
    ];
    if let Some((flag, _)) = others.into_iter().find(|(_, given)| *given) {
        bail!("{flag} has no meaning with {kind}, a plain Burn module; nearest legal: without it");
    }
    check_module(&config)?;
    if training.dtype == Precision::F64 {
        bail!("training.dtype = f64: runs of {kind} are planned in f32 and bf16; nearest legal: f32");
    }
    let subject = Subject {
        batch: training.micro_batch,
        length: training.seq_length,
        target: config.masked.decoder_seq_length,
        classes: None,
        lora: config.lora.config(),
    };
    let run = ModuleRun {
        layout: config.parallel.clone(),
        micro_batches: training.global_batch / (training.micro_batch * config.parallel.dp),
        autocast: training.dtype == Precision::Bf16,
        ..ModuleRun::default()
    };
    let plan = plan_config(&config.model.config, &subject, &run).map_err(|error| anyhow!(error))?;
    Ok(Some(format!("model        {kind}, a plain Burn module\n{}", described(args, &plan, run.autocast)?)))
}

fn described(args: &Args, plan: &ModulePlan, autocast: bool) -> Result<String> {
    let (hardware, name) = args.machine.hardware(if autocast { 2 } else { 4 })?;
    let [least, most] = plan.seconds(&hardware).map(|seconds| seconds * 1e3);
    let verdict = if plan.peak() <= hardware.memory { "fits into" } else { "DOES NOT FIT into" };
    Ok(format!(
        "{plan}{name:<12} {verdict} its {}; passes of a step {least:.1} ms of arithmetic, {most:.1} ms with every operation in \
         a kernel of its own\n",
        bytes(hardware.memory)
    ))
}
