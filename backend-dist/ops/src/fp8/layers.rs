//! The FP8 layers of a rank's part of a model: what is updated for all of them together from step to step.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::Tensor;
use parking_lot::Mutex;

use super::recipe::Fp8Recipe;

/// The quantised tensors of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operand {
    Input,
    Weight,
    Gradient,
}

pub(super) const OPERANDS: usize = 3;

/// The amax of this step and the scales in use of one layer: `[1]`, or `[experts]` for a layer of experts, where 0
/// means none.
#[derive(Debug, Default)]
pub(super) struct AmaxSlots {
    pub found: [Option<Tensor<1>>; OPERANDS],
    pub scales: [Option<[Tensor<1>; 2]>; OPERANDS],
}

/// The layer's name, its recipe and its amax slots.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    pub name: String,
    pub recipe: Fp8Recipe,
    /// Experts of an MoE layer. All ranks have the histories of all of its experts.
    pub experts: Option<usize>,
    pub slots: Arc<Mutex<AmaxSlots>>,
}

impl Layer {
    /// Elements of a slot.
    pub fn width(&self) -> usize {
        self.experts.unwrap_or(1)
    }

    /// `[1]` for each element of all slots.
    pub fn columns(&self) -> usize {
        OPERANDS * self.width()
    }
}

/// The FP8 layers that were built for one model, in the order in which they were built. Clones are the same layers.
///
/// Quantised weights are computed whenever they are used, which suits weights that are gathered and released (ZeRO 3),
/// until [`weights_changed`](Self::weights_changed) is called, or [`frozen_weights_changed`](Self::frozen_weights_changed)
/// for weights that are not trained.
#[derive(Clone, Debug, Default)]
pub struct Fp8Layers {
    /// Those with delayed scaling.
    pub(super) delayed: Arc<Mutex<Vec<Layer>>>,
    pub(super) trained: WeightVersion,
    pub(super) frozen: WeightVersion,
}

impl Fp8Layers {
    /// Reports a change of the trained weights. From now on every change must be reported: until the next call a weight is
    /// quantised once and the result, two bytes for each element, is cached.
    pub fn weights_changed(&self) {
        self.trained.changed();
    }

    /// Ends the caching that [`weights_changed`](Self::weights_changed) began.
    pub fn weights_may_change(&self) {
        self.trained.set(|version| (version + 1) & !1);
    }

    /// As [`weights_changed`](Self::weights_changed), of the frozen weights: when they are read from a checkpoint.
    pub fn frozen_weights_changed(&self) {
        self.frozen.changed();
    }
}

/// Counts the reported changes of a model's weights; even while nothing is cached, so that no odd number comes twice.
#[derive(Clone, Debug, Default)]
pub(super) struct WeightVersion(Arc<AtomicU64>);

impl WeightVersion {
    /// `None` while weights may change without a report.
    pub fn get(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Relaxed)).filter(|version| !version.is_multiple_of(2))
    }

    fn changed(&self) {
        self.set(|version| (version + 1) | 1);
    }

    fn set(&self, next: impl Fn(u64) -> u64) {
        let version = self.0.load(Ordering::Relaxed);
        self.0.store(next(version), Ordering::Relaxed);
    }
}
