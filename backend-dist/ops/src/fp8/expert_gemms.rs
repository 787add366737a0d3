//! FP8 GEMMs of chunks of a rank's experts. A scale is that of all tokens of an expert in a micro-batch, and these are
//! in one chunk, so the values do not depend on the chunks. The weights are quantised once for all chunks.

use std::ops::Range;

use burn::backend::{DType, TensorMetadata, tensor::FloatTensor};

use super::experts::{self, Fp8Experts, QuantizedExperts, SavedExperts};
use super::groups::{Fp8GroupKernels, Groups, QuantizedGroups};
use super::kernels::{Precision, Sides};
use super::linear_gemms::Purpose;
use crate::moe::{ExpertGemms, ExpertRange, MoeKernels};

/// Some of the groups.
fn slice_groups<B: MoeKernels>(x: &Groups<B>, groups: &Range<usize>) -> Groups<B> {
    let elements = |groups: Range<usize>| x.counts[groups].iter().sum::<usize>() * x.columns;
    let start = elements(0..groups.start);
    let data = B::rows_in_place(&x.data, start..start + elements(groups.clone()), 1);
    let apart = x.inverse.shape().num_elements() / x.counts.len();
    let inverse = B::rows_in_place(&x.inverse, groups.clone(), apart);
    Groups { data, counts: x.counts[groups.clone()].into(), inverse, ..x.clone() }
}

impl<B: MoeKernels + Fp8GroupKernels> ExpertGemms<B> for Fp8Experts {
    type Matrices = QuantizedExperts<B>;
    type Transposed = Groups<B>;
    type Input = SavedExperts<B>;
    type Gradient = (Groups<B>, DType);
    type Pair = ([Groups<B>; 2], DType);

    fn matrices(&self, w: &FloatTensor<B>) -> QuantizedExperts<B> {
        self.weight::<B>(w.clone())
    }

    fn forward(
        &self,
        QuantizedExperts { scaling, matrices }: &QuantizedExperts<B>,
        x: FloatTensor<B>,
        range: &ExpertRange,
        purpose: Purpose,
    ) -> (FloatTensor<B>, SavedExperts<B>) {
        let by_rows = matrices.by_rows.as_ref().map(|x| slice_groups::<B>(x, &range.experts));
        let matrices = QuantizedGroups { by_rows, by_columns: None };
        let weight = QuantizedExperts { scaling: scaling.clone(), matrices };
        experts::gemm::<B>(&self.chunk(&range.experts), x, weight, &range.counts, purpose)
    }

    fn transposed(&self, w: &FloatTensor<B>, input: &SavedExperts<B>) -> Groups<B> {
        self.weight_columns::<B>(w.clone(), &input.weight_scaling)
    }

    fn gradient(
        &self,
        grad: FloatTensor<B>,
        input: SavedExperts<B>,
        recompute: impl FnOnce() -> FloatTensor<B>,
        ExpertRange { experts, counts, .. }: &ExpertRange,
        wanted: bool,
    ) -> (Self::Gradient, Option<Self::Pair>) {
        let (dtype, sides) = (grad.dtype(), Sides { by_rows: true, by_columns: wanted });
        let (by_rows, pair) = experts::gradient::<B>(&self.chunk(experts), input, grad, recompute, counts, sides);
        ((by_rows.expect("rows were asked for"), dtype), pair.map(|pair| (pair, dtype)))
    }

    fn input_grad(&self, (grad, dtype): Self::Gradient, matrices: &Groups<B>, range: &ExpertRange) -> FloatTensor<B> {
        B::fp8_groups_gemm(&grad, &slice_groups::<B>(matrices, &range.experts), dtype, Precision::Full)
    }

    fn weight_grad(([grad, x], dtype): Self::Pair, range: &ExpertRange) -> FloatTensor<B> {
        B::fp8_groups_weight_grad(&grad, &x, range.experts.len(), dtype)
    }

    fn accumulate_weight_grad(([grad, x], _): Self::Pair, range: &ExpertRange, sum: &FloatTensor<B>, add: bool) {
        B::fp8_groups_accumulate(&grad, &x, range.experts.len(), sum, add);
    }
}
