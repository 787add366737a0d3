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
        let fused = Fused::of(self);
        let clipping = fused.settings.grad_clipping.clone();
        let optimizer = ModuleOptimizer::from(fused);
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

impl Fused {
    fn of(config: &AdamWConfig) -> Self {
        // Burn keeps the fields to itself, and says them in a configuration's file.
        let settings = serde_json::to_value(config).and_then(serde_json::from_value);
        Self { settings: settings.expect("a configuration can be written and read"), adamw: config.build() }
    }
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
    use crate::logical::Placement;
    use crate::mesh_backend::local::Known;
    use crate::mesh_backend::{LogicalDevice, LogicalOptions, Redistribute, explain};
    use crate::parallelize::{Plan, parallelize};
    use burn::module::{Module, ModuleVisitor, Param};
    use burn::nn::{SwiGlu, SwiGluConfig};
    use burn::optim::GradientsParams;
    use burn::tensor::{DType, TensorData};
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

    fn fusing(rank: &Rank) -> Device {
        rank.logical_device_with(&[Axis::Tp], LogicalOptions { fusion: Some(true), ..Default::default() })
    }

    fn matrix([rows, columns]: [usize; 2], seed: usize, device: &Device) -> Tensor<2> {
        let values: Vec<f64> = (0..rows * columns).map(|i| ((i + 7 * seed) as f64 * 0.37).sin()).collect();
        Tensor::from_data(TensorData::new(values, [rows, columns]), (device, DType::F64))
    }

    fn bits(x: &Tensor<2>) -> Vec<u64> {
        x.to_data().iter::<f64>().map(f64::to_bits).collect()
    }

    fn kernels(device: &Device) -> usize {
        explain(device).kernels.get("fused kernel").copied().unwrap_or(0)
    }

    /// Bits of matrices and of their moments after some steps of `step`, of which one is read early, and the kernels that
    /// the steps took.
    fn stepped_apart<O: Optimizer<State<2> = AdamWState<2>>>(rank: &Rank, optimizer: &O) -> (Vec<u64>, usize) {
        let device = fusing(rank);
        let matrix = |shape, seed| matrix(shape, seed, &device);
        // Neighbours are not of one size.
        let shapes = [[4, 3], [1, 6], [3, 4], [2, 3], [4, 3], [1, 7], [6, 2], [6, 1]];
        let mut all: Vec<_> = shapes.iter().enumerate().map(|(i, shape)| (matrix(*shape, i), None)).collect();
        let mut found = Vec::new();
        let before = kernels(&device);
        for step in 0..STEPS {
            let one = |(i, (x, state)): (usize, (Tensor<2>, Option<AdamWState<2>>))| {
                let gradient = matrix(shapes[i], 100 * step + i);
                optimizer.step(1e-2, x, gradient, state)
            };
            all = all.into_iter().enumerate().map(one).collect();
            found.extend(bits(&all[step].0));
        }
        for (x, state) in &all {
            let moments = &state.as_ref().unwrap().momentum;
            found.extend([x, &moments.moment_1, &moments.moment_2].into_iter().flat_map(bits));
        }
        (found, kernels(&device) - before)
    }

    #[test]
    fn steps_of_one_size_are_one_kernel_with_the_same_bits() {
        for layout in ["TP1", "TP2"] {
            launch(&Mesh::new(layout.parse().unwrap()).unwrap(), &[Device::flex()], |rank| {
                let config = AdamWConfig::new().with_weight_decay(0.1);
                let (expected, apart) = stepped_apart(&rank, &config.build());
                let (found, together) = stepped_apart(&rank, &Fused::of(&config));
                assert_eq!(found, expected, "{layout}");
                assert!(3 * together < 2 * apart, "{layout}: {together} kernels, {apart} without");
                Ok(())
            })
            .unwrap();
        }
    }

    /// A weight and its state after a step, in memory.
    fn after_one(weight: Tensor<2>, gradient: Tensor<2>, optimizer: &Fused) -> (Tensor<2>, Option<AdamWState<2>>) {
        let (weight, state) = optimizer.step(1e-2, weight, gradient, None);
        let moments = &state.as_ref().unwrap().momentum;
        for read in [&weight, &moments.moment_1, &moments.moment_2] {
            bits(read);
        }
        (weight, state)
    }

    #[test]
    fn a_step_like_no_other_waits_until_the_next_gemm_or_flush() {
        launch(&Mesh::new("TP1".parse().unwrap()).unwrap(), &[Device::flex()], |rank| {
            let (device, optimizer) = (fusing(&rank), Fused::of(&AdamWConfig::new()));
            let matrix = |seed| matrix([4, 4], seed, &device);
            let (mut weight, mut state) = after_one(matrix(0), matrix(1), &optimizer);
            let x = matrix(2);
            for with_gemm in [true, false] {
                let gradient = matrix(3);
                let before = kernels(&device);
                (weight, state) = optimizer.step(1e-2, weight, gradient, state);
                assert_eq!(kernels(&device), before, "it waits");
                // Of other tensors.
                let _product = match with_gemm {
                    true => Some(x.clone().matmul(x.clone())),
                    false => device.flush().map(|()| None)?,
                };
                assert_eq!(kernels(&device), before + 1, "with a GEMM: {with_gemm}");
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn what_takes_the_place_of_a_parameter_is_one_wherever_its_gradient_is() {
        launch(&Mesh::new("TP2".parse().unwrap()).unwrap(), &[Device::flex()], |rank| {
            let (device, optimizer) = (fusing(&rank), Fused::of(&AdamWConfig::new()));
            // A matrix of one row is taken for an activation where operations make it.
            let matrix = |seed| matrix([1, 4], seed, &device);
            let known = |x: &Tensor<2>| Known::of(x).unwrap().is_weight();
            for at in [Placement::Replicate, Placement::Shard(1)] {
                let weight = matrix(0).redistribute_parameter(&rank, Axis::Tp, Placement::Replicate);
                let (weight, state) = after_one(weight, matrix(1), &optimizer);
                let weight = weight.redistribute_parameter(&rank, Axis::Tp, Placement::Replicate);
                let gradient = matrix(2).redistribute(&rank, Axis::Tp, at);
                let (weight, state) = optimizer.step(1e-2, weight, gradient, state);
                let moments = state.unwrap().momentum;
                let are = [&weight, &moments.moment_1, &moments.moment_2].map(known);
                assert_eq!(are, [true, false, false], "a gradient in {at}");
            }
            Ok(())
        })
        .unwrap();
    }
}
