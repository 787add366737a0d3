//! FP8 linear layers over GPUs that share a sequence: scales follow from all tokens, so each GPU computes the numbers
//! that one GPU with the whole sequence would.

use crate::numbers::{host, most, relative};
use crate::ranks::on_gpus;
use crate::report::Report;
use backend_dist::collective::broadcast;
use backend_dist::comm::Group;
use backend_dist::launch::Rank;
use backend_dist::mesh::{Axis, ParallelLayout};
use backend_dist::ops::fp8::{Fp8Format, Fp8Layers, Fp8Linear, Fp8Recipe, Sharing};
use backend_dist::ops::{LinearOptions, PassContext, Prologue, linear_with, pull_back};
use burn::tensor::{DType, Distribution, Tensor};

/// Tokens of a GPU, input and output features.
const SIZES: [usize; 3] = [512, 1024, 768];

/// The tokens of the last GPU, and their gradients, are smaller than those of the first by these powers of two: so many
/// that the scales of the first GPU leave few of their digits.
const SMALLER: [i32; 2] = [16, 30];

/// Norms of the differences over the norms of the expected values.
struct Errors {
    /// Of output and gradient with the scales of all tokens.
    shared: [f64; 2],
    /// The same with the scales of the GPU's own tokens.
    alone: [f64; 2],
}

pub fn check(gpus: usize, report: &mut Report) {
    let name = "FP8 over a shared sequence";
    let found = on_gpus(&ParallelLayout { cp: gpus, ..Default::default() }, |rank| Ok(compare(rank)));
    let Some(found) = report.attempt(name, found) else { return };
    for (i, of) in ["output", "gradient"].into_iter().enumerate() {
        report.error(format!("{name}, {of}"), most(found.iter().map(|errors| errors.shared[i])), 1e-2);
        // Otherwise nothing was checked.
        let alone = most(found.iter().map(|errors| errors.alone[i]));
        report.holds(format!("scales of single GPUs change the {of} by {alone:.1e}"), alone > 0.1);
    }
}

fn compare(rank: &Rank) -> Errors {
    let (group, [rows, inputs, outputs]) = (rank.group(Axis::Cp), SIZES);
    let whole = |features: usize, smaller: i32| {
        let random = Tensor::random([rows, 1, features], Distribution::Normal(0.0, 1.0), (&rank.device, DType::BF16));
        let random = broadcast(random, 0, &group);
        let part = |part: usize| {
            let power = smaller * part as i32 / (group.size() as i32 - 1);
            random.clone() * 2f64.powi(-power)
        };
        Tensor::<3>::cat((0..group.size()).map(part).collect(), 0)
    };
    let (x, upstream) = (whole(inputs, SMALLER[0]), whole(outputs, SMALLER[1]));
    let w = Tensor::<2>::random([outputs, inputs], Distribution::Normal(0.0, 0.02), (&rank.device, DType::BF16));
    let w = broadcast(w, 0, &group);
    let own = |x: &Tensor<3>| x.clone().narrow(0, group.rank() * rows, rows);
    let expected = layer([x.clone(), upstream.clone()], &w, Sharing::default()).map(|all| host(own(&all)));
    let parts = || [own(&x), own(&upstream)];
    let shared = layer(parts(), &w, Sharing { ranks: Some(group.clone()), ..Sharing::default() });
    let alone = layer(parts(), &w, Sharing::default());
    let off = |found: [Tensor<3>; 2]| {
        let found = found.map(host);
        std::array::from_fn(|i| relative(&found[i], &expected[i]))
    };
    Errors { shared: off(shared), alone: off(alone) }
}

/// Output and gradient of the input.
fn layer([x, upstream]: [Tensor<3>; 2], w: &Tensor<2>, sharing: Sharing) -> [Tensor<3>; 2] {
    let layer =
        Fp8Linear::new(&Fp8Layers::default(), "layer", Fp8Recipe::tensorwise(Fp8Format::Hybrid), Group::single());
    let options =
        LinearOptions { fp8: Some(layer), pass: PassContext { sharing, ..Default::default() }, ..Default::default() };
    let (x, w) = (Tensor::from_inner(x).require_grad(), Tensor::from_inner(w.clone()));
    let y = linear_with(x.clone(), Prologue::None, w, None, options);
    let grads = pull_back(y.clone(), upstream);
    [y.inner(), x.grad(&grads).expect("the input has a gradient")]
}
