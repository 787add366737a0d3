//! AdamW and the schedule of its learning rate, as burn-train's learner takes them.

use backend_dist::paths::PathVisitor;
use burn::lr_scheduler::{LrScheduler, LrSchedulerRecord};
use burn::module::{Module, Param, ParamGroup};
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::Tensor;

use crate::lr::LrSchedule;
use crate::optim::AdamWConfig as Constants;

/// AdamW with these constants; vectors do not decay unless they are to.
pub(super) fn adamw<M: Module>(constants: &Constants, model: &M) -> ModuleOptimizer {
    let config = AdamWConfig::new()
        .with_beta_1(constants.beta1 as f32)
        .with_beta_2(constants.beta2 as f32)
        .with_epsilon(constants.eps as f32)
        .with_weight_decay(constants.weight_decay as f32);
    if constants.decay_vectors || constants.weight_decay == 0.0 {
        return config.init();
    }
    let Vectors(paths) = Vectors(Vec::new()).walk(model);
    let without = config.clone().with_weight_decay(0.0);
    config.init().with_group(ParamGroup::from_paths(paths), without.build(), None)
}

/// The paths of parameters of one dimension.
struct Vectors(Vec<String>);

impl PathVisitor for Vectors {
    fn visit<const D: usize>(&mut self, path: &str, _: &Param<Tensor<D>>) {
        if D == 1 {
            self.0.push(path.to_string());
        }
    }
}

/// The learning rate of the next step.
#[derive(Clone)]
pub(super) struct Rate {
    pub schedule: LrSchedule,
    /// Samples of a step.
    pub samples: u64,
    /// Steps that were taken.
    pub steps: u64,
}

impl LrScheduler for Rate {
    fn step(&mut self) -> f64 {
        let rate = self.schedule.at(self.steps * self.samples);
        self.steps += 1;
        rate
    }

    fn to_record(&self) -> LrSchedulerRecord {
        LrSchedulerRecord::new().with_scalar("steps", self.steps)
    }

    fn load_record(&mut self, record: LrSchedulerRecord) {
        self.steps = record.scalar("steps").unwrap_or(self.steps);
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::GradientsParams;
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn vectors_decay_only_if_they_are_to() {
        let device = Device::flex().autodiff();
        let model: Linear = LinearConfig::new(3, 2).init(&device);
        let numbers = |model: &Linear| {
            let bias = model.bias.as_ref().expect("it has one").val().into_data().iter::<f64>().collect::<Vec<_>>();
            (model.weight.val().into_data().iter::<f64>().collect::<Vec<_>>(), bias)
        };
        let (weight, bias) = numbers(&model);
        assert!(bias.iter().any(|value| value.abs() > 1e-3), "{bias:?} would not decay");
        for decay_vectors in [false, true] {
            let constants = Constants { weight_decay: 0.5, decay_vectors, ..Constants::default() };
            // Without a gradient the decay alone is left.
            let loss = model.forward(Tensor::<2>::zeros([1, 3], &device)).mul_scalar(0).sum();
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            let stepped = adamw(&constants, &model).step(0.1, model.clone(), gradients);
            let (found_weight, found_bias) = numbers(&stepped);
            let close = |found: &[f64], before: &[f64], factor: f64| {
                found.iter().zip(before).all(|(found, before)| (found - before * factor).abs() < 1e-6)
            };
            assert!(close(&found_weight, &weight, 0.95), "{found_weight:?} of {weight:?}");
            assert!(close(&found_bias, &bias, if decay_vectors { 0.95 } else { 1.0 }), "{found_bias:?} of {bias:?}");
        }
    }

    #[test]
    fn the_rate_is_that_of_the_samples_before_a_step() {
        let schedule = crate::lr::LrConfig::constant(0.5).schedule(4).unwrap();
        let mut rate = Rate { schedule, samples: 4, steps: 0 };
        assert_eq!((rate.step(), rate.steps), (0.5, 1));
        let record = rate.to_record();
        rate.step();
        rate.load_record(record);
        assert_eq!(rate.steps, 1);
    }
}
