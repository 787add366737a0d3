//! Random programs: what waits, is recognized or recomputed must not show, whatever comes before and after it.

use crate::cpu;
use crate::operations::flat;
use crate::property::values;
use backend_dist::launch::launch;
use backend_dist::logical::Placement::{Replicate, Shard};
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::mesh_backend::{LogicalDevice, LogicalOptions, Redistribute};
use burn::tensor::activation::{gelu, softmax};
use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor, TensorData};
use proptest::prelude::*;

/// Every dimension, so that all tensors fit each other.
const N: usize = 4;

/// A tensor of two others.
type Step = fn(Tensor<3>, Tensor<3>) -> Tensor<3>;

/// The first row of the first sample.
fn row(x: Tensor<3>) -> Tensor<3> {
    x.slice([0..1, 0..1])
}

/// The first sample.
fn matrix(x: Tensor<3>) -> Tensor<3> {
    x.slice([0..1])
}

fn normalized(x: Tensor<3>) -> Tensor<3> {
    let variance = x.clone().powf_scalar(2.0).mean_dim(2);
    x / (variance + 0.1).sqrt()
}

fn dropout<const D: usize>(x: Tensor<D>, p: f64) -> Tensor<D> {
    let kept = Tensor::random(x.dims(), Distribution::Bernoulli(1.0 - p), (&x.device(), x.dtype()));
    x * kept * (1.0 / (1.0 - p))
}

fn heads(x: Tensor<3>) -> Tensor<4> {
    x.reshape([N, N, 2, N / 2]).swap_dims(1, 2)
}

fn merged(x: Tensor<4>) -> Tensor<3> {
    x.swap_dims(1, 2).reshape([N; 3])
}

/// Attention, whose last sample is hidden if something is.
fn attend(x: Tensor<3>, y: Tensor<3>, hides: bool, drops: bool) -> Tensor<3> {
    let mut scores = heads(x).matmul(heads(y.clone()).transpose()) * 0.5;
    let keys = Tensor::<1, Int>::arange(0..(N * N) as i64, &y.device());
    let last = keys.clone().greater_equal_elem((N * N - N) as i64);
    let hidden = (keys % 5).equal_elem(1).bool_or(last).reshape([N, 1, 1, N]);
    if hides {
        scores = scores.mask_fill(hidden.clone(), f32::NEG_INFINITY).mask_fill(hidden.clone().all_dim(3), 0.0);
    }
    let mut weights = softmax(scores, 3);
    if hides {
        weights = weights.mask_fill(hidden, 0.0);
    }
    if drops {
        weights = dropout(weights, 0.3);
    }
    merged(weights.matmul(heads(y)))
}

