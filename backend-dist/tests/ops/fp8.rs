//! FP8 linear layers against their definition: every operand rounded to the nearest number of a table, and f64 GEMMs.

use crate::compare::{leaf, numbers, values};
use backend_dist::comm::Group;
use backend_dist::launch::launch;
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use backend_dist::ops::fp8::{
    AmaxAlgorithm, DelayedScaling, Fp8Format, Fp8Layers, Fp8Linear, Fp8Recipe, Fp8Scaling, Number,
};
use backend_dist::ops::{LinearOptions, Prologue, linear, linear_with, pull_back};
use burn::tensor::{DType, Device, Tensor};
use std::collections::BTreeMap;

const TOKENS: usize = 32;
pub const IN: usize = 48;
pub const OUT: usize = 16;

/// All finite non-negative numbers of a format, by its definition.
fn table(number: Number) -> Vec<f64> {
    let (mantissa, bias, most) = match number {
        Number::E4m3 => (3, 7, 448.0),
        Number::E5m2 => (2, 15, 57344.0),
    };
    let number = |bits: i32| {
        let (exponent, fraction) =
            (bits >> mantissa, f64::from(bits & ((1 << mantissa) - 1)) / f64::from(1 << mantissa));
        match exponent {
            0 => fraction * 2f64.powi(1 - bias),
            _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
        }
    };
    (0..128).map(number).filter(|&x| x <= most).collect()
}

/// Every value rounded to the nearest number of the scaled table; the inputs here have no ties.
pub fn quantised(values: &[f64], number: Number, amax: f64) -> Vec<f64> {
    quantised_by(values, number, number.max() / amax)
}

/// The same with a given scale.
pub fn quantised_by(values: &[f64], number: Number, scale: f64) -> Vec<f64> {
    let table = table(number);
    let nearest = |x: f64| {
        let scaled = (x * scale).abs();
        let by_distance = |a: &&f64, b: &&f64| (*a - scaled).abs().total_cmp(&(*b - scaled).abs());
        table.iter().min_by(by_distance).unwrap().copysign(x) / scale
    };
    values.iter().map(|&x| nearest(x)).collect()
}

pub fn amax(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |top: f64, x| top.max(x.abs()))
}

/// `a [m, k] · b [n, k]ᵀ` with strides `(row, inner)` of each.
pub fn gemm([m, n, k]: [usize; 3], a: &[f64], at: [usize; 2], b: &[f64], bt: [usize; 2]) -> Vec<f64> {
    let entry = |i, j| (0..k).map(|l| a[i * at[0] + l * at[1]] * b[j * bt[0] + l * bt[1]]).sum();
    (0..m).flat_map(|i| (0..n).map(move |j| (i, j))).map(|(i, j)| entry(i, j)).collect()
}

fn layer(recipe: Fp8Recipe) -> Fp8Linear {
    layer_of(&Fp8Layers::default(), recipe)
}

fn layer_of(layers: &Fp8Layers, recipe: Fp8Recipe) -> Fp8Linear {
    Fp8Linear::new(layers, "layer", recipe, Group::single())
}

fn options(layer: &Fp8Linear) -> LinearOptions {
    LinearOptions { fp8: Some(layer.clone()), ..Default::default() }
}

pub fn assert_close(what: &str, found: &[f64], expected: &[f64]) {
    let off = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(found.len() == expected.len() && off <= 1e-12 * amax(expected), "{what}: off by {off}");
}

/// Input, weight and output gradient, `[32, 1, 48]`, `[16, 48]` and `[32, 1, 16]`, of very different scales.
fn operands() -> (Tensor<3>, Tensor<2>, Tensor<3>) {
    let of = |len, seed, size: f64| numbers(len, seed).into_iter().map(|x| size * x).collect::<Vec<_>>();
    let x = leaf(&of(TOKENS * IN, 1, 1.0), DType::F64, true).reshape([TOKENS, 1, IN]);
    let w = leaf(&of(OUT * IN, 2, 1e-3), DType::F64, true).reshape([OUT, IN]);
    (x, w, leaf(&of(TOKENS * OUT, 3, 1e5), DType::F64, false).reshape([TOKENS, 1, OUT]))
}

