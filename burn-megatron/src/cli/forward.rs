//! `burn-megatron forward`: logits, loss and gradients of a Hugging Face folder.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use backend_dist::mesh::ParallelLayout;
use backend_dist::process::Cluster;
use burn::tensor::FloatDType;
use clap::ValueEnum;
use host::partial_file::partial;
use models::ModelConfig;

use super::device::DeviceKind;
use super::layout::LayoutArgs;
use super::refused;
use crate::element::Element;
use crate::forward::{
    Settings, forward, forward_module, preference, read_input, read_module_inputs, read_preference,
    write_module_outputs, write_output, write_preference,
};
use crate::hf::{HfFolder, ModuleFolder, read_adapter};
use crate::preference::PreferenceLoss;
use crate::refusal::Access;

/// What is computed in.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Precision {
    F64,
    F32,
    Bf16,
}

impl Precision {
    /// Of an element.
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

impl From<Precision> for FloatDType {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F64 => FloatDType::F64,
            Precision::F32 => FloatDType::F32,
            Precision::Bf16 => FloatDType::BF16,
        }
    }
}

/// What the loss is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Objective {
    /// Cross-entropy of the next token
    NextToken,
    /// Direct preference optimisation of pairs
    Dpo,
    /// Identity preference optimisation
    Ipo,
    /// Kahneman-Tversky optimisation
    Kto,
    /// Odds-ratio preference optimisation, without a reference model
    Orpo,
    /// Simple preference optimisation, without a reference model
    Simpo,
}

impl Objective {
    /// The loss of pairs that it is.
    fn of_pairs(self) -> Option<PreferenceLoss> {
        Some(match self {
            Self::NextToken => return None,
            Self::Dpo => PreferenceLoss::Dpo,
            Self::Ipo => PreferenceLoss::Ipo,
            Self::Kto => PreferenceLoss::Kto,
            Self::Orpo => PreferenceLoss::Orpo,
            Self::Simpo => PreferenceLoss::Simpo,
        })
    }
}

/// Arguments of `forward`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder with config.json and the weights
    #[arg(long, value_name = "DIR")]
    hf: PathBuf,
    /// Folder with adapter_config.json and adapter_model.safetensors, as peft writes them; gradients are then those of
    /// the adapters
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// What the loss is. With a loss of pairs the input has `input_ids` and `completion_mask` [2 pairs, tokens], first the
    /// chosen sequences, then the rejected ones, and perhaps `beta`, `label_smoothing`, `gamma`, `desirable_weight` and
    /// `undesirable_weight` [1] (kto: also `kl_input_ids` and `kl_completion_mask`); the output `policy_logps`,
    /// `reference_logps`, `rewards`, `loss` and `grad.NAME`
    #[arg(long, value_enum, default_value = "next-token")]
    objective: Objective,
    /// With --objective dpo, ipo or kto: folder of the reference model; without it the model of --hf without --adapter
    #[arg(long, value_name = "DIR")]
    reference: Option<PathBuf>,
    /// Safetensors file with `input_ids` [sequences, tokens] and perhaps `labels` of the same shape; -100 is ignored. An
    /// `attention_mask` may hide padding at the end; models other than causal language models take others, and more by
    /// Hugging Face's names
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// Safetensors file to write: `logits`, with labels `loss`, with --grads `grad.NAME` of every weight, named as in the
    /// folder's files
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// Also compute the gradient of the loss of every weight
    #[arg(long)]
    grads: bool,
    /// Type of weights and activations
    #[arg(long, value_enum, default_value = "f32")]
    dtype: Precision,
    /// Compute everything in --dtype. Without it, RMSNorms and the loss are rounded to fp32 also in f64, as
    /// transformers does it
    #[arg(long)]
    exact: bool,
    /// Where the ranks run
    #[arg(long, value_enum, default_value = "cpu")]
    pub(super) device: DeviceKind,
    #[command(flatten)]
    layout: LayoutArgs,
}

