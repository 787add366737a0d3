//! SwiGLU of the sum of a layer and its adapters.

use crate::compare::{numbers, run, same};
use backend_dist::comm::Group;
use backend_dist::ops::fp8::{Fp8Format, Fp8Layers, Fp8Linear, Fp8Recipe, KnownAmax, ToldGradient};
use backend_dist::ops::{
    HandOvers, LinearOptions, PassContext, Prologue, SharedInput, SwiGluNeighbours, add_linear, linear_with,
    low_rank_swiglu,
};
use burn::tensor::activation::sigmoid;
use burn::tensor::{DType, Tensor};

const TOKENS: usize = 16;
const IN: usize = 32;
const HALF: usize = 16;
const LOW: usize = 3;

#[test]
fn it_is_the_activation_of_the_sum() {
    // The second time gate and up read columns of their own.
    for parts in [1, 2] {
        let shaped = |x: &[Tensor<1>]| {
            let base = x[0].clone().reshape([TOKENS, 1, 2 * HALF]);
            (base, x[1].clone().reshape([TOKENS, 1, parts * LOW]), x[2].clone().reshape([2 * HALF, LOW]))
        };
        let fused = |x: Vec<Tensor<1>>| {
            let (base, low, b) = shaped(&x);
            low_rank_swiglu(base, low, b, SwiGluNeighbours::default()).flatten(0, 2)
        };
        let plain = |x: Vec<Tensor<1>>| {
            let (base, low, b) = shaped(&x);
            let of = |half: usize| {
                let low = low.clone().narrow(2, half * (parts - 1) * LOW, LOW);
                let b = b.clone().narrow(0, half * HALF, HALF);
                base.clone().narrow(2, half * HALF, HALF) + low.matmul(b.transpose().unsqueeze())
            };
            let (gate, up) = (of(0), of(1));
            (sigmoid(gate.clone()) * gate * up).flatten(0, 2)
        };
        same("SwiGLU with adapters", &[TOKENS * 2 * HALF, TOKENS * parts * LOW, 2 * HALF * LOW], fused, plain);
    }
}

/// Layers in FP8 before and after it quantise with the amax that they are told as with their own, and read a cast as their own.
#[test]
fn layers_in_fp8_are_told_the_amax() {
    told_the_amax(TOKENS, 0);
}

/// With so many tokens the layers are not in FP8: the amax of the output is left for nobody, and nothing of its gradient.
#[test]
fn layers_that_cannot_be_in_fp8_are_told_nothing() {
    told_the_amax(6, 1);
}

fn told_the_amax(tokens: usize, missed: usize) {
    let sizes = [tokens * IN, 2 * HALF * IN, tokens * LOW, 2 * HALF * LOW, IN * HALF];
    let inputs: Vec<Vec<f64>> = sizes.iter().enumerate().map(|(i, &n)| numbers(n, i)).collect();
    let hand_overs = HandOvers::counted();
    let of = |told: bool| {
        let layer = |x: Vec<Tensor<1>>| -> Tensor<1> {
            let recipe = Fp8Recipe::tensorwise(Fp8Format::Hybrid);
            let [up, down] =
                ["up", "down"].map(|name| Fp8Linear::new(&Fp8Layers::default(), name, recipe, Group::single()));
            let output_amax = told.then(|| KnownAmax::new(&hand_overs));
            let pass = PassContext { hand_overs: hand_overs.clone(), ..PassContext::default() };
            let (up, gradient) = match told {
                true => {
                    let (up, gradient) = ToldGradient::of(up, &pass);
                    (up, Some(gradient))
                }
                false => (up, None),
            };
            let down = output_amax.clone().into_iter().fold(down, Fp8Linear::with_input_amax);
            let linear = |x: Tensor<3>, w: Tensor<2>, fp8| {
                let options = LinearOptions { fp8: Some(fp8), ..LinearOptions::default() };
                linear_with(x, Prologue::None, w, None, options)
            };
            let base = linear(x[0].clone().reshape([tokens, 1, IN]), x[1].clone().reshape([2 * HALF, IN]), up);
            let (low, b) = (x[2].clone().reshape([tokens, 1, LOW]), x[3].clone().reshape([2 * HALF, LOW]));
            let hidden = low_rank_swiglu(base, low, b, SwiGluNeighbours { output_amax, gradient, readers: None });
            linear(hidden, x[4].clone().reshape([IN, HALF]), down).flatten(0, 2)
        };
        run(&layer, &inputs, &[true, false, true, true, false], DType::F64)
    };
    assert_eq!(of(true), of(false));
    assert_eq!(hand_overs.missed(), missed);
}

/// The GEMM that the adapter behind it leaves is added by its gradient, for every choice of tracked inputs.
#[test]
fn the_adapter_behind_it_leaves_its_gradient() {
    let sizes = [TOKENS * 2 * HALF, TOKENS * LOW, 2 * HALF * LOW, IN * HALF, LOW * HALF, IN * LOW];
    let inputs: Vec<Vec<f64>> = sizes.iter().enumerate().map(|(i, &n)| numbers(n, i)).collect();
    let hand_overs = HandOvers::counted();
    let of = |left: bool, in_fp8: bool, choice: usize| {
        let layer = |x: Vec<Tensor<1>>| -> Tensor<1> {
            let matrix = |i: usize, rows: usize| x[i].clone().reshape([rows, sizes[i] / rows]);
            let tokens = |i: usize| x[i].clone().reshape([TOKENS, 1, sizes[i] / TOKENS]);
            let readers = left.then(|| SharedInput::added_by_writer(&hand_overs));
            let neighbours = SwiGluNeighbours { readers: readers.clone(), ..SwiGluNeighbours::default() };
            let hidden = low_rank_swiglu(tokens(0), tokens(1), matrix(2, 2 * HALF), neighbours);
            let recipe = Fp8Recipe::tensorwise(Fp8Format::Hybrid);
            let fp8 = in_fp8.then(|| Fp8Linear::new(&Fp8Layers::default(), "down", recipe, Group::single()));
            let linear = |w, fp8| {
                let options = LinearOptions { shared_input: readers.clone(), fp8, ..LinearOptions::default() };
                linear_with(hidden.clone(), Prologue::None, w, None, options)
            };
            let base = linear(matrix(3, IN), fp8);
            add_linear(base, linear(matrix(4, LOW), None), matrix(5, IN), None).flatten(0, 2)
        };
        let tracked: Vec<bool> = (0..sizes.len()).map(|i| choice >> i & 1 == 1).collect();
        run(&layer, &inputs, &tracked, DType::F64)
    };
    for choice in 0..1 << sizes.len() {
        for in_fp8 in [false, true] {
            assert_eq!(of(true, in_fp8, choice), of(false, in_fp8, choice), "tracked {choice:b}, FP8 {in_fp8}");
            assert_eq!(hand_overs.missed(), 0, "tracked {choice:b}, FP8 {in_fp8}");
        }
    }
}
