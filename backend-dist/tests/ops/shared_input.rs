//! The gradient of an input that two linear layers share is the sum of both.

use crate::compare::{numbers, run};
use backend_dist::comm::Group;
use backend_dist::ops::fp8::{Fp8Format, Fp8Layers, Fp8Linear, Fp8Recipe};
use backend_dist::ops::{LinearOptions, Prologue, SharedInput, add_linear, linear_with};
use burn::tensor::{DType, Tensor};

const TOKENS: usize = 16;
const IN: usize = 32;
const OUT: usize = 16;
const LOW: usize = 2;

/// An adapter next to a layer: output and gradients, for every choice of tracked inputs.
fn adapted(shared: bool, is_leaf: bool, in_fp8: bool, adapter_first: bool) -> Vec<Vec<Vec<f64>>> {
    let sizes = [TOKENS * IN, OUT * IN, LOW * IN, OUT * LOW];
    let inputs: Vec<Vec<f64>> = sizes.iter().enumerate().map(|(i, &n)| numbers(n, i)).collect();
    let layer = |x: Vec<Tensor<1>>| -> Tensor<1> {
        let input = if is_leaf { x[0].clone() } else { x[0].clone().mul_scalar(3.0) };
        let input = input.reshape([TOKENS, 1, IN]);
        let [w, a, b] = [(1, OUT, IN), (2, LOW, IN), (3, OUT, LOW)].map(|(i, m, n)| x[i].clone().reshape([m, n]));
        let shared_input = shared.then(SharedInput::default);
        let recipe = Fp8Recipe::tensorwise(Fp8Format::Hybrid);
        let fp8 = in_fp8.then(|| Fp8Linear::new(&Fp8Layers::default(), "layer", recipe, Group::single()));
        let linear = |w, fp8| {
            let options = LinearOptions { shared_input: shared_input.clone(), fp8, ..LinearOptions::default() };
            linear_with(input.clone(), Prologue::None, w, None, options)
        };
        let (base, low) = match adapter_first {
            true => {
                let low = linear(a, None);
                (linear(w, fp8), low)
            }
            false => (linear(w, fp8), linear(a, None)),
        };
        add_linear(base, low, b, None).flatten(0, 2)
    };
    (0..1 << sizes.len())
        .map(|choice| {
            let tracked: Vec<bool> = (0..sizes.len()).map(|i| choice >> i & 1 == 1).collect();
            let (out, grads) = run(&layer, &inputs, &tracked, DType::F64);
            assert_eq!(grads.iter().map(Option::is_some).collect::<Vec<_>>(), tracked);
            grads.into_iter().flatten().chain([out]).collect()
        })
        .collect()
}

#[test]
fn two_layers_share_an_input() {
    for case in 0..8 {
        let [is_leaf, in_fp8, adapter_first] = [case & 1 == 1, case & 2 == 2, case & 4 == 4];
        let adapted = |shared| adapted(shared, is_leaf, in_fp8, adapter_first);
        assert_eq!(adapted(true), adapted(false), "leaf {is_leaf}, FP8 {in_fp8}, adapter first {adapter_first}");
    }
}
