//! Frequencies of rotary position embeddings: from the base, or with a scaling.
//!
//! Everything is fp32 whatever the model computes in, step by step as Hugging Face transformers does it on a CPU: that
//! is what checkpoints were trained with, and at position 10,000 an angle of full precision is another one.

use std::f32::consts::TAU;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::dynamic::DynamicScaling;
use super::longrope::LongRopeScaling;
use super::yarn::YarnScaling;

/// Llama 3.1's stretching of the low frequencies (Hugging Face transformers, `modeling_rope_utils.py`,
/// `_compute_llama3_parameters`).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Llama3Scaling {
    /// Low frequencies are divided by this.
    pub factor: f64,
    /// Wavelengths longer than `original_max_position_embeddings / low_freq_factor` are stretched fully.
    pub low_freq_factor: f64,
    /// Wavelengths shorter than `original_max_position_embeddings / high_freq_factor` are left alone.
    pub high_freq_factor: f64,
    /// Context length of the model before stretching.
    pub original_max_position_embeddings: usize,
}

impl Llama3Scaling {
    /// Every operation rounds, in the order of `_compute_llama3_parameters`; dividing a number by a tensor is
    /// multiplying it by the tensor's reciprocal there.
    fn apply(&self, frequency: f32) -> f32 {
        let (factor, low, high) = (self.factor as f32, self.low_freq_factor as f32, self.high_freq_factor as f32);
        let context = self.original_max_position_embeddings as f64;
        let wavelength = TAU * frequency.recip();
        if wavelength > (context / self.low_freq_factor) as f32 {
            return frequency / factor;
        }
        if wavelength < (context / self.high_freq_factor) as f32 {
            return frequency;
        }
        let smooth = (context as f32 * wavelength.recip() - low) / (high - low);
        (1.0 - smooth) * frequency / factor + smooth * frequency
    }
}

/// Positions divided by a factor (Chen et al. 2023, <https://arxiv.org/abs/2306.15595>), as Hugging Face transformers
/// does it: frequencies are (`modeling_rope_utils.py`, `_compute_linear_scaling_rope_parameters`).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename = "linear", deny_unknown_fields)]
pub struct LinearScaling {
    /// All frequencies are divided by this.
    pub factor: f64,
}

/// A scaling of the rotary frequencies. In files each is told by its `rope_type`, Llama 3's and YaRN also by their
/// keys.
#[allow(clippy::large_enum_variant, reason = "configurations are copied, so a model's factors are in the value itself")]
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum RopeScaling {
    /// All frequencies alike.
    Linear(LinearScaling),
    /// Of sequences beyond the model's context, by their length.
    Dynamic(DynamicScaling),
    /// Llama 3.1's.
    Llama3(Llama3Scaling),
    /// YaRN.
    Yarn(YarnScaling),
    /// LongRoPE.
    LongRope(LongRopeScaling),
}

/// Not one after the other, so that a message is about the keys that are there.
impl<'de> Deserialize<'de> for RopeScaling {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut keys = Value::deserialize(deserializer)?;
        let kind = keys.as_object_mut().and_then(|keys| keys.remove("rope_type"));
        let has = |key: &str| keys.get(key).is_some();
        let llama3 = has("low_freq_factor") || has("high_freq_factor");
        let yarn = has("original_max_position_embeddings") && !llama3;
        let read = match kind.as_ref().map(|kind| kind.as_str().unwrap_or_default()) {
            Some("linear") => serde_json::from_value(keys).map(Self::Linear),
            Some("dynamic") => serde_json::from_value(keys).map(Self::Dynamic),
            Some("llama3") => serde_json::from_value(keys).map(Self::Llama3),
            Some("yarn") => serde_json::from_value(keys).map(Self::Yarn),
            Some("longrope") => serde_json::from_value(keys).map(Self::LongRope),
            None if yarn => serde_json::from_value(keys).map(Self::Yarn),
            None => serde_json::from_value(keys).map(Self::Llama3),
            Some(_) => {
                let kind = kind.unwrap_or_default();
                return Err(D::Error::custom(format!(
                    "rope_type = {kind}; there are linear, dynamic, llama3, yarn and longrope"
                )));
            }
        };
        read.map_err(D::Error::custom)
    }
}

impl RopeScaling {
    /// Hugging Face's word.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Linear(_) => "linear",
            Self::Dynamic(_) => "dynamic",
            Self::Llama3(_) => "llama3",
            Self::Yarn(_) => "yarn",
            Self::LongRope(_) => "longrope",
        }
    }

    /// How far the longest waves are stretched.
    pub(crate) fn factor(&self) -> f64 {
        match self {
            Self::Linear(scaling) => scaling.factor,
            Self::Dynamic(scaling) => scaling.factor,
            Self::Llama3(scaling) => scaling.factor,
            Self::Yarn(scaling) => scaling.factor,
            Self::LongRope(scaling) => scaling.factor,
        }
    }

    /// Most positions of a sequence whose keys are cached: with LongRoPE and dynamic NTK scaling the angles of all change
    /// when it outgrows the original context.
    pub(crate) fn cached_positions(&self) -> Option<usize> {
        match self {
            Self::LongRope(scaling) => Some(scaling.original_max_position_embeddings),
            Self::Dynamic(scaling) => Some(scaling.original_max_position_embeddings),
            _ => None,
        }
    }
}

impl From<Llama3Scaling> for RopeScaling {
    fn from(scaling: Llama3Scaling) -> Self {
        Self::Llama3(scaling)
    }
}