/// Writes the output file and says what is in it. Fails if a file, the model or the layout cannot be used.
pub fn run(args: Args, cluster: &Cluster) -> anyhow::Result<ExitCode> {
    let folders = args.adapter.iter().chain(&args.reference);
    let inputs: Vec<_> = [&args.input, &args.hf].into_iter().chain(folders).collect();
    super::is_no_input("--output", &args.output, &inputs)?;
    if cluster.is_first() {
        // What cannot be written is not worth computing.
        partial(&args.output).map(drop).map_err(refused(Access::Write, &args.output))?;
    }
    let layout = args.layout.over(ParallelLayout::default())?;
    let loss = args.objective.of_pairs();
    if args.reference.is_some() && !loss.is_some_and(PreferenceLoss::has_reference) {
        bail!("--reference has a meaning with --objective dpo, ipo or kto only");
    }
    if ModuleFolder::is_one(&args.hf)? {
        return module(&args, layout, cluster);
    }
    let folder = super::open_folder(&args.hf, Some(cluster))?;
    let adapter = args.adapter.as_deref().map(|path| read_adapter(path, folder.config())).transpose()?;
    let settings = Settings {
        exact: args.exact,
        gradients: args.grads,
        adapter,
        ..Settings::new(args.device.of_cluster(&layout, cluster)?, layout, args.dtype)
    };
    let element = if matches!(args.dtype, Precision::F64) { Element::F64 } else { Element::F32 };
    if let Some(loss) = loss {
        return pairs(&args, loss, &folder, &settings, element);
    }
    let input = read_input(&args.input)?;
    let output = forward(folder.config(), &folder, &input, &settings)?;
    if !cluster.is_first() {
        return Ok(ExitCode::SUCCESS);
    }
    write_output(&args.output, &input, &output, element)?;
    let loss = output.loss.map_or(String::new(), |loss| format!(", loss {loss:.9}"));
    let gradients = match output.gradients.len() {
        0 => String::new(),
        count => format!(", {count} gradients"),
    };
    super::print(&format!(
        "{} x {} tokens in {}, {:?}: logits{loss}{gradients} in {}\n",
        input.sequences,
        input.seq,
        settings.layout,
        args.dtype,
        args.output.display()
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// A model that is a plain Burn module.
fn module(args: &Args, layout: ParallelLayout, cluster: &Cluster) -> anyhow::Result<ExitCode> {
    let folder = ModuleFolder::open(&args.hf)?;
    if args.objective != Objective::NextToken {
        bail!("--objective is for causal language models; `model_type` {} has its own loss", folder.model_type());
    }
    let folder = if let Some(adapter) = &args.adapter { folder.with_adapter(adapter) } else { folder };
    let settings = Settings {
        exact: true,
        gradients: args.grads,
        ..Settings::new(args.device.of_cluster(&layout, cluster)?, layout, args.dtype)
    };
    let outputs = forward_module(&folder, &read_module_inputs(&args.input)?, &settings)?;
    if !cluster.is_first() {
        return Ok(ExitCode::SUCCESS);
    }
    let element = if matches!(args.dtype, Precision::F64) { Element::F64 } else { Element::F32 };
    write_module_outputs(&args.output, &outputs, element)?;
    let shapes = outputs.tensors.iter().map(|(name, tensor)| format!("{name} {:?}", tensor.shape));
    let loss = outputs.loss.map(|loss| format!("loss {loss:.9}"));
    let gradients = Some(outputs.gradients.len()).filter(|count| *count > 0).map(|count| format!("{count} gradients"));
    let what = shapes.chain(loss).chain(gradients).collect::<Vec<_>>().join(", ");
    super::print(&format!(
        "{} in {}, {:?}: {what} in {}\n",
        folder.model_type(),
        settings.layout,
        args.dtype,
        args.output.display()
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// The loss of pairs of answers.
fn pairs(
    args: &Args,
    loss: PreferenceLoss,
    policy: &HfFolder,
    settings: &Settings,
    element: Element,
) -> anyhow::Result<ExitCode> {
    let pairs = read_preference(&args.input, loss)?;
    let other = args.reference.as_deref().map(HfFolder::open).transpose()?;
    if other.is_none() && settings.adapter.is_none() && loss.has_reference() {
        let what = "needs --reference, or --adapter: then the model without it is the reference";
        bail!("--objective {} {what}", format!("{loss:?}").to_lowercase());
    }
    let reference = other.as_ref().unwrap_or(policy);
    if reference.config().vocab_size() != policy.config().vocab_size() {
        let [theirs, ours] = [reference, policy].map(|folder| folder.config().vocab_size());
        bail!("--reference has a vocabulary of {theirs} tokens, --hf of {ours}: they must have the same tokens");
    }
    let output = preference((policy.config(), policy), (reference.config(), reference), &pairs, settings)?;
    if !settings.cluster.is_first() {
        return Ok(ExitCode::SUCCESS);
    }
    write_preference(&args.output, &output, element)?;
    super::print(&format!(
        "{} pairs in {}, {:?}: loss {:.9}, {} gradients in {}\n",
        pairs.input.sequences / 2,
        settings.layout,
        args.dtype,
        output.loss,
        output.gradients.len(),
        args.output.display()
    ))?;
    Ok(ExitCode::SUCCESS)
}
