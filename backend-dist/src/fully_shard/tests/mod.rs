//! A sharded module trains as the module does on one device.

mod mappers;
mod records;

use burn::module::{Lora, Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor, TensorData};

use super::*;
use ranks::launch::launch;
use ranks::mesh::{Axis, Mesh, ParallelLayout};

/// Tokens in, one number for each of 3 classes out. `tied` is the embedding's parameter in a second field.
#[derive(Module, Debug)]
struct Net {
    embedding: Embedding,
    layers: TransformerEncoder,
    frozen: Linear,
    head: Linear,
    tied: Option<Embedding>,
}

impl Net {
    fn new(device: &Device, tied: bool) -> Self {
        let embedding = EmbeddingConfig::new(10, 8).init(device);
        let net = Self {
            tied: tied.then(|| embedding.clone()),
            embedding,
            layers: TransformerEncoderConfig::new(8, 16, 2, 2).with_dropout(0.0).init(device),
            frozen: LinearConfig::new(8, 8).init(device).no_grad(),
            head: LinearConfig::new(8, 3).init(device),
        };
        net.map(&mut ToF64)
    }

    /// The mean over the batch of something that depends on all parameters but `never`.
    fn loss(&self, tokens: Tensor<2, Int>) -> Tensor<1> {
        let mut x = self.layers.forward(TransformerEncoderInput::new(self.embedding.forward(tokens.clone())));
        if let Some(tied) = &self.tied {
            x = x + tied.forward(tokens);
        }
        self.head.forward(self.frozen.forward(x)).powf_scalar(2.0).mean()
    }
}

struct ToF64;

impl ModuleMapper for ToF64 {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| {
            let wide = Tensor::from_inner(value.clone().inner().cast(FloatDType::F64));
            let wide = match value.gradient_checkpointing_strategy() {
                Some(strategy) => wide.with_gradient_checkpointing_strategy(strategy),
                None => wide,
            };
            wide.set_require_grad(value.is_require_grad())
        })
    }
}

fn device() -> Device {
    Device::flex().autodiff().gradient_checkpointing()
}

const BATCH: usize = 4;
const LENGTH: usize = 5;

/// Tokens of one step, of all ranks.
fn tokens(step: usize) -> Vec<i64> {
    (0..BATCH * LENGTH).map(|i| ((i * 7 + step * 3) % 10) as i64).collect()
}

fn batch(step: usize, member: usize, size: usize) -> Tensor<2, Int> {
    let share = BATCH / size;
    let own = tokens(step)[member * share * LENGTH..(member + 1) * share * LENGTH].to_vec();
    Tensor::from_data(TensorData::new(own, [share, LENGTH]), &device())
}

fn adamw() -> ModuleOptimizer {
    AdamWConfig::new().with_weight_decay(0.1).init()
}

fn sgd() -> ModuleOptimizer {
    SgdConfig::new().with_momentum(Some(MomentumConfig { momentum: 0.9, dampening: 0.1, nesterov: true })).init()
}

/// The values of all parameters after three steps.
fn on_one_device(mut net: Net, mut optimizer: ModuleOptimizer) -> Vec<Vec<f64>> {
    for step in 0..3 {
        let grads = GradientsParams::from_grads(net.loss(batch(step, 0, 1)).backward(), &net);
        net = optimizer.step(0.01, net, grads);
    }
    values(&net.materialize())
}

fn values(net: &Net) -> Vec<Vec<f64>> {
    struct Values(Vec<Vec<f64>>);
    impl ModuleVisitor for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            assert_eq!(param.val().dtype(), DType::F64);
            self.0.push(param.val().into_data().iter().collect());
        }
    }
    let mut values = Values(Vec::new());
    net.visit(&mut values);
    values.0
}

fn worst(found: &[Vec<f64>], expected: &[Vec<f64>]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let pairs = found.iter().zip(expected);
    pairs
        .map(|(found, expected)| {
            assert_eq!(found.len(), expected.len());
            norm(&mut found.iter().zip(expected).map(|(a, b)| a - b)) / norm(&mut expected.iter().copied()).max(1e-300)
        })
        .fold(0.0, f64::max)
}

fn data_parallel(size: usize) -> Mesh {
    Mesh::new(ParallelLayout { dp: size, ..Default::default() }).unwrap()
}

