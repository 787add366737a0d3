//! GEMMs of short rows, added to wide ones; where a device has no such kernel, that they are refused.
use super::{Element, download, poisoned, random, report, upload};
use cubecl::prelude::*;
use kernels_cubecl::fp8::cast::{Conversion, cast};
use kernels_cubecl::fp8::{Codec, Format};
use kernels_cubecl::pointwise::low_rank::{self, LowRank};
use kernels_cubecl::pointwise::low_rank_gradients::{self, ForFp8, LowRankGradients, OfWeight};
use kernels_cubecl::pointwise::low_rank_swiglu::{self, GateAndUp, Left};

/// `y + x · w`, `w [inner, columns]`.
fn sums(y: &[f64], x: &[f64], w: &[f64], [columns, inner]: [usize; 2]) -> Vec<f64> {
    let at = |i: usize| -> f64 {
        let (row, column) = (i / columns, i % columns);
        (0..inner).map(|k| x[row * inner + k] * w[k * columns + column]).sum()
    };
    y.iter().enumerate().map(|(i, y)| y + at(i)).collect()
}

fn transposed(w: &[f64], columns: usize) -> Vec<f64> {
    (0..w.len()).map(|i| w[i % (w.len() / columns) * columns + i / (w.len() / columns)]).collect()
}

pub fn add<E: Element>(client: &Client, [rows, columns, inner]: [usize; 3]) -> usize {
    let (y, x, w) = (random(rows * columns, 1), random(rows * inner, 2), random(inner * columns, 3));
    let expected = sums(&y, &x, &w, [columns, inner]);
    let run = |is_transposed: bool| {
        let sizes = LowRank { rows, columns, inner, transposed: is_transposed };
        let w = if is_transposed { transposed(&w, columns) } else { w.clone() };
        let [x, w, y] = [&x, &w, &y].map(|x| upload::<E>(client, x));
        let done = low_rank::add::<E>(client, sizes, [&x, &w, &y]);
        match sizes.has_kernel::<E>(client) {
            false => usize::from(done.is_ok()),
            true => {
                done.expect("legal");
                report(&format!("{} {sizes:?}", E::NAME), &download::<E>(client, &y), &expected, E::LIMIT)
            }
        }
    };
    run(false) + run(true)
}

pub fn swiglu<E: Element>(client: &Client, [rows, half, inner]: [usize; 3], apart: bool) -> usize {
    let sizes = GateAndUp { rows, half, inner, apart };
    let (y, x) = (random(2 * rows * half, 1), random(rows * inner * if apart { 2 } else { 1 }, 2));
    let (w, dout) = (random(2 * inner * half, 3), random(rows * half, 4));
    let of = transposed(&w, 2 * half);
    // With columns of its own, a half is as if the other's were zero.
    let sum = match apart {
        false => sums(&y, &x, &w, [2 * half, inner]),
        true => {
            let mut all = vec![0.0; 4 * inner * half];
            for (i, w) in of.iter().enumerate() {
                let (column, k) = (i / inner, i % inner);
                all[(k + if column >= half { inner } else { 0 }) * 2 * half + column] = *w;
            }
            sums(&y, &x, &all, [2 * half, 2 * inner])
        }
    };
    let (mut out, mut gradient) = (vec![0.0; rows * half], vec![0.0; 2 * rows * half]);
    for (i, d) in dout.iter().enumerate() {
        let at = i / half * 2 * half + i % half;
        let (g, u) = (sum[at], sum[at + half]);
        let s = 1.0 / (1.0 + (-g).exp());
        out[i] = g * s * u;
        gradient[at] = d * u * s * (1.0 + g * (1.0 - s));
        gradient[at + half] = d * g * s;
    }
    let [y, x, w, dout] = [&y, &x, &of, &dout].map(|x| upload::<E>(client, x));
    let (to, dy) = (poisoned::<E>(client, rows * half), poisoned::<E>(client, 2 * rows * half));
    let [most, most_of_dy] = [(); 2].map(|()| poisoned::<f32>(client, 1));
    let forward = low_rank_swiglu::forward::<E>(client, sizes, [&y, &x, &w, &to], Some(&most));
    let backward = low_rank_swiglu::backward::<E>(client, sizes, [&y, &x, &w, &dout, &dy], None, Some(&most_of_dy));
    if !sizes.has_kernel::<E>(client) {
        return usize::from(forward.is_ok() || backward.is_ok());
    }
    [forward, backward].into_iter().for_each(|done| done.expect("legal"));
    let (to, dy) = (download::<E>(client, &to), download::<E>(client, &dy));
    // A GEMM that is added to `dout` first: the bits of two kernels.
    let (left_x, left_w) = (upload::<E>(client, &random(16 * rows, 5)), upload::<E>(client, &random(16 * half, 6)));
    let (left, both) = (Left { inner: 16, x: &left_x, w: &left_w }, poisoned::<E>(client, 2 * rows * half));
    low_rank_swiglu::backward::<E>(client, sizes, [&y, &x, &w, &dout, &both], Some(left), None).expect("legal");
    let (of_left, separate) =
        (LowRank { rows, columns: half, inner: 16, transposed: false }, poisoned::<E>(client, 2 * rows * half));
    low_rank::add::<E>(client, of_left, [&left_x, &left_w, &dout]).expect("legal");
    low_rank_swiglu::backward::<E>(client, sizes, [&y, &x, &w, &dout, &separate], None, None).expect("legal");
    let [both, separate] = [&both, &separate].map(|x| download::<E>(client, x));
    // The amax is that of the rounded numbers.
    let amax = |x: &[f64]| [x.iter().fold(0.0, |top: f64, x| top.max(x.abs()))];
    let found = [&most, &most_of_dy].map(|x| download::<f32>(client, x));
    report(&format!("swiglu of a sum, {} {sizes:?}", E::NAME), &to, &out, E::LIMIT)
        + report("its gradient", &dy, &gradient, E::LIMIT)
        + report("the gradient with a GEMM added before", &both, &separate, 0.0)
        + report("its amax", &found[0], &amax(&to), 0.0)
        + report("the gradient's amax", &found[1], &amax(&dy), 0.0)
}

