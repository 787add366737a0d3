//! Shared by the examples of plain Burn models: flags, random numbers, and the score of a trained model.

use std::sync::Arc;

use anyhow::{Result, anyhow};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::tensor::Device;
use burn::train::{ClassificationOutput, LearnerModel, LearningResult};
use burn_megatron::cli::device::DeviceChoice;
use burn_megatron::prelude::ParallelLayout;
use clap::builder::RangedU64ValueParser;

/// Trains a plain Burn model, on one device or over ranks.
#[derive(clap::Parser)]
pub struct Args {
    /// Tensor, sequence and data parallelism with ZeRO, such as `"TP2 SP DP2 ZeRO1"`, and pipelines (`PP2`) of a model that
    /// says what its blocks are; without it and without --ranks burn-train's own strategy trains on one device
    #[arg(long, value_name = "LAYOUT", conflicts_with_all = ["ranks", "zero"])]
    pub layout: Option<ParallelLayout>,
    /// Data-parallel ranks: short for a layout `DP<N>`
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=256))]
    pub ranks: Option<usize>,
    /// ZeRO stage of the ranks: 1 shards the optimizer states, 2 also the accumulated gradients, 3 also the
    /// parameters
    #[arg(long, value_name = "STAGE", default_value_t = 0, requires = "ranks",
        value_parser = clap::value_parser!(u8).range(0..=3))]
    pub zero: u8,
    /// Device of the ranks; with several on GPUs, rank r is on GPU r
    #[arg(long, value_enum, default_value = "cpu")]
    pub device: DeviceChoice,
}

impl Args {
    /// The layout to train in, if it is not one device.
    pub fn layout(&self) -> Option<ParallelLayout> {
        let ranks = |dp| ParallelLayout { dp, zero: self.zero, ..ParallelLayout::default() };
        self.layout.clone().or(self.ranks.map(ranks))
    }

    /// The device that the model is made on, and its random numbers in a known state.
    ///
    /// # Errors
    /// If the device is not there.
    pub fn device(&self) -> Result<Device> {
        let device = self.device.kind().devices(&ParallelLayout::default())?.remove(0);
        device.seed(1);
        Ok(device)
    }
}

/// Batches of `items`, shuffled in every epoch.
pub fn loader<I, B>(items: Vec<I>, batch: usize, batcher: impl Batcher<I, B> + 'static) -> Arc<dyn DataLoader<B>>
where
    I: Send + Sync + Clone + std::fmt::Debug + 'static,
    B: Send + Clone + std::fmt::Debug + 'static,
{
    DataLoaderBuilder::new(batcher).batch_size(batch).shuffle(1).build(InMemDataset::new(items))
}

/// The model of a training that ended well, without autodiff.
///
/// # Errors
/// Why the training failed.
pub fn trained<M: LearnerModel>(result: LearningResult<M>) -> Result<M> {
    match result.error {
        None => Ok(result.model.valid()),
        Some(error) => Err(anyhow!("{error}")),
    }
}

/// The steps of a model whose `forward` takes such a batch and returns a [`ClassificationOutput`].
#[macro_export]
macro_rules! classification_steps {
    ($model:ty, $batch:ty) => {
        impl burn::train::TrainStep for $model {
            type Input = $batch;
            type Output = burn::train::ClassificationOutput;

            fn step(&self, batch: $batch) -> burn::train::TrainOutput<Self::Output> {
                let output = self.forward(batch);
                burn::train::TrainOutput::new(self, output.loss.backward(), output)
            }
        }

        impl burn::train::InferenceStep for $model {
            type Input = $batch;
            type Output = burn::train::ClassificationOutput;

            fn step(&self, batch: $batch) -> Self::Output {
                self.forward(batch)
            }
        }
    };
}

/// The share of right answers, over all batches.
///
/// # Errors
/// If the loader fails.
pub fn accuracy<B>(
    loader: &Arc<dyn DataLoader<B>>,
    device: &Device,
    forward: impl Fn(B) -> ClassificationOutput,
) -> Result<f64> {
    let (mut right, mut all) = (0, 0);
    for batch in loader.to_device(device).iter() {
        let ClassificationOutput { output, targets, .. } = forward(batch.map_err(|error| anyhow!("{error}"))?);
        all += targets.dims()[0];
        let same = output.argmax(1).reshape([-1]).equal(targets).int().sum();
        right += same.into_scalar::<i64>() as usize;
    }
    Ok(right as f64 / all as f64)
}

/// A splitmix64 generator.
pub struct Dice(pub u64);

impl Dice {
    /// A number in `[0, 1)`.
    pub fn roll(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 24) as f32
    }

    /// A number from 0 to `sides` - 1.
    pub fn below(&mut self, sides: usize) -> usize {
        (self.roll() * sides as f32) as usize
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;

    #[test]
    fn ranks_are_short_for_a_layout() {
        Args::command().debug_assert();
        let parse = |line: &str| Args::try_parse_from(line.split(' '));
        let layout = |line: &str| parse(line).unwrap().layout().map(|layout| layout.to_string());
        assert_eq!(layout("lstm --ranks 4 --zero 2").as_deref(), Some("DP4 ZeRO2"));
        assert_eq!(layout("lstm --layout tp2,sp,dp2,zero1").as_deref(), Some("TP2 SP DP2 ZeRO1"));
        assert_eq!(layout("lstm"), None);
        for refused in ["lstm --zero 1", "lstm --ranks 0", "lstm --ranks 2 --zero 4", "lstm --layout DP2 --ranks 2"] {
            assert!(parse(refused).is_err(), "{refused}");
        }
    }
}
