//! Pieces of a rank's experts in FP8. A scale is that of all rows of an expert in a micro-batch, and these are in one
//! piece: the numbers are those of all experts at once. The matrices are quantised once for all pieces.

use std::ops::Range;

use burn::backend::{DType, TensorMetadata, tensor::FloatTensor};

use super::experts::{self, Fp8Experts, Kept, QuantizedExperts};
use super::groups::{Fp8GroupKernels, Groups, QuantizedGroups};
use super::kernels::{Precision, Sides};
use super::linear::Purpose;
use crate::ops::moe::{MoeKernels, Part, Products};

/// Some of the groups.
fn part<B: MoeKernels>(x: &Groups<B>, groups: &Range<usize>) -> Groups<B> {
    let elements = |groups: Range<usize>| x.counts[groups].iter().sum::<usize>() * x.columns;
    let start = elements(0..groups.start);
    let data = B::rows_in_place(&x.data, start..start + elements(groups.clone()), 1);
    let apart = x.inverse.shape().num_elements() / x.counts.len();
    let inverse = B::rows_in_place(&x.inverse, groups.clone(), apart);
    Groups { data, counts: x.counts[groups.clone()].into(), inverse, ..x.clone() }
}

impl<B: MoeKernels + Fp8GroupKernels> Products<B> for Fp8Experts {
    type Matrices = QuantizedExperts<B>;
    type Transposed = Groups<B>;
    type Input = Kept<B>;
    type Gradient = (Groups<B>, DType);
    type Pair = ([Groups<B>; 2], DType);

    fn matrices(&self, w: &FloatTensor<B>) -> QuantizedExperts<B> {
        self.weight::<B>(w.clone())
    }

    fn forward(
        &self,
        QuantizedExperts { scales, matrices }: &QuantizedExperts<B>,
        x: FloatTensor<B>,
        piece: &Part,
        purpose: Purpose,
    ) -> (FloatTensor<B>, Kept<B>) {
        let by_rows = matrices.by_rows.as_ref().map(|x| part::<B>(x, &piece.experts));
        let matrices = QuantizedGroups { by_rows, by_columns: None };
        let weight = QuantizedExperts { scales: scales.clone(), matrices };
        experts::product::<B>(&self.piece(&piece.experts), x, weight, &piece.counts, purpose)
    }

    fn transposed(&self, w: &FloatTensor<B>, input: &Kept<B>) -> Groups<B> {
        self.weight_columns::<B>(w.clone(), &input.weight_scales)
    }

    fn gradient(
        &self,
        grad: FloatTensor<B>,
        input: Kept<B>,
        again: impl FnOnce() -> FloatTensor<B>,
        Part { experts, counts, .. }: &Part,
        wanted: bool,
    ) -> (Self::Gradient, Option<Self::Pair>) {
        let (dtype, sides) = (grad.dtype(), Sides { by_rows: true, by_columns: wanted });
        let (by_rows, pair) = experts::gradient::<B>(&self.piece(experts), input, grad, again, counts, sides);
        ((by_rows.expect("rows were asked for"), dtype), pair.map(|pair| (pair, dtype)))
    }

    fn input_grad(&self, (grad, dtype): Self::Gradient, matrices: &Groups<B>, piece: &Part) -> FloatTensor<B> {
        B::fp8_groups_product(&grad, &part::<B>(matrices, &piece.experts), dtype, Precision::Full)
    }

    fn weight_grad(([grad, x], dtype): Self::Pair, piece: &Part) -> FloatTensor<B> {
        B::fp8_groups_weight_grad(&grad, &x, piece.experts.len(), dtype)
    }

    fn accumulate_weight_grad(([grad, x], _): Self::Pair, piece: &Part, sum: &FloatTensor<B>, add: bool) {
        B::fp8_groups_accumulate(&grad, &x, piece.experts.len(), sum, add);
    }
}
