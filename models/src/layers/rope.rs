//! Rotary position embeddings: the angles of positions, in fp32 as their [frequencies](super::frequencies) are.

use std::ops::Range;
use std::sync::Arc;

use backend_dist::ops::context::Documents;
use backend_dist::ops::{embedding, rope_packed};
use burn::tensor::{DType, Device, Tensor, TensorData};
use parking_lot::{Mutex, MutexGuard};

use super::frequencies::RopeConfig;
use super::trigonometry::{cos, sin};
use crate::micro_batch::{MicroBatch, positions_in_documents};

/// Cosine and sine of every position's angles, `[s, head_dim / 2]`, the same for all samples; or of each sample's,
/// `[s b, head_dim / 2]`, of all samples at the first position, then at the next.
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
/// If `angles` are not those of `x`'s positions.
pub fn rotate(x: Tensor<4>, heads: usize, angles: &Angles) -> Tensor<4> {
    let shape @ [seq, samples, all, head_dim] = x.dims();
    let (cos, sin) = (angles.cos.clone(), angles.sin.clone());
    match cos.dims()[0] == seq {
        true => rope_packed(x, cos, sin, heads),
        false => rope_packed(x.reshape([seq * samples, 1, all, head_dim]), cos, sin, heads).reshape(shape),
    }
}

/// The angles of positions, cached for the next forward pass.
#[derive(Clone, Debug)]
pub struct RotaryEmbedding {
    config: Arc<RopeConfig>,
    /// Of sequences within the original context.
    frequencies: Vec<f32>,
    factor: f32,
    cached: Arc<Mutex<Cached>>,
}

/// Angles of positions, and of positions in the last documents.
#[derive(Debug, Default)]
struct Cached {
    at_positions: Option<(Key, Angles)>,
    of_documents: Option<(Key, Documents, Angles)>,
}

#[derive(Clone, Debug, PartialEq)]
struct Key {
    ranges: Vec<Range<usize>>,
    /// Of a sequence of this length, if that is known.
    length: Option<usize>,
    dtype: DType,
    device: Device,
    /// Devices are equal whether or not they record gradients; an evaluation must not record because of its angles.
    autodiff: bool,
}

impl RotaryEmbedding {
    /// Angles for a configuration.
    pub fn new(config: &RopeConfig) -> Self {
        Self {
            config: Arc::new(*config),
            frequencies: config.frequencies(),
            factor: config.attention_factor(),
            cached: Arc::default(),
        }
    }

    /// The angles of `positions` as tensors of a type on a device. The sequence is within the original context.
    pub fn angles(&self, positions: Range<usize>, dtype: DType, device: &Device) -> Angles {
        self.at_positions(&mut self.cached(), Key::new(Vec::from([positions]), dtype, device))
    }

    /// The angles of all positions of these ranges, one after the other, of such a sequence.
    pub fn angles_of(&self, positions: Vec<Range<usize>>, dtype: DType, device: &Device) -> Angles {
        self.at_positions(&mut self.cached(), Key::new(positions, dtype, device))
    }

    /// The angles of this rank's `count` positions of the `samples` samples of a micro-batch. With LongRoPE and dynamic NTK
    /// scaling the length of the whole sequence decides about the frequencies, packed or not, so that they are the same in
    /// all layouts.
    pub fn of_positions(
        &self,
        batch: &MicroBatch,
        [count, samples]: [usize; 2],
        dtype: DType,
        device: &Device,
    ) -> Angles {
        let (ranges, mut cached) = (batch.positions(count), self.cached());
        let length = batch.sequence_length(count);
        let key = |ranges| Key { length: Some(length), ..Key::new(ranges, dtype, device) };
        let Some(documents) = &batch.restarts else { return self.at_positions(&mut cached, key(ranges)) };
        let (all, key) = (key(Vec::from([0..length])), key(ranges));
        let known =
            cached.of_documents.as_ref().filter(|(of, documents_of, _)| *of == key && documents_of == documents);
        if let Some((.., angles)) = known {
            return angles.clone();
        }
        let ids: Vec<i64> = positions_in_documents(&key.ranges, documents).into_iter().map(|id| id as i64).collect();
        let ids = Tensor::from_data(TensorData::new(ids, [count * samples, 1]), (device, DType::I64));
        let table = self.at_positions(&mut cached, all);
        let of = |table: Tensor<2>| embedding(table, ids.clone(), 0).reshape([count * samples, self.frequencies.len()]);
        let angles = Angles { cos: of(table.cos), sin: of(table.sin) };
        cached.of_documents = Some((key, documents.clone(), angles.clone()));
        angles
    }

