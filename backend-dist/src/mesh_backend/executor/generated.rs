//! Tensors that are computed where they are used, from nothing that is in memory.

use super::chain::Chain;
use super::expression::{self, Expression, Generated};
use super::lazy::Source;
use super::{Executor, Float};
use crate::mesh_backend::ids::ById;
use crate::mesh_backend::inner::Inner;
use burn::tensor::Shape;
use burn_ir::{OperationIr, TensorId, TensorIr, TensorStatus};
use kernels_cubecl::fused::Draw;

impl<B: Inner> Executor<B> {
    /// What a tensor is, if it is not in memory.
    pub fn generated(&self, id: TensorId) -> Option<Generated> {
        self.generated.get(&id).map(|(generated, _)| *generated)
    }

    pub fn register_generated(&mut self, id: TensorId, generated: Generated, shape: Shape) {
        self.generated.insert(id, (generated, shape));
    }

    /// Keeps a random tensor of zeros and ones as its draw, if it can be computed where it is used.
    pub fn keep_draw(&mut self, out: &TensorIr, draw: Draw) -> bool {
        let fits = (1..=self.limits.elements).contains(&out.shape.num_elements());
        let is_kept = self.fuses && fits && out.dtype == self.limits.dtype;
        if is_kept {
            self.register_generated(out.id, Generated::Draw(draw), out.shape.clone());
        }
        is_kept
    }

    /// Keeps a tensor of which all elements are one number as that number.
    pub(super) fn note_constant(&mut self, op: &OperationIr) -> bool {
        let constant = expression::constant(op).filter(|(_, out)| out.dtype == self.limits.dtype);
        if let Some((value, out)) = constant {
            self.register_generated(out.id, Generated::Number(value), out.shape.clone());
        }
        constant.is_some()
    }

    /// As [`settle_before`](Self::settle_before), and writes a generated tensor to memory.
    pub(super) fn settle_generated(&mut self, id: TensorId) {
        self.settle_before(id);
        let Some((generated, shape)) = self.generated.remove(&id) else { return };
        let (x, is_half) = match generated {
            Generated::Number(value) => {
                self.count("fill");
                (B::float_full(shape, value.into(), &self.device, self.limits.dtype.into()), false)
            }
            Generated::Draw(draw) => self.drawn(draw, shape),
        };
        self.insert(id, x, is_half);
    }

    /// A draw in memory, and whether that is half precision.
    fn drawn(&mut self, draw: Draw, shape: Shape) -> (Float<B>, bool) {
        self.count("random numbers");
        let out = TensorIr { id: TensorId::new(0), shape, status: TensorStatus::NotInit, dtype: self.limits.dtype };
        let mut chain = Chain::<Source<B>>::default();
        chain.join((&Expression::Bernoulli(draw), &out), self.limits, &ById::default(), |_, _| {
            unreachable!("a draw reads no tensor")
        });
        let taken = chain.take(self.limits.dtype, self.half.is_some(), Some(out.id));
        let (launch, _) = taken.expect("a draw has elements");
        let is_half = launch.outputs[0].is_half;
        (self.launch(launch).remove(0), is_half)
    }
}
