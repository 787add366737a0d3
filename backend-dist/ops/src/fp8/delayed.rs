//! Delayed scaling: a tensor's scale is computed from its amax in earlier steps, so that a cast needs no separate pass
//! over the tensor (`transformer_engine/pytorch/fp8.py`, `FP8GlobalStateManager`).
//!
//! Transformer Engine updates the histories with every forward pass. Here they are updated once a step, over all ranks
//! of a pipeline stage, so that they do not depend on how the batch is split. A tensor without a history is scaled by
//! its present amax, where Transformer Engine would start with 1.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor, TensorData};
use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

use super::layers::{AmaxSlots, Fp8Layers, Layer, OPERANDS, Operand};
use super::recipe::{AmaxAlgorithm, Fp8Recipe, Fp8Scaling, Number};
use crate::dtype::wide;
use ranks::collective::all_reduce;
use ranks::comm::{Group, ReduceOp};

/// New amax slots among `layers` if the recipe has delayed scaling: of one layer, or of all experts of an MoE layer.
pub(super) fn slots(
    layers: &Fp8Layers,
    name: &str,
    recipe: Fp8Recipe,
    experts: Option<usize>,
) -> Option<Arc<Mutex<AmaxSlots>>> {
    (recipe.scaling == Fp8Scaling::Delayed).then(|| {
        let slots = Arc::default();
        let layer = Layer { name: name.into(), recipe, experts, slots: Arc::clone(&slots) };
        layers.delayed.lock().push(layer);
        slots
    })
}

/// Records an amax of this step.
pub(super) fn note(slots: &Mutex<AmaxSlots>, operand: Operand, amax: Tensor<1>) {
    let found = &mut slots.lock().found[operand as usize];
    *found = Some(match found.take() {
        Some(before) => before.max_pair(amax),
        None => amax,
    });
}

/// Scale and reciprocal, once there is a history; 0 for an expert without one.
pub(super) fn scales(slots: &Mutex<AmaxSlots>, operand: Operand) -> Option<[Tensor<1>; 2]> {
    slots.lock().scales[operand as usize].clone()
}

/// The amax histories of a rank's layers. Empty without delayed scaling.
#[derive(Debug, Default)]
pub struct DelayedScaling {
    layers: Vec<Layer>,
    /// `[steps, tensors]`, the latest step first.
    histories: Option<Tensor<2>>,
    /// Of each tensor.
    scales: Option<Tensor<1>>,
}

/// One layer's histories, as a checkpoint stores them: of input, weight and gradient, in the bits of `f64`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerHistory {
    /// The amax of each step, the latest first.
    pub amax: [Vec<u64>; OPERANDS],
    /// The scales in use.
    pub scale: [u64; OPERANDS],
}

