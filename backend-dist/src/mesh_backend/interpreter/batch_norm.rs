//! Batch normalization with the statistics of all data-parallel ranks, as PyTorch's `SyncBatchNorm`.
//!
//! Burn's batch normalization reaches a device as its parts. All that it takes from other samples are means over the
//! second dimension of `x.swap_dims(0, 1).reshape([channels, samples])`: two in the forward pass, of the input and of
//! its squared deviation, and two in the backward pass, of the output's gradient and of that times the normalized input.
//! With the mean over the ranks in place of each, the rest is what one device computes with all ranks' samples.

use super::Interpreter;
use crate::mesh_backend::inner::Inner;
use crate::mesh_backend::reshard::run_collective;
use burn_ir::{BaseOperationIr, NumericOperationIr, OperationIr, TensorId, TensorIr};
use ranks::collective_ops::Collective;
use ranks::comm::ReduceOp;
use std::collections::VecDeque;

/// Recognizes means over the samples of a batch.
#[derive(Default)]
pub(super) struct BatchMeans {
    /// Tensors that are on the way to one, of the last operations that may be.
    recent: VecDeque<(TensorId, Form)>,
}

#[derive(Clone, Copy, PartialEq)]
enum Form {
    /// `x.swap_dims(0, 1)`.
    Swapped,
    /// The same as `[channels, samples]`.
    Flat,
}

/// The four reshapes and swaps of a backward pass come before its means.
const RECENT: usize = 8;

impl BatchMeans {
    /// The output of `op` if that is a mean over samples.
    pub fn of(&mut self, op: &OperationIr) -> Option<TensorIr> {
        match op {
            OperationIr::BaseFloat(BaseOperationIr::SwapDims(op)) if [op.dim1, op.dim2] == [0, 1] => {
                self.note(op.out.id, Form::Swapped);
            }
            OperationIr::BaseFloat(BaseOperationIr::Reshape(op)) => {
                let is_flat = op.out.shape.num_dims() == 2 && op.out.shape[0] == op.input.shape[0];
                if is_flat && self.is(op.input.id, Form::Swapped) {
                    self.note(op.out.id, Form::Flat);
                }
            }
            OperationIr::NumericFloat(_, NumericOperationIr::MeanDim(op)) if op.axis == 1 => {
                return self.is(op.input.id, Form::Flat).then(|| op.out.clone());
            }
            _ => {}
        }
        None
    }

    fn is(&self, id: TensorId, form: Form) -> bool {
        self.recent.contains(&(id, form))
    }

    fn note(&mut self, id: TensorId, form: Form) {
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back((id, form));
    }
}

impl<B: Inner> Interpreter<B> {
    /// Replaces what the rank holds of `x` by the mean of what the ranks of the groups around it hold.
    ///
    /// The device group is locked meanwhile, and at the end of a backward pass Burn frees what is left of all graphs of
    /// the process, on devices of other ranks too. No rank waits for such a lock while others wait for it here if a
    /// program has one backward pass between two collectives outside of operations.
    pub(super) fn mean_across(&mut self, x: &TensorIr) {
        let (mut handle, is_half) = self.share(x, false);
        let mut ranks = 1;
        for group in self.across.iter().filter(|group| group.size() > 1) {
            handle = run_collective(handle, Collective::AllReduce(ReduceOp::Sum), group);
            ranks *= group.size();
        }
        let id = self.new_id();
        self.executor.register_stored(id, handle, is_half);
        let entry = self.table.get_mut(x.id);
        let old = std::mem::replace(&mut entry.local, id);
        let mut share = x.clone();
        for (at, axis) in entry.state.at.iter().zip(&self.axes) {
            if let Some(dim) = at.dim() {
                share.shape[dim] /= axis.ranks;
            }
        }
        self.drop_local(old);
        self.scale(&[share], 1.0 / ranks as f64);
    }
}
