//! Random training: gradients of weights that wait for collectives, whoever adds, reads or drops them, and what ranks alone
//! read meanwhile.

use crate::cpu;
use crate::property::values;
use backend_dist::launch::{Rank, launch};
use backend_dist::logical::Placement::{Replicate, Shard};
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::mesh_backend::{LogicalDevice, LogicalOptions, Redistribute, Teams};
use burn::tensor::activation::{gelu, softmax};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use proptest::{prelude::*, sample::select};

/// Samples.
const B: usize = 4;
/// Features.
const N: usize = 8;
const WEIGHTS: usize = 3;

/// What a layer makes of the tensor so far, an earlier one, a weight and a bias.
type Layer = fn(Tensor<3>, Tensor<3>, Tensor<2>, Tensor<1>) -> Tensor<3>;

fn row(b: Tensor<1>) -> Tensor<3> {
    b.reshape([1, 1, N])
}

fn one(w: Tensor<2>) -> Tensor<3> {
    w.reshape([1, N, N])
}

fn normalized(x: Tensor<3>) -> Tensor<3> {
    let centered = x.clone() - x.mean_dim(2);
    let variance = centered.clone().powf_scalar(2.0).mean_dim(2);
    centered / (variance + 0.1).sqrt()
}

fn heads(x: Tensor<3>) -> Tensor<4> {
    let [b, s, n] = x.dims();
    x.reshape([b, s, 2, n / 2]).swap_dims(1, 2)
}

fn linear(x: Tensor<3>, w: Tensor<2>, b: Option<Tensor<1>>) -> Tensor<3> {
    burn::tensor::module::linear(x, w, b) * 0.5
}

const LAYERS: &[Layer] = &[
    |x, _, w, b| linear(x, w, Some(b)),
    |x, _, w, _| linear(x, w, None),
    |x, e, w, b| linear(x, w, Some(b)).tanh() + e,
    |x, _, w, b| gelu(linear(x, w.transpose(), Some(b))),
    // Sums over samples.
    |x, _, w, b| x.matmul(one(w)) * 0.5 + row(b),
    |x, _, w, _| x.matmul(one(w).transpose()) * 0.3,
    // All rows.
    |x, e, w, b| {
        let shape = x.dims();
        let rows = |x: Tensor<3>| x.reshape([shape[0] * shape[1], N]);
        (rows(x).matmul(w) * 0.5 + b.reshape([1, N]) + rows(e)).reshape(shape)
    },
    // A bias that is read before it is added.
    |x, _, w, b| x.matmul(one(w)).sum_dim(2) * row(b) * 0.2,
    |x, _, w, _| linear(x, w.clone().matmul(w) * 0.3, None),
    |x, _, w, b| linear(x.clone(), w, Some(b)) * x,
    |x, _, w, b| x.clone() + linear(x.sum_dim(1) * 0.3, w, Some(b)),
    |x, _, w, b| x.clone() + linear(x.slice([0..1, 0..1]), w, Some(b)),
    |x, e, w, _| {
        let [q, k] = [heads(x), heads(e.clone())];
        let y = softmax(q.matmul(k.transpose()) * 0.4, 3).matmul(heads(e));
        linear(y.swap_dims(1, 2).reshape([B as i32, -1, N as i32]), w, None)
    },
    |x, _, _, b| normalized(x) * row(b.clone()) + row(b),
    |x, e, _, b| normalized(x + e) * (row(b) + 1.0),
    |x, e, w, _| x + e.detach() * w.sum_dim(0).reshape([1, 1, N]) * 0.2,
    |x, e, _, _| Tensor::cat(vec![x.slice([0..1]), e.slice([1..B])], 0),
    |x, _, _, _| x.tanh(),
    // What is no memory.
    |x, _, w, _| x.clone() * linear(x.ones_like() * 0.5, w, None),
];

/// What becomes of a weight's gradient: it is added, read by a rank and added, scaled and added, or dropped.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Use {
    Added,
    Read,
    Scaled,
    Dropped,
}

/// A training of two steps.
#[derive(Clone, Debug)]
struct Program {
    /// For each layer its number, the earlier tensor, weight and bias, and whether a rank looks at what comes out.
    layers: Vec<(usize, usize, usize, bool)>,
    /// Of each weight in each micro-batch.
    uses: Vec<[Use; WEIGHTS]>,
    positions: usize,
    recomputes: bool,
    clips: bool,
}