/// Both gradients of `x · wᵀ`; of `x` the columns that a block reads are its own.
pub fn gradients<E: Element>(client: &Client, [rows, columns, inner]: [usize; 3], blocks: usize) -> usize {
    let sizes = LowRankGradients { rows, columns, inner, blocks };
    let (dy, x, w) = (random(rows * columns, 1), random(rows * blocks * inner, 2), random(columns * inner, 3));
    let (mut dx, mut dw) = (vec![0.0; rows * blocks * inner], vec![0.0; columns * inner]);
    for (i, dy) in dy.iter().enumerate() {
        let (row, column) = (i / columns, i % columns);
        let of_row = row * blocks * inner + column / (columns / blocks) * inner;
        for k in 0..inner {
            dx[of_row + k] += dy * w[column * inner + k];
            dw[column * inner + k] += dy * x[of_row + k];
        }
    }
    let before = random(columns * inner, 4);
    let [dy_, x_, w_] = [&dy, &x, &w].map(|x| upload::<E>(client, x));
    let run = |of_weight: OfWeight, for_fp8: ForFp8| {
        let to = poisoned::<E>(client, rows * blocks * inner);
        let done = low_rank_gradients::gradients::<E>(client, sizes, [&dy_, &x_, &w_, &to], of_weight, for_fp8);
        done.map(|()| download::<E>(client, &to))
    };
    let most = poisoned::<f32>(client, 1);
    let (rounded, sum) = (poisoned::<E>(client, columns * inner), upload::<f32>(client, &before));
    let first = run(OfWeight::Rounded(&rounded), ForFp8::Amax(&most));
    if !sizes.has_kernel::<E>(client) {
        return usize::from(first.is_ok());
    }
    let (first, again) =
        (first.expect("legal"), run(OfWeight::Sum { sum: &sum, add: true }, ForFp8::Nothing).expect("legal"));
    let added: Vec<f64> = dw.iter().zip(&before).map(|(dw, before)| dw + before).collect();
    let (placed, scale) = (poisoned::<f32>(client, columns * inner), upload::<f32>(client, &[100.0]));
    let [fused, apart] = [(); 2].map(|()| poisoned::<E>(client, rows * columns / 2));
    let format = Format::E5m2;
    run(OfWeight::Sum { sum: &placed, add: false }, ForFp8::Cast { scale: &scale, to: &fused, format }).expect("legal");
    let conversion = Conversion { format, codec: Codec::Instruction, rows, columns };
    cast::<E>(client, &dy_, &scale, Some(&apart), None, conversion).expect("legal");
    let [fused, apart] = [&fused, &apart].map(|x| client.read_one_unchecked(x.clone()).to_vec());
    let [fused, apart] = [fused, apart].map(|x| x.into_iter().map(f64::from).collect::<Vec<_>>());
    let amax = [dy.iter().fold(0.0, |top: f64, x| top.max(x.abs()))];
    report(&format!("dx, {} {sizes:?}", E::NAME), &first, &dx, E::LIMIT)
        + report("dx again", &again, &first, 0.0)
        + report("dw", &download::<E>(client, &rounded), &dw, E::LIMIT)
        + report("dw added", &download::<f32>(client, &sum), &added, f32::LIMIT)
        + report("dw in fp32", &download::<f32>(client, &placed), &dw, f32::LIMIT)
        + report("amax", &download::<f32>(client, &most), &amax, 0.0)
        + report("cast", &fused, &apart, 0.0)
}
