//! FP8 with a scale for each block, against its definition.

use crate::compare::{leaf, numbers, values};
use crate::fp8::{amax, assert_close, gemm, quantised_by};
use backend_dist::comm::Group;
use backend_dist::ops::fp8::{BLOCK, Fp8Format, Fp8Layers, Fp8Linear, Fp8Recipe, Fp8Scaling, Number};
use backend_dist::ops::{LinearOptions, Prologue, linear, linear_with, pull_back};
use burn::tensor::{DType, Tensor};

const SIZES: [usize; 3] = [2 * BLOCK, 3 * BLOCK, BLOCK];

/// `x [rows, columns]`, each block of `height` rows and as many columns as a block has, times the power of two that takes its
/// amax just into the format, rounded, and back.
pub fn in_blocks(x: &[f64], columns: usize, height: usize, number: Number) -> Vec<f64> {
    let mut found = x.to_vec();
    for first_row in (0..x.len() / columns).step_by(height) {
        for first in (0..columns).step_by(BLOCK) {
            let places = (first_row..first_row + height)
                .flat_map(|row| (first..first + BLOCK).map(move |at| row * columns + at));
            let places: Vec<usize> = places.collect();
            let block: Vec<f64> = places.iter().map(|at| x[*at]).collect();
            let scale = 2f64.powf((number.max() / amax(&block)).log2().floor());
            let rounded = quantised_by(&block, number, scale);
            places.iter().zip(rounded).for_each(|(at, value)| found[*at] = value);
        }
    }
    found
}

pub fn turned(x: &[f64], columns: usize) -> Vec<f64> {
    let rows = x.len() / columns;
    (0..x.len()).map(|i| x[i % rows * columns + i / rows]).collect()
}

/// Numbers whose rows are of very different sizes.
pub fn uneven(rows: usize, columns: usize, seed: usize) -> Vec<f64> {
    let size = |i: usize| 3f64.powi((i / columns % 11) as i32 - 5);
    numbers(rows * columns, seed).into_iter().enumerate().map(|(i, x)| x * size(i)).collect()
}

fn layer(format: Fp8Format) -> Fp8Linear {
    let recipe = Fp8Recipe { scaling: Fp8Scaling::Blockwise, ..Fp8Recipe::tensorwise(format) };
    Fp8Linear::new(&Fp8Layers::default(), "layer", recipe, Group::single())
}

#[test]
fn output_and_gradients_are_gemms_of_operands_in_blocks() {
    let [tokens, inner, out] = SIZES;
    for (format, number) in [(Fp8Format::E4m3, Number::E4m3), (Fp8Format::Hybrid, Number::E5m2)] {
        let (x, w, grad) = (uneven(tokens, inner, 1), uneven(out, inner, 2), uneven(tokens, out, 3));
        let of = |values: &[f64]| leaf(values, DType::F64, true);
        let (xs, ws) = (of(&x).reshape([tokens, 1, inner]), of(&w).reshape([out, inner]));
        let (xs, ws) = (xs.detach().require_grad(), ws.detach().require_grad());
        let options = LinearOptions { fp8: Some(layer(format)), ..Default::default() };
        let y = linear_with(xs.clone(), Prologue::None, ws.clone(), None, options);
        let upstream: Tensor<3> = of(&grad).detach().reshape([tokens, 1, out]);
        let grads = pull_back(y.clone(), upstream);
        let (by_rows, square) = (in_blocks(&x, inner, 1, Number::E4m3), in_blocks(&w, inner, BLOCK, Number::E4m3));
        assert_close("output", &values(y), &gemm([tokens, out, inner], &by_rows, [inner, 1], &square, [inner, 1]));
        let of_rows = in_blocks(&grad, out, 1, number);
        let dx = gemm([tokens, inner, out], &of_rows, [out, 1], &square, [1, inner]);
        assert_close("gradient of x", &values(xs.grad(&grads).unwrap()), &dx);
        // Along the tokens: blocks of other numbers.
        let [dy, x] = [(&grad, out, number), (&x, inner, Number::E4m3)]
            .map(|(values, columns, number)| in_blocks(&turned(values, columns), tokens, 1, number));
        let dw = gemm([out, inner, tokens], &dy, [tokens, 1], &x, [tokens, 1]);
        assert_close("gradient of w", &values(ws.grad(&grads).unwrap()), &dw);
    }
}

#[test]
fn sizes_that_are_no_blocks_are_multiplied_as_ever() {
    let [tokens, inner, out] = SIZES;
    let [x, w] = [(tokens, 1), (out, 2)].map(|(rows, seed)| leaf(&uneven(rows, inner, seed), DType::F64, false));
    let (x, w): (Tensor<3>, Tensor<2>) = (x.reshape([tokens, 1, inner]), w.reshape([out, inner]));
    for (x, w) in [(x.clone().narrow(0, 0, tokens - 16), w.clone()), (x.clone(), w.clone().narrow(0, 0, out - 16))] {
        let options = LinearOptions { fp8: Some(layer(Fp8Format::Hybrid)), ..Default::default() };
        let y = linear_with(x.clone(), Prologue::None, w.clone(), None, options);
        assert_eq!(values(y), values(linear(x, w)));
    }
}

/// One value far larger than the others takes the digits of its own block alone.
#[test]
fn an_outlier_is_felt_in_its_block_alone() {
    let [tokens, inner, out] = SIZES;
    let (mut x, w) = (numbers(tokens * inner, 1), numbers(out * inner, 2));
    x[0] = 1e6;
    let run = |scaling| {
        let recipe = Fp8Recipe { scaling, ..Fp8Recipe::tensorwise(Fp8Format::E4m3) };
        let fp8 = Some(Fp8Linear::new(&Fp8Layers::default(), "layer", recipe, Group::single()));
        let of = |values: &[f64]| leaf(values, DType::F64, false);
        let (x, w): (Tensor<3>, Tensor<2>) = (of(&x).reshape([tokens, 1, inner]), of(&w).reshape([out, inner]));
        values(linear_with(x, Prologue::None, w, None, LinearOptions { fp8, ..Default::default() }))
    };
    let exact = gemm([tokens, out, inner], &x, [inner, 1], &w, [inner, 1]);
    // Of all rows but that with the outlier.
    let off = |found: Vec<f64>| {
        let pairs = found[out..].iter().zip(&exact[out..]);
        let (off, size) = pairs.fold((0.0, 0.0), |(off, size), (a, b)| (off + (a - b).powi(2), size + b * b));
        f64::sqrt(off / size)
    };
    assert!(off(run(Fp8Scaling::Tensorwise)) > 0.9, "everything else is rounded to 0");
    assert!(off(run(Fp8Scaling::Blockwise)) < 0.05);
}
