//! Gradients that are reduced during the backward pass are those that are reduced after it.

mod errors;

use std::collections::BTreeMap;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams};
use burn::tensor::{DType, Device, Tensor, TensorData, activation};

use super::*;
use crate::gradients::average_gradients;
use ranks::launch::{Rank, launch};
use ranks::mesh::{Axis, Mesh, ParallelLayout};

/// `shared` is used twice, `sometimes` by one rank only, `never` by none.
#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
    shared: Linear,
    frozen: Linear,
    sometimes: Linear,
    never: Linear,
}

const WIDTH: usize = 4;

impl Net {
    fn new() -> Self {
        let linear = || LinearConfig::new(WIDTH, WIDTH).init(&device());
        let net = Self {
            layers: (0..3).map(|_| linear()).collect(),
            shared: linear(),
            frozen: linear().no_grad(),
            sometimes: linear(),
            never: linear(),
        };
        net.map(&mut ToF64)
    }

    fn loss(&self, x: Tensor<2>, sometimes: bool) -> Tensor<1> {
        let mut x = self.shared.forward(x);
        for layer in &self.layers {
            x = activation::tanh(layer.forward(x));
        }
        x = self.shared.forward(self.frozen.forward(x));
        if sometimes {
            x = self.sometimes.forward(x);
        }
        x.powf_scalar(2.0).mean()
    }
}

struct ToF64;

impl ModuleMapper for ToF64 {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| {
            Tensor::from_inner(value.clone().inner().cast(DType::F64)).set_require_grad(value.is_require_grad())
        })
    }
}

fn device() -> Device {
    Device::flex().autodiff()
}

/// The share of one of `size` ranks in a batch of 8.
fn batch(step: usize, rank: usize, size: usize) -> Tensor<2> {
    let share = 8 / size;
    let value = |i: usize| ((i * 7 + step * 3) as f64 * 0.37).sin();
    let values: Vec<f64> = (rank * share * WIDTH..(rank + 1) * share * WIDTH).map(value).collect();
    Tensor::from_data(TensorData::new(values, [share, WIDTH]), (&device(), DType::F64))
}

fn data_parallel<T: Send>(size: usize, run: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    let mesh = Mesh::new(ParallelLayout { dp: size, ..Default::default() }).unwrap();
    launch(&mesh, &[Device::flex()], |rank| Ok(run(rank))).unwrap()
}

/// The values of a module, or its gradients, by path.
fn named(net: &Net, grads: Option<&GradientsParams>) -> BTreeMap<String, Vec<f64>> {
    struct Named<'a> {
        grads: Option<&'a GradientsParams>,
        found: BTreeMap<String, Vec<f64>>,
    }
    impl PathVisitor for Named<'_> {
        fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
            let tensor = match self.grads {
                Some(grads) => grads.get::<D>(param.id),
                None => Some(param.val()),
            };
            if let Some(tensor) = tensor {
                self.found.insert(path.to_string(), tensor.into_data().iter().collect());
            }
        }
    }
    Named { grads, found: BTreeMap::new() }.walk(net).found
}

fn backward(net: &Net, loss: Tensor<1>) -> GradientsParams {
    GradientsParams::from_grads(loss.backward(), net)
}

/// In three steps of two micro-batches; the last rank uses `sometimes`.
#[test]
fn the_bits_are_those_of_a_reduction_after_the_backward_pass() {
    let net = Net::new();
    for size in [2, 4] {
        for (bytes, owned) in [(1, false), (300, false), (1 << 20, false), (1, true), (300, true)] {
            data_parallel(size, |rank| {
                let (group, plain) = (rank.group(Axis::Dp), net.clone().fork(&device()));
                let number = |id| Trained::of(&|_| true).walk(&plain).known.get(&id).map(|index| index % size);
                let owner = |id| number(id).filter(|_| owned);
                let reducer = Reducer::with_buckets(&plain, &group, owner, bytes);
                let hooked = reducer.attach(plain.clone());
                let last = rank.rank + 1 == size;
                for step in 0..3 {
                    let x = |micro: usize| batch(2 * step + micro, rank.rank, size);
                    let mut sum = GradientsAccumulator::new();
                    sum.accumulate(&plain, backward(&plain, plain.loss(x(0), last)));
                    sum.accumulate(&plain, backward(&plain, plain.loss(x(1), last)));
                    let expected = average_gradients(&plain, sum.grads(), &group);

                    // Between passes gradients are where Burn puts them.
                    let earlier = backward(&hooked, hooked.loss(x(0), last));
                    reducer.begin_pass(&hooked, earlier);
                    let left = backward(&hooked, hooked.loss(x(1), last));
                    assert!(left.is_empty());
                    let found = named(&hooked, Some(&reducer.end_pass(&hooked, left)));

                    let mut expected = named(&plain, Some(&expected));
                    assert!(expected.contains_key("sometimes.weight") && !expected.contains_key("never.weight"));
                    assert!(expected["sometimes.weight"].iter().any(|value| *value != 0.0));
                    if owned {
                        let trained = Trained::of(&|_| true).walk(&plain);
                        expected.retain(|path, _| trained.fields[path].index % size == rank.rank);
                    }
                    assert_eq!(found, expected, "{size} ranks, buckets of {bytes}, owned {owned}, step {step}");
                }
            });
        }
    }
}

