//! Burn's AdamW with fewer operations on logical devices.
//!
//! A program issues about fifteen operations a parameter for Burn's AdamW, half of all operations of a training step, and
//! they take it as long as those of the layers. Here it is one, which says what to compute as a whole.

use burn::grad_clipping::GradientClippingConfig;
use burn::optim::{AdamW, AdamWConfig, AdamWState, AdaptiveMomentumState, LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Tensor};
use serde::Deserialize;

use crate::mesh_backend::formula::AdamWStep;
use crate::mesh_backend::local::{is_logical, stepped};

/// PyTorch's `AdamW(fused=True)` for Burn's [`AdamWConfig`].
///
/// ```
/// use backend_dist::fused_adamw::FusedAdamW;
/// use burn::optim::AdamWConfig;
///
/// let optimizer = AdamWConfig::new().with_weight_decay(0.1).init_fused();
/// # let _: burn::optim::ModuleOptimizer = optimizer;
/// ```
pub trait FusedAdamW {
    /// The optimizer that `init` makes: the same bits, and the same records. Parameters on a
    /// [logical device](crate::mesh_backend) take fewer operations, but with `amsgrad` or `cautious_weight_decay`.
    fn init_fused(&self) -> ModuleOptimizer;
}

impl FusedAdamW for AdamWConfig {
    fn init_fused(&self) -> ModuleOptimizer {
        // Burn keeps the fields to itself, and says them in a configuration's file.
        let settings = serde_json::to_value(self).and_then(serde_json::from_value);
        let settings: Settings = settings.expect("a configuration can be written and read");
        let clipping = settings.grad_clipping.clone();
        let optimizer = ModuleOptimizer::from(Fused { settings, adamw: self.build() });
        match clipping {
            Some(clipping) => optimizer.with_grad_clipping(clipping.init()),
            None => optimizer,
        }
    }
}

/// Those of [`AdamWConfig`].
#[derive(Clone, Deserialize)]
struct Settings {
    beta_1: f32,
    beta_2: f32,
    epsilon: f32,
    weight_decay: f32,
    cautious_weight_decay: bool,
    amsgrad: bool,
    grad_clipping: Option<GradientClippingConfig>,
}

#[derive(Clone)]
struct Fused {
    settings: Settings,
    adamw: AdamW,
}

impl Optimizer for Fused {
    type State<const D: usize> = AdamWState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<AdamWState<D>>,
    ) -> (Tensor<D>, Option<AdamWState<D>>) {
        let Settings { beta_1, beta_2, epsilon, weight_decay, cautious_weight_decay, amsgrad, .. } = self.settings;
        let is_fused = !cautious_weight_decay && !amsgrad && is_logical(&grad.device());
        let state = match state {
            Some(state) if is_fused => state.momentum,
            state => return self.adamw.step(lr, tensor, grad, state),
        };
        // In the types in which Burn computes them.
        let time = state.time + 1;
        let corrected = |beta: f32| f64::from(1.0 - beta.powi(time as i32));
        let rest = |beta: f32| f64::from(1.0 - beta);
        let step = AdamWStep {
            decays: [beta_1, beta_2].map(f64::from),
            rests: [beta_1, beta_2].map(rest),
            corrections: [beta_1, beta_2].map(corrected),
            epsilon: epsilon.into(),
            keep: 1.0 - lr * f64::from(weight_decay),
            rate: lr,
        };
        let [tensor, moment_1, moment_2] = stepped(step, [tensor, state.moment_1, state.moment_2, grad]);
        (tensor, Some(AdamWState::new(AdaptiveMomentumState::new(time, moment_1, moment_2))))
    }

    fn to_device<const D: usize>(state: AdamWState<D>, device: &Device) -> AdamWState<D> {
        AdamW::to_device(state, device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh_backend::{LogicalDevice, explain};
    use crate::parallelize::{Plan, parallelize};
    use burn::module::{Module, ModuleVisitor, Param};
    use burn::nn::{SwiGlu, SwiGluConfig};
    use burn::optim::GradientsParams;
    use ranks::launch::{Rank, launch};
    use ranks::mesh::{Axis, Mesh};

    const STEPS: usize = 4;

    /// The bits of all parameters after some steps, and the operations of the last one's optimizer.
    fn train(rank: &Rank, config: &AdamWConfig, is_fused: impl Fn(usize) -> bool) -> (Vec<u64>, usize) {
        let device = rank.logical_device(&[Axis::Tp]).autodiff();
        device.seed(3);
        let model = SwiGluConfig::new(6, 8).with_bias(true).init(&device);
        let mut model: SwiGlu = parallelize(model, rank, &Plan::auto()).unwrap();
        let init = |step| if is_fused(step) { config.init_fused() } else { config.init() };
        let mut optimizer = init(0);
        let mut operations = 0;
        for step in 0..STEPS {
            let x = Tensor::<2>::ones([3, 6], &device) * (step as f64 + 0.5);
            let loss = model.forward(x).powi_scalar(2).mean();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            let before = explain(&device).operations;
            // A record of one is a record of the other. Its order is not the same on all ranks, which read alike.
            if rank.mesh.world_size() == 1 {
                optimizer = init(step).load_record(optimizer.to_record());
            }
            let read = explain(&device).operations - before;
            model = optimizer.step(1e-2, model, grads);
            operations = explain(&device).operations - before - read;
        }
        let mut bits = Bits(Vec::new());
        model.visit(&mut bits);
        (bits.0, operations)
    }

    struct Bits(Vec<u64>);

    impl ModuleVisitor for Bits {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.extend(param.val().into_data().iter::<f64>().map(f64::to_bits));
        }
    }

    #[test]
    fn steps_as_burns_in_fewer_operations() {
        let clipped = AdamWConfig::new().with_grad_clipping(Some(GradientClippingConfig::Norm(1e-3)));
        for layout in ["TP1", "TP2"] {
            for (config, fewer) in [
                (AdamWConfig::new().with_beta_1(0.8).with_beta_2(0.99).with_epsilon(1e-3), true),
                (AdamWConfig::new().with_weight_decay(0.3), true),
                (AdamWConfig::new().with_amsgrad(true), false),
                (AdamWConfig::new().with_cautious_weight_decay(true), false),
                (AdamWConfig::new().with_weight_decay(0.0), true),
                (clipped.clone(), true),
            ] {
                launch(&Mesh::new(layout.parse().unwrap()).unwrap(), &[Device::flex()], |rank| {
                    let (expected, plain) = train(&rank, &config, |_| false);
                    let (found, fused) = train(&rank, &config, |_| true);
                    let (mixed, _) = train(&rank, &config, |step| step % 2 == 0);
                    assert_eq!((&found, &mixed), (&expected, &expected), "{layout} {config}");
                    assert_eq!(fused < plain, fewer, "{layout} {config}: {fused} of {plain} operations");
                    Ok(())
                })
                .unwrap();
            }
        }
    }
}
