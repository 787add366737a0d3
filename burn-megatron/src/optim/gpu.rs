//! What a bucket has on a GPU only: weights in one buffer, and everything in one launch.

use super::adamw::Coefficients;
use super::blocks::Blocks;
use super::config::OptimizerConfig;
use super::flat::{Flat, wide};
use super::layout::{Layout, Part};
use super::modules::{map, visit};
use super::rule::Rule;
use super::states::place;
use backend_dist::buffer_collectives::{Wait, all_gather};
use backend_dist::comm::Group;
use backend_dist::gpu::buffer::{
    AdamWBuffers, AdamWStep, Buffer, ChunkTable, Moments, MomentumBuffers, MomentumRule, MomentumStep, Parameters,
    Place, RangeTable, TensorTable, adamw, join_masters, momentum, split_masters,
};
use backend_dist::shard::{Element, HostFloats, into_data};
use burn::module::Module;
use burn::tensor::{DType, Device, Tensor};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

/// The weights of a bucket in the model's type. The module's parameters are views of them and never change identity: a
/// step writes to the rank's region, and data-parallel ranks gather their regions.
///
/// Under ZeRO 3 the memory of the gathered weights is shared with other buckets (`weight_buffers`), and the region lies
/// elsewhere.
pub(super) struct Weights {
    all: Buffer,
    /// What this rank updates.
    own: Buffer,
    narrow: bool,
    /// What the masters have more than `own`, where they are not kept apart.
    remainder: Option<Buffer>,
    /// The collective of the last step.
    running: RefCell<Option<Wait>>,
}

impl Weights {
    /// Zeros; `None` where the device has no buffers.
    pub fn new(layout: &Layout, region: &Range<usize>, device: &Device, dtype: DType, split: bool) -> Option<Self> {
        let all = Buffer::zeros(layout.len, device, dtype)?;
        let own = all.part(region.clone());
        Some(Self::of(all, own, region.len(), device, dtype, split))
    }

    /// Zeros for the region, and the slot as it is; `None` where the device has no buffers.
    pub fn in_slot(slot: &Buffer, region: &Range<usize>, device: &Device, dtype: DType, split: bool) -> Option<Self> {
        let own = Buffer::zeros(region.len(), device, dtype)?;
        Some(Self::of(slot.clone(), own, region.len(), device, dtype, split))
    }

    fn of(all: Buffer, own: Buffer, len: usize, device: &Device, dtype: DType, split: bool) -> Self {
        // Without remainders the masters are the weights.
        let remainder = if split { Buffer::zeros(len, device, dtype) } else { None };
        Self { all, own, narrow: wide(dtype) != dtype, remainder, running: RefCell::new(None) }
    }

    /// Whether the masters are weights with remainders.
    pub fn has_remainders(&self) -> bool {
        self.remainder.is_some()
    }

    /// Bytes of the remainders.
    pub fn remainder_bytes(&self) -> u64 {
        let bytes = |remainder: &Buffer| 2 * remainder.tensor().dims()[0] as u64;
        self.remainder.as_ref().map_or(0, bytes)
    }

    /// The region's masters, from weights with remainders.
    pub fn masters(&self) -> Option<Flat> {
        self.wait();
        self.remainder.as_ref().map(|remainder| Flat::new(join_masters(&self.own, remainder)))
    }

    /// Replaces the region's masters, where they are weights with remainders.
    pub fn set_masters(&self, values: HostFloats, device: &Device) {
        let Some(remainder) = &self.remainder else { return };
        self.wait();
        let values = Tensor::from_data(into_data(values.convert(Element::F32)), (device, DType::F32));
        split_masters(values, &self.own, remainder);
    }

    /// Moves the module's parameters here.
    pub fn take<M: Module>(&self, model: M, layout: &Layout, region: &Range<usize>, zero: u8) -> M {
        visit(&model, layout, |slot, values| self.put(layout.slots[slot].range.start, values));
        if zero == 3 {
            self.own.put(0, self.all.part(region.clone()).tensor());
        }
        map(model, layout, |slot, _| self.all.part(layout.slots[slot].range.clone()).tensor())
    }