/// As in a pipeline: the last micro-batch goes forward before the others go back.
#[test]
fn passes_of_others_between_a_forward_and_its_backward_pass_are_only_added() {
    let net = Net::new();
    data_parallel(2, |rank| {
        let (group, plain) = (rank.group(Axis::Dp), net.clone().fork(&device()));
        let reducer = Reducer::of_some(&plain, &group, |_| None, |id| id != plain.shared.weight.id, 1);
        let hooked = reducer.attach(plain.clone());
        for step in 0..3 {
            let x = |micro: usize| batch(2 * step + micro, rank.rank, 2);
            let mut sum = GradientsAccumulator::new();
            sum.accumulate(&plain, backward(&plain, plain.loss(x(0), true)));
            sum.accumulate(&plain, backward(&plain, plain.loss(x(1), true)));
            let sum = sum.grads();
            let of_shared = sum.get::<2>(plain.shared.weight.id).unwrap().into_data();
            let mut expected = named(&plain, Some(&average_gradients(&plain, sum, &group)));

            reducer.begin_pass(&hooked, GradientsParams::new());
            let last = hooked.loss(x(1), true);
            reducer.pause();
            let rest = reducer.resume(&hooked, backward(&hooked, hooked.loss(x(0), true)));
            let mut sum = GradientsAccumulator::new();
            sum.accumulate(&hooked, rest);
            sum.accumulate(&hooked, backward(&hooked, last));
            assert!(step == 0 || reducer.take_counts().during > 0);
            let found = reducer.end_pass(&hooked, sum.grads());
            // That of the parameter which is left is the sum of this rank.
            assert_eq!(found.get::<2>(plain.shared.weight.id).unwrap().into_data(), of_shared);
            let mut found = named(&hooked, Some(&found));
            assert!(found.remove("shared.weight") != expected.remove("shared.weight"));
            assert_eq!(found, expected, "step {step}");
        }
    });
}

#[test]
fn three_steps_are_those_of_one_device() {
    let net = Net::new();
    let optimizer = || AdamWConfig::new().with_weight_decay(0.1).init();
    let (mut alone, mut adamw) = (net.clone(), optimizer());
    for step in 0..3 {
        let grads = backward(&alone, alone.loss(batch(step, 0, 1), true));
        alone = adamw.step(0.01, alone, grads);
    }
    let (start, expected) = (named(&net, None), named(&alone, None));
    let gap = |left: &BTreeMap<String, Vec<f64>>| {
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let of = |(path, own): (&String, &Vec<f64>)| {
            norm(&mut own.iter().zip(&expected[path]).map(|(a, b)| a - b)) / norm(&mut own.iter().copied())
        };
        left.iter().map(of).fold(0.0, f64::max)
    };
    assert!(gap(&start) > 1e-3, "nothing was trained");
    for size in [1, 2, 4] {
        let found = data_parallel(size, |rank| {
            let reducer = Reducer::with_buckets(&net, &rank.group(Axis::Dp), |_| None, 300);
            let (mut net, mut adamw) = (reducer.attach(net.clone().fork(&device())), optimizer());
            for step in 0..3 {
                reducer.begin_pass(&net, GradientsParams::new());
                let grads = backward(&net, net.loss(batch(step, rank.rank, size), true));
                net = adamw.step(0.01, net.clone(), reducer.end_pass(&net, grads));
            }
            named(&net, None)
        });
        found.iter().for_each(|found| assert!(gap(found) < 1e-12, "{size} ranks: {:e}", gap(found)));
    }
}

/// A weight has 128 bytes, a bias 32. That buckets leave between two steps is a test of the order of steps.
#[test]
fn a_bucket_with_an_unused_parameter_waits_for_the_end_of_the_pass() {
    let net = Net::new();
    for (bytes, expected) in [
        // In the first pass all wait for `never`, which comes first in it.
        (1, [Counts { during: 0, after: 12 }, Counts { during: 10, after: 2 }]),
        // 320 of 960 bytes each.
        (300, [Counts { during: 0, after: 3 }, Counts { during: 2, after: 1 }]),
    ] {
        let counts = data_parallel(2, |rank| {
            let reducer = Reducer::with_buckets(&net, &rank.group(Axis::Dp), |_| None, bytes);
            let net = reducer.attach(net.clone().fork(&device()));
            let pass = |step| {
                reducer.begin_pass(&net, GradientsParams::new());
                let grads = backward(&net, net.loss(batch(step, rank.rank, 2), true));
                reducer.end_pass(&net, grads);
                reducer.take_counts()
            };
            [pass(0), pass(1)]
        });
        assert_eq!(counts, [expected, expected], "buckets of {bytes}");
    }
}

#[test]
fn records_have_no_hooks() {
    let net = Net::new();
    let records = data_parallel(2, |rank| {
        let reducer = Reducer::new(&net, &rank.group(Axis::Dp), |_| None);
        Net::new().load_record(reducer.attach(net.clone()).into_record())
    });
    records.iter().for_each(|loaded| assert_eq!(named(loaded, None), named(&net, None)));
}