#[test]
fn output_and_gradients_are_gemms_of_quantised_operands() {
    for (format, number) in [(Fp8Format::E4m3, Number::E4m3), (Fp8Format::Hybrid, Number::E5m2)] {
        let (x, w, grad) = operands();
        let (x, w) = (x.detach().require_grad(), w.detach().require_grad());
        let y = linear_with(x.clone(), Prologue::None, w.clone(), None, options(&layer(Fp8Recipe::tensorwise(format))));
        let grads = pull_back(y.clone(), grad.clone());
        let of = |values: Vec<f64>, number| quantised(&values, number, amax(&values));
        let (qx, qw) = (of(values(x.clone()), Number::E4m3), of(values(w.clone()), Number::E4m3));
        let qg = of(values(grad), number);
        assert_close("output", &values(y), &gemm([TOKENS, OUT, IN], &qx, [IN, 1], &qw, [IN, 1]));
        let dx = gemm([TOKENS, IN, OUT], &qg, [OUT, 1], &qw, [1, IN]);
        assert_close("gradient of x", &values(x.grad(&grads).unwrap()), &dx);
        let dw = gemm([OUT, IN, TOKENS], &qg, [1, OUT], &qx, [1, IN]);
        assert_close("gradient of w", &values(w.grad(&grads).unwrap()), &dw);
    }
}

#[test]
fn sizes_that_fp8_has_not_are_multiplied_as_ever() {
    let (x, w, _) = operands();
    let options = options(&layer(Fp8Recipe::tensorwise(Fp8Format::Hybrid)));
    let x = x.narrow(0, 0, TOKENS - 1);
    let y = linear_with(x.clone(), Prologue::None, w.clone(), None, options);
    assert_eq!(values(y), values(linear(x, w)));
}

#[test]
fn weights_are_quantised_once_until_they_change() {
    let (x, w, _) = operands();
    let layers = Fp8Layers::default();
    let layer = layer_of(&layers, Fp8Recipe::tensorwise(Fp8Format::Hybrid));
    let run = |w: Tensor<2>| values(linear_with(x.clone(), Prologue::None, w, None, options(&layer)));
    let doubled = w.clone() * 2.0;
    let [once, twice] = [run(w.clone()), run(doubled.clone())];
    assert_ne!(once, twice, "nobody reports changes: every use quantises");
    layers.weights_changed();
    assert_eq!([run(w.clone()), run(doubled.clone())], [once.clone(), once.clone()], "kept");
    layers.weights_changed();
    assert_eq!(run(doubled.clone()), twice);
    layers.weights_may_change();
    assert_eq!([run(w.clone()), run(doubled)], [once.clone(), twice]);
    layers.weights_changed();
    assert_eq!(run(w), once, "nothing is left of the weights before");
}

/// A step reports changes of the trained weights, a checkpoint that is read those of the frozen ones.
#[test]
fn frozen_weights_are_quantised_once_for_all_steps() {
    let (x, w, grad) = operands();
    let layers = Fp8Layers::default();
    let of = |recipe| layer_of(&layers, recipe).with_frozen_weight(&layers);
    let run = |layer: &Fp8Linear, w: &Tensor<2>| {
        let x = x.clone().detach().require_grad();
        let y = linear_with(x.clone(), Prologue::None, w.clone().detach(), None, options(layer));
        let grads = pull_back(y.clone(), grad.clone());
        [values(y), values(x.grad(&grads).unwrap())]
    };
    let doubled = w.clone() * 2.0;
    let layer = of(Fp8Recipe::tensorwise(Fp8Format::Hybrid));
    let [once, twice] = [&w, &doubled].map(|w| run(&layer, w));
    assert_ne!(once, twice, "nobody reports changes: every use quantises");
    layers.frozen_weights_changed();
    assert_eq!(run(&layer, &w), once);
    layers.weights_changed();
    assert_eq!(run(&layer, &doubled), once, "kept over steps");
    layers.frozen_weights_changed();
    assert_eq!(run(&layer, &doubled), twice);
    // Delayed scaling records the amax of every step, for its histories.
    let delayed = Fp8Recipe { scaling: Fp8Scaling::Delayed, ..Fp8Recipe::tensorwise(Fp8Format::Hybrid) };
    let (layer, mut scaling) = (of(delayed), DelayedScaling::new([&layers]));
    for w in [&w, &doubled] {
        layers.weights_changed();
        run(&layer, w);
        scaling.end_step(&[Group::single()], &Device::flex(), DType::F64);
        let found = f64::from_bits(scaling.state()["layer"].amax[1][0]);
        assert_eq!(found, amax(&values(w.clone())));
    }
}