const SMOOTH: &[Step] = &[
    |x, y| x + y,
    |x, y| x * y * 0.5,
    |x, y| x / (y.clone().abs() + 1.0) + (y.powf_scalar(2.0) + 1.0).log(),
    |x, _| gelu(x),
    |x, _| x.tanh(),
    |x, _| x.zeros_like() + 0.5,
    |x, _| x.detach(),
    // Norms, and what is read of them or of their inputs.
    |x, _| x.clone() - x.mean_dim(2),
    |x, _| normalized(x),
    |x, y| normalized(x.clone() - x.mean_dim(2)) * row(y.clone()) + row(y),
    |x, y| {
        let z = x.clone() - x.clone().mean_dim(2);
        drop(x.into_data());
        z.clone() * y.clone() + z.matmul(y) * 0.2
    },
    |x, _| normalized(x.reshape([2, 2 * N, N])).reshape([N; 3]),
    |x, _| normalized(x.reshape([N, 2, 2 * N])).reshape([N; 3]),
    |x, y| {
        let z = heads(normalized(x));
        let moved = z.clone().swap_dims(0, 2).swap_dims(0, 2);
        merged(z.swap_dims(2, 3).swap_dims(2, 3) * 0.5 + moved) + y
    },
    |x, _| softmax(x, 2),
    |x, y| softmax(x, 1) + y * 0.1,
    // Layers and biases.
    |x, y| x.matmul(y) * 0.3,
    |x, y| x.matmul(matrix(y)) * 0.3,
    |x, y| x.matmul(matrix(y.clone())) + row(y),
    |x, y| x.matmul(matrix(y.clone()).transpose()) + y.slice([1..2, 0..1]),
    |x, y| {
        let weight = matrix(y.clone()).reshape([N, N]);
        (x.reshape([N * N, N]).matmul(weight) + row(y).reshape([1, N])).reshape([N; 3])
    },
    |x, y| x.matmul(matrix(y)).sum_dim(0).expand([N; 3]) * 0.2,
    |x, y| matrix(x).expand([N; 3]).matmul(y.slice([1..2])) * 0.3,
    |x, y| {
        let weight = y.slice([0..1, 0..2, 0..2]).reshape([1, 1, 2, 2]);
        merged(heads(x).matmul(weight.clone()) + weight.slice([0..1, 0..1, 0..1]))
    },
    // Attention.
    |x, y| attend(x, y, false, false),
    |x, y| attend(x, y, true, false),
    |x, y| attend(x, y, false, true),
    |x, y| attend(x, y, true, true),
    |x, y| {
        let keys = heads(y.clone()).slice([0..1, 0..1]);
        merged(softmax(heads(x).matmul(keys.transpose()) * 0.4, 3).matmul(heads(y)))
    },
    // Sums of rows and of all, which the next step reads or nobody does.
    |x, y| x * 0.5 + (y.clone() * y).sum_dims(&[0, 1]) * 0.1,
    |x, y| x.clone() + (x * y).sum_dims(&[0, 1]).reshape([1, N, 1]) * 0.1,
    |x, y| {
        let z = x.clone() * y.clone();
        let sums = [z.clone().sum_dims(&[0, 1]), (z.clone() + y).sum_dims(&[0, 1]), z.sum_dims(&[0, 1])];
        x + sums[0].clone().tanh() + sums[2].clone().tanh() * 0.2
    },
    |x, y| {
        let z = x.clone().reshape([2 * N, N, 2]);
        x + (z.clone() * z).sum_dims(&[0, 1]).sum_dim(2) * y.mean().unsqueeze::<3>() * 0.05
    },
    // Broadcasts, views and draws.
    |x, y| x + row(y),
    |x, y| x + y.sum_dim(2) * 0.2,
    |x, y| x * 0.5 + y.sum_dim(0) * 0.2,
    |x, y| x.sum_dim(2) * row(y) * 0.2,
    |x, _| x.transpose(),
    |x, _| x.swap_dims(0, 1),
    |x, y| Tensor::cat(vec![matrix(x), y.slice([1..N])], 0),
    |x, y| dropout(x, 0.3) + y,
    |x, _| dropout(x.ones_like(), 0.5).swap_dims(1, 2) * x,
    |x, _| dropout(x.clone().sum_dim(2), 0.5) + x,
];

/// Steps in which a little may change much.
const SHARP: &[Step] = &[
    |x, y| x.mask_fill(y.clone().greater_elem(0.2), 0.3) + y,
    |x, y| x.mask_where(y.clone().lower_elem(0.0), y),
    |x, y| x.max_dim(2) + y * 0.3,
    |x, y| x.clone().max_pair(y) - x,
];

/// For each step its number, the tensors that it reads, and whether the program has no more use for the first.
type Program = Vec<(usize, usize, usize, bool)>;

fn programs(steps: usize) -> impl Strategy<Value = Program> {
    proptest::collection::vec((0..steps, 0usize..8, 0usize..8, any::<bool>()), 1..14)
}

fn layouts() -> impl Strategy<Value = (&'static str, [Option<usize>; 2])> {
    let shard = || prop_oneof![Just(None), (0usize..3).prop_map(Some)];
    (prop_oneof![Just("TP1"), Just("TP2"), Just("TP4"), Just("TP2 DP2")], [shard(), shard()])
}

/// How a program runs.
#[derive(Clone, Copy)]
struct How {
    layout: &'static str,
    fusion: bool,
    dtype: DType,
    autocast: Option<FloatDType>,
    /// The dimensions of the first two tensors that ranks share, of the first along the first axis.
    shards: [Option<usize>; 2],
    /// Whether every step's tensor is rounded to half precision.
    rounds: bool,
}

const ALONE: How =
    How { layout: "TP1", fusion: false, dtype: DType::F64, autocast: None, shards: [None; 2], rounds: false };