impl DelayedScaling {
    /// Of the layers with delayed scaling of a rank's stages.
    pub fn new<'a>(stages: impl IntoIterator<Item = &'a Fp8Layers>) -> Self {
        let of = |stage: &Fp8Layers| stage.delayed.lock().clone();
        Self { layers: stages.into_iter().flat_map(of).collect(), ..Self::default() }
    }

    /// Ends a step: adds the amax of the layers in this step to the histories, after a maximum over each of the groups
    /// in turn. All ranks of a group hold shards or copies of the same layers, and all call this, also those without
    /// tokens. `dtype` is that of the model. Nothing waits for the device.
    pub fn end_step(&mut self, groups: &[Group], device: &Device, dtype: DType) {
        if self.layers.is_empty() {
            return;
        }
        let mut slots: Vec<MutexGuard<AmaxSlots>> = self.layers.iter().map(|layer| layer.slots.lock()).collect();
        let found: Vec<[Option<Tensor<1>>; OPERANDS]> =
            slots.iter_mut().map(|slots| std::mem::take(&mut slots.found)).collect();
        let options = (device, wide(dtype));
        let or_zeros =
            |(found, width): (Option<Tensor<1>>, usize)| found.unwrap_or_else(|| Tensor::zeros([width], options));
        let widths = self.layers.iter().flat_map(|layer| [layer.width(); OPERANDS]);
        let amax = Tensor::cat(found.iter().flatten().cloned().zip(widths).map(or_zeros).collect(), 0);
        let among = groups.iter().filter(|group| group.size() > 1);
        let amax = among.fold(amax, |amax, group| all_reduce(amax, ReduceOp::Max, group));
        let recipe = self.layers[0].recipe;
        let row = amax.clone().unsqueeze_dim::<2>(0);
        let histories = match self.histories.take() {
            Some(before) if recipe.amax_history_len > 1 => {
                let kept = before.dims()[0].min(recipe.amax_history_len - 1);
                Tensor::cat(vec![row, before.narrow(0, 0, kept)], 0)
            }
            _ => row,
        };
        let chosen = match recipe.amax_compute_algo {
            AmaxAlgorithm::MostRecent => amax,
            AmaxAlgorithm::Max => histories.clone().max_dim(0).squeeze_dim::<1>(0),
        };
        let before = self.scales.take().unwrap_or_else(|| self.first(&chosen));
        let scales = updated(chosen, before, self.largest());
        drop(slots);
        self.hand_out(&scales);
        (self.histories, self.scales) = (Some(histories), Some(scales));
    }

    /// Drops the amax of inputs and gradients of a step that is not to be part of the histories. That of a weight stays:
    /// it depends on no sample, and a quantised weight that is kept is not looked at again.
    pub fn forget_step(&mut self) {
        for layer in &self.layers {
            let found = &mut layer.slots.lock().found;
            [Operand::Input, Operand::Gradient].into_iter().for_each(|operand| found[operand as usize] = None);
        }
    }

    /// Drops the amax of weights that are no more, or not those that are trained; the next pass looks at all weights again.
    /// To be called with every change of them.
    pub fn forget_weights(&self) {
        self.layers.iter().for_each(|layer| layer.slots.lock().found[Operand::Weight as usize] = None);
    }

    /// The format's maximum less the margin, for each tensor.
    fn largest(&self) -> Vec<f64> {
        let of = |layer: &Layer| {
            let Layer { recipe, .. } = layer;
            let numbers = [recipe.forward(), recipe.forward(), recipe.backward()];
            let largest = numbers.map(|number: Number| number.max() * 2f64.powi(-(recipe.margin as i32)));
            largest.map(|largest| vec![largest; layer.width()]).concat()
        };
        self.layers.iter().flat_map(of).collect()
    }

    /// The scales before the first amax. An expert without tokens is then scaled by its present amax.
    fn first(&self, like: &Tensor<1>) -> Tensor<1> {
        let of = |layer: &Layer| vec![if layer.experts.is_some() { 0.0 } else { 1.0 }; layer.columns()];
        let scales: Vec<f64> = self.layers.iter().flat_map(of).collect();
        let data = TensorData::new(scales, like.dims()).convert_dtype(like.dtype());
        Tensor::from_data(data, (&like.device(), like.dtype()))
    }

    /// Gives every layer its scales.
    fn hand_out(&self, scales: &Tensor<1>) {
        let inverses = scales.clone().recip();
        let mut start = 0;
        for layer in &self.layers {
            let width = layer.width();
            let of = |operand| {
                let at = start + operand * width;
                Some([scales.clone().narrow(0, at, width), inverses.clone().narrow(0, at, width)])
            };
            layer.slots.lock().scales = std::array::from_fn(of);
            start += layer.columns();
        }
    }

    /// Names of layers and single experts, with their columns.
    fn names(&self) -> Vec<(String, [usize; OPERANDS])> {
        let mut start = 0;
        let mut names = Vec::new();
        for layer in &self.layers {
            for at in 0..layer.width() {
                let name = if layer.experts.is_some() { format!("{}.{at}", layer.name) } else { layer.name.clone() };
                names.push((name, std::array::from_fn(|operand| start + operand * layer.width() + at)));
            }
            start += layer.columns();
        }
        names
    }

    /// Histories and scales by layer name; waits for the device.
    pub fn state(&self) -> BTreeMap<String, LayerHistory> {
        let (Some(histories), Some(scales)) = (&self.histories, &self.scales) else { return BTreeMap::new() };
        let [steps, tensors] = histories.dims();
        let (amax, scale) = (host(histories.clone()), host(scales.clone()));
        let column = |at: usize| (0..steps).map(|step| amax[step * tensors + at].to_bits()).collect();
        let of = |(name, columns): (String, [usize; OPERANDS])| {
            (name, LayerHistory { amax: columns.map(column), scale: columns.map(|at| scale[at].to_bits()) })
        };
        self.names().into_iter().map(of).collect()
    }

    /// Restores the histories of a run of any layout, in tensors of `dtype` (at least f32) on `device`, in place of what
    /// there is. If a layer is missing, all histories start anew.
    pub fn restore(&mut self, state: &BTreeMap<String, LayerHistory>, device: &Device, dtype: DType) {
        (self.histories, self.scales) = (None, None);
        self.layers.iter().for_each(|layer| *layer.slots.lock() = AmaxSlots::default());
        let names = self.names();
        let found: Option<Vec<&LayerHistory>> = names.iter().map(|(name, _)| state.get(name)).collect();
        let Some(found) = found.filter(|found| !found.is_empty()) else { return };
        let steps = found.iter().flat_map(|layer| &layer.amax).map(Vec::len).min().unwrap_or(0);
        if steps == 0 {
            return;
        }
        let tensors = OPERANDS * found.len();
        let (mut rows, mut scales) = (vec![0.0; steps * tensors], vec![0.0; tensors]);
        for ((_, columns), layer) in names.iter().zip(found) {
            for ((at, amax), scale) in columns.iter().zip(&layer.amax).zip(layer.scale) {
                scales[*at] = f64::from_bits(scale);
                (0..steps).for_each(|step| rows[step * tensors + at] = f64::from_bits(amax[step]));
            }
        }
        let dtype = wide(dtype);
        let rows = TensorData::new(rows, [steps, tensors]).convert_dtype(dtype);
        self.histories = Some(Tensor::from_data(rows, (device, dtype)));
        let scales = Tensor::from_data(TensorData::new(scales, [tensors]).convert_dtype(dtype), (device, dtype));
        self.hand_out(&scales);
        self.scales = Some(scales);
    }
}

/// `largest / amax`, or the scale `before` if the amax is 0 or not finite.
fn updated(amax: Tensor<1>, before: Tensor<1>, largest: Vec<f64>) -> Tensor<1> {
    let (device, dtype, count) = (amax.device(), amax.dtype(), [largest.len()]);
    let most = if dtype == DType::F64 { f64::MAX } else { f64::from(f32::MAX) };
    let largest = Tensor::from_data(TensorData::new(largest, count).convert_dtype(dtype), (&device, dtype));
    let usable = amax.clone().greater_elem(0.0).bool_and(amax.clone().lower_equal_elem(most));
    before.mask_where(usable, (largest / amax).clamp_max(most))
}

fn host<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().convert::<f64>().try_to_vec().expect("converted to f64")
}
