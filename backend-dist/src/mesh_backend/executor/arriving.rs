//! GEMMs of layers that overlap with a collective: one multiplies the shards of an all-gather as they arrive, or computes its
//! result in parts, which ranks sum one after the other.

use super::Executor;
use super::lazy::Gemm;
use crate::mesh_backend::inner::Inner;
use burn_ir::{FloatOperationIr, HandleKind, NumericOperationIr, OperationIr, TensorId, TensorIr, TensorStatus};
use ranks::collective_ops::Collective;
use ranks::comm::Group;

/// An all-gather that is on its way, and the tensor that it gives.
pub(super) struct Gather<B: Inner> {
    id: TensorId,
    arriving: B::Arriving,
}

impl<B: Inner> Executor<B> {
    /// Begins to gather the shard `x` along its first dimension. What is gathered becomes the tensor `id`, which the next
    /// operation multiplies. `None`, and nothing has begun, where waiting sums hide the gather, or GEMMs are in FP8.
    pub fn begin_gather(&mut self, id: TensorId, x: &HandleKind<B>, group: &Group) -> Option<HandleKind<B>> {
        let HandleKind::Float(x) = x else { return None };
        if !self.fuses || self.fp8 || !self.sums.is_empty() {
            return None;
        }
        let (whole, arriving) = B::begin_gather(x, group)?;
        self.arriving = Some(Gather { id, arriving });
        Some(HandleKind::Float(whole))
    }

    /// The collective of `x`, and whether it is half precision, if `x` is a GEMM that waits and no waiting sums hide the
    /// collective.
    pub fn gemm_and_collective(
        &mut self,
        x: &TensorIr,
        what: &Collective,
        group: &Group,
    ) -> Option<(HandleKind<B>, bool)> {
        self.arrive();
        let gemm = self.gemms.get(&x.id).filter(|gemm| gemm.is_layer())?.clone();
        if self.fp8 || !self.sums.is_empty() {
            return None;
        }
        let [a, b] = self.operands_of(&gemm);
        let operands = (a, b, gemm.bias.clone());
        let result = B::gemm_and_collective(operands, what, group, &mut |bytes| self.run_sums(bytes))?;
        self.count("GEMM");
        if x.status == TensorStatus::ReadWrite {
            self.gemms.remove(&x.id);
            self.forget(x.id);
        }
        Some((HandleKind::Float(result), self.half == Some(gemm.dtype)))
    }

    /// Waits for the gather that is on its way, unless `op` is a layer's GEMM of it, or adds the bias of that GEMM.
    pub(super) fn arrive_for(&mut self, op: &OperationIr) {
        let Some(id) = self.arriving.as_ref().map(|gather| gather.id) else { return };
        let can_wait = match op {
            OperationIr::Float(_, FloatOperationIr::Matmul(op)) => {
                let lead = op.rhs.shape.num_dims() - 2;
                lead < 2 && op.rhs.shape[..lead].iter().all(|size| *size == 1) && op.lhs.id == id && op.rhs.id != id
            }
            OperationIr::NumericFloat(_, NumericOperationIr::Add(op)) => {
                Some(op.lhs.id) == self.layer && op.rhs.id != id
            }
            _ => false,
        };
        if !can_wait {
            self.arrive();
        }
    }

    /// Waits for the gather that is on its way. The layer's GEMM that reads it runs first, so that it overlaps.
    pub(super) fn arrive(&mut self) {
        let Some(id) = self.arriving.as_ref().map(|gather| gather.id) else { return };
        if let Some(layer) = self.layer.filter(|layer| self.gemms.get(layer).is_some_and(|gemm| gemm.reads(id))) {
            self.run_gemm(layer);
        }
        self.arriving = None;
    }

    /// What is on its way, if the GEMM reads that.
    pub(super) fn gather_of(&mut self, gemm: &Gemm<B>) -> Option<B::Arriving> {
        self.arriving.take_if(|gather| gemm.reads(gather.id)).map(|gather| gather.arriving)
    }
}
