//! Runs a model on one device and on the ranks of a mesh, and compares losses and gradients.

use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::mesh_backend::{LogicalDevice, LogicalOptions, Report, explain};
use backend_dist::parallelize::{Plan, parallelize};
use backend_dist::paths::PathVisitor;
use burn::module::{Module, ModuleDisplay, ModuleMapper, Param};
use burn::tensor::{DType, Device, FloatDType, Gradients, Int, Tensor, TensorData};
use std::sync::Once;

/// The CPU, with f64 as the default type: some modules make tensors of the default type.
pub fn cpu() -> Device {
    static CONFIGURED: Once = Once::new();
    let mut device = Device::flex();
    CONFIGURED.call_once(|| device.configure(FloatDType::F64).unwrap());
    device
}

/// Loss and every gradient by path, read from the device.
#[derive(Clone, Debug)]
pub struct Step {
    pub loss: f64,
    pub gradients: Vec<(String, Vec<f64>)>,
}

/// Numbers that repeat nowhere.
pub fn floats(shape: &[usize], seed: usize) -> TensorData {
    let n: usize = shape.iter().product();
    let value = |i: usize| ((i * 7 + seed * 13) as f64 * 0.37).sin();
    TensorData::new((0..n).map(value).collect::<Vec<f64>>(), shape.to_vec())
}

pub fn tensor<const D: usize>(shape: [usize; D], seed: usize, device: &Device) -> Tensor<D> {
    Tensor::from_data(floats(&shape, seed), (device, DType::F64))
}

pub fn ints<const D: usize>(shape: [usize; D], below: usize, device: &Device) -> Tensor<D, Int> {
    let n: usize = shape.iter().product();
    let values: Vec<i64> = (0..n).map(|i| ((i * 7 + 3) % below) as i64).collect();
    Tensor::from_data(TensorData::new(values, shape.to_vec()), device)
}

/// The module in f64 with values that depend on the path alone.
pub fn determined<M: Module>(module: M) -> M {
    module.map(&mut Determine { path: Vec::new() })
}

struct Determine {
    path: Vec<String>,
}

impl ModuleMapper for Determine {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        let seed = path.bytes().fold(7, |hash: usize, byte| (hash * 31 + usize::from(byte)) % 1009);
        param.map(|value| {
            let device = value.device();
            let is_tracked = value.is_require_grad();
            let one = if path.ends_with("gamma") { 1.0 } else { 0.0 };
            let data = tensor(value.dims(), seed, &device).mul_scalar(0.3).add_scalar(one);
            data.detach().set_require_grad(is_tracked)
        })
    }
}

/// The gradients of all parameters.
pub fn gradients<M: Module>(module: &M, gradients: &Gradients) -> Vec<(String, Vec<f64>)> {
    Collect { gradients, found: Vec::new() }.walk(module).found
}

struct Collect<'a> {
    gradients: &'a Gradients,
    found: Vec<(String, Vec<f64>)>,
}

impl PathVisitor for Collect<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if let Some(gradient) = param.val().grad(self.gradients) {
            self.found.push((path.to_string(), gradient.into_data().iter::<f64>().collect()));
        }
    }
}

/// Ranks of the axis along which parameters are sharded.
pub const LAYOUTS: [&str; 3] = ["TP1", "TP2", "TP4"];

/// A model under test: how to make it, and its loss on a device.
pub struct Case<M> {
    pub init: fn(&Device) -> M,
    /// Gets the rank, if there are several, to place inputs.
    pub loss: fn(&M, &Device, Option<&Rank>) -> Tensor<1>,
}

impl<M: Module + ModuleDisplay> Case<M> {
    /// Forward and backward on one device.
    pub fn alone(&self) -> Step {
        let device = cpu().autodiff();
        let model = determined((self.init)(&device));
        let loss = (self.loss)(&model, &device, None);
        let grads = loss.backward();
        Step { loss: loss.into_data().iter::<f64>().next().unwrap(), gradients: gradients(&model, &grads) }
    }

    /// Forward and backward on the ranks of `layout`; compares every rank with one device, and returns what rank 0 did
    /// before gradients were read.
    pub fn check(&self, layout: &str, plan: &Plan) -> Report {
        self.check_on(layout, &[Axis::Tp], std::slice::from_ref(plan))
    }

    /// [`check`](Self::check) on a device with these axes, by one plan after the other.
    pub fn check_on(&self, layout: &str, axes: &[Axis], plans: &[Plan]) -> Report {
        self.check_with(layout, axes, plans, true);
        self.check_with(layout, axes, plans, false)
    }

    /// [`check_on`](Self::check_on) with fused operations, or without.
    pub fn check_with(&self, layout: &str, axes: &[Axis], plans: &[Plan], fusion: bool) -> Report {
        self.check_against(&self.alone(), layout, axes, plans, fusion)
    }

    /// [`check_with`](Self::check_with), compared with another step than that of one device.
    pub fn check_against(&self, expected: &Step, layout: &str, axes: &[Axis], plans: &[Plan], fusion: bool) -> Report {
        let mut ranks = self.run(layout, axes, plans, fusion);
        for (rank, (step, _)) in ranks.iter().enumerate() {
            compare(step, expected, &format!("{layout} rank {rank}, fusion {fusion}"));
        }
        ranks.swap_remove(0).1
    }

    /// Forward and backward on each rank of `layout`, and what it did before gradients were read.
    pub fn run(&self, layout: &str, axes: &[Axis], plans: &[Plan], fusion: bool) -> Vec<(Step, Report)> {
        let options = LogicalOptions { fusion: Some(fusion), run_ahead: Some(fusion), ..Default::default() };
        let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
        launch(&mesh, &[cpu()], |rank| {
            let device = rank.logical_device_with(axes, options).autodiff();
            let mut model = determined((self.init)(&device));
            for plan in plans {
                model = parallelize(model, &rank, plan)?;
            }
            let before = explain(&device);
            let loss = (self.loss)(&model, &device, Some(&rank));
            let grads = loss.backward();
            // Gradients of weights wait for collectives.
            device.sync()?;
            let report = explain(&device).since(&before);
            let step =
                Step { loss: loss.into_data().iter::<f64>().next().unwrap(), gradients: gradients(&model, &grads) };
            Ok((step, report))
        })
        .unwrap()
    }
}

/// Relative 2-norms of the loss and every gradient.
pub fn compare(step: &Step, expected: &Step, what: &str) {
    let bound = 1e-10;
    let difference = (step.loss - expected.loss).abs() / expected.loss.abs();
    assert!(difference <= bound, "{what}: loss {} instead of {}", step.loss, expected.loss);
    assert_eq!(step.gradients.len(), expected.gradients.len(), "{what}: number of gradients");
    let largest = expected.gradients.iter().map(|(_, x)| norm(x)).fold(0.0, f64::max);
    for ((path, x), (other, y)) in step.gradients.iter().zip(&expected.gradients) {
        assert_eq!((path, x.len()), (other, y.len()), "{what}");
        let difference: Vec<f64> = x.iter().zip(y).map(|(x, y)| x - y).collect();
        // A gradient that is zero but for rounding, as that of a key's bias, is compared with the largest.
        let scale = if norm(y) < 1e-12 * largest { largest } else { norm(y) };
        assert!(norm(&difference) <= bound * scale, "{what}: {path}: {} of {}", norm(&difference), norm(y));
    }
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}