/// One step of a delayed layer with `x` scaled by `size`; the output.
fn step(layer: &Fp8Linear, size: f64) -> (Vec<f64>, Vec<f64>) {
    let (x, w, grad) = operands();
    let x = x.detach() * size;
    let y = linear_with(x.clone(), Prologue::None, w, None, options(layer));
    let _ = pull_back(y.clone(), grad);
    (values(y), values(x))
}

#[test]
fn delayed_scales_are_those_of_the_steps_before() {
    for (algorithm, scaled_by) in [(AmaxAlgorithm::MostRecent, 0.25), (AmaxAlgorithm::Max, 4.0)] {
        let recipe = Fp8Recipe {
            scaling: Fp8Scaling::Delayed,
            amax_history_len: 2,
            amax_compute_algo: algorithm,
            ..Fp8Recipe::tensorwise(Fp8Format::Hybrid)
        };
        let layers = Fp8Layers::default();
        let layer = layer_of(&layers, recipe);
        let mut scaling = DelayedScaling::new([&layers]);
        let w = values(operands().1);
        let qw = quantised(&w, Number::E4m3, amax(&w));
        let expect = |x: &[f64], size: f64| {
            let unit = amax(&values(operands().0));
            gemm([TOKENS, OUT, IN], &quantised(x, Number::E4m3, size * unit), [IN, 1], &qw, [IN, 1])
        };
        // The first step has no history, the others that of the one or two before.
        for (size, scale) in [(4.0, 4.0), (0.25, 4.0), (1.0, scaled_by)] {
            let (y, x) = step(&layer, size);
            assert_close(&format!("{algorithm:?} {size}"), &y, &expect(&x, scale));
            scaling.end_step(&[Group::single()], &Device::flex(), DType::F64);
        }
        let state = scaling.state();
        assert_eq!(state["layer"].amax[0].len(), 2);

        let others = Fp8Layers::default();
        let again = layer_of(&others, recipe);
        let mut restored = DelayedScaling::new([&others]);
        restored.restore(&state, &Device::flex(), DType::F64);
        assert_eq!(restored.state(), state);
        assert_eq!(step(&again, 2.0), step(&layer, 2.0));
        for scaling in [&mut scaling, &mut restored] {
            scaling.end_step(&[Group::single()], &Device::flex(), DType::F64);
        }
        assert_eq!(restored.state(), scaling.state());

        // Without histories all begins anew, whatever there was.
        let news = Fp8Layers::default();
        let new = layer_of(&news, recipe);
        let mut begun = DelayedScaling::new([&news]);
        step(&again, 8.0);
        restored.restore(&BTreeMap::new(), &Device::flex(), DType::F64);
        assert!(restored.state().is_empty());
        assert_eq!(step(&again, 3.0), step(&new, 3.0));
        for scaling in [&mut begun, &mut restored] {
            scaling.end_step(&[Group::single()], &Device::flex(), DType::F64);
        }
        assert_eq!(restored.state(), begun.state());
    }
}

#[test]
fn a_rank_that_had_no_rows_takes_the_scales_of_those_that_had_some() {
    let recipe = Fp8Recipe { scaling: Fp8Scaling::Delayed, ..Fp8Recipe::tensorwise(Fp8Format::Hybrid) };
    let mesh = Mesh::new(ParallelLayout { dp: 2, ..Default::default() }).unwrap();
    let states = launch(&mesh, &[Device::flex()], |rank| {
        let layers = Fp8Layers::default();
        let layer = layer_of(&layers, recipe);
        let mut scaling = DelayedScaling::new([&layers]);
        if rank.rank == 0 {
            step(&layer, 4.0);
        }
        scaling.end_step(&[rank.group(Axis::Dp)], &rank.device, DType::F64);
        Ok(scaling.state())
    });
    let states = states.unwrap();
    assert!(!states[0].is_empty());
    assert_eq!(states[0], states[1]);
}