    /// Replaces elements from `at` on.
    pub fn put(&self, at: usize, values: Tensor<1>) {
        self.wait();
        self.all.put(at, values);
    }

    /// The `len` main values of this rank's region: the weights themselves, or an fp32 copy of bf16 or f16 ones; `None`
    /// where they are weights with remainders.
    pub fn values(&self, len: usize, device: &Device) -> Option<Flat> {
        self.wait();
        if self.has_remainders() {
            return None;
        }
        if !self.narrow {
            return Some(Flat::over(self.own.clone(), DType::F32, len));
        }
        let mut values = Flat::zeros(len, device, DType::F32);
        values.put(0, self.own.tensor());
        Some(values)
    }

    /// The weights of this rank's region.
    pub fn own(&self) -> &Buffer {
        &self.own
    }

    /// Rounds the region's main values to the weights, unless they are the same.
    pub fn set_own(&self, values: &Flat) {
        if self.narrow {
            self.wait();
            self.own.put(0, values.part(0..values.len()));
        }
    }

    /// Replaces the region, rounded to the weights' type.
    pub fn replace(&self, values: Tensor<1>) {
        self.wait();
        self.own.put(0, values);
    }

    /// Starts the collective of the data-parallel ranks' regions.
    pub fn collective(&self, dp_ranks: &Group) {
        self.wait();
        *self.running.borrow_mut() = Some(all_gather(&self.own, &self.all, dp_ranks));
    }

    /// Lets what the thread issues from now on find the weights of the last step.
    pub fn wait(&self) {
        if let Some(wait) = self.running.take() {
            wait.wait();
        }
    }
}

/// One launch for a region of the bucket instead of one for each part.
pub(super) struct Launches {
    /// The elements of the region that the rank counts in norms, by shard.
    pub counted: ChunkTable,
    /// By the number of ranks over which gradients are partial: these gradients.
    pub partial: BTreeMap<usize, RangeTable>,
    /// The parts, where an element-wise rule updates all of them and there are any.
    tensors: Option<TensorTable>,
}

impl Launches {
    /// `sum` holds the region's gradients, of which `counted` count in norms.
    pub fn new(
        sum: &Buffer,
        counted: &[(usize, Vec<Range<usize>>)],
        (layout, parts): (&Layout, &[Part]),
        region: &Range<usize>,
        config: &OptimizerConfig,
    ) -> Self {
        let ranges: Vec<_> = counted.iter().flat_map(|(_, ranges)| ranges.clone()).collect();
        let tensors = tensor_table(sum, (layout, parts), region.len(), config);
        let mut partial = BTreeMap::<usize, Vec<Range<usize>>>::new();
        for part in parts {
            if let Some(size) = layout.units[part.unit].partial {
                partial.entry(size).or_default().push(part.at..part.at + part.range.len());
            }
        }
        let partial = partial.into_iter().map(|(size, ranges)| (size, RangeTable::new(sum, &ranges))).collect();
        Self { counted: ChunkTable::new(sum, &ranges), partial, tensors }
    }

