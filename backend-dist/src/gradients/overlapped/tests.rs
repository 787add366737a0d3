//! Gradients that are reduced during the backward pass are those that are reduced after it.

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
                let number = |id| Trained::default().walk(&plain).known.get(&id).map(|index| index % size);
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
                        let trained = Trained::default().walk(&plain);
                        expected.retain(|path, _| trained.fields[path].index % size == rank.rank);
                    }
                    assert_eq!(found, expected, "{size} ranks, buckets of {bytes}, owned {owned}, step {step}");
                }
            });
        }
    }
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

/// Why a run of two ranks fails.
fn failure(run: impl Fn(&Net, &Reducer, usize) + Sync) -> String {
    let (net, mesh) = (Net::new(), Mesh::new("DP2".parse().unwrap()).unwrap());
    let result = launch(&mesh, &[Device::flex()], |rank| {
        let reducer = Reducer::with_buckets(&net, &rank.group(Axis::Dp), |_| None, 1);
        let net = reducer.attach(net.clone().fork(&device()));
        for _ in 0..2 {
            reducer.begin_pass(&net, GradientsParams::new());
            run(&net, &reducer, rank.rank);
        }
        Ok(())
    });
    result.unwrap_err().to_string()
}

#[test]
fn a_rank_that_fails_while_the_other_reduces_ends_both_with_its_error() {
    let begun = std::time::Instant::now();
    let passes = std::sync::atomic::AtomicUsize::new(0);
    let text = failure(|net, reducer, rank| {
        let loss = net.loss(batch(0, rank, 2), true);
        // In the second pass the other rank waits inside its backward pass.
        if rank == 1 && passes.fetch_add(1, std::sync::atomic::Ordering::SeqCst) == 1 {
            panic!("the gradients ran into a wall");
        }
        let grads = backward(net, loss);
        reducer.end_pass(net, grads);
    });
    assert!(text.contains("the gradients ran into a wall"), "{text}");
    assert!(begun.elapsed().as_secs() < 5);
}

#[test]
fn a_second_backward_pass_is_an_error() {
    let text = failure(|net, _, rank| {
        let _ = net.loss(batch(0, rank, 2), true).backward();
        let _ = net.loss(batch(1, rank, 2), true).backward();
    });
    assert!(text.contains("`shared.weight` is used after a backward pass had its gradient"), "{text}");
    assert!(text.contains("nearest legal: without overlap"), "{text}");
}
