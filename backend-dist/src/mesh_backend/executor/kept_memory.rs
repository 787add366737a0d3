//! Memory that stays with the size of tensor that it was allocated for.

use super::Executor;
use crate::mesh_backend::inner::Inner;
use crate::mesh_backend::interpreter::Window;
use burn_ir::OperationIr;
use std::collections::HashSet;

/// Most sizes of tensors whose memory is kept. A model with batches of one shape has a hundred; with sequences of all
/// lengths nearly every batch has others, and none would use what was kept for them.
const MOST_SIZES: usize = 512;

/// For which tensors memory is kept.
#[derive(Default)]
pub(super) struct KeptMemory {
    /// Whether everything is allocated within a window of kept memory.
    is_for_all: bool,
    /// Elements of tensors, in such a window.
    sizes: HashSet<usize>,
    /// Elements of the rank's share of a parameter, for each size that there is.
    parameters: HashSet<usize>,
}

impl KeptMemory {
    /// An operation allocates its outputs.
    pub fn note(&mut self, op: &OperationIr) {
        if self.is_for_all {
            self.sizes.extend(op.outputs().map(|out| out.shape.num_elements()));
            self.is_for_all = self.sizes.len() <= MOST_SIZES;
        }
    }
}

impl<B: Inner> Executor<B> {
    /// A parameter has so many elements on this rank.
    pub fn note_parameter(&mut self, elements: usize) {
        self.memory.parameters.insert(elements);
    }

    /// Within which all memory is kept.
    pub fn memory_window(&mut self) -> Window {
        self.memory.is_for_all = true;
        let device = self.device.clone();
        Box::new(move |work| B::keeping_memory(&device, work))
    }

    /// Whether all memory is kept.
    pub fn keeps_memory(&self) -> bool {
        self.memory.is_for_all
    }

    /// Runs `work`, whose outputs have so many elements. Parameters, their gradients and an optimizer's states are as
    /// large as they were a step before, so their memory is always kept.
    pub(super) fn allocating<T: Send>(&self, elements: usize, work: impl FnOnce() -> T + Send) -> T {
        let is_lasting = !self.memory.is_for_all && self.memory.parameters.contains(&elements);
        if is_lasting { B::keeping_memory(&self.device, work) } else { work() }
    }
}
