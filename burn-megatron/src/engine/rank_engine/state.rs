//! The engine's state as slices of global tensors: what a checkpoint holds, in any layout.

use super::RankEngine;
use crate::checkpoint::{Checkpoint, CheckpointError, Kind, Slice};
use backend_dist::shard::Section;
use burn::module::{ModuleVisitor, Param};
use burn::tensor::Tensor;
use models::CausalLm;
use std::ops::Range;

/// How far a run has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Finished optimizer steps.
    pub step: u64,
    /// Rows of the data set consumed.
    pub consumed: u64,
    /// Updates of the optimizer, which its bias correction counts.
    pub updates: u64,
}

impl<M: CausalLm> RankEngine<M> {
    /// How far the run has come.
    pub fn position(&self) -> Position {
        Position { step: self.step, consumed: self.consumed, updates: self.optimizer.updates() }
    }

    /// Bytes of the tensors of a checkpoint of the whole model.
    pub fn checkpoint_bytes(&self) -> u64 {
        struct Widths(u64);

        impl ModuleVisitor for Widths {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                // Two moments, and a wide copy of parameters that are narrower.
                let own = param.val().dtype().size() as u64;
                self.0 = own + 2 * own.max(4) + if own < 4 { 4 } else { 0 };
            }
        }
        let mut widths = Widths(0);
        self.model().visit(&mut widths);
        widths.0 * self.registry().global_elements() as u64
    }

    /// This rank's share of weights and optimizer states: every element of the model is on exactly one rank of the
    /// world. Replicas of the same weights share the work.
    pub fn snapshot(&self) -> Vec<Slice> {
        self.optimizer.snapshot(0, self.model())
    }

    /// Takes weights, optimizer states and position from a checkpoint that any layout has written. A checkpoint without
    /// updates, such as imported weights, leaves the optimizer at its start.
    ///
    /// # Errors
    /// If a tensor is missing, has another shape or does not cover this rank's slice; then nothing has changed.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
        let state = checkpoint.state();
        let weights = checkpoint.weights();
        // Without updates there are no moments yet.
        let moments = state.updates > 0;
        for section in self.registry().sections() {
            checkpoint.check(weights, &section.name, &section.global_shape)?;
        }
        for (kind, section) in self.optimizer.kinds(0).into_iter().filter(|_| moments) {
            checkpoint.check(kind, &section.name, &section.global_shape)?;
        }
        let model = self.model.take().expect("the model is in place between steps");
        let mut read = |kind, section: &Section, ranges: &[Range<usize>]| {
            let kind = if kind == Kind::Weight { weights } else { kind };
            checkpoint.read_f64(kind, &section.name, &section.global_shape, ranges)
        };
        let (model, result) = self.optimizer.restore(0, model, moments, &mut read);
        self.model = Some(model);
        result?;
        self.optimizer.set_updates(state.updates);
        (self.step, self.consumed) = (state.step, state.consumed_samples);
        Ok(())
    }
}
