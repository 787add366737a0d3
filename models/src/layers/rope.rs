//! Rotary position embeddings: the angles, from the base or with a scaling.
//!
//! All of it is fp32 whatever the model computes in, step by step as Hugging Face transformers does it on a CPU: that is
//! what checkpoints were trained with, and at position 10,000 an angle of full precision is another one.

use std::f32::consts::TAU;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use backend_dist::ops::context::Documents;
use backend_dist::ops::{embedding, rope_packed};
use burn::tensor::{DType, Device, Tensor, TensorData};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::trigonometry::{cos, sin};
use super::yarn::YarnScaling;
use crate::micro_batch::{MicroBatch, positions_in_documents};

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

/// Positions divided by a factor (Chen et al. 2023, <https://arxiv.org/abs/2306.15595>), as Hugging Face transformers does it:
/// frequencies are (`modeling_rope_utils.py`, `_compute_linear_scaling_rope_parameters`).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename = "linear", deny_unknown_fields)]
pub struct LinearScaling {
    /// All frequencies are divided by this.
    pub factor: f64,
}

/// A scaling of the rotary frequencies. In files each is told by its `rope_type`, Llama 3's and YaRN also by their keys.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum RopeScaling {
    /// All frequencies alike.
    Linear(LinearScaling),
    /// Llama 3.1's.
    Llama3(Llama3Scaling),
    /// YaRN.
    Yarn(YarnScaling),
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
            Some("llama3") => serde_json::from_value(keys).map(Self::Llama3),
            Some("yarn") => serde_json::from_value(keys).map(Self::Yarn),
            None if yarn => serde_json::from_value(keys).map(Self::Yarn),
            None => serde_json::from_value(keys).map(Self::Llama3),
            Some(_) => {
                let kind = kind.unwrap_or_default();
                return Err(D::Error::custom(format!("rope_type = {kind}; there are linear, llama3 and yarn")));
            }
        };
        read.map_err(D::Error::custom)
    }
}

