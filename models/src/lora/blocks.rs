//! The B of several outputs as one matrix, in few kernels.

use backend_dist::ops::matmul;
use burn::module::Param;
use burn::tensor::{Tensor, TensorData};

/// What makes one matrix of all B.
#[derive(Clone, Debug)]
pub(super) struct Blocks {
    /// `[rank, adapters rank]`: repeats the columns of B for each adapter. A GEMM's gradient needs no reduction kernel.
    repeat: Tensor<2>,
    /// `[rows of B, adapters, 1]`: the scale where a row is of an output that reads this A, else zero.
    scales: Tensor<3>,
}

impl Blocks {
    /// Of outputs that read `count` A of this rank.
    pub fn new(
        outputs: &[(usize, Option<usize>)],
        [count, rank]: [usize; 2],
        scale: f64,
        b: &Param<Tensor<2>>,
    ) -> Self {
        let one_of = |count: usize, at: usize, value: f64| (0..count).map(move |i| if i == at { value } else { 0.0 });
        let own = outputs.iter().filter_map(|(features, adapter)| adapter.map(|adapter| (*features, adapter)));
        let rows = own.flat_map(|(features, adapter)| std::iter::repeat_n(adapter, features));
        let scales: Vec<f64> = rows.flat_map(|adapter| one_of(count, adapter, scale)).collect();
        let repeat: Vec<f64> = (0..rank).flat_map(|row| (0..count).flat_map(move |_| one_of(rank, row, 1.0))).collect();
        let (rows, b) = (scales.len() / count, b.val().inner());
        let place = (&b.device(), b.dtype());
        Self {
            repeat: Tensor::from_data(TensorData::new(repeat, [rank, count * rank]), place),
            scales: Tensor::from_data(TensorData::new(scales, [rows, count, 1]), place),
        }
    }

    /// `b [rows, rank]` as `[rows, adapters rank]`, scaled: each row in the columns of its adapter, elsewhere zero.
    pub fn of(&self, b: Tensor<2>) -> Tensor<2> {
        let (repeat, scales) = match b.device().is_autodiff() {
            true => (Tensor::from_inner(self.repeat.clone()), Tensor::from_inner(self.scales.clone())),
            false => (self.repeat.clone(), self.scales.clone()),
        };
        let ([rows, rank], [_, adapters, _]) = (b.dims(), scales.dims());
        let spread = matmul(b, repeat).reshape([rows, adapters, rank]) * scales;
        spread.reshape([rows, adapters * rank])
    }
}
