//! FP8 linear layers over GPUs that share a sequence: scales follow from all tokens, so each GPU computes the numbers
//! that one GPU with the whole sequence would.

use crate::context::on_ranks;
use crate::verdict;
use backend_dist::collective::broadcast;
use backend_dist::comm::Group;
use backend_dist::launch::Rank;
use backend_dist::mesh::Axis;
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

/// Number of wrong checks.
pub fn check(gpus: usize) -> usize {
    let found = match on_ranks(gpus, compare) {
        Ok(found) => found,
        Err(why) => return verdict("FP8 over a shared sequence", Err(why)),
    };
    let judge = |(i, name): (usize, &str)| {
        let worst = found.iter().map(|found| found.shared[i]).max_by(f64::total_cmp).unwrap_or(f64::NAN);
        let unshared = found.iter().map(|found| found.alone[i]).fold(0.0, f64::max);
        let outcome = match (worst <= 1e-2, unshared > 0.1) {
            (true, true) => Ok(()),
            (false, _) => Err(format!("off by {worst:.1e} of its norm, more than 1e-2")),
            (_, false) => Err(format!("scales of single GPUs change only {unshared:.1e}: nothing was checked")),
        };
        verdict(&format!("FP8 over a shared sequence, {name}"), outcome)
    };
    ["output", "gradient"].into_iter().enumerate().map(|(i, name)| judge((i, name))).sum()
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
    let expected = layer([x.clone(), upstream.clone()], &w, Sharing::default()).map(|all| own(&all));
    let parts = || [own(&x), own(&upstream)];
    let shared = layer(parts(), &w, Sharing { ranks: Some(group.clone()), ..Sharing::default() });
    let alone = layer(parts(), &w, Sharing::default());
    let off = |found: [Tensor<3>; 2]| {
        let mut pairs = found.into_iter().zip(&expected);
        std::array::from_fn(|_| pairs.next().map_or(f64::NAN, |(found, expected)| relative(found, expected.clone())))
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

fn relative(found: Tensor<3>, expected: Tensor<3>) -> f64 {
    let host = |x: Tensor<3>| x.into_data().convert::<f64>().try_to_vec::<f64>().expect("converted to f64");
    let (found, expected) = (host(found), host(expected));
    let (off, size) =
        found.iter().zip(&expected).fold((0.0, 0.0), |(off, size), (a, b)| (off + (a - b).powi(2), size + b * b));
    f64::sqrt(off / size)
}
