//! Optimizer steps that wait, so that some run as one kernel: a launch takes the host longer than the device takes for a
//! small parameter, and a model has hundreds. None waits longer than to the first GEMM, or operation of a module, that comes next.
//!
//! Which kernel that is, a chain says: it is given the steps' operations once, with places instead of buffers and numbers.

use super::chain::{Chain, Launch, Limits, Operand, Written};
use super::expression::expression;
use super::lazy::Source;
use super::{Executor, Float, float};
use crate::mesh_backend::formula::AdamWStep;
use crate::mesh_backend::ids::ById;
use crate::mesh_backend::inner::Inner;
use burn::tensor::Shape;
use burn_ir::{OperationIr, TensorId, TensorIr, TensorStatus};
use std::collections::HashMap;
use std::sync::Arc;

/// As many as a chain has room for.
const TOGETHER: usize = 3;
/// Most elements of a parameter whose step waits: what a step reads and writes lives until it has run.
const MOST: usize = 1 << 22;
const INPUTS: usize = 4;
const OUTPUTS: usize = 3;
const NUMBERS: usize = 9;

/// What the kernel depends on, of weight, moments and gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Kind {
    /// Whether they are stored in half precision.
    halves: [bool; INPUTS],
    /// Whether there is a copy in half precision.
    copies: [bool; INPUTS],
}

/// Kind, and number of elements.
type Key = (Kind, usize);

struct Step<B: Inner> {
    numbers: [f64; NUMBERS],
    inputs: [Float<B>; INPUTS],
    outs: [TensorIr; OUTPUTS],
}

/// The launch of some steps; inputs, numbers and outputs are places among those of the steps, one after the other.
type Template = Launch<usize>;

pub(super) struct Steps<B: Inner> {
    waiting: HashMap<Key, Vec<Step<B>>>,
    /// To what outputs that are waited for belong.
    keys: ById<Key>,
    /// By kind and number of steps.
    templates: HashMap<(Kind, usize), Arc<Template>>,
}

impl<B: Inner> Default for Steps<B> {
    fn default() -> Self {
        Self { waiting: HashMap::new(), keys: ById::default(), templates: HashMap::new() }
    }
}

impl<B: Inner> Executor<B> {
    /// Lets a step of weight, moments and gradient wait, unless it has to run in operations; then returns the outputs.
    pub fn step(
        &mut self,
        formula: AdamWStep,
        inputs: [&TensorIr; INPUTS],
        outs: [TensorIr; OUTPUTS],
    ) -> Option<[TensorIr; OUTPUTS]> {
        inputs.iter().for_each(|x| self.settle_before(x.id));
        let elements = outs[0].shape.num_elements();
        let is_like = |x: &TensorIr| x.dtype == self.limits.dtype && x.shape == outs[0].shape;
        // What a chain computes it had better use itself.
        let is_stored = |x: &&TensorIr| !self.chain.has(x.id) && !self.generated.contains_key(&x.id);
        let may_wait = self.fuses
            && (1..=MOST).contains(&elements)
            && inputs.iter().all(|x| is_like(x) && is_stored(x))
            && outs.iter().all(is_like);
        if !may_wait {
            return Some(outs);
        }
        let kind =
            Kind { halves: inputs.map(|x| self.halves.contains(&x.id)), copies: inputs.map(|x| self.has_copy(x.id)) };
        // What is made of these is not stored in half precision either.
        if kind.halves[..OUTPUTS].contains(&true) {
            return Some(outs);
        }
        let inputs = inputs.map(|x| {
            let handle = float(self.inner.get_tensor(x));
            if x.status == TensorStatus::ReadWrite {
                self.forget(x.id);
            }
            handle
        });
        let key = (kind, elements);
        self.steps.keys.extend(outs.iter().map(|out| (out.id, key)));
        let waiting = self.steps.waiting.entry(key).or_default();
        waiting.push(Step { numbers: formula.numbers(), inputs, outs });
        if waiting.len() == TOGETHER {
            self.run_steps_like(key);
        }
        None
    }

    /// Runs the step that gives this tensor.
    pub(super) fn run_step(&mut self, id: TensorId) {
        if !self.steps.keys.is_empty()
            && let Some(key) = self.steps.keys.get(&id).copied()
        {
            self.run_steps_like(key);
        }
    }

