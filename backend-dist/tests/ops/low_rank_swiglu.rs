//! SwiGLU of the sum of a layer and its adapters.

use crate::compare::{numbers, run, same};
use backend_dist::comm::Group;
use backend_dist::ops::fp8::{Fp8Format, Fp8Layers, Fp8Linear, Fp8Recipe, KnownAmax};
use backend_dist::ops::{AmaxOfSwiGlu, LinearOptions, Prologue, linear_with, low_rank_swiglu};
use burn::tensor::activation::sigmoid;
use burn::tensor::{DType, Tensor};

const TOKENS: usize = 16;
const IN: usize = 32;
const HALF: usize = 16;
const LOW: usize = 3;

#[test]
fn it_is_the_activation_of_the_sum() {
    let shaped = |x: &[Tensor<1>]| {
        let base = x[0].clone().reshape([TOKENS, 1, 2 * HALF]);
        (base, x[1].clone().reshape([TOKENS, 1, LOW]), x[2].clone().reshape([2 * HALF, LOW]))
    };
    let fused = |x: Vec<Tensor<1>>| {
        let (base, low, b) = shaped(&x);
        low_rank_swiglu(base, low, b, AmaxOfSwiGlu::default()).flatten(0, 2)
    };
    let plain = |x: Vec<Tensor<1>>| {
        let (base, low, b) = shaped(&x);
        let sum = base + low.matmul(b.transpose().unsqueeze());
        let (gate, up) = (sum.clone().narrow(2, 0, HALF), sum.narrow(2, HALF, HALF));
        (sigmoid(gate.clone()) * gate * up).flatten(0, 2)
    };
    same("SwiGLU with adapters", &[TOKENS * 2 * HALF, TOKENS * LOW, 2 * HALF * LOW], fused, plain);
}

/// Layers in FP8 before and after it quantise with the amax that they are told as with their own.
#[test]
fn layers_in_fp8_are_told_the_amax() {
    let sizes = [TOKENS * IN, 2 * HALF * IN, TOKENS * LOW, 2 * HALF * LOW, IN * HALF];
    let inputs: Vec<Vec<f64>> = sizes.iter().enumerate().map(|(i, &n)| numbers(n, i)).collect();
    let of = |told: bool| {
        let layer = |x: Vec<Tensor<1>>| -> Tensor<1> {
            let recipe = Fp8Recipe::tensorwise(Fp8Format::Hybrid);
            let [up, down] =
                ["up", "down"].map(|name| Fp8Linear::new(&Fp8Layers::default(), name, recipe, Group::single()));
            let [output, gradient] = [(); 2].map(|()| told.then(KnownAmax::default));
            let up = gradient.clone().into_iter().fold(up, Fp8Linear::with_gradient_amax);
            let down = output.clone().into_iter().fold(down, Fp8Linear::with_input_amax);
            let linear = |x: Tensor<3>, w: Tensor<2>, fp8| {
                let options = LinearOptions { fp8: Some(fp8), ..LinearOptions::default() };
                linear_with(x, Prologue::None, w, None, options)
            };
            let base = linear(x[0].clone().reshape([TOKENS, 1, IN]), x[1].clone().reshape([2 * HALF, IN]), up);
            let (low, b) = (x[2].clone().reshape([TOKENS, 1, LOW]), x[3].clone().reshape([2 * HALF, LOW]));
            let hidden = low_rank_swiglu(base, low, b, AmaxOfSwiGlu { output, gradient });
            linear(hidden, x[4].clone().reshape([IN, HALF]), down).flatten(0, 2)
        };
        run(&layer, &inputs, &[true, false, true, true, false], DType::F64)
    };
    assert_eq!(of(true), of(false));
}
