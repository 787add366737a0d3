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
        // What waited for a bias or a collective has none.
        if let Some(before) = self.layer.take() {
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
        let is_layer = gemm.is_layer();
        self.gemms.insert(op.out.id, Arc::new(gemm));
        match (may_be_summed || may_be_attention, is_layer) {
            (true, _) => {}
            (false, true) => self.layer = Some(op.out.id),
            (false, false) => self.run_gemm(op.out.id),
        }
    }

    /// Lets the GEMM of a layer add the layer's bias, if that is the next operation. Of several ranks it waits on, for the
    /// collective of its result.
    pub(super) fn add_bias(&mut self, op: &OperationIr) -> bool {
        let OperationIr::NumericFloat(_, NumericOperationIr::Add(op)) = op else { return false };
        let (x, bias) = (&op.lhs, &op.rhs);
        let columns = x.shape[x.shape.num_dims() - 1];
        let is_bias = bias.shape[..].last() == Some(&columns) && bias.shape.num_elements() == columns;
        let waits = |gemm: &&Arc<Gemm<B>>| is_bias && x.status == TensorStatus::ReadWrite && gemm.may_have_bias();
        let Some(gemm) = self.gemms.get(&x.id).filter(waits).cloned() else { return false };
        self.gemms.remove(&x.id);
        self.want(bias.id, gemm.dtype);
        let bias = self.in_type(bias, gemm.dtype);
        self.gemms.insert(op.out.id, Arc::new(gemm.with_bias(bias)));
        self.forget(x.id);
        match self.hides {
            true => self.layer = Some(op.out.id),
            false => self.run_gemm(op.out.id),
        }
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
        if let Some(result) = self.fp8_layer(gemm) {
            return gemm.result.get_or_init(|| result).clone();
        }
        let (gather, [a, b]) = (self.gather_of(gemm), self.operands_of(gemm));
        let (bias, dtype, elements) = (gemm.bias.clone(), gemm.dtype, gemm.shape.num_elements());
        self.count("GEMM");
        let result = match (gather, bias) {
            (Some(gather), bias) => B::gemm_of_arriving(gather, b, bias),
            (None, Some(bias)) => self.allocating(elements, || B::gemm_and_bias([a, b, bias], dtype)),
            (None, None) => self.allocating(elements, || B::gemm(a, b, dtype)),
        };
        gemm.result.get_or_init(|| result).clone()
    }

    /// As GEMMs read them.
    pub(super) fn operands_of(&mut self, gemm: &Gemm<B>) -> [Float<B>; 2] {
        gemm.operands.each_ref().map(|(id, x)| self.spaced(*id, x.clone(), gemm.dtype))
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
