//! The optimizers' kernels on buffers.

use super::{Buffer, float_type, primitive, table};
use crate::buffer::{AdamWBuffers, AdamWStep, MomentumBuffers, MomentumRule, MomentumStep};
use crate::cuda::dense;
use crate::profile::{Operation, operation};
use burn::tensor::{DType, Tensor};
use cubecl::server::Handle;
use kernels_cubecl::pointwise::adamw::{self, AdamWBucket};
use kernels_cubecl::pointwise::flat::FloatType;
use kernels_cubecl::pointwise::momentum::{self, MomentumBucket};
use kernels_cubecl::pointwise::muon;
use std::fmt;

/// The ends of a buffer's tensors, in GPU memory.
pub struct TensorTable {
    ends: Handle,
    decays: Handle,
    tensors: usize,
}

impl fmt::Debug for TensorTable {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "TensorTable({} tensors)", self.tensors)
    }
}

impl TensorTable {
    /// For `buffer`: the end of each tensor, including the padding after it, ascending up to the buffer's length, and
    /// whether the tensor has weight decay.
    ///
    /// # Panics
    /// If the last tensor does not end with the buffer.
    pub fn new(buffer: &Buffer, ends: &[u32], decays: &[bool]) -> Self {
        assert_eq!(ends.last().map(|&end| end as usize), Some(buffer.len()), "the last tensor ends with {buffer:?}");
        assert_eq!(ends.len(), decays.len(), "one flag for each tensor");
        let decays: Vec<u32> = decays.iter().copied().map(u32::from).collect();
        Self { ends: table(&buffer.0, ends), decays: table(&buffer.0, &decays), tensors: ends.len() }
    }
}

/// One step of AdamW in one launch.
///
/// # Panics
/// If a buffer is shorter than the masters, or their number is not a multiple of four.
pub fn adamw(buffers: AdamWBuffers, k: &AdamWStep) {
    let AdamWBuffers { master, first, second, grad, weight, tensors } = buffers;
    let narrow = weight.map_or(0, |weight| weight.0.dtype.size());
    // Masters and both moments are read and written, gradients read, weights written.
    let _noted = operation(&master.0, || Operation::optimizer("AdamW", master.len() * (28 + narrow)));
    let bucket = AdamWBucket {
        master: &master.0.handle,
        first: &first.0.handle,
        second: &second.0.handle,
        gradient: &grad.0.handle,
        weight: weight.map(typed),
        ends: &tensors.ends,
        decays: &tensors.decays,
        tensors: tensors.tensors,
        len: master.len(),
    };
    let step = adamw::AdamWStep {
        beta1: k.beta1 as f32,
        beta2: k.beta2 as f32,
        eps: k.eps as f32,
        step_size: k.step_size as f32,
        root_scale: k.root_scale as f32,
        keep: k.keep as f32,
        gradient_scale: k.grad_scale as f32,
    };
    adamw::step(&master.0.client, bucket, &step).unwrap_or_else(|error| panic!("AdamW on {master:?}: {error}"));
}

/// One step of SGD or Lion in one launch.
///
/// # Panics
/// If a buffer is shorter than the masters, or their number is not a multiple of four.
pub fn momentum(buffers: MomentumBuffers, k: &MomentumStep) {
    let MomentumBuffers { master, momentum, grad, weight, tensors } = buffers;
    let narrow = weight.map_or(0, |weight| weight.0.dtype.size());
    let state = if momentum.is_some() { 16 } else { 8 };
    let _noted = operation(&master.0, || Operation::optimizer("momentum", master.len() * (state + 4 + narrow)));
    let bucket = MomentumBucket {
        master: &master.0.handle,
        momentum: momentum.map(|momentum| &momentum.0.handle),
        gradient: &grad.0.handle,
        weight: weight.map(typed),
        ends: &tensors.ends,
        decays: &tensors.decays,
        tensors: tensors.tensors,
        len: master.len(),
    };
    let (rule, a, b) = match k.rule {
        MomentumRule::Plain => (momentum::MomentumRule::Plain, 0.0, 0.0),
        MomentumRule::Sum { momentum } => (momentum::MomentumRule::Sum, momentum, 0.0),
        MomentumRule::Nesterov { momentum } => (momentum::MomentumRule::Nesterov, momentum, 0.0),
        MomentumRule::Lion { beta1, beta2 } => (momentum::MomentumRule::Lion, beta1, beta2),
    };
    let step = momentum::MomentumStep {
        rule,
        a: a as f32,
        b: b as f32,
        lr: k.lr as f32,
        keep: k.keep as f32,
        gradient_scale: k.grad_scale as f32,
    };
    momentum::step(&master.0.client, bucket, &step)
        .unwrap_or_else(|error| panic!("{:?} on {master:?}: {error}", k.rule));
}

/// Muon's momentum of the gradients of `grad`: `m ← decay m + (1 − decay) grad_scale g`. `out` becomes this `m`, or
/// with `nesterov` the same average of this `m` and the gradient.
///
/// # Panics
/// If the buffers differ in length.
pub fn muon_mix(grad: &Buffer, momentum: &Buffer, out: &Buffer, decay: f64, grad_scale: f64, nesterov: bool) {
    let (len, from) = (grad.len(), &grad.0.handle);
    assert!(momentum.len() == len && out.len() == len, "Muon: {grad:?}, {momentum:?} and {out:?} differ in length");
    let _noted = operation(&grad.0, || Operation::optimizer("Muon's momentum", 16 * len));
    let (targets, k) = ((&momentum.0.handle, &out.0.handle), (decay as f32, grad_scale as f32));
    muon::mix(&grad.0.client, from, targets, len, k, nesterov)
        .unwrap_or_else(|error| panic!("Muon's momentum {momentum:?}: {error}"));
}

/// `p ← keep p − factor step` for the parameters of `master`.
///
/// # Panics
/// If `step` has another length or is on another device.
pub fn muon_step(step: Tensor<1>, master: &Buffer, keep: f64, factor: f64) {
    let step = dense(primitive(step.cast(DType::F32)));
    let (len, found) = (master.len(), step.meta.shape()[0]);
    assert_eq!(found, len, "Muon: a step of {found} elements for {master:?}");
    let _noted = operation(&master.0, || Operation::optimizer("Muon's step", 12 * len));
    muon::apply(&master.0.client, &step.handle, &master.0.handle, len, (keep as f32, factor as f32))
        .unwrap_or_else(|error| panic!("Muon's step of {master:?}: {error}"));
}

fn typed(weight: &Buffer) -> (&Handle, FloatType) {
    (&weight.0.handle, float_type(weight.0.dtype).expect("buffers are of types that fit"))
}
