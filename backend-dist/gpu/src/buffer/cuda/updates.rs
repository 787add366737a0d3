//! The optimizers' kernels on buffers.

use super::{Buffer, float_type, primitive, table};
use crate::buffer::{
    AdamWBuffers, AdamWStep, BLOCK, Blocks, Map, Moments, MomentumBuffers, MomentumRule, MomentumStep, Parameters,
    Place,
};
use crate::cuda::dense;
use crate::profile::{Operation, operation};
use burn::backend::Cube;
use burn::tensor::{DType, Shape, Tensor};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use cubecl::server::Handle;
use kernels_cubecl::pointwise::adamw::{self, AdamWBucket};
use kernels_cubecl::pointwise::adamw_blocks::{self, BlocksBucket};
use kernels_cubecl::pointwise::flat::FloatType;
use kernels_cubecl::pointwise::momentum::{self, MomentumBucket};
use kernels_cubecl::pointwise::{muon, remainder};
use std::fmt;

/// The ends of a buffer's tensors, in GPU memory.
pub struct TensorTable {
    ends: Handle,
    decays: Handle,
    places: Handle,
    /// Of moments in 8 bits.
    maps: Handle,
    tensors: usize,
}

impl fmt::Debug for TensorTable {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "TensorTable({} tensors)", self.tensors)
    }
}

impl TensorTable {
    /// For `buffer`: the end of each tensor, including the padding after it, ascending up to the buffer's length;
    /// whether the tensor has weight decay; and its place, given the number of an element in the buffer.
    ///
    /// # Panics
    /// If the last tensor does not end with the buffer.
    pub fn new(buffer: &Buffer, ends: &[u32], decays: &[bool], places: &[Place]) -> Self {
        assert_eq!(ends.last().map(|&end| end as usize), Some(buffer.len()), "the last tensor ends with {buffer:?}");
        assert!(ends.len() == decays.len() && ends.len() == places.len(), "one flag and one place for each tensor");
        let decays: Vec<u32> = decays.iter().copied().map(u32::from).collect();
        let places: Vec<u32> = places.iter().flat_map(Place::words).collect();
        let [ends_table, decays, places, maps] =
            [ends, &decays, &places, &Map::words()].map(|values| table(&buffer.0, values));
        Self { ends: ends_table, decays, places, maps, tensors: ends.len() }
    }
}

/// One step of AdamW in one launch.
///
/// # Panics
/// If a buffer is shorter than the gradient, or the number of parameters is not a multiple of four; with moments in 8 bits
/// of [`BLOCK`].
pub fn adamw(buffers: AdamWBuffers, k: &AdamWStep) {
    let AdamWBuffers { parameters, moments, grad, tensors } = buffers;
    let width = |buffer: &Buffer| buffer.0.dtype.size();
    let (place, own) = match parameters {
        Parameters::Wide(master) => (adamw::Parameters::Wide(&master.0.handle), 8),
        Parameters::Master { master, weight } => {
            let (handle, float) = typed(weight);
            (adamw::Parameters::Master(&master.0.handle, handle, float), 8 + width(weight))
        }
        Parameters::Split { weight, remainder } => (adamw::Parameters::Split(&weight.0.handle, &remainder.0.handle), 8),
    };
    let (client, len, gradient) = (&grad.0.client, grad.len(), typed(grad));
    let states = match moments {
        Moments::Floats(first, second) => width(first) + width(second),
        Moments::Blocks(..) => 2,
    };
    // Masters and both moments are read and written, gradients read, weights written.
    let _noted = operation(&grad.0, || Operation::optimizer("AdamW", len * (own + 2 * states + width(grad))));
    let TensorTable { ends, decays, places, maps, tensors } = tensors;
    let step = adamw::AdamWStep {
        beta1: k.beta1 as f32,
        beta2: k.beta2 as f32,
        eps: k.eps as f32,
        step_size: k.step_size as f32,
        root_scale: k.root_scale as f32,
        keep: k.keep as f32,
        gradient_scale: k.grad_scale as f32,
        step: k.step,
    };
    let done = match moments {
        Moments::Floats(first, second) => {
            let (first, second, tensors) = (typed(first), typed(second), *tensors);
            let bucket = AdamWBucket { parameters: place, first, second, gradient, ends, decays, places, tensors, len };
            adamw::step(client, bucket, &step)
        }
        Moments::Blocks(first, second) => {
            let (first, second, tensors) = (handles(first), handles(second), *tensors);
            let bucket = BlocksBucket { parameters: place, first, second, gradient, maps, ends, decays, tensors, len };
            adamw_blocks::step(client, bucket, &step)
        }
    };
    done.unwrap_or_else(|error| panic!("AdamW on {grad:?}: {error}"));
}

fn handles(blocks: &Blocks) -> adamw_blocks::Blocks<'_> {
    adamw_blocks::Blocks { codes: &blocks.codes.0.handle, scales: &blocks.scales.0.handle }
}

/// Writes the codes of `values`, by the scales that `blocks` has.
///
/// # Panics
/// If there are less values than elements, or their number is not a multiple of [`BLOCK`].
pub fn encode_blocks(values: Tensor<1>, blocks: &Blocks, map: Map) {
    let (values, scales) = (dense(primitive(values.cast(DType::F32))), &blocks.scales);
    let maps = table(&scales.0, &Map::words());
    adamw_blocks::encode(&scales.0.client, &values.handle, handles(blocks), (map, &maps), scales.len() * BLOCK)
        .unwrap_or_else(|error| panic!("the codes of {scales:?}: {error}"));
}

/// Writes `values` as `bf16` weights and remainders ([`split`](crate::buffer::split)).
///
/// # Panics
/// If the lengths differ, or are not a multiple of four.
pub fn split_masters(values: Tensor<1>, weight: &Buffer, remainder: &Buffer) {
    let (values, len) = (dense(primitive(values.cast(DType::F32))), weight.len());
    assert_eq!(values.meta.shape()[0], len, "as many values as {weight:?} has");
    remainder::split(&weight.0.client, &values.handle, (&weight.0.handle, &remainder.0.handle), len)
        .unwrap_or_else(|error| panic!("splitting the masters of {weight:?}: {error}"));
}

/// The `f32` values of `bf16` weights and their remainders, in memory of their own.
pub fn join_masters(weight: &Buffer, remainder: &Buffer) -> Tensor<1> {
    let len = weight.len();
    let (client, device) = (weight.0.client.clone(), weight.0.device.clone());
    let values = empty_device_contiguous_dtype(client, device, Shape::from([len]), DType::F32);
    remainder::join(&weight.0.client, (&weight.0.handle, &remainder.0.handle), &values.handle, len)
        .unwrap_or_else(|error| panic!("joining the masters of {weight:?}: {error}"));
    Tensor::from_primitive::<Cube>(values)
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

pub(super) fn typed(weight: &Buffer) -> (&Handle, FloatType) {
    (&weight.0.handle, float_type(weight.0.dtype).expect("buffers are of types that fit"))
}