/// The loss, and the gradients of the first two tensors.
fn run(
    program: &Program,
    device: &Device,
    how: How,
    placed: impl Fn(usize, Tensor<3>) -> Tensor<3>,
    seen: impl Fn(&Tensor<3>),
) -> [Vec<f64>; 3] {
    device.seed(5);
    let tensor = |seed| Tensor::<3>::from_data(TensorData::new(values([N; 3], seed), [N; 3]), (device, how.dtype));
    let [x, y] = [1, 2].map(|seed| tensor(seed).require_grad());
    let mut tensors = vec![placed(0, x.clone()), placed(1, y.clone())];
    for &(step, a, b, ends) in program {
        let reads = (a + b) % 5 == 0;
        let (a, b) = (a % tensors.len(), b % tensors.len());
        let other = tensors[b].clone();
        let first = if ends && tensors.len() > 2 { tensors.remove(a) } else { tensors[a].clone() };
        let out = SMOOTH.iter().chain(SHARP).nth(step).unwrap()(first, other);
        if reads {
            seen(&out);
        }
        tensors.push(if how.rounds { out.cast(FloatDType::BF16).cast(FloatDType::F64) } else { out });
    }
    // What nothing depends on has a gradient too.
    let mut loss = x.clone().sum() + y.clone().sum();
    for (i, x) in tensors.into_iter().enumerate() {
        loss = loss + (x * tensor(3 + i)).sum();
    }
    let grads = loss.backward();
    let read = |x: Tensor<1>| x.into_data().iter::<f64>().collect::<Vec<_>>();
    let [of_x, of_y] = [x, y].map(|leaf| read(flat(leaf.grad(&grads).unwrap())));
    [read(loss), of_x, of_y]
}

/// What the first rank finds.
fn outcome(program: &Program, how: How) -> [Vec<f64>; 3] {
    let options = LogicalOptions { fusion: Some(how.fusion), autocast: how.autocast, ..Default::default() };
    let ranks = launch(&Mesh::new(how.layout.parse().unwrap()).unwrap(), &[cpu()], |rank| {
        let axes: &[Axis] = if how.layout.contains("DP") { &[Axis::Dp, Axis::Tp] } else { &[Axis::Tp] };
        let device = rank.logical_device_with(axes, options).autodiff();
        let placed = |number: usize, x: Tensor<3>| match how.shards[number] {
            Some(dim) => x.redistribute(&rank, axes[number % axes.len()], Shard(dim)),
            None => x,
        };
        // One rank alone may read what is whole on all.
        let seen = |x: &Tensor<3>| {
            if rank.rank == 0 && axes.iter().all(|axis| x.placement(*axis) == Replicate) {
                drop(x.clone().into_data());
                device.sync().unwrap();
            }
        };
        Ok(run(program, &device, how, placed, seen))
    });
    ranks.unwrap_or_else(|error| panic!("{program:?}: {error}")).swap_remove(0)
}

/// The largest difference of loss and gradients, by what is expected unless that is small: sums may cancel.
fn apart(found: &[Vec<f64>; 3], expected: &[Vec<f64>; 3]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let part = |(x, y): (&Vec<f64>, &Vec<f64>)| {
        norm(&mut x.iter().zip(y).map(|(x, y)| x - y)) / norm(&mut y.iter().copied()).max(1.0)
    };
    found.iter().zip(expected).map(part).fold(0.0, |most, part| if part <= most { most } else { part })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_fused_program_gives_the_same(
        program in programs(SMOOTH.len() + SHARP.len()),
        (layout, shards) in layouts(),
    ) {
        let found = outcome(&program, How { layout, shards, fusion: true, ..ALONE });
        let found = apart(&found, &outcome(&program, ALONE));
        prop_assert!(found < 1e-10, "{found:e}");
    }

    /// In f32 chains do not fuse on a CPU, but GEMMs wait; bf16 has both. Judged are programs to which it matters little that
    /// all of their tensors are rounded.
    #[test]
    fn a_program_in_other_precisions_is_near(program in programs(SMOOTH.len()), (layout, shards) in layouts()) {
        let expected = outcome(&program, ALONE);
        prop_assume!(apart(&outcome(&program, How { rounds: true, ..ALONE }), &expected) < 0.01);
        for (autocast, bound) in [(None, 1e-3), (Some(FloatDType::BF16), 0.3)] {
            let how = How { layout, shards, autocast, fusion: true, dtype: DType::F32, rounds: false };
            let found = apart(&outcome(&program, how), &expected);
            prop_assert!(found < bound, "{autocast:?}: {found:e}");
        }
    }
}
