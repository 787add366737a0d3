//! Metrics that keep tensors from batch to batch, of ranks on several devices.

use std::sync::Arc;

use burn::prelude::*;
use burn::tensor::ExecutionError;
use burn::train::logger::{FileMetricLogger, MetricLogger};
use burn::train::metric::store::Split;
use burn::train::metric::{Adaptor, AurocMetric, ClassReduction, ConfusionStatsInput, ItemLazy, Metric, RecallMetric};
use burn::train::{
    ClassificationOutput, ExecutionStrategy, InferenceStep, SupervisedTraining, TrainOutput, TrainStep,
    TrainingStrategy,
};
use burn_megatron::prelude::*;

use crate::training::{Batch, Classifies, Student, error, mesh, model, trained, trained_in};

macro_rules! classifier {
    ($(#[$doc:meta])* $name:ident, $output:ty, $made:expr) => {
        $(#[$doc])*
        #[derive(Module, Debug)]
        pub struct $name {
            pub student: Student,
        }

        impl TrainStep for $name {
            type Input = Batch;
            type Output = $output;

            fn step(&self, batch: Batch) -> TrainOutput<Self::Output> {
                let output = self.student.classify(batch);
                TrainOutput::new(self, output.loss.backward(), $made(output))
            }
        }

        impl InferenceStep for $name {
            type Input = Batch;
            type Output = $output;

            fn step(&self, batch: Batch) -> Self::Output {
                $made(self.student.classify(batch))
            }
        }
    };
}

classifier!(
    /// The student without a step of its own.
    Bare, ClassificationOutput, std::convert::identity
);
classifier!(
    /// With outputs in host memory.
    Counted, OnHost<ClassificationOutput>, OnHost
);
classifier!(
    /// With outputs of a type of its own.
    Unknown, Own, Own
);

pub struct Own(ClassificationOutput);

impl ItemLazy for Own {
    fn sync(self) -> Result<Self, ExecutionError> {
        self.0.sync().map(Self)
    }
}

impl Adaptor<ConfusionStatsInput> for Own {
    fn adapt(&self) -> ConfusionStatsInput {
        self.0.adapt()
    }
}

fn metrics() -> (RecallMetric, AurocMetric) {
    (RecallMetric::multiclass(1, ClassReduction::Macro), AurocMetric::multiclass(ClassReduction::Macro))
}

/// What the metrics say of the last epoch.
fn values<M: Classifies>(
    model: M,
    batch: usize,
    strategy: TrainingStrategy<M>,
    metered: impl Fn(SupervisedTraining<M>) -> SupervisedTraining<M>,
) -> [f64; 2] {
    let directory = tempfile::tempdir().unwrap();
    let result = trained_in(directory.path(), model, batch, strategy, metered);
    assert!(result.error.is_none(), "{:?}", result.error);
    let mut logger = FileMetricLogger::new(directory.path());
    let names = [metrics().0.name(), Arc::new("AUROC [Macro]".into())];
    names.map(|name| logger.read_numeric(&name, 2, &Split::Train).unwrap().last().unwrap().current())
}

/// What one device says of all items, and not of the last batch.
#[test]
fn metrics_that_add_up_the_outputs_of_several_ranks() {
    let of_bare =
        |batch, strategy| values(Bare { student: model() }, batch, strategy, |training| training.metrics(metrics()));
    let of_counted =
        |strategy| values(Counted { student: model() }, 8, strategy, |training| training.metrics(metrics()));
    let one = of_bare(16, ExecutionStrategy::single(Device::flex()).into());
    assert!(one.iter().all(|value| value.is_finite()), "{one:?}");
    for layout in ["TP2 DP2", "DP2 ZeRO1"] {
        for two in [of_bare(8, mesh(layout).seeded().into()), of_counted(mesh(layout).seeded().into())] {
            assert!(one.iter().zip(&two).all(|(one, two)| (one - two).abs() < 1e-9), "{layout}: {one:?}, {two:?}");
        }
    }
}

/// Nobody knows its tensors.
#[test]
fn an_output_of_ones_own_type_needs_on_host() {
    let unknown = Unknown { student: model() };
    let text = error(trained(unknown, 8, mesh("TP2 DP2").into(), |training| training.metrics((metrics().0,))));
    assert!(text.contains("make outputs `OnHost`"), "{text}");
}
