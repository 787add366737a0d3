//! What one unit needs in its passes, found by walking through its operations.

use std::collections::BTreeMap;

use crate::plan::Job;
use crate::plan::operations::{Activation, Op, Over, Unit};

/// Bytes of a unit's passes.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::plan) struct UnitMemory {
    /// Kept between forward and backward.
    pub kept: u64,
    /// Kept between the two halves of a backward.
    pub deferred: u64,
    /// The most in a forward, of which `kept` remains.
    pub forward: u64,
    /// The most in a backward, with `kept`.
    pub backward: u64,
    /// The same in the first half of a backward.
    pub backward_input: u64,
    /// Gradients of its weights, as autodiff gives them.
    pub gradients: u64,
}

impl UnitMemory {
    pub fn new(unit: &Unit, job: &Job) -> Self {
        // On GPUs a weight's gradient is added to the main gradients as it is computed.
        let element = if job.gpu { 0 } else { job.element };
        let lives = Lives::of(unit);
        let first = unit.ops[0].input.bytes;
        let gradients = unit.ops.iter().map(|op| op.weight).sum::<u64>() * element;
        // Gradients of weights that are not put off wait for the others.
        let at_once = |op: &Op| if op.linear { 0 } else { op.weight * element };
        let deferred = unit.ops.iter().map(|op| put_off(op) + at_once(op)).sum();
        let recorded = lives.forward(unit, false);
        let (kept, forward) = match unit.recomputed {
            true => (first + unit.attended(), lives.forward(unit, true) + unit.attended()),
            false => (lives.kept(), recorded),
        };
        let again = if unit.recomputed { recorded } else { 0 };
        let backward = |split| lives.backward(unit, element, split, job.gpu && job.overlap).max(again);
        Self { kept, deferred, forward, backward: backward(false), backward_input: backward(true), gradients }
    }
}

/// What a linear layer holds until its weight gradient is computed: its input and the gradient of its output.
fn put_off(op: &Op) -> u64 {
    match op.fp8 {
        Some(fp8) => fp8.deferred,
        None if op.linear => op.output.bytes + op.keeps.iter().map(|input| input.bytes).sum::<u64>(),
        None => 0,
    }
}

/// A linear layer gathers its input again beside the product that gives the input's gradient, whose sum over the ranks
/// runs beside the product that gives the weight's (backend-dist/src/ops/cuda/product.rs).
fn in_flight(unit: &Unit, at: usize) -> u64 {
    let gathers = |op: &&Op| op.exchange.is_some_and(|exchange| exchange.again && exchange.over == Over::Tensor);
    let gather = at.checked_sub(1).map(|before| &unit.ops[before]).filter(gathers);
    gather.map_or(0, |gather| gather.output.bytes + gather.input.bytes)
}

/// Which operations keep a tensor.
struct Lives {
    tensors: Vec<Life>,
}

struct Life {
    tensor: Activation,
    first: usize,
    last: usize,
    dropped: bool,
}

impl Lives {
    fn of(unit: &Unit) -> Self {
        let mut lives: BTreeMap<usize, Life> = BTreeMap::new();
        for (at, op) in unit.ops.iter().enumerate() {
            for &tensor in &op.keeps {
                let dropped = tensor.module.is_some_and(|module| unit.dropped.contains(&module));
                lives.entry(tensor.id).or_insert(Life { tensor, first: at, last: at, dropped }).last = at;
            }
        }
        Self { tensors: lives.into_values().collect() }
    }

    fn sum(&self, alive: impl Fn(&Life) -> bool) -> u64 {
        self.tensors.iter().filter(|life| alive(life)).map(|life| life.tensor.bytes).sum()
    }

    fn kept(&self) -> u64 {
        self.sum(|life| !life.dropped)
    }

    /// The most in a forward pass: what is kept so far, what an operation reads and what it makes.
    fn forward(&self, unit: &Unit, unrecorded: bool) -> u64 {
        let during = |(at, op): (usize, &Op)| {
            let hands = |id: usize| id == op.input.id || id == op.output.id;
            let own = op.input.bytes + if op.output.id == op.input.id { 0 } else { op.output.bytes };
            let keeps = |life: &Life| if unrecorded { life.tensor.stream } else { !life.dropped };
            own + self.sum(|life| keeps(life) && life.first <= at && !hands(life.tensor.id))
        };
        unit.ops.iter().enumerate().map(during).max().unwrap_or(0)
    }

    /// The most in a backward pass: what earlier operations keep, the gradient that comes in and the one that goes out,
    /// the residual stream's, and the gradients of weights so far; with `overlap` also what is in flight meanwhile.
    fn backward(&self, unit: &Unit, element: u64, split: bool, overlap: bool) -> u64 {
        let residual = unit.ops[0].input;
        let residual = if residual.stream && !unit.head { residual.bytes } else { 0 };
        let (mut peak, mut behind) = (0, 0);
        for (at, op) in unit.ops.iter().enumerate().rev() {
            let alive = |life: &Life| life.first <= at && (!life.dropped || at <= life.last);
            let own = if op.output.id == op.input.id { op.input.bytes } else { op.input.bytes + op.output.bytes };
            let later = split && op.linear;
            behind += if later { 0 } else { op.weight * element };
            let in_flight = if overlap && !later { in_flight(unit, at) } else { 0 };
            peak = peak.max(self.sum(alive) + own + in_flight + residual + behind);
            behind += if later { put_off(op) } else { 0 };
        }
        peak
    }
}