impl RopeScaling {
    /// How far the longest waves are stretched.
    pub(crate) fn factor(&self) -> f64 {
        match self {
            Self::Linear(scaling) => scaling.factor,
            Self::Llama3(scaling) => scaling.factor,
            Self::Yarn(scaling) => scaling.factor,
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
    /// Features of a head; all of them are rotated.
    pub head_dim: usize,
    /// Base of the frequencies.
    pub theta: f64,
    /// Scaling of the frequencies.
    pub scaling: Option<RopeScaling>,
}

impl RopeConfig {
    /// Radians per position of each of the `head_dim / 2` rotated pairs.
    pub fn frequencies(&self) -> Vec<f32> {
        let wave = |pair: usize| {
            let exponent = (2 * pair) as f32 / self.head_dim as f32;
            f64::from(self.theta as f32).powf(exponent.into()) as f32
        };
        let waves: Vec<f32> = (0..self.head_dim / 2).map(wave).collect();
        match self.scaling {
            None => waves.into_iter().map(f32::recip).collect(),
            Some(RopeScaling::Linear(scaling)) => waves.iter().map(|w| w.recip() / scaling.factor as f32).collect(),
            Some(RopeScaling::Llama3(scaling)) => waves.iter().map(|wave| scaling.apply(wave.recip())).collect(),
            Some(RopeScaling::Yarn(scaling)) => scaling.frequencies(&waves, self.theta),
        }
    }

    /// What cosines and sines are multiplied with.
    fn factor(&self) -> f32 {
        match self.scaling {
            Some(RopeScaling::Yarn(scaling)) => scaling.attention_factor() as f32,
            _ => 1.0,
        }
    }
}

/// Cosine and sine of every position's angles, `[s, head_dim / 2]`, the same for all samples; or of each sample's,
/// `[s b, head_dim / 2]`, of all samples at the first place, then at the next.
#[derive(Clone, Debug)]
pub struct Angles {
    /// Cosines.
    pub cos: Tensor<2>,
    /// Sines.
    pub sin: Tensor<2>,
}

/// Rotates the first `heads` heads of `x [s, b, h, d]`, each sample by its own angles if there are such.
///
/// # Panics
/// If `angles` are not those of `x`'s rows.
pub fn rotate(x: Tensor<4>, heads: usize, angles: &Angles) -> Tensor<4> {
    let shape @ [seq, samples, all, head_dim] = x.dims();
    let (cos, sin) = (angles.cos.clone(), angles.sin.clone());
    match cos.dims()[0] == seq {
        true => rope_packed(x, cos, sin, heads),
        false => rope_packed(x.reshape([seq * samples, 1, all, head_dim]), cos, sin, heads).reshape(shape),
    }
}

/// Gives the angles of positions, and keeps them for the next forward pass.
#[derive(Clone, Debug)]
pub struct RotaryEmbedding {
    frequencies: Vec<f32>,
    factor: f32,
    kept: Arc<Mutex<Kept>>,
}

/// Angles of places, and of the places of the last documents.
#[derive(Debug, Default)]
struct Kept {
    of_places: Option<(Key, Angles)>,
    of_documents: Option<(Key, Documents, Angles)>,
}

#[derive(Clone, Debug, PartialEq)]
struct Key {
    places: Vec<Range<usize>>,
    dtype: DType,
    device: Device,
    /// Devices are equal whether or not they record gradients; an evaluation must not record because of its angles.
    autodiff: bool,
}

impl RotaryEmbedding {
    /// Angles for a configuration.
    pub fn new(config: &RopeConfig) -> Self {
        Self { frequencies: config.frequencies(), factor: config.factor(), kept: Arc::default() }
    }

    /// The angles of `positions` as tensors of a type on a device.
    pub fn angles(&self, positions: Range<usize>, dtype: DType, device: &Device) -> Angles {
        self.of_places(&mut self.kept(), Key::new(Vec::from([positions]), dtype, device))
    }

    /// The angles of this rank's `rows` rows of the `samples` samples of a micro-batch.
    pub fn of_rows(&self, batch: &MicroBatch, [rows, samples]: [usize; 2], dtype: DType, device: &Device) -> Angles {
        let (places, mut kept) = (batch.places(rows), self.kept());
        let Some(documents) = &batch.restarts else {
            return self.of_places(&mut kept, Key::new(places, dtype, device));
        };
        let key = Key::new(places, dtype, device);
        let known = kept.of_documents.as_ref().filter(|(of, documents_of, _)| *of == key && documents_of == documents);
        if let Some((.., angles)) = known {
            return angles.clone();
        }
        let ids: Vec<i64> = positions_in_documents(&key.places, documents).into_iter().map(|id| id as i64).collect();
        let ids = Tensor::from_data(TensorData::new(ids, [rows * samples, 1]), (device, DType::I64));
        let all = Key::new(Vec::from([0..batch.sequence_length(rows)]), dtype, device);
        let table = self.of_places(&mut kept, all);
        let of = |table: Tensor<2>| embedding(table, ids.clone(), 0).reshape([rows * samples, self.frequencies.len()]);
        let angles = Angles { cos: of(table.cos), sin: of(table.sin) };
        kept.of_documents = Some((key, documents.clone(), angles.clone()));
        angles
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn of_places(&self, kept: &mut Kept, key: Key) -> Angles {
        if let Some((_, angles)) = kept.of_places.as_ref().filter(|(of, _)| *of == key) {
            return angles.clone();
        }
        let positions: Vec<usize> = key.places.iter().cloned().flatten().collect();
        let table = |function: fn(f32) -> f32| {
            let of = |position: &usize, frequency: &f32| function(*position as f32 * frequency) * self.factor;
            let rows = positions.iter().flat_map(|p| self.frequencies.iter().map(move |f| of(p, f)));
            let data = TensorData::new(rows.collect::<Vec<f32>>(), [positions.len(), self.frequencies.len()]);
            Tensor::from_data(data, (&key.device, key.dtype))
        };
        let angles = Angles { cos: table(cos), sin: table(sin) };
        kept.of_places = Some((key, angles.clone()));
        angles
    }
}

impl Key {
    fn new(places: Vec<Range<usize>>, dtype: DType, device: &Device) -> Self {
        Self { places, dtype, device: device.clone(), autodiff: device.is_autodiff() }
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

    /// Between the two limits frequencies go continuously from one to `factor` times stretched.
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
        let said = read(r#"{"rope_type":"longrope","factor":2.0}"#).unwrap_err();
        assert!(said.contains("rope_type = \"longrope\"; there are linear, llama3 and yarn"), "{said}");
        let yarn = r#"{"rope_type":"yarn","factor":2.0,"original_max_position_embeddings":64}"#;
        assert_eq!(read(yarn), Ok(RopeScaling::Yarn(YarnScaling::new(2.0, 64))));
    }

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
