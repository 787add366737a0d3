//! A layer that is frozen at first.

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::nn::LinearConfig;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use burn::train::metric::LossMetric;
use burn::train::{ClassificationOutput, ExecutionStrategy, InferenceStep, TrainOutput, TrainStep};
use burn_megatron::prelude::*;

use crate::training::{Batch, Student, error, mesh, model, trained};

/// Unfreezes its teacher in the step of the optimizer.
#[derive(Module, Debug)]
struct Thawing {
    student: Student,
}

impl TrainStep for Thawing {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let output = self.student.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }

    fn optimize(self, optimizer: &mut ModuleOptimizer, rate: ModuleLearningRate, grads: GradientsParams) -> Self {
        let mut model = optimizer.step(rate, self, grads);
        model.student.teacher.weight = model.student.teacher.weight.map(|weight| weight.detach().require_grad());
        model
    }
}

impl InferenceStep for Thawing {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        self.student.classify(batch)
    }
}

#[test]
fn a_layer_that_thaws_in_the_step_of_the_optimizer() {
    let mut student = model();
    student.teacher = LinearConfig::new(3, 4).with_bias(false).init(&student.student.weight.device()).no_grad();
    student.teacher.weight.val();
    let start = Thawing { student };
    let run =
        |batch, strategy| trained(start.clone(), batch, strategy, |training| training.metrics((LossMetric::new(),)));
    let weights = |model: Thawing| model.student.teacher.weight.val().into_data();
    let teacher = weights(run(16, ExecutionStrategy::single(Device::flex()).into()).model);
    assert_ne!(teacher, weights(start.clone()));
    for strategy in [MegatronStrategy::data_parallel(2), mesh("DP2").seeded().into()] {
        let result = run(8, strategy);
        assert!(result.error.is_none(), "{:?}", result.error);
        weights(result.model).assert_approx_eq::<f64>(&teacher, burn::tensor::Tolerance::absolute(1e-12));
    }
    for strategy in [mesh("DP2 ZeRO1"), mesh("DP2").overlap_grad_reduce(), mesh("TP2 DP2")] {
        let text = error(run(8, strategy.into()));
        assert!(text.contains("changes whether `student.teacher.weight` is trained"), "{text}");
    }
}