    fn cached(&self) -> MutexGuard<'_, Cached> {
        self.cached.lock()
    }

    fn at_positions(&self, cached: &mut Cached, key: Key) -> Angles {
        if let Some((_, angles)) = cached.at_positions.as_ref().filter(|(of, _)| *of == key) {
            return angles.clone();
        }
        let positions: Vec<usize> = key.ranges.iter().cloned().flatten().collect();
        let of_length = key.length.and_then(|length| self.config.frequencies_of(length));
        let frequencies = of_length.as_ref().unwrap_or(&self.frequencies);
        let table = |function: fn(f32) -> f32| {
            let of = |position: &usize, frequency: &f32| function(*position as f32 * frequency) * self.factor;
            let angles = positions.iter().flat_map(|p| frequencies.iter().map(move |f| of(p, f)));
            let data = TensorData::new(angles.collect::<Vec<f32>>(), [positions.len(), frequencies.len()]);
            Tensor::from_data(data, (&key.device, key.dtype))
        };
        let angles = Angles { cos: table(cos), sin: table(sin) };
        cached.at_positions = Some((key, angles.clone()));
        angles
    }
}

/// The rotations of a decoder's layers. Layers of equal frequencies share their angles; some may have none.
#[derive(Clone, Debug)]
pub struct LayerRopes {
    rotations: Vec<RotaryEmbedding>,
    /// Of each layer.
    indices: Vec<Option<usize>>,
}

impl LayerRopes {
    /// The rotation of each layer, in order.
    pub fn new(layers: impl IntoIterator<Item = Option<RopeConfig>>) -> Self {
        let (mut known, mut indices): (Vec<RopeConfig>, Vec<_>) = (Vec::new(), Vec::new());
        for config in layers {
            let find = |config| known.iter().position(|other| *other == config);
            let index = config.map(|config| find(config).unwrap_or(known.len()));
            known.extend(config.filter(|_| index == Some(known.len())));
            indices.push(index);
        }
        Self { rotations: known.iter().map(RotaryEmbedding::new).collect(), indices }
    }

    /// What `of` is for the rotation of each layer, computed once for all layers that share it.
    pub fn map<T: Clone>(&self, of: impl FnMut(&RotaryEmbedding) -> T) -> impl Iterator<Item = Option<T>> {
        let shared: Vec<T> = self.rotations.iter().map(of).collect();
        self.indices.iter().map(move |index| index.map(|index| shared[index].clone()))
    }

    /// The angles of a layer for the rank's activations `x` of a micro-batch, before its sequence is sharded of `positions`
    /// positions.
    pub fn angles(&self, layer: usize, positions: usize, x: &Tensor<3>, batch: &MicroBatch) -> Option<Angles> {
        let samples = x.dims()[1];
        self.of(layer).map(|rope| rope.of_positions(batch, [positions, samples], x.dtype(), &x.device()))
    }

    /// The rotation of a layer, counted from the first of these.
    pub fn of(&self, layer: usize) -> Option<&RotaryEmbedding> {
        self.indices[layer].map(|index| &self.rotations[index])
    }
}

impl Key {
    fn new(ranges: Vec<Range<usize>>, dtype: DType, device: &Device) -> Self {
        Self { ranges, length: None, dtype, device: device.clone(), autodiff: device.is_autodiff() }
    }
}