fn programs() -> impl Strategy<Value = Program> {
    let used = || select(&[Use::Added, Use::Read, Use::Scaled, Use::Dropped][..]);
    let layer = (0..LAYERS.len(), 0usize..8, 0..WEIGHTS, any::<bool>());
    let layers = proptest::collection::vec(layer, 1..9);
    let uses = proptest::collection::vec([used(), used(), used()], 1..4);
    let positions = select(&[4, 8, 12][..]);
    (layers, uses, positions, any::<bool>(), any::<bool>())
        .prop_map(|(layers, uses, positions, recomputes, clips)| Program { layers, uses, positions, recomputes, clips })
}

/// How it runs.
#[derive(Clone, Copy, Debug)]
struct How {
    layout: &'static str,
    /// Whether the first rank runs the program for all.
    leads: bool,
    fusion: bool,
    dtype: DType,
    autocast: Option<FloatDType>,
    /// The dimensions of weights that ranks share, and that of the samples.
    shards: [Option<usize>; WEIGHTS],
    of_samples: Option<usize>,
    /// Whether every layer's output is rounded to half precision.
    rounds: bool,
}

const ALONE: How = How {
    layout: "TP1",
    leads: false,
    fusion: false,
    dtype: DType::F64,
    autocast: None,
    shards: [None; WEIGHTS],
    of_samples: None,
    rounds: false,
};

/// Places tensors, and looks at them.
struct Watch<'a> {
    rank: &'a Rank,
    axes: &'a [Axis],
    how: How,
}

impl Watch<'_> {
    fn weight<const D: usize>(&self, w: Tensor<D>, number: usize) -> Tensor<D> {
        let axis = self.axes[number % self.axes.len()];
        let to = self.how.shards[number].map_or(Replicate, |dim| Shard(dim.min(D - 1)));
        w.redistribute_parameter(self.rank, axis, to)
    }

    fn samples(&self, x: Tensor<3>) -> Tensor<3> {
        self.how.of_samples.map_or(x.clone(), |dim| x.redistribute(self.rank, self.axes[0], Shard(dim)))
    }

    /// One rank alone reads what is whole on all.
    fn look<const D: usize>(&self, x: &Tensor<D>) {
        let is_whole = || self.axes.iter().all(|axis| x.placement(*axis) == Replicate);
        if self.rank.rank == 0 && (self.how.leads || is_whole()) {
            drop(x.clone().into_data());
            x.device().sync().unwrap();
        }
    }
}

fn numbers<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

/// Losses by the root of their number of terms, which cancel, and the weights and the gradients of the last step.
fn train(program: &Program, device: &Device, watch: &Watch) -> Vec<Vec<f64>> {
    let device = &if program.recomputes { device.clone().gradient_checkpointing() } else { device.clone() };
    let strategy = device.gradient_checkpointing_strategy().unwrap();
    let dtype = watch.how.dtype;
    let batch = |seed| {
        let shape = [B, program.positions, N];
        watch.samples(Tensor::<3>::from_data(TensorData::new(values(shape, seed), shape), (device, dtype)))
    };
    let leaf = |seed| {
        let data = TensorData::new(values([1, N, N], seed), [N, N]);
        Tensor::<2>::from_data(data, (device, dtype))
    };
    let mut weights: Vec<Tensor<2>> = (0..WEIGHTS).map(|i| watch.weight(leaf(i + 1), i).require_grad()).collect();
    let bias = Tensor::<1>::from_data(TensorData::new(values([1, 1, N], 7), [N]), (device, dtype));
    let bias = watch.weight(bias, 0).require_grad();
    let mut found = Vec::new();
    for step in 0..2 {
        let mut sums: Vec<Option<Tensor<2>>> = vec![None; WEIGHTS];
        for (micro, uses) in program.uses.iter().enumerate() {
            let mut tensors = vec![batch(10 + 5 * step + micro)];
            for &(layer, earlier, w, looks) in &program.layers {
                let (x, e) = (tensors[tensors.len() - 1].clone(), tensors[earlier % tensors.len()].clone());
                let out = LAYERS[layer](x, e, weights[w].clone(), bias.clone());
                if looks {
                    watch.look(&out);
                }
                tensors.push(match watch.how.rounds {
                    true => out.cast(FloatDType::BF16).cast(FloatDType::F64),
                    false => out,
                });
            }
            let y = tensors.pop().unwrap();
            drop(tensors);
            // What nothing depends on has a gradient too.
            let loss = (y.tanh() * batch(30)).sum() + bias.clone().sum();
            let grads = loss.backward();
            for (i, how) in uses.iter().enumerate() {
                let Some(mut grad) = weights[i].grad(&grads) else { continue };
                match how {
                    Use::Added => {}
                    Use::Read => watch.look(&grad),
                    Use::Scaled => grad = grad * 0.5,
                    Use::Dropped => continue,
                }
                sums[i] = Some(sums[i].take().map_or(grad.clone(), |sum| sum + grad));
            }
            if let Some(grad) = bias.grad(&grads) {
                watch.look(&grad);
            }
            drop(grads);
            found.push(numbers(loss / ((B * program.positions * N) as f64).sqrt()));
        }
        let norm = sums.iter().flatten().map(|sum| sum.clone().powf_scalar(2.0).sum()).reduce(|a, b| a + b);
        for (weight, sum) in weights.iter_mut().zip(&sums) {
            let (Some(sum), Some(norm)) = (sum.clone(), norm.clone()) else { continue };
            let sum = if program.clips { sum / (norm.sqrt() + 1.0).unsqueeze::<2>() } else { sum * 0.1 };
            let updated = Tensor::from_inner(weight.clone().inner() - sum * 0.1);
            *weight = updated.with_gradient_checkpointing_strategy(strategy).require_grad();
        }
        if step == 1 {
            found.extend(sums.into_iter().map(|sum| sum.map_or(Vec::new(), numbers)));
        }
    }
    found.extend(weights.into_iter().map(|weight| numbers(weight.inner())));
    found
}

