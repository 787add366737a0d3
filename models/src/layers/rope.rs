//! Rotary position embeddings: the angles of positions, in fp32 as their [frequencies](super::frequencies) are.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use backend_dist::ops::context::Documents;
use backend_dist::ops::{embedding, rope_packed};
use burn::tensor::{DType, Device, Tensor, TensorData};

use super::frequencies::RopeConfig;
use super::trigonometry::{cos, sin};
use crate::micro_batch::{MicroBatch, positions_in_documents};

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
        Self { frequencies: config.frequencies(), factor: config.attention_factor(), kept: Arc::default() }
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
