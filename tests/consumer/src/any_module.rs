//! A regression with burn-nn, over ranks by `MegatronStrategy::mesh`.

use std::error::Error;
use std::path::Path;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::transformer::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};
use burn::train::logger::{FileMetricLogger, MetricLogger};
use burn::train::metric::LossMetric;
use burn::train::metric::store::Split;
use burn::train::{InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep};
use burn_megatron::prelude::*;

const WIDTH: usize = 16;

#[derive(Module, Debug)]
struct Regression {
    layer: PositionWiseFeedForward,
}

impl Regression {
    /// To be learned: the inputs in reverse order.
    fn forward(&self, x: Tensor<2>) -> RegressionOutput {
        let (output, targets) = (self.layer.forward(x.clone()), x.flip([1]));
        RegressionOutput::new(MseLoss::new().forward(output.clone(), targets.clone(), Reduction::Mean), output, targets)
    }
}

impl TrainStep for Regression {
    type Input = Tensor<2>;
    type Output = RegressionOutput;

    fn step(&self, x: Tensor<2>) -> TrainOutput<RegressionOutput> {
        let output = self.forward(x);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Regression {
    type Input = Tensor<2>;
    type Output = RegressionOutput;

    fn step(&self, x: Tensor<2>) -> RegressionOutput {
        self.forward(x)
    }
}

struct Rows;

impl Batcher<u64, Tensor<2>> for Rows {
    fn batch(&self, seeds: Vec<u64>, device: &Device) -> Tensor<2> {
        let rows = seeds.iter().flat_map(|&seed| (0..WIDTH as u64).map(move |column| wave(seed * 31 + column)));
        Tensor::<1>::from_floats(rows.collect::<Vec<f32>>().as_slice(), device).reshape([seeds.len(), WIDTH])
    }
}

/// Between -1 and 1.
fn wave(at: u64) -> f32 {
    (at as f32 * 12.9898).sin()
}

/// The losses of the steps of the last epoch, after that of the first step.
pub fn losses(folder: &Path) -> Result<Vec<f64>, Box<dyn Error>> {
    let device = Device::flex().autodiff();
    let model = Regression { layer: PositionWiseFeedForwardConfig::new(WIDTH, 64).with_dropout(0.0).init(&device) };
    let loader = |seeds: std::ops::Range<u64>| {
        DataLoaderBuilder::new(Rows).batch_size(16).build(InMemDataset::new(seeds.collect::<Vec<_>>()))
    };
    let result = SupervisedTraining::new(folder, loader(0..256), loader(256..288))
        .metrics((LossMetric::new(),))
        .num_epochs(10)
        .with_training_strategy(MegatronStrategy::mesh("TP2".parse()?).into())
        .launch(Learner::new(model, AdamWConfig::new().init(), 5e-3));
    if let Some(error) = result.error {
        return Err(error.to_string().into());
    }
    let read = |epoch| FileMetricLogger::new(folder).read_numeric("Loss", epoch, &Split::Train);
    let (first, last) = (read(1)?, read(10)?);
    Ok(first.iter().take(1).chain(&last).map(|entry| entry.current()).collect())
}