    /// An element-wise step over the region, weights included; false where that is not for one launch.
    pub fn step(
        &self,
        rule: &Rule,
        [values, first, second, sum]: [Option<&Flat>; 4],
        blocks: Option<&[Blocks; 2]>,
        weights: Option<&Weights>,
    ) -> bool {
        let [master, first, second, grad] = [values, first, second, sum].map(|flat| flat.and_then(Flat::buffer));
        let (Some(grad), Some(tensors)) = (grad, &self.tensors) else { return false };
        weights.into_iter().for_each(Weights::wait);
        let weight = weights.filter(|weights| weights.narrow).map(|weights| &weights.own);
        let remainder = weights.and_then(|weights| weights.remainder.as_ref());
        let parameters = match (master, weight, remainder) {
            (_, Some(weight), Some(remainder)) => Parameters::Split { weight, remainder },
            (Some(master), Some(weight), None) => Parameters::Master { master, weight },
            (Some(master), ..) => Parameters::Wide(master),
            (None, ..) => return false,
        };
        let by_momentum = |rule: MomentumRule, lr: f64, weight_decay: f64, grad_scale: f64| {
            let Some(master) = master else { return false };
            let step = MomentumStep { rule, lr, keep: 1.0 - lr * weight_decay, grad_scale };
            momentum(MomentumBuffers { master, momentum: first, grad, weight, tensors }, &step);
            true
        };
        match rule {
            Rule::AdamW(k) => {
                let moments = match (blocks.map(|[m, v]| (m.gpu(), v.gpu())), first, second) {
                    (Some((Some(first), Some(second))), ..) => Moments::Blocks(first, second),
                    (None, Some(first), Some(second)) => Moments::Floats(first, second),
                    _ => return false,
                };
                adamw(AdamWBuffers { parameters, moments, grad, tensors }, &adamw_step(k));
                true
            }
            Rule::Sgd(k) => {
                let momentum = k.config.momentum;
                let rule = match k.config.nesterov {
                    _ if momentum == 0.0 => MomentumRule::Plain,
                    true => MomentumRule::Nesterov { momentum },
                    false => MomentumRule::Sum { momentum },
                };
                by_momentum(rule, k.lr, k.config.weight_decay, k.grad_scale)
            }
            Rule::Lion(k) => {
                let rule = MomentumRule::Lion { beta1: k.config.beta1, beta2: k.config.beta2 };
                by_momentum(rule, k.lr, k.config.weight_decay, k.grad_scale)
            }
        }
    }
}

/// The parts of `len` gradients, where an element-wise rule updates all of them and there are any.
pub(super) fn tensor_table(
    sum: &Buffer,
    (layout, parts): (&Layout, &[Part]),
    len: usize,
    config: &OptimizerConfig,
) -> Option<TensorTable> {
    let has_matrices = config.muon().is_some() && parts.iter().any(|part| layout.units[part.unit].matrix);
    (!parts.is_empty() && !has_matrices).then(|| {
        let decays = |part: &Part| layout.units[part.unit].decays || config.decays_vectors();
        let decays: Vec<bool> = parts.iter().map(decays).collect();
        TensorTable::new(sum, &ends(parts, len), &decays, &places(layout, parts))
    })
}

/// The constants of a launch.
pub(super) fn adamw_step(k: &Coefficients) -> AdamWStep {
    AdamWStep {
        beta1: k.config.beta1,
        beta2: k.config.beta2,
        eps: k.config.eps,
        step_size: k.step_size,
        root_scale: k.root_scale,
        keep: k.keep,
        grad_scale: k.grad_scale,
        step: k.step,
    }
}

/// Where each part ends in a region of `len` elements, the gap after it included. A gap at the start is the first
/// part's.
fn ends(parts: &[Part], len: usize) -> Vec<u32> {
    parts.iter().skip(1).map(|part| part.at).chain([len]).map(|end| end as u32).collect()
}

/// The place of each part, given the number of an element in the region.
fn places(layout: &Layout, parts: &[Part]) -> Vec<Place> {
    let of = |part: &Part| {
        let place = place(&layout.units[part.unit], &part.range);
        Place { first: place.first.wrapping_sub(part.at as u32), ..place }
    };
    parts.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_belong_to_the_part_before() {
        let part = |at: usize, len: usize| Part { unit: 0, range: 100 + at..100 + at + len, at };
        assert_eq!(ends(&[part(0, 5), part(8, 4), part(16, 1)], 24), [8, 16, 24]);
        assert_eq!(ends(&[part(8, 2)], 12), [12]);
    }
}
