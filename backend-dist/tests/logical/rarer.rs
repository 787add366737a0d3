//! More operations under test, as models of Burn's own repository have them.

use crate::operations::{Inputs, Operation, few, flat, number};
use burn::tensor::activation::{
    celu, elu, glu, hard_sigmoid, hard_swish, leaky_relu, log_sigmoid, mish, prelu, quiet_softmax, relu6, selu, silu,
    softmin, softplus,
};
use burn::tensor::grid::{GridIndexing, GridOptions, GridSparsity, meshgrid};
use burn::tensor::ops::PadMode;
use burn::tensor::{Bool, DType, FloatDType, IndexingUpdateOp, Int, Tensor, einsum};

/// Signs, so that there is something to decide.
fn positive(x: &Tensor<3>) -> Tensor<3, Bool> {
    x.clone().greater_elem(0.0)
}

fn matrices(x: Tensor<3>, columns: usize) -> Tensor<2> {
    let n = x.dims().iter().product::<usize>();
    x.reshape([n / columns, columns])
}

fn indices_by_row(i: &Inputs) -> Tensor<2, Int> {
    let [a, b, _] = i.x.dims();
    let of = |n: usize| Tensor::<1, Int>::arange(0..n as i64, &i.x.device());
    let rows = of(a).reshape([a, 1]);
    let columns = (of(a) % b as i64).reshape([a, 1]);
    Tensor::cat(vec![rows, columns], 1)
}