/// Which angles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeConfig {
    /// Features of a head that are rotated, the first ones.
    pub head_dim: usize,
    /// Base of the frequencies.
    pub theta: f64,
    /// Scaling of the frequencies.
    pub scaling: Option<RopeScaling>,
}

impl RopeConfig {
    /// Radians per position of each of the `head_dim / 2` rotated pairs, of sequences within the original context.
    pub fn frequencies(&self) -> Vec<f32> {
        let waves = self.waves(self.theta as f32);
        match self.scaling {
            None | Some(RopeScaling::Dynamic(_)) => waves.into_iter().map(f32::recip).collect(),
            Some(RopeScaling::Linear(scaling)) => waves.iter().map(|w| w.recip() / scaling.factor as f32).collect(),
            Some(RopeScaling::Llama3(scaling)) => waves.iter().map(|wave| scaling.apply(wave.recip())).collect(),
            Some(RopeScaling::Yarn(scaling)) => scaling.frequencies(&waves, self.theta),
            Some(RopeScaling::LongRope(scaling)) => scaling.frequencies(&waves, false),
        }
    }

    /// The frequencies of sequences of so many positions, if they are others than [`frequencies`](Self::frequencies).
    pub(super) fn frequencies_of(&self, length: usize) -> Option<Vec<f32>> {
        let scaling = self.scaling.filter(|of| of.cached_positions().is_some_and(|original| length > original))?;
        match scaling {
            RopeScaling::LongRope(scaling) => Some(scaling.frequencies(&self.waves(self.theta as f32), true)),
            RopeScaling::Dynamic(scaling) => {
                let waves = self.waves(scaling.base(self.theta, length, self.head_dim));
                Some(waves.into_iter().map(f32::recip).collect())
            }
            _ => None,
        }
    }

    /// Positions per radian without scaling.
    fn waves(&self, base: f32) -> Vec<f32> {
        let wave = |pair: usize| {
            let exponent = (2 * pair) as f32 / self.head_dim as f32;
            f64::from(base).powf(exponent.into()) as f32
        };
        (0..self.head_dim / 2).map(wave).collect()
    }

    /// What cosines and sines are multiplied with.
    pub(super) fn attention_factor(&self) -> f32 {
        match self.scaling {
            Some(RopeScaling::Yarn(scaling)) => scaling.attention_factor() as f32,
            Some(RopeScaling::LongRope(scaling)) => scaling.attention_factor() as f32,
            _ => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `inv_freq` of transformers 5.23 for its tiny Llama 3 test model: head size 4, base 500000, factor 8, low 1,
    /// high 4, original context 64. The wavelengths 2π and 2π·√500000 are below 64/4 and above 64/1.
    #[test]
    fn llama3_scaling_leaves_short_and_divides_long_wavelengths() {
        let scaling = Llama3Scaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 64,
        };
        let config = RopeConfig { head_dim: 4, theta: 500_000.0, scaling: Some(scaling.into()) };
        let frequencies = config.frequencies();
        assert_eq!(frequencies[0], 1.0);
        assert_eq!(frequencies[1], (500_000f64.sqrt() as f32).recip() / 8.0);
    }

    /// Position 8 of a model stretched fourfold has the angles of position 2 of the model as it was.
    #[test]
    fn linear_scaling_divides_positions() {
        let angles = |scaling| RopeConfig { head_dim: 8, theta: 10_000.0, scaling }.frequencies();
        let linear = angles(Some(RopeScaling::Linear(LinearScaling { factor: 4.0 })));
        for (stretched, frequency) in linear.iter().zip(angles(None)) {
            assert_eq!(8.0 * stretched, 2.0 * frequency);
        }
        // transformers divides the fp32 reciprocal, which rounds once more.
        let third = angles(Some(RopeScaling::Linear(LinearScaling { factor: 3.0 })));
        assert_eq!(third[1], (1.0 / 10_000f64.powf(0.25) as f32) / 3.0);
    }

    #[test]
    fn scalings_in_files_are_told_by_their_type() {
        let read = |text: &str| serde_json::from_str::<RopeScaling>(text).map_err(|error| error.to_string());
        let linear = RopeScaling::Linear(LinearScaling { factor: 2.0 });
        let written = serde_json::to_string(&linear).unwrap();
        assert_eq!(written, r#"{"rope_type":"linear","factor":2.0}"#);
        assert_eq!(read(&written), Ok(linear));
        assert!(read(r#"{"factor":2.0}"#).unwrap_err().contains("low_freq_factor"), "no type is guessed");
        let said = read(r#"{"rope_type":"axial","factor":2.0}"#).unwrap_err();
        assert!(said.contains("rope_type = \"axial\"; there are linear, dynamic, llama3, yarn and longrope"), "{said}");
        let yarn = r#"{"rope_type":"yarn","factor":2.0,"original_max_position_embeddings":64}"#;
        assert_eq!(read(yarn), Ok(RopeScaling::Yarn(YarnScaling::new(2.0, 64))));
    }

    /// Between the two limits frequencies go continuously from one to `factor` times stretched.
    #[test]
    fn llama3_scaling_is_continuous() {
        let scaling = Llama3Scaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        let at = |wavelength: f32| scaling.apply(TAU / wavelength) * wavelength / TAU;
        assert!((at(8191.9) - 1.0 / 8.0).abs() < 1e-5);
        assert!((at(2048.1) - 1.0).abs() < 1e-4);
        // Half-way in inverse wavelength, (1 + 4) / 2 = 2.5 turns per context: the mean of both.
        assert!((at(8192.0 / 2.5) - (1.0 + 1.0 / 8.0) / 2.0).abs() < 1e-6);
    }
}
