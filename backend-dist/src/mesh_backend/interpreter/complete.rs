//! What a rank does around its share of an operation where placements alone do not make it right: look-ups in a dimension
//! of which the rank has a part, and maxima over one.

use super::Interpreter;
use crate::{logical::rules::Completion, mesh_backend::inner::Inner, mesh_backend::reshard::run_collective};
use burn::backend::tensor::BoolTensor;
use burn::backend::{DeviceOps, TensorMetadata};
use burn_ir::{BaseOperationIr, HandleKind, ModuleOperationIr, OperationIr, TensorId, TensorIr, TensorStatus};
use ranks::collective_ops::Collective;
use ranks::comm::ReduceOp;

/// An operation whose indices are those of a whole dimension.
struct LookUp<'a> {
    indices: &'a mut TensorIr,
    /// What this rank has of the dimension.
    size: usize,
    /// What is added where the indices say; of an operation that reads there, nothing.
    value: Option<&'a mut TensorIr>,
    /// The shape in which the indices broadcast to what is read or added.
    spread: Vec<usize>,
}

impl<'a> LookUp<'a> {
    fn of(op: &'a mut OperationIr) -> Self {
        let along = |indices: &TensorIr, dims: usize, dim: usize| {
            let mut shape = vec![1; dims];
            shape[dim] = indices.shape[0];
            shape
        };
        let with_features = |indices: &TensorIr| [&indices.shape.to_vec()[..], &[1]].concat();
        match op {
            OperationIr::Module(ModuleOperationIr::Embedding(op)) => {
                let spread = with_features(&op.indices);
                Self { size: op.weights.shape[0], value: None, spread, indices: &mut op.indices }
            }
            OperationIr::Module(ModuleOperationIr::EmbeddingBackward(op)) => {
                let spread = with_features(&op.indices);
                Self { size: op.out.shape[0], value: Some(&mut op.out_grad), spread, indices: &mut op.indices }
            }
            OperationIr::BaseFloat(BaseOperationIr::Gather(op)) => {
                let spread = op.indices.shape.to_vec();
                Self { size: op.tensor.shape[op.dim], value: None, spread, indices: &mut op.indices }
            }
            OperationIr::BaseFloat(BaseOperationIr::Scatter(op)) => {
                let spread = op.indices.shape.to_vec();
                let size = op.tensor.shape[op.dim];
                Self { size, value: Some(&mut op.value), spread, indices: &mut op.indices }
            }
            OperationIr::BaseFloat(BaseOperationIr::Select(op)) => {
                let spread = along(&op.indices, op.tensor.shape.num_dims(), op.dim);
                Self { size: op.tensor.shape[op.dim], value: None, spread, indices: &mut op.indices }
            }
            OperationIr::BaseFloat(BaseOperationIr::SelectAssign(op)) => {
                let spread = along(&op.indices, op.tensor.shape.num_dims(), op.dim);
                let size = op.tensor.shape[op.dim];
                Self { size, value: Some(&mut op.value), spread, indices: &mut op.indices }
            }
            other => unreachable!("no rule masks the indices of {other:?}"),
        }
    }
}

impl<B: Inner> Interpreter<B> {
    /// Runs `local`, the rank's share of an operation, with what completes it along the axis `axis`.
    pub(super) fn run_completed(&mut self, mut local: OperationIr, axis: usize, completion: Completion) {
        match completion {
            Completion::MaskIndices => {
                let outside = self.mask_indices(&mut local, axis);
                let out = local.outputs().next().cloned();
                self.executor.register_op(&local);
                let ((mask, temporaries), Some(out)) = (outside, out) else { return };
                temporaries.into_iter().for_each(|id| self.drop_local(id));
                if let Some(mask) = mask {
                    self.replace(&out, |x| {
                        let x = float(x);
                        let mask = B::bool_expand(mask, x.shape());
                        HandleKind::Float(B::float_mask_fill(x, mask, 0.into()))
                    });
                }
            }
            Completion::Max | Completion::Min => {
                let outputs: Vec<TensorIr> = local.outputs().cloned().collect();
                self.executor.register_op(&local);
                let op = if completion == Completion::Max { ReduceOp::Max } else { ReduceOp::Min };
                let group = self.groups[axis].clone();
                for out in outputs {
                    self.report.collective("all-reduce", out.shape.num_elements() * out.dtype.size());
                    self.replace(&out, |x| run_collective(x, Collective::AllReduce(op), &group));
                }
            }
        }
    }

    /// Makes the indices those of what this rank has, and what they add elsewhere zero. What is to be filled with zeros
    /// where nothing was read, and what is to be dropped after the operation.
    fn mask_indices(&mut self, local: &mut OperationIr, axis: usize) -> (Option<BoolTensor<B>>, Vec<TensorId>) {
        let LookUp { indices, size, value, spread } = LookUp::of(local);
        let (HandleKind::Int(global), _) = self.executor.stored(indices) else { unreachable!("indices are integers") };
        let start = (self.groups[axis].rank() * size) as i64;
        let shifted = B::int_sub_scalar(global, start.into());
        let here = B::int_clamp(shifted.clone(), 0.into(), (size as i64 - 1).into());
        let bools = DeviceOps::defaults(&self.device).bool_dtype;
        let outside = B::bool_reshape(B::int_not_equal(shifted, here.clone(), bools), spread.into());
        let mut temporaries = vec![self.new_id()];
        self.executor.register_stored(temporaries[0], HandleKind::Int(here), false);
        (indices.id, indices.status) = (temporaries[0], TensorStatus::ReadOnly);
        let Some(value) = value else {
            return (Some(outside), temporaries);
        };
        let (handle, is_half) = self.executor.stored(value);
        let handle = float(handle);
        let mask = B::bool_expand(outside, handle.shape());
        let masked = B::float_mask_fill(handle, mask, 0.into());
        let id = self.new_id();
        self.executor.register_stored(id, HandleKind::Float(masked), is_half);
        (value.id, value.status) = (id, TensorStatus::ReadOnly);
        temporaries.push(id);
        (None, temporaries)
    }

    /// Replaces a tensor of the rank, which keeps its name.
    fn replace(&mut self, x: &TensorIr, change: impl FnOnce(HandleKind<B>) -> HandleKind<B>) {
        let (handle, is_half) = self.executor.stored(&TensorIr { status: TensorStatus::ReadWrite, ..x.clone() });
        self.executor.register_stored(x.id, change(handle), is_half);
    }
}

pub(super) fn float<B: Inner>(x: HandleKind<B>) -> burn::backend::tensor::FloatTensor<B> {
    match x {
        HandleKind::Float(x) => x,
        _ => unreachable!("sums are of floats"),
    }
}
