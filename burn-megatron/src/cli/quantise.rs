//! The part of `burn-megatron export` that writes few bits.

use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use indicatif::HumanBytes;

use super::calibration::{CalibrationArgs, compared};
use crate::calibrate::SequentialHessians;
use crate::element::Element;
use crate::hf::{Export, Format, HfFolder, Nearest, Rounding, export_compressed, linear_inputs};
use crate::quantise::{Grid, Scheme};

/// Numbers of a quantised weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Bits {
    /// e4m3, a scale for each output channel
    Fp8,
    /// 8-bit integers, a scale for each output channel
    Int8,
    /// 4-bit integers, a scale for each group of inputs
    Int4,
}

/// How weights become these numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Method {
    /// Round to nearest
    Rtn,
    /// Weights that are not rounded yet make up for the errors of others (Frantar et al., 2022); needs --calibration
    Gptq,
}

/// Arguments of a quantised export.
#[derive(Debug, clap::Args)]
pub(super) struct QuantiseArgs {
    /// Write the weights of linear layers, but for the output layer and routers, in few bits as compressed-tensors does
    #[arg(long, value_enum, value_name = "NUMBERS", conflicts_with_all = ["dcp", "torch_dist", "adapter"])]
    quantize: Option<Bits>,
    /// How weights are rounded
    #[arg(long, value_enum, default_value = "rtn", requires = "quantize")]
    method: Method,
    /// Inputs of a linear layer that share a scale in int4 [default: 128]
    #[arg(long, value_name = "N", requires = "quantize")]
    group_size: Option<usize>,
    #[command(flatten)]
    texts: CalibrationArgs,
}

impl QuantiseArgs {
    /// Whether weights are to have few bits. Fails if they are not, and there are texts to read.
    pub fn is_asked(&self) -> Result<bool> {
        if self.quantize.is_none() && self.texts.is_given() {
            bail!("--calibration and --perplexity are for --quantize");
        }
        Ok(self.quantize.is_some())
    }

    /// Writes the weights of the folder `from` to `to`, and gives what to print. Fails if a file, the model or a number
    /// cannot be used.
    pub fn export(&self, from: &Path, to: &Path, element: Option<Element>, shard_bytes: u64) -> Result<String> {
        let folder = super::open_folder(from, None)?;
        let scheme = self.scheme(&folder)?;
        if self.method == Method::Gptq && self.texts.calibration.is_empty() {
            bail!("--method gptq needs --calibration: texts that show what the layers' inputs are like");
        }
        if self.method == Method::Rtn && !self.texts.calibration.is_empty() {
            bail!("--calibration is for --method gptq: rounding to the nearest looks at no text");
        }
        let texts = self.texts.texts(from, &folder)?;
        let mut rounding: Box<dyn Rounding> = match self.method {
            Method::Rtn => Box::new(Nearest),
            Method::Gptq => Box::new(SequentialHessians::new(texts.calibration(&folder))),
        };
        let tokenizer = super::tokenizer_to_copy(from);
        let what = Export {
            config: folder.config(),
            companions: folder.companions(),
            tokenizer: tokenizer.as_deref(),
            element,
            shard_bytes,
            format: Format::Safetensors,
        };
        let before = texts.perplexities(&folder)?;
        let written = export_compressed(to, &what, &folder, scheme, &mut *rounding)?;
        let after = texts.perplexities(&HfFolder::open(to)?)?;

        let mut said = format!(
            "{}: {} matrices in few bits, {} of them by GPTQ, in {} file{} of weights, {}\n",
            to.display(),
            written.matrices,
            written.calibrated,
            written.files,
            if written.files == 1 { "" } else { "s" },
            HumanBytes(written.bytes)
        );
        said += &compared(&before, &after);
        Ok(said)
    }

    fn scheme(&self, folder: &HfFolder) -> Result<Scheme> {
        let layers = linear_inputs(folder.config());
        if layers.is_empty() {
            bail!("--quantize: Hugging Face stores no matrix of this model as a linear layer's (GPT-2 has Conv1D)");
        }
        let bits = self.quantize.context("--quantize is needed")?;
        if let (Bits::Fp8 | Bits::Int8, Some(group)) = (bits, self.group_size) {
            bail!("--group-size {group} is for --quantize int4: the others have a scale for each output channel");
        }
        let group = match bits {
            Bits::Fp8 => return Ok(Scheme { grid: Grid::Fp8, group: None }),
            Bits::Int8 => return Ok(Scheme { grid: Grid::Int { bits: 8 }, group: None }),
            Bits::Int4 => self.group_size.unwrap_or(128),
        };
        let fits = |group: usize| group > 0 && layers.iter().all(|(_, inputs)| inputs.is_multiple_of(group));
        if !fits(group) {
            let wrong = layers.iter().find(|(_, inputs)| group == 0 || !inputs.is_multiple_of(group));
            let (name, inputs) = wrong.unwrap_or(&layers[0]);
            let nearest = (1..=*inputs).filter(|near| fits(*near)).min_by_key(|near| near.abs_diff(group)).unwrap_or(1);
            bail!("--group-size {group} does not divide the {inputs} inputs of {name}; nearest legal: {nearest}");
        }
        Ok(Scheme { grid: Grid::Int { bits: 4 }, group: Some(group) })
    }
}
