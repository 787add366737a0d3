//! The values of `verify`'s flags.

use std::fmt;
use std::sync::LazyLock;

use backend_dist::ops::fp8::{Fp8Format, Fp8Scaling};
use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser};
use models::FamilyConfig;
use models::family::{Sample, SampleSizes};
use models::lora::BaseFormat;

use crate::verify::LoraKind;

/// The models that can be verified, and their names with `_` in place of `-`.
static MODELS: LazyLock<Vec<(Sample<FamilyConfig>, String)>> = LazyLock::new(|| {
    let samples = FamilyConfig::samples(&SampleSizes::default()).into_iter();
    samples.map(|sample| (sample.clone(), sample.name.replace('-', "_"))).collect()
});

/// Models that are plain Burn modules, and what they are.
pub const MODULES: [(&str, &str); 4] = [
    ("bert", "BERT with a head for masked tokens and one for the next sentence"),
    ("t5", "T5: encoder and decoder, each of --layers"),
    ("vit", "ViT with a head for seven classes, images of 8 x 8"),
    ("llava", "LLaVA: image tower and language model, each of --layers"),
];

/// The names of the models that can be verified.
pub fn models() -> PossibleValuesParser {
    let families = MODELS.iter().map(|(sample, other)| {
        let other = Some(other.as_str()).filter(|other| *other != sample.name);
        PossibleValue::new(sample.name).help(sample.about).aliases(other)
    });
    let modules = MODULES.map(|(name, about)| PossibleValue::new(name).help(about));
    PossibleValuesParser::new(families.chain(modules).collect::<Vec<_>>())
}

/// The model of a name of [`models()`].
pub fn model(name: &str, sizes: &SampleSizes) -> FamilyConfig {
    let name = name.replace('_', "-");
    let found = FamilyConfig::samples(sizes).into_iter().find(|of| of.name == name);
    found.expect("its name is among the legal ones").config
}

/// Model and batch sizes to choose from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Size {
    /// Seconds on a CPU: width 32, head_dim 8, vocabulary 101, sequences of 16 tokens
    Tiny,
    /// Multiples of 16 on each of four ranks, which FP8 takes: width 64, head_dim 8, vocabulary 101, sequences of 64
    /// tokens
    Wide,
    /// Whole blocks of fp8-block on two ranks, of nf4 on four: width 256, head_dim 64, vocabulary 101, sequences of 16 tokens
    Blocks,
    /// Whole blocks of FP8 by blocks on two ranks: width 256, head_dim 64, vocabulary 101, sequences of 512 tokens
    Fp8Blocks,
    /// What the GPU kernels take: width 256, head_dim 64, vocabulary 512, sequences of 256 tokens
    Kernels,
}

impl Size {
    /// Width, inner width of the MLP, heads, key/value heads, vocabulary, tokens of a sequence.
    pub fn of(self) -> [usize; 6] {
        match self {
            Self::Tiny => [32, 64, 4, 2, 101, 16],
            Self::Wide => [64, 128, 8, 4, 101, 64],
            Self::Blocks => [256, 256, 4, 4, 101, 16],
            Self::Fp8Blocks => [256, 256, 4, 4, 101, 512],
            Self::Kernels => [256, 512, 4, 2, 512, 256],
        }
    }
}

/// Numbers of 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// e4m3 everywhere
    E4m3,
    /// e4m3, and e5m2 for gradients of outputs
    Hybrid,
}

/// What has a scale of its own in FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Scaling {
    /// Each tensor
    Tensorwise,
    /// 128 consecutive numbers, of weights 128 x 128
    Blockwise,
}

impl Scaling {
    pub fn of(self) -> Fp8Scaling {
        match self {
            Self::Tensorwise => Fp8Scaling::Tensorwise,
            Self::Blockwise => Fp8Scaling::Blockwise,
        }
    }
}

/// Kinds of adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Adapters {
    /// Scale alpha / r
    Lora,
    /// Scale alpha / √r
    Rslora,
    /// Magnitude and direction apart
    Dora,
}

/// Kinds of frozen weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Base {
    /// 4 bits in blocks of 64, with double quantization
    Nf4,
    /// E4M3 in blocks of 128 x 128
    Fp8Block,
}

impl Base {
    pub fn of(self) -> BaseFormat {
        match self {
            Self::Nf4 => BaseFormat::Nf4,
            Self::Fp8Block => BaseFormat::Fp8Block,
        }
    }
}

impl Adapters {
    pub fn of(self) -> LoraKind {
        match self {
            Self::Lora => LoraKind::Lora,
            Self::Rslora => LoraKind::Rslora,
            Self::Dora => LoraKind::Dora,
        }
    }
}

impl Format {
    pub fn of(self) -> Fp8Format {
        match self {
            Self::E4m3 => Fp8Format::E4m3,
            Self::Hybrid => Fp8Format::Hybrid,
        }
    }
}

/// The most ranks of a list of layouts.
const MOST_RANKS: usize = 256;

pub fn ranks(text: &str) -> Result<usize, String> {
    let ranks: usize = text.parse().map_err(|_| format!("not a number of ranks; legal: 1 to {MOST_RANKS}"))?;
    match ranks {
        1..=MOST_RANKS => Ok(ranks),
        _ => {
            Err(format!("a list of layouts has 1 to {MOST_RANKS} ranks; nearest legal: {}", ranks.clamp(1, MOST_RANKS)))
        }
    }
}

/// Every difference is below infinity, and none is below 0 or NaN: such bounds would say nothing.
pub fn tolerance(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(bound) if bound.is_finite() && bound >= 0.0 => Ok(bound),
        Ok(bound) if bound < 0.0 => Err("a difference is at least 0; nearest legal: 0".into()),
        _ => Err("not a finite number; nearest legal: 1e-10".into()),
    }
}

/// A flag's value as it is written.
pub struct Words<T: ValueEnum>(pub T);

impl<T: ValueEnum> fmt::Display for Words<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.to_possible_value().map_or(Ok(()), |value| f.write_str(value.get_name()))
    }
}