/// What each rank that runs the program finds.
fn outcomes(program: &Program, how: How) -> Vec<Vec<Vec<f64>>> {
    let mesh = Mesh::new(how.layout.parse().unwrap()).unwrap();
    let options = LogicalOptions { fusion: Some(how.fusion), autocast: how.autocast, ..Default::default() };
    let teams = Teams::new(&mesh, Axis::Tp).sequence_parallel(how.layout.contains("SP")).options(options);
    let ranks = launch(&mesh, &[cpu()], |rank| {
        let axes: &[Axis] = if how.layout.contains("DP") { &[Axis::Dp, Axis::Tp] } else { &[Axis::Tp] };
        let watch = Watch { rank: &rank, axes, how };
        if how.leads {
            return teams.run(&rank, |device| Ok(train(program, &device.autodiff(), &watch)));
        }
        let device = rank.logical_device_with(axes, options).autodiff();
        Ok(Some(train(program, &device, &watch)))
    });
    ranks.unwrap_or_else(|error| panic!("{how:?} {program:?}: {error}")).into_iter().flatten().collect()
}

/// The largest difference, by what is expected unless that is small.
fn apart(found: &[Vec<f64>], expected: &[Vec<f64>]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let part = |(x, y): (&Vec<f64>, &Vec<f64>)| {
        assert_eq!(x.len(), y.len());
        norm(&mut x.iter().zip(y).map(|(x, y)| x - y)) / norm(&mut y.iter().copied()).max(1.0)
    };
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(part).fold(0.0, |most, part| if part <= most { most } else { part })
}

fn ways() -> impl Strategy<Value = How> {
    let shard = || prop_oneof![Just(None), (0usize..2).prop_map(Some)];
    let layout = prop_oneof![
        select(&["TP1", "TP2", "TP4", "TP2 DP2"][..]).prop_map(|layout| (layout, false)),
        select(&["TP2", "TP4", "TP2 SP", "TP4 SP"][..]).prop_map(|layout| (layout, true)),
    ];
    (layout, [shard(), shard(), shard()], prop_oneof![Just(None), (0usize..2).prop_map(Some)]).prop_map(
        |((layout, leads), shards, of_samples)| How { layout, leads, shards, of_samples, fusion: true, ..ALONE },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_fused_training_gives_the_same(program in programs(), how in ways()) {
        let expected = outcomes(&program, ALONE).swap_remove(0);
        for found in outcomes(&program, how) {
            let found = apart(&found, &expected);
            prop_assert!(found < 1e-10, "{found:e}");
        }
    }

    #[test]
    fn a_training_in_half_precision_is_near(program in programs(), how in ways()) {
        let expected = outcomes(&program, ALONE).swap_remove(0);
        prop_assume!(apart(&outcomes(&program, How { rounds: true, ..ALONE })[0], &expected) < 0.01);
        for (autocast, bound) in [(None, 1e-3), (Some(FloatDType::BF16), 0.3)] {
            for found in outcomes(&program, How { autocast, dtype: DType::F32, ..how }) {
                let found = apart(&found, &expected);
                prop_assert!(found < bound, "{autocast:?}: {found:e}");
            }
        }
    }
}
