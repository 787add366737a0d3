//! GEMMs, which wait where they may be a sum of GEMMs or a part of attention, or may add a bias.

use super::chain::Launch;
use super::lazy::{Gemm, Source};
use super::{Executor, Float};
use crate::mesh_backend::inner::Inner;
use burn::tensor::DType;
use burn_ir::{HandleKind, MatmulOpIr, NumericOperationIr, OperationIr, TensorId, TensorStatus};
use std::sync::Arc;

impl<B: Inner> Executor<B> {
    /// `a · b`.
    pub(super) fn matmul(&mut self, op: &MatmulOpIr) {
        // What waited for a bias alone has none.
        if let Some(before) = self.may_have_bias.take() {
            self.run_gemm(before);
        }
        if self.gemm_of_attention(op) || self.gradient_gemm(op) {
            return;
        }
        let dtype = self.half.filter(|_| op.out.dtype == self.limits.dtype).unwrap_or(op.out.dtype);
        let (rank, lead) = (op.out.shape.num_dims(), op.out.shape.num_dims().saturating_sub(2));
        let is_batch = op.lhs.shape[..lead] == op.rhs.shape[..lead];
        // Burn's gradient of a weight is a sum over samples.
        let may_be_summed = rank == 3 && op.out.shape[0] > 1 && is_batch;
        let may_be_attention = rank == 4 && is_batch;
        let inputs = [&op.lhs, &op.rhs];
        let names = inputs.map(|x| self.name(x.id));
        inputs.iter().for_each(|x| self.want(x.id, dtype));
        let operands = inputs.map(|x| (x.id, self.in_type(x, dtype)));
        let gemm = Gemm::new(operands, names, dtype, op.out.shape.clone());
        let may_have_bias = gemm.may_have_bias();
        self.gemms.insert(op.out.id, Arc::new(gemm));
        match (may_be_summed || may_be_attention, may_have_bias) {
            (true, _) => {}
            (false, true) => self.may_have_bias = Some(op.out.id),
            (false, false) => self.run_gemm(op.out.id),
        }
    }

    /// Lets a GEMM with the weight of a layer add the layer's bias, if that is the next operation.
    pub(super) fn add_bias(&mut self, op: &OperationIr) -> bool {
        let OperationIr::NumericFloat(_, NumericOperationIr::Add(op)) = op else { return false };
        let (x, bias) = (&op.lhs, &op.rhs);
        let columns = x.shape[x.shape.num_dims() - 1];
        let is_bias = bias.shape[..].last() == Some(&columns) && bias.shape.num_elements() == columns;
        let waits = |gemm: &&Arc<Gemm<B>>| is_bias && x.status == TensorStatus::ReadWrite && gemm.may_have_bias();
        let Some(gemm) = self.gemms.get(&x.id).filter(waits).cloned() else { return false };
        self.gemms.remove(&x.id);
        let dtype = gemm.dtype;
        self.want(bias.id, dtype);
        let added = self.in_type(bias, dtype);
        let [a, b] = gemm.operands.each_ref().map(|(id, x)| self.spaced(*id, x.clone(), dtype));
        self.count("GEMM");
        let sum = self.allocating(gemm.shape.num_elements(), || B::gemm_and_bias([a, b, added], dtype));
        self.insert(op.out.id, sum, self.half == Some(dtype));
        self.forget(x.id);
        true
    }

    pub(super) fn run_gemm(&mut self, id: TensorId) {
        let Some(gemm) = self.gemms.remove(&id) else { return };
        let result = self.result_of(&gemm);
        self.insert(id, result, self.half == Some(gemm.dtype));
    }

    /// What a GEMM gives; it runs once.
    pub(super) fn result_of(&mut self, gemm: &Gemm<B>) -> Float<B> {
        if let Some(result) = gemm.result.get() {
            return result.clone();
        }
        let [a, b] = gemm.operands.each_ref().map(|(id, x)| self.spaced(*id, x.clone(), gemm.dtype));
        self.count("GEMM");
        let result = self.allocating(gemm.shape.num_elements(), || B::gemm(a, b, gemm.dtype));
        gemm.result.get_or_init(|| result).clone()
    }

    /// The outputs of a launch.
    pub(super) fn launch(&mut self, launch: Launch<Source<B>>) -> Vec<Float<B>> {
        self.count("fused kernel");
        let launch = launch.with_inputs(|source| match source {
            Source::Stored(x) | Source::Mask(_, x) | Source::Output(_, x) => x,
            Source::Gemm(gemm) => self.result_of(&gemm),
        });
        let half = self.half.unwrap_or(DType::BF16);
        self.allocating(launch.rows * launch.columns, || B::fused(launch, half, &self.device))
    }

    /// `x`, the tensor `id`, as GEMMs read it. What must be copied for that is copied once, however many read it.
    fn spaced(&mut self, id: TensorId, x: Float<B>, dtype: DType) -> Float<B> {
        let Some(spaced) = B::evenly_spaced(&x) else { return x };
        self.count("spaced evenly");
        let is_stored_so = self.halves.contains(&id) == (self.half == Some(dtype));
        if let Some(copy) = self.copies.get_mut(&id) {
            *copy = spaced.clone();
        } else if is_stored_so && self.inner.read_failure(&id).is_none() {
            self.inner.register_tensor_to_device(id, HandleKind::Float(spaced.clone()));
        }
        spaced
    }
}
