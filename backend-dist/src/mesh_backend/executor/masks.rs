//! Which rows of a mask are true from end to end, as modules ask before a softmax: Burn has an operation for that, and
//! under autodiff counts.

use super::Executor;
use super::lazy::Mask;
use crate::mesh_backend::ids::ById;
use crate::mesh_backend::inner::Inner;
use burn_ir::{
    BaseOperationIr, BoolOperationIr, NumericOperationIr, OperationIr, ReduceDimOpIr, ScalarIr, TensorId, TensorIr,
    TensorStatus,
};

/// What a tensor is of another one, of booleans.
#[derive(Clone, Copy, Debug)]
pub(super) enum OfMask {
    /// One for true, else zero.
    Integers(TensorId),
    /// How many of each row are true, and how many it has.
    Counts(TensorId, usize),
    /// Whether all of each row are.
    AllOfRows(TensorId),
}

impl<B: Inner> Executor<B> {
    /// Which booleans a tensor has.
    pub(super) fn note_mask(&mut self, op: &OperationIr) {
        if let Some((out, noted)) = self.of_mask(op) {
            self.of_masks.insert(out.id, noted);
        }
    }

    fn of_mask<'a>(&self, op: &'a OperationIr) -> Option<(&'a TensorIr, OfMask)> {
        let known = |x: &TensorIr| self.of_masks.get(&x.id).copied();
        match op {
            OperationIr::BaseBool(BaseOperationIr::AllDim(op)) if is_of_rows(op) => {
                Some((&op.out, OfMask::AllOfRows(op.input.id)))
            }
            OperationIr::Bool(BoolOperationIr::IntoInt(op)) => Some((&op.out, OfMask::Integers(op.input.id))),
            OperationIr::NumericInt(_, NumericOperationIr::SumDim(op)) if is_of_rows(op) => match known(&op.input)? {
                OfMask::Integers(mask) => Some((&op.out, OfMask::Counts(mask, op.input.shape[op.axis]))),
                _ => None,
            },
            OperationIr::BaseInt(BaseOperationIr::EqualElem(op)) => match (known(&op.lhs)?, op.rhs) {
                (OfMask::Counts(mask, all), ScalarIr::Int(count)) if count == all as i64 => {
                    Some((&op.out, OfMask::AllOfRows(mask)))
                }
                _ => None,
            },
            _ => None,
        }
    }
}

/// Which booleans `x` has, about to be read.
pub(super) fn mask(x: &TensorIr, of_masks: &mut ById<OfMask>) -> Mask {
    let known = of_masks.get(&x.id).copied();
    if x.status == TensorStatus::ReadWrite {
        of_masks.remove(&x.id);
    }
    match known {
        Some(OfMask::AllOfRows(mask)) => Mask::AllOfRows(mask),
        _ => Mask::Tensor(x.id),
    }
}

fn is_of_rows(op: &ReduceDimOpIr) -> bool {
    op.axis + 1 == op.input.shape.num_dims()
}
