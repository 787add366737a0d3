//! Linear layers in FP8 against their emulation on the CPU in f64: both cast the same numbers with the same scales, so
//! what is left is the rounding of sums and results.

use backend_dist::comm::Group;
use backend_dist::gpu::model::FP8_BLOCKS;
use backend_dist::ops::fp8::{BLOCK, Fp8Format, Fp8Layers, Fp8Linear, Fp8Recipe, Fp8Scaling, MULTIPLE};
use backend_dist::ops::main_grads::{self, MainGrad};
use backend_dist::ops::{LinearOptions, Prologue, linear_with, pull_back};
use burn::tensor::{DType, Device, Tensor};
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::cases::Scale;
use super::{KernelCheck, Side, bound, error, gpu_of, numbers, values};

const NAMES: [&str; 4] = ["output", "gradient of x", "gradient of w", "gradient of bias"];

/// Fast sums keep some 14 bits: an eighth of a percent of the largest summand is lost in each addition at worst.
pub(super) const FAST: f64 = 1e-2;
/// Sums of gradients go to f32 every few GEMMs.
pub(super) const FULL: f64 = 2e-3;

/// The checks of types and sizes that FP8 layers have.
pub fn check(device: &Device, scale: &Scale, dtype: DType) -> Vec<KernelCheck> {
    let sizes = [scale.tokens(), scale.hidden, scale.ffn];
    if !matches!(dtype, DType::BF16 | DType::F16) || !sizes.iter().all(|size| size.is_multiple_of(MULTIPLE)) {
        return vec![];
    }
    let [side, reference] = Side::both(device, dtype);
    let of = |recipe: Fp8Recipe| {
        let whole =
            |size: usize| if recipe.scaling == Fp8Scaling::Blockwise { size.next_multiple_of(BLOCK) } else { size };
        let scale = Scale { seq: whole(scale.seq), hidden: whole(scale.hidden), ffn: whole(scale.ffn), ..*scale };
        compare(&side, &reference, &scale, recipe, dtype)
    };
    recipes(gpu_of(device).map(|gpu| gpu.capability)).flat_map(of).collect()
}

/// What a GPU of this compute capability has, and the emulation without one.
pub(super) fn recipes(capability: Option<(u32, u32)>) -> impl Iterator<Item = Fp8Recipe> {
    let scalings = [Fp8Scaling::Tensorwise, Fp8Scaling::Blockwise];
    let is_there = move |scaling: &Fp8Scaling| {
        *scaling != Fp8Scaling::Blockwise || capability.is_none_or(|capability| capability == FP8_BLOCKS)
    };
    let formats = [Fp8Format::E4m3, Fp8Format::Hybrid].map(Fp8Recipe::tensorwise).into_iter();
    formats.flat_map(move |recipe| {
        scalings.into_iter().filter(is_there).map(move |scaling| Fp8Recipe { scaling, ..recipe })
    })
}

/// For names of checks.
pub(super) fn by_scaling(recipe: Fp8Recipe) -> &'static str {
    if recipe.scaling == Fp8Scaling::Blockwise { " by blocks" } else { "" }
}

fn compare(side: &Side, reference: &Side, scale: &Scale, recipe: Fp8Recipe, dtype: DType) -> Vec<KernelCheck> {
    let (expected, format, by) = (run(reference, scale, recipe, false), recipe.format, by_scaling(recipe));
    let in_place = main_grads::is_available(&side.device);
    let mut checks = Vec::new();
    for sums in [false, true].into_iter().filter(|sums| in_place || !sums) {
        let found = catch_unwind(AssertUnwindSafe(|| run(side, scale, recipe, sums)));
        main_grads::detach_all();
        checks.extend(expected.iter().enumerate().map(|(i, expected)| KernelCheck {
            name: format!("FP8 {format:?}{by}{}: {}", if sums { ", main gradients" } else { "" }, NAMES[i]),
            dtype: format!("{dtype:?}"),
            shape: format!("[{}, {}] · [{}, {}]ᵀ", scale.tokens(), scale.hidden, scale.ffn, scale.hidden),
            error: found.as_ref().map_or(f64::NAN, |found| error(&found[i], expected)),
            bound: bound(dtype, 1) + [FAST, FULL, FULL, 0.0][i],
        }));
    }
    checks
}

/// Output and gradients of two micro-batches' worth of one layer; with `sums` the parameters' are accumulated in place.
fn run(side: &Side, scale: &Scale, recipe: Fp8Recipe, sums: bool) -> [Vec<f64>; 4] {
    let Scale { seq, batch, hidden, ffn, .. } = *scale;
    let x: Tensor<3> = side.tensor(numbers(seq * batch * hidden, 1), [seq, batch, hidden]).require_grad();
    let w: Tensor<2> = side.tensor(numbers(ffn * hidden, 2), [ffn, hidden]).require_grad();
    let bias: Tensor<1> = side.tensor(numbers(ffn, 3), [ffn]).require_grad();
    let places = [ffn * hidden, ffn].map(|len| {
        let garbage = Tensor::<1>::full([len], 7.0, (&side.device.clone().inner(), DType::F32));
        sums.then(|| (garbage.clone(), MainGrad::new(garbage)))
    });
    if let [Some((_, of_weight)), Some((_, of_bias))] = &places {
        main_grads::attach(&w, of_weight.clone());
        main_grads::attach(&bias, of_bias.clone());
    }
    let layer = Fp8Linear::new(&Fp8Layers::default(), "layer", recipe, Group::single());
    let mut out = vec![];
    let mut gradients = [vec![], vec![], vec![]];
    for pass in 0..2 {
        let options = LinearOptions { fp8: Some(layer.clone()), ..Default::default() };
        let y = linear_with(x.clone(), Prologue::None, w.clone(), Some(bias.clone()), options);
        let upstream = side.tensor(numbers(seq * batch * ffn, 10 + pass), [seq, batch, ffn]);
        out = values(y.clone());
        let grads = pull_back(y, upstream);
        let found = [x.grad(&grads).map(values), w.grad(&grads).map(values), bias.grad(&grads).map(values)];
        for (sum, found) in gradients.iter_mut().zip(found) {
            let Some(found) = found else { continue };
            *sum = if sum.is_empty() { found } else { sum.iter().zip(found).map(|(a, b)| a + b).collect() };
        }
    }
    let [of_x, mut of_w, mut of_bias] = gradients;
    if let [Some((weight, _)), Some((bias, _))] = places {
        assert!(of_w.is_empty() && of_bias.is_empty(), "a gradient with a main-gradient slot was registered");
        (of_w, of_bias) = (values(weight), values(bias));
    }
    [out, of_x, of_w, of_bias]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_of_blocks_are_checked_where_gpus_have_them() {
        let count = |capability| recipes(capability).count();
        assert_eq!([None, Some((9, 0)), Some((8, 9)), Some((10, 0))].map(count), [4, 4, 2, 2]);
    }
}