    /// Runs all steps that wait.
    pub fn run_steps(&mut self) {
        if self.steps.waiting.is_empty() {
            return;
        }
        let keys: Vec<Key> = self.steps.waiting.keys().copied().collect();
        keys.into_iter().for_each(|key| self.run_steps_like(key));
    }

    fn run_steps_like(&mut self, key: Key) {
        let Some(steps) = self.steps.waiting.remove(&key) else { return };
        let (kind, elements) = key;
        let (limits, keeps_half) = (self.limits, self.half.is_some());
        let template = self.steps.templates.entry((kind, steps.len()));
        let template = template.or_insert_with(|| Arc::new(template_of(kind, steps.len(), limits, keeps_half))).clone();
        let outs: Vec<&TensorIr> = steps.iter().flat_map(|step| &step.outs).collect();
        let written = |x: &Written| {
            let out = outs[x.id.expect("all outputs are of a step").value() as usize];
            Written { id: Some(out.id), shape: out.shape.clone(), ..*x }
        };
        let outputs: Vec<Written> = template.outputs.iter().map(written).collect();
        let targets: Vec<_> = outputs.iter().map(|x| (x.id, x.is_half, x.is_copy)).collect();
        let launch = Launch {
            dtype: template.dtype,
            program: template.program.clone(),
            rows: 1,
            columns: elements,
            inputs: template
                .inputs
                .iter()
                .map(|&x| Source::Stored(steps[x / INPUTS].inputs[x % INPUTS].clone()))
                .collect(),
            shares: Vec::new(),
            scalars: template
                .scalars
                .iter()
                .map(|&x| steps[x as usize / NUMBERS].numbers[x as usize % NUMBERS])
                .collect(),
            draws: Vec::new(),
            outputs,
            others: Vec::new(),
        };
        for out in &outs {
            self.steps.keys.remove(&out.id);
        }
        // Their memory is free once the kernel has run.
        drop(steps);
        let written = self.launch(launch);
        targets.into_iter().zip(written).for_each(|(target, x)| self.keep(target, x));
    }

    /// Whether there is a copy of the tensor in half precision.
    fn has_copy(&self, id: TensorId) -> bool {
        self.copies.contains_key(&id) || self.shared_copies.get(&id).is_some_and(|copy| copy.get().is_some())
    }
}

/// The launch of `count` steps of this kind. Each number of elements has the same, because no row is summed.
fn template_of(kind: Kind, count: usize, limits: Limits, keeps_half: bool) -> Template {
    let mut chain = Chain::<usize>::default();
    let mut next = (count * (INPUTS + OUTPUTS)) as u64;
    for step in 0..count {
        let tensor = |id, status| TensorIr {
            id: TensorId::new(id as u64),
            shape: Shape::from([2]),
            status,
            dtype: limits.dtype,
        };
        // Outputs are first, so that an id is a place.
        let inputs: [_; INPUTS] =
            std::array::from_fn(|i| tensor(count * OUTPUTS + step * INPUTS + i, TensorStatus::ReadWrite));
        let outs: [_; OUTPUTS] = std::array::from_fn(|i| tensor(step * OUTPUTS + i, TensorStatus::NotInit));
        let formula = AdamWStep::of_numbers(std::array::from_fn(|i| (step * NUMBERS + i) as f64));
        let new_id = || {
            next += 1;
            TensorId::new(next)
        };
        for op in formula.operations(inputs.each_ref(), outs.each_ref(), new_id) {
            let joins = join(&mut chain, &op, limits, |x| {
                let place = x.id.value() as usize - count * OUTPUTS;
                let input = place % INPUTS;
                Operand { handle: place, is_half: kind.halves[input], has_copy: kind.copies[input] }
            });
            assert!(joins, "{count} steps are one chain");
        }
    }
    let (launch, remade) = chain.take(limits.dtype, keeps_half, None).expect("a step has outputs");
    debug_assert!(remade.is_empty(), "no output of a step follows from another");
    launch
}

fn join(
    chain: &mut Chain<usize>,
    op: &OperationIr,
    limits: Limits,
    mut place: impl FnMut(&TensorIr) -> Operand<usize>,
) -> bool {
    let (expression, out) = expression(op, |_| None).expect("a step is of elements");
    chain.join((&expression, out), limits, &ById::default(), |x, _| place(x))
}
