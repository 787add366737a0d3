//! Memory of one unit's passes, by the lifetimes of its tensors.

use std::collections::BTreeMap;

use layouts::sizes::{LENT, size_class};

use crate::Job;
use crate::operations::{Activation, Op, Over, Unit};

/// Bytes of a unit's passes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct UnitMemory {
    /// Saved between forward and backward.
    pub kept: u64,
    /// Held between the two halves of a split backward.
    pub deferred: u64,
    /// Peak of a forward, of which `kept` remains.
    pub forward: u64,
    /// Peak of a backward, with `kept`.
    pub backward: u64,
    /// The same in the first half of a backward.
    pub backward_input: u64,
    /// Gradients of its weights, as autodiff gives them.
    pub gradients: u64,
    /// Its input, if that waits for the backward pass in host memory.
    pub host: u64,
}

impl UnitMemory {
    pub fn new(unit: &Unit, job: &Job) -> Self {
        // On GPUs a weight's gradient is added to the main gradients as it is computed.
        let element = if job.gpu { 0 } else { job.element };
        let buffers = job.gpu.then(|| in_buffers(unit));
        let unit = buffers.as_ref().unwrap_or(unit);
        let lifetimes = Lifetimes::of(unit);
        let first = unit.ops[0].input.bytes;
        let gradients = unit.ops.iter().map(|op| op.weight).sum::<u64>() * element;
        // Gradients of weights that are not deferred wait for the others.
        let at_once = |op: &Op| if op.linear { 0 } else { op.weight * element };
        let deferred = unit.ops.iter().map(|op| deferred_bytes(op) + at_once(op)).sum();
        if unit.constant {
            return Self { forward: lifetimes.forward(unit, true), ..Self::default() };
        }
        let recorded = lifetimes.forward(unit, false);
        let (kept, forward) = match unit.recomputed {
            true => (first + unit.saved_attention(), lifetimes.forward(unit, true) + unit.saved_attention()),
            false => (lifetimes.kept(), recorded),
        };
        let again = if unit.recomputed { recorded } else { 0 };
        let backward = |split| lifetimes.backward(unit, element, split, job.gpu && job.overlap).max(again);
        let memory = Self {
            kept,
            deferred,
            forward,
            backward: backward(false),
            backward_input: backward(true),
            gradients,
            host: 0,
        };
        let offloads = job.gpu && job.recompute.cpu_offload && unit.recomputed && !unit.layers.is_empty() && !unit.head;
        if offloads { memory.offloaded(first) } else { memory }
    }
}

impl UnitMemory {
    /// The unit whose `input` waits on the host. The inputs of the units before it are on their way there in the forward
    /// pass, and that of the unit before it on its way back in the backward pass, which has its own.
    fn offloaded(self, input: u64) -> Self {
        Self {
            kept: self.kept - input,
            forward: self.forward + LENT as u64 * input,
            backward: self.backward + input,
            backward_input: self.backward_input + input,
            host: input,
            ..self
        }
    }
}

/// The unit with its tensors as large as their buffers on GPUs.
fn in_buffers(unit: &Unit) -> Unit {
    let mut unit = unit.clone();
    for op in &mut unit.ops {
        for tensor in [&mut op.input, &mut op.output].into_iter().chain(&mut op.saves) {
            tensor.bytes = size_class(tensor.bytes as usize) as u64;
        }
    }
    unit
}

/// Bytes that a linear layer holds until its weight gradient is computed: its input and its output's gradient.
fn deferred_bytes(op: &Op) -> u64 {
    match op.fp8 {
        Some(fp8) => fp8.deferred,
        None if op.linear && op.flops[2] > 0.0 => {
            op.output.bytes + op.saves.iter().map(|input| input.bytes).sum::<u64>()
        }
        None => 0,
    }
}

/// A linear layer gathers its input again while the GEMM of the input's gradient runs, and reduces that gradient
/// while the GEMM of the weight's gradient runs.
fn in_flight(unit: &Unit, at: usize) -> u64 {
    let gathers = |op: &&Op| {
        op.communication.is_some_and(|communication| communication.again && communication.over == Over::Tensor)
    };
    let gather = at.checked_sub(1).map(|before| &unit.ops[before]).filter(gathers);
    gather.map_or(0, |gather| gather.output.bytes + gather.input.bytes)
}

/// The operations that save each tensor.
struct Lifetimes {
    tensors: Vec<Lifetime>,
}

struct Lifetime {
    tensor: Activation,
    first: usize,
    last: usize,
    dropped: bool,
}

impl Lifetimes {
    fn of(unit: &Unit) -> Self {
        let mut lifetimes: BTreeMap<usize, Lifetime> = BTreeMap::new();
        for (at, op) in unit.ops.iter().enumerate() {
            for &tensor in &op.saves {
                let dropped = tensor.module.is_some_and(|module| unit.dropped.contains(&module));
                lifetimes.entry(tensor.id).or_insert(Lifetime { tensor, first: at, last: at, dropped }).last = at;
            }
        }
        Self { tensors: lifetimes.into_values().collect() }
    }

    fn sum(&self, alive: impl Fn(&Lifetime) -> bool) -> u64 {
        self.tensors.iter().filter(|lifetime| alive(lifetime)).map(|lifetime| lifetime.tensor.bytes).sum()
    }

    fn kept(&self) -> u64 {
        self.sum(|lifetime| !lifetime.dropped)
    }

    /// Peak of a forward pass: the tensors saved so far, and an operation's input and output.
    fn forward(&self, unit: &Unit, unrecorded: bool) -> u64 {
        let during = |(at, op): (usize, &Op)| {
            let hands = |id: usize| id == op.input.id || id == op.output.id;
            let own = op.input.bytes + if op.output.id == op.input.id { 0 } else { op.output.bytes } + op.temporary;
            let saves = |lifetime: &Lifetime| if unrecorded { lifetime.tensor.stream } else { !lifetime.dropped };
            own + self.sum(|lifetime| saves(lifetime) && lifetime.first <= at && !hands(lifetime.tensor.id))
        };
        unit.ops.iter().enumerate().map(during).max().unwrap_or(0)
    }

    /// Peak of a backward pass: saved tensors of earlier operations, the gradients of the output, of the input and
    /// of the residual stream, and weight gradients so far; with `overlap` also tensors in communication.
    fn backward(&self, unit: &Unit, element: u64, split: bool, overlap: bool) -> u64 {
        let residual = unit.ops[0].input;
        let residual = if residual.stream && !unit.head { residual.bytes } else { 0 };
        let (mut peak, mut behind) = (0, 0);
        for (at, op) in unit.ops.iter().enumerate().rev() {
            let alive = |lifetime: &Lifetime| lifetime.first <= at && (!lifetime.dropped || at <= lifetime.last);
            let input = if op.in_place { 0 } else { op.input.bytes };
            let own = if op.output.id == op.input.id { input } else { input + op.output.bytes };
            let own = own + op.temporary;
            let later = split && op.linear;
            behind += if later { 0 } else { op.weight * element };
            let in_flight = if overlap && !later { in_flight(unit, at) } else { 0 };
            peak = peak.max(self.sum(alive) + own + in_flight + residual + behind);
            behind += if later { deferred_bytes(op) } else { 0 };
        }
        peak
    }
}
