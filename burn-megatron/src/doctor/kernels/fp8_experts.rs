//! Experts in FP8 against their emulation on the CPU in f64.

use backend_dist::comm::Group;
use backend_dist::ops::fp8::{
    BLOCK, ExpertRanks, ExpertSharding, Fp8Experts, Fp8Layers, Fp8Recipe, MULTIPLE, grouped_linear,
};
use backend_dist::ops::main_grads::{self, MainGrad};
use backend_dist::ops::pull_back;
use burn::tensor::{DType, Device, Tensor};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::cases::Scale;
use super::fp8::{FAST, FULL, by_scaling, recipes};
use super::{KernelCheck, Side, bound, error, gpu_of, numbers, values};

const NAMES: [&str; 3] = ["output", "gradient of x", "gradient of w"];
const EXPERTS: usize = 3;

/// The checks of types and sizes that experts in FP8 have.
pub fn check(device: &Device, scale: &Scale, dtype: DType) -> Vec<KernelCheck> {
    let sizes = [scale.tokens(), scale.hidden];
    if !matches!(dtype, DType::BF16 | DType::F16) || !sizes.iter().all(|size| size.is_multiple_of(MULTIPLE)) {
        return vec![];
    }
    // The kernels of all experts in one launch, and scales of blocks, take tokens in these multiples.
    let ([side, reference], counts) = (Side::both(device, dtype), counts(scale.tokens().next_multiple_of(BLOCK)));
    let hidden = scale.hidden.next_multiple_of(BLOCK);
    let of_recipe = |recipe: Fp8Recipe| {
        let expected = run(&reference, &counts, hidden, recipe, false);
        let in_place = main_grads::is_available(&side.device);
        let of_sums = |sums| {
            let found = catch_unwind(AssertUnwindSafe(|| run(&side, &counts, hidden, recipe, sums)));
            main_grads::detach_all();
            let check = |(i, expected): (usize, &Vec<f64>)| KernelCheck {
                name: format!(
                    "FP8 {:?}{} experts{}: {}",
                    recipe.format,
                    by_scaling(recipe),
                    if sums { ", main gradients" } else { "" },
                    NAMES[i]
                ),
                dtype: format!("{dtype:?}"),
                shape: format!("{counts:?} tokens · [{hidden}, {hidden}]ᵀ"),
                error: found.as_ref().map_or(f64::NAN, |found| error(&found[i], expected)),
                bound: bound(dtype, 1) + [FAST, FULL, FULL][i],
            };
            expected.iter().enumerate().map(check).collect::<Vec<_>>()
        };
        [false, true].into_iter().filter(|sums| in_place || !sums).flat_map(of_sums).collect::<Vec<_>>()
    };
    recipes(gpu_of(device).map(|gpu| gpu.capability)).flat_map(of_recipe).collect()
}

/// Two groups of tokens for each expert: the first has both if there are tokens enough, the second none, the third one.
fn counts(tokens: usize) -> Arc<[usize]> {
    let blocks = tokens / BLOCK;
    let (first, last) = (blocks.div_ceil(2), blocks / 3);
    [first, blocks - first - last, 0, 0, 0, last].map(|blocks| blocks * BLOCK).into()
}

/// Output and gradients of two micro-batches' worth of one layer; with `sums` the matrices' are accumulated in place.
fn run(side: &Side, counts: &Arc<[usize]>, hidden: usize, recipe: Fp8Recipe, sums: bool) -> [Vec<f64>; 3] {
    let (rows, len) = (counts.iter().sum::<usize>(), EXPERTS * hidden * hidden);
    // Groups of different sizes, so that scales differ.
    let size = |index: usize| if index < counts[0] * hidden { 1.0 } else { 0.125 };
    let sized = |values: Vec<f64>| values.into_iter().enumerate().map(|(i, x)| x * size(i)).collect::<Vec<_>>();
    let x: Tensor<2> = side.tensor(sized(numbers(rows * hidden, 1)), [rows, hidden]).require_grad();
    let w: Tensor<2> = side.tensor(numbers(len, 2), [EXPERTS * hidden, hidden]).require_grad();
    let place = sums.then(|| {
        let garbage = Tensor::<1>::full([len], 7.0, (&side.device.clone().inner(), DType::F32));
        main_grads::attach(&w, MainGrad::new(garbage.clone()));
        garbage
    });
    let ranks =
        ExpertRanks { experts: EXPERTS, local: 0..EXPERTS, shards: Group::single(), tokens: None, dp_ranks: 0..1 };
    let layer = Fp8Experts::new(&Fp8Layers::default(), "layer", recipe, ExpertSharding::Outputs, ranks);
    let (mut out, mut gradients) = (vec![], [vec![], vec![]]);
    for pass in 0..2 {
        let y = grouped_linear(x.clone(), w.clone(), counts, &layer);
        let upstream = side.tensor(sized(numbers(rows * hidden, 10 + pass)), [rows, hidden]);
        out = values(y.clone());
        let grads = pull_back(y, upstream);
        for (sum, found) in gradients.iter_mut().zip([x.grad(&grads).map(values), w.grad(&grads).map(values)]) {
            let Some(found) = found else { continue };
            *sum = if sum.is_empty() { found } else { sum.iter().zip(found).map(|(a, b)| a + b).collect() };
        }
    }
    let [of_x, mut of_w] = gradients;
    if let Some(place) = place {
        assert!(of_w.is_empty(), "a gradient with a main-gradient slot was registered");
        of_w = values(place);
    }
    [out, of_x, of_w]
}