pub const RARER: &[Operation] = &[
    ("powers of tensors", |i| flat((i.x.abs() + 0.5).powf(i.y.clone())) + flat(i.y.clone().atan2(i.y + 3.0))),
    ("hypotenuse", |i| flat(i.x.hypot(i.y))),
    ("remainders", |i| {
        flat(i.x.clone().remainder_scalar(0.3) + i.x.clone().fmod_scalar(0.25) + i.x.remainder(i.y.abs() + 0.7))
    }),
    ("roundings", |i| {
        let x = i.x * 5.0;
        flat(x.clone().round() + x.clone().floor() + x.clone().ceil() + x.clone().trunc() + x.sign())
    }),
    ("trigonometry", |i| {
        let x = i.x * 0.9;
        flat(
            x.clone().sin() + x.clone().cos() + x.clone().tan() + x.clone().asin() + x.clone().atan()
                - x.clone().sinh()
                + x.clone().cosh()
                + x.clone().atanh()
                + x.asinh(),
        )
    }),
    ("rarer activations", |i| {
        let x = i.x;
        flat(
            leaky_relu(x.clone(), 0.1)
                + elu(x.clone(), 0.7)
                + celu(x.clone(), 0.8)
                + selu(x.clone())
                + mish(x.clone())
                + silu(x.clone())
                + softplus(x.clone(), 2.0)
                + relu6(x.clone() * 9.0)
                + hard_swish(x.clone())
                + hard_sigmoid(x.clone(), 0.3, 0.4)
                + log_sigmoid(x),
        )
    }),
    ("prelu", |i| {
        let alpha = i.y.slice([0..1, 0..1, 0..1]).reshape([1]);
        flat(prelu(i.x, alpha))
    }),
    ("prelu of channels", |i| {
        let b = i.x.dims()[1];
        let alpha = i.y.sum_dim(0).sum_dim(2).reshape([b]);
        flat(prelu(i.x, alpha))
    }),
    ("gated linear unit", |i| flat(glu(i.x, 2))),
    ("softmin", |i| flat(softmin(i.x.clone(), i.dim)) + flat(quiet_softmax(i.y, i.dim))),
    ("multiplied up", |i| flat(i.x.clone().cumprod(i.dim)) + flat(i.y.cumsum(i.dim))),
    ("cumulative extrema", |i| flat(i.x.clone().cummax(i.dim) + i.y.cummin(i.dim))),
    ("where it is sorted", |i| {
        let (values, indices) = i.x.clone().sort_with_indices(i.dim);
        flat(values) + number(indices) + number(i.x.argsort_descending(i.dim))
    }),
    ("top and where", |i| {
        // Burn wants fewer than all.
        let i = if i.x.dims()[i.dim] == 1 { Inputs { dim: 2, ..i } } else { i };
        let (values, indices) = i.x.clone().topk_with_indices(1, i.dim);
        flat(values) + number(indices) + number(i.x.argtopk(1, i.dim))
    }),
    ("other extrema", |i| {
        let (least, at) = i.x.clone().min_dim_with_indices(i.dim);
        let a = flat(least) + number(at) + number(i.x.clone().argmin(i.dim)) + flat(i.y.clone().min_dim(i.dim));
        a + flat(i.x.clone().max_abs_dim(i.dim)) + i.x.clone().max_abs() + i.x.min() + i.y.prod()
    }),
    ("pairs", |i| flat(i.x.clone().max_pair(i.y.clone()) + i.x.min_pair(i.y))),
    ("spread", |i| {
        let (variance, mean) = i.x.clone().var_mean_bias(i.dim);
        flat(variance + mean) + flat(i.x.median(i.dim))
    }),
    ("sums over several", |i| {
        flat(i.x.clone().sum_dims(&[0, 2])).sum()
            + flat(i.x.clone().mean_dims(&[1, 2])).sum()
            + flat(i.x.max_dims(&[0, 1])).sum()
    }),
    ("padded with a number", |i| flat(i.x.pad([(1, 2), (0, 1)], PadMode::Constant(3.5)))),
    ("padded by reflection", |i| {
        let [_, b, c] = i.x.dims();
        flat(i.x.pad([(usize::from(b > 1), 0), (c - 1, 1)], PadMode::Reflect))
    }),
    ("padded by the edge", |i| flat(i.x.pad([(1, 0), (0, 0), (1, 2)], PadMode::Edge))),
    ("windows", |i| flat(i.x.unfold::<4, _>(i.dim, 1, 2))),
    ("rolled", |i| flat(i.x.roll_dim(1, i.dim) + i.y.roll(&[1, 2], &[0, 2]))),
    ("triangles", |i| flat(i.x.tril(0) + i.y.triu(1))),
    ("steps", |i| {
        let [a, b, c] = i.x.dims();
        let every_other = i.x.clone().slice(burn::tensor::s![.., .., ..;2]);
        let back = i.x.slice(burn::tensor::s![.., ..;-1, -1..]);
        let filled = i.y.slice_fill(burn::tensor::s![0..1, .., ..], 2.5);
        flat(every_other).sum() + flat(back).sum() + flat(filled.reshape([a, b, c]))
    }),
    ("steps assigned", |i| {
        let [a, b, c] = i.x.dims();
        let value = i.y.slice([0..a, 0..b, 0..c / 2]);
        flat(i.x.slice_assign(burn::tensor::s![.., .., ..;2], value))
    }),
    ("parts", |i| {
        let parts = i.x.clone().chunk(2, i.dim).into_iter().enumerate();
        let sum = parts.map(|(at, part)| part.sum() * (at + 1) as f64).reduce(|a, b| a + b).unwrap();
        let each =
            i.y.iter_dim(i.dim).enumerate().map(|(at, x)| x.sum() * (at + 2) as f64).reduce(|a, b| a + b).unwrap();
        sum + each + flat(i.x.narrow(i.dim, 0, 1)).sum()
    }),
    ("stacked", |i| flat(Tensor::stack::<4>(vec![i.x.clone(), i.y, i.x], i.dim))),
    ("repeated", |i| flat(i.x.repeat(&[2, 1, 3]))),
    ("moved", |i| flat(i.x.clone().movedim(0, 2)) + flat(i.y.movedim(vec![0usize, 1], vec![1usize, 2]))),
    ("truth", |i| {
        let (x, y) = (positive(&i.x), positive(&i.y));
        let both = x.clone().bool_and(y.clone()).int() + x.clone().bool_or(y.clone()).int() * 2;
        let more = x.clone().bool_xor(y.clone()).int() * 4 + y.clone().bool_not().int() * 8;
        number(both + more) + number(x.equal(y).int())
    }),
    ("truth of some", |i| {
        let x = positive(&i.x);
        number(x.clone().all_dim(i.dim).int()).sum()
            + number(x.any().int())
            + number(positive(&i.y).any_dim(i.dim).int()).sum()
    }),
    ("truths moved", |i| {
        let (x, y) = (positive(&i.x), positive(&i.y));
        let joined = Tensor::cat(vec![x.clone(), y.clone()], i.dim);
        let chosen = x.clone().select(i.dim, few(&i).zeros_like());
        let looked_up = y.gather(i.dim, i.index.zeros_like());
        number(joined.int()).sum() + number(chosen.flip([i.dim]).int()).sum() + number(looked_up.swap_dims(0, 1).int())
    }),
    ("masks of numbers", |i| {
        let mask = i.index.clone().greater_elem(0);
        let ints = i.index.clone().mask_fill(mask.clone(), 9) + i.index.clone().mask_where(mask, i.index * 2);
        number(ints)
    }),
    ("bits", |i| {
        let x = i.index.clone() + 3;
        number(
            x.clone().bitwise_and(i.index.clone())
                + x.clone().bitwise_or_scalar(4)
                + x.clone().bitwise_xor(i.index)
                + x.clone().bitwise_left_shift_scalar(1)
                + x.bitwise_not(),
        )
    }),
    ("integers computed", |i| {
        let x = i.index.clone();
        let a = number(x.clone().cumsum(i.dim)) + number(x.clone() * 3 / 2) + number((x.clone() + 5) % 3);
        let b = number(x.clone().sort(i.dim)) + number(x.clone().powi_scalar(2)) + number(x.clone().neg().abs());
        a + b
            + number(x.clone().max_dim(i.dim)).sum()
            + number(x.clone().mean_dim(i.dim)).sum()
            + number(x.prod()).sum()
    }),
    ("integers moved", |i| {
        let x = i.index.clone();
        let joined = Tensor::cat(vec![x.clone(), x.clone() + 1], i.dim);
        let put = x.clone().scatter(i.dim, x.zeros_like(), x.clone(), IndexingUpdateOp::Add);
        number(joined.repeat_dim(i.dim, 2)).sum() + number(put) + number(x.clone().cast(burn::tensor::IntDType::I32))
    }),
    ("a matmul of integers", |i| number(i.index.clone().matmul(i.index.swap_dims(1, 2)))),
    ("one of many", |i| number(i.index.one_hot::<4>(9)).sum() + i.x.sum()),
    ("counted", |i| {
        let where_ = positive(&i.x).argwhere();
        number(where_.clone().sum()) + i.x.clone().mask_select(positive(&i.x)).sum()
    }),
    ("cast", |i| {
        flat(i.x.sign().cast(DType::F32).exp().cast(FloatDType::F64)) + number(i.y.clone().mul_scalar(9.0).int())
    }),
    ("not numbers", |i| {
        let x = (i.x - 2.0).log();
        number(x.clone().is_nan().int()) + number(i.y.recip().is_inf().int()) + number(x.is_finite().int())
    }),
    ("read and used", |i| {
        let scale: f64 = i.y.clone().abs().mean().into_scalar();
        let x = if scale > 0.1 { i.x / scale } else { i.x };
        flat(x) + i.y.max()
    }),
    ("summation convention", |i| {
        let [_, b, c] = i.x.dims();
        let y = i.y.sum_dim(0).reshape([b, c]);
        let z: Tensor<3> = einsum!("abc,bd->acd", i.x.clone(), y.clone());
        let w: Tensor<1> = einsum!("abc,bc->a", i.x, y);
        flat(z).sum() + w.sum()
    }),
    ("crossed", |i| {
        let [a, b, _] = i.x.dims();
        let three = |x: Tensor<3>| x.slice([0..a, 0..b, 0..2]).pad([(0, 1)], PadMode::Constant(0.5));
        flat(three(i.x).cross(three(i.y), 2))
    }),
    ("covariance", |i| flat(matrices(i.x, 2).cov(1, 0)).sum() + i.y.sum()),
    ("mesh of coordinates", |i| {
        let last = i.x.dims()[2];
        let x = i.x.sum_dim(0).sum_dim(1).reshape([last]);
        let options = GridOptions { indexing: GridIndexing::Cartesian, sparsity: GridSparsity::Dense };
        let [p, q] = meshgrid(&[x.clone(), x], options);
        flat((p * 2.0 - q).powi_scalar(2))
    }),
    ("assigned by index", |i| {
        let index = few(&i).zeros_like().slice([0..1]);
        let value = i.y.clone().select(i.dim, index.clone());
        flat(i.x.select_assign(i.dim, index, value, IndexingUpdateOp::Assign))
    }),
    ("scattered over", |i| {
        flat(i.x.scatter(
            i.dim,
            i.index.zeros_like().narrow(i.dim, 0, 1),
            i.y.narrow(i.dim, 0, 1),
            IndexingUpdateOp::Max,
        ))
    }),
    ("many indices", |i| {
        let at = indices_by_row(&i);
        let read: Tensor<2> = i.x.clone().gather_nd(at.clone());
        flat(i.y.scatter_nd(at, read, IndexingUpdateOp::Add))
    }),
    ("taken", |i| flat(i.x.clone().take::<1, 3>(i.dim, few(&i).zeros_like()))),
];
