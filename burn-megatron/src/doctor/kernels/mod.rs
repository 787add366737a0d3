//! Compares every operation of `backend_dist::ops` on a device with the same operation on the CPU in f64.
//!
//! Both sides get the same numbers, rounded to the type under test, so that an error is the operation's own.

mod cases;
mod fp8;
mod fp8_experts;
mod initial;
mod main_grads;
#[cfg(test)]
mod tests;

use backend_dist::gpu::{self, GpuInfo, model::FP8};
use backend_dist::ops::pull_back;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use std::panic::{AssertUnwindSafe, catch_unwind};

use cases::{Case, Scale, attention_forms, cases};

/// One result, the output of an operation or a gradient, against its reference.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelCheck {
    /// Operation and result, for example `rms_norm: gradient of weight`.
    pub name: String,
    /// Element type of the inputs.
    pub dtype: String,
    /// Sizes of the inputs.
    pub shape: String,
    /// `‖found - expected‖ / ‖expected‖`; NaN if the operation failed or gave something that is no number.
    pub error: f64,
    /// Largest error that rounding explains.
    pub bound: f64,
}

impl KernelCheck {
    /// Whether the error is within the bound. NaN is not.
    pub fn ok(&self) -> bool {
        self.error <= self.bound
    }
}

/// Checks every operation on `device`, forward and all gradients, in bf16, f16, f32 and f64, and the gradients that
/// are accumulated in place and the initial weights if `device` has them.
///
/// An operation that panics is reported with an error of NaN; its message goes to where panics go. `on_result` is
/// called for each result at once.
pub fn check_kernels(device: &Device, on_result: &mut dyn FnMut(&KernelCheck)) {
    let all = [DType::BF16, DType::F16, DType::F32, DType::F64];
    for (scale, dtypes) in [(Scale::ODD, &all[..]), (Scale::SMALL, &all[..]), (Scale::LLAMA_8B, &all[..1])] {
        for &dtype in dtypes {
            check_scale(device, &scale, dtype, on_result);
        }
    }
    for dtype in [DType::BF16, DType::F32] {
        for case in attention_forms(&Scale::SMALL) {
            check(&case, device, dtype).iter().for_each(&mut *on_result);
        }
    }
    all.iter().flat_map(|dtype| initial::check(device, *dtype)).for_each(|check| on_result(&check));
}

/// The GPU that `device` is, if it is one.
fn gpu_of(device: &Device) -> Option<GpuInfo> {
    let index = gpu::index(&device.clone().inner())?;
    gpu::gpus().ok()?.into_iter().find(|gpu| gpu.index == index)
}

/// All operations in the sizes of `scale`.
fn check_scale(device: &Device, scale: &Scale, dtype: DType, on_result: &mut dyn FnMut(&KernelCheck)) {
    for case in cases(scale) {
        check(&case, device, dtype).iter().for_each(&mut *on_result);
    }
    main_grads::check(device, scale, dtype).iter().for_each(&mut *on_result);
    if gpu_of(device).is_none_or(|gpu| gpu.capability >= FP8) {
        fp8::check(device, scale, dtype).iter().for_each(&mut *on_result);
        fp8_experts::check(device, scale, dtype).iter().for_each(on_result);
    }
}

/// Where and in which precision a case is computed.
struct Side {
    device: Device,
    /// What is computed in.
    dtype: DType,
    /// What all inputs are rounded to.
    rounded: DType,
}

impl Side {
    /// A side of a comparison for inputs of type `dtype`: on the device, and the reference.
    fn both(device: &Device, dtype: DType) -> [Self; 2] {
        let device = device.clone().autodiff();
        let reference = Self { device: Device::flex().autodiff(), dtype: DType::F64, rounded: dtype };
        [Self { device, dtype, rounded: dtype }, reference]
    }

    /// `values`, rounded, in `dtype`.
    fn tensor_as<const D: usize>(&self, values: Vec<f64>, shape: [usize; D], dtype: DType) -> Tensor<D> {
        let rounded = TensorData::new(values, shape).convert_dtype(self.rounded);
        Tensor::from_data(rounded.convert_dtype(dtype), (&self.device, dtype))
    }

    /// `values`, rounded, in the type that is computed in.
    fn tensor<const D: usize>(&self, values: Vec<f64>, shape: [usize; D]) -> Tensor<D> {
        self.tensor_as(values, shape, self.dtype)
    }

    fn ids<const D: usize>(&self, ids: Vec<i64>, shape: [usize; D]) -> Tensor<D, Int> {
        Tensor::from_data(TensorData::new(ids, shape), &self.device)
    }

    /// The output of `case` and the gradients of its inputs, each with a name.
    fn run(&self, case: &Case) -> Vec<(String, Vec<f64>)> {
        let leaf = |(i, &(_, len)): (usize, &(&str, usize))| self.tensor(numbers(len, i as u64), [len]).require_grad();
        let leaves: Vec<Tensor<1>> = case.inputs.iter().enumerate().map(leaf).collect();
        let y = (case.run)(self, &leaves);
        let upstream = self.tensor_as(numbers(y.dims()[0], 99), y.dims(), y.dtype());
        let mut results = vec![("output".to_string(), values(y.clone()))];
        let grads = pull_back(y, upstream);
        for ((name, len), leaf) in case.inputs.iter().zip(leaves) {
            let grad = leaf.grad(&grads).map_or(vec![f64::NAN; *len], values);
            results.push((format!("gradient of {name}"), grad));
        }
        results
    }
}

fn check(case: &Case, device: &Device, dtype: DType) -> Vec<KernelCheck> {
    let [side, reference] = Side::both(device, dtype);
    let expected = reference.run(case);
    let found = catch_unwind(AssertUnwindSafe(|| side.run(case)));
    let one = |(i, (result, expected)): (usize, (String, Vec<f64>))| KernelCheck {
        name: format!("{}: {result}", case.name),
        dtype: format!("{dtype:?}"),
        shape: case.shape.clone(),
        error: found.as_ref().map_or(f64::NAN, |found| error(&found[i].1, &expected)),
        bound: bound(dtype, case.roundings).max(case.floor),
    };
    expected.into_iter().enumerate().map(one).collect()
}

/// Largest error of an operation with `roundings` consecutive roundings to `dtype`. A rounding to p bits is off by
/// at most 2⁻ᵖ. Errors of sums are far smaller in the norm, but for f32 and f64 they dominate.
fn bound(dtype: DType, roundings: u32) -> f64 {
    let once = match dtype {
        DType::BF16 => 4e-3,
        DType::F16 => 5e-4,
        DType::F64 => 1e-10,
        _ => 1e-5,
    };
    once * f64::from(roundings)
}

/// `‖found - expected‖ / ‖expected‖`.
fn error(found: &[f64], expected: &[f64]) -> f64 {
    if found.len() != expected.len() {
        return f64::NAN;
    }
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let off = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    let size = norm(&mut expected.iter().copied());
    if off == 0.0 { 0.0 } else { off / size }
}

/// Numbers in `-1..1` that look random, the same for the same seed.
fn numbers(len: usize, seed: u64) -> Vec<f64> {
    let mut state = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn values<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().convert::<f64>().try_to_vec().expect("converted to f64")
}