/// Trains three steps on each member of a group and returns every member's whole values.
fn sharded(
    net: &Net,
    optimizer: fn() -> ModuleOptimizer,
    size: usize,
    units: &Units,
    passes: bool,
) -> Vec<Vec<Vec<f64>>> {
    launch(&data_parallel(size), &[device()], |rank| {
        let group = rank.group(Axis::Dp);
        let net = net.clone().fork(&device());
        let shards = FullyShard::new(&net, &group, units);
        let mut net = shards.shard(net);
        let mut optimizer = optimizer();
        for step in 0..3 {
            if passes {
                shards.begin_pass(&net);
            }
            let loss = net.loss(batch(step, group.rank(), size));
            let mut grads = GradientsParams::from_grads(loss.backward(), &net);
            if passes {
                grads = shards.end_pass(&net, grads);
            }
            net = optimizer.step(0.01, net, grads);
        }
        Ok(values(&net.materialize()))
    })
    .unwrap()
}

#[test]
fn a_module_trains_as_on_one_device() {
    for tied in [false, true] {
        let net = Net::new(&device(), tied);
        let start = values(&net);
        for optimizer in [adamw, sgd] {
            let expected = on_one_device(net.clone(), optimizer());
            assert!(worst(&start, &expected) > 1e-3, "nothing was trained");
            for size in [1, 2, 4] {
                for (units, passes) in [
                    (Units::auto().keep_below(0), false),
                    (Units::auto().keep_below(0), true),
                    (Units::by_path("layers.layers.*").keep_below(0), true),
                    (Units::auto().keep_below(60), false),
                    (Units::auto().keep_below(60), true),
                ] {
                    for found in sharded(&net, optimizer, size, &units, passes) {
                        let worst = worst(&found, &expected);
                        assert!(worst < 1e-12, "{size} ranks, {units:?}, passes {passes}, tied {tied}: {worst:e}");
                    }
                }
            }
        }
    }
}

/// Twice gathered and once reduced: forward, backward, and the gradient.
#[test]
fn a_matrix_is_gathered_twice_and_its_gradient_reduced_once() {
    let net = Net::new(&device(), false);
    let counts = launch(&data_parallel(2), &[device()], |rank| {
        let net = net.clone().fork(&device());
        let shards = FullyShard::new(&net, &rank.group(Axis::Dp), &Units::auto().keep_below(60));
        let net = shards.shard(net);
        let mut counts = Vec::new();
        for step in 0..3 {
            shards.begin_pass(&net);
            let loss = net.loss(batch(step, rank.rank, 2));
            let grads = GradientsParams::from_grads(loss.backward(), &net);
            let _ = shards.end_pass(&net, grads);
            counts.push(shards.take_counts());
        }
        Ok(counts)
    });
    // 2 layers of 6 matrices; the embedding, whose value no gradient needs; the frozen matrix, which has no gradient and
    // is saved for backward.
    let expected = Counts { forward: 14, backward: 12, reduced: 13 };
    assert_eq!(counts.unwrap(), vec![vec![expected; 3]; 2]);
}

/// A rank that takes another way than its peers is named, and nobody waits.
#[test]
fn ranks_that_use_other_parameters_are_an_error() {
    let (first, second) = (LinearConfig::new(8, 8).init(&device()), LinearConfig::new(8, 9).init(&device()));
    let result = launch(&data_parallel(2), &[device()], |rank| {
        let pair = (first.clone().fork(&device()), second.clone().fork(&device()));
        let (first, second) = fully_shard(pair, &rank.group(Axis::Dp), &Units::auto().keep_below(0));
        let x = Tensor::<2>::random([1, 8], Distribution::Default, &device());
        let y = if rank.rank == 0 { first.forward(x) } else { second.forward(x) };
        Ok(y.into_data())
    });
    let message = result.unwrap_err().to_string();
    assert!(message.contains("broadcast from member"), "{message}");
}

/// Adapters are sharded, what they adapt stays whole.
#[test]
fn a_module_with_lora_trains_as_on_one_device() {
    let net = Net::new(&device(), false).apply_lora(Lora::new(2, 4.0));
    let expected = on_one_device(net.clone(), adamw());
    assert!(worst(&values(&net.clone().materialize()), &expected) > 1e-3, "nothing was trained");
    for passes in [false, true] {
        for found in sharded(&net, adamw, 2, &Units::auto().keep_below(0), passes) {
            let worst = worst(&found, &expected);
            assert!(worst < 1e-12, "passes {passes}: {worst:e}");
        }
    }
}

#[test]
#[should_panic(expected = "`weight` is trained and has a reparameterization")]
fn a_trained_parameter_with_lora_is_refused_without_passes() {
    let linear = LinearConfig::new(8, 8).init(&device()).apply_lora(Lora::new(2, 4.0)).unfreeze();
    let mesh = data_parallel(1);
    launch(&mesh, &[device()], |rank| {
        let _ = fully_shard(linear.clone(), &rank.group(Axis::Dp), &Units::auto());
        Ok(())
    })
    .unwrap();
}
