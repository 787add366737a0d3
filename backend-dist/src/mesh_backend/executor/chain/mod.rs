//! A chain of operations that waits to run as one kernel: what belongs to it, and what it must write.

mod facts;
mod launch;
mod remake;
mod split;
mod steps;
#[cfg(test)]
mod tests;

pub use launch::{Launch, Written};
pub(super) use split::Origin;

use super::expression::Expression;
use crate::mesh_backend::ids::ById;
use burn::tensor::{DType, Shape};
use burn_ir::{TensorId, TensorIr, TensorStatus};
use facts::{Fact, place, size};
use kernels_cubecl::fused::{Draw, Element, Extent, Input, Register, Sharing, Step};
use std::sync::Arc;
use steps::Operands;

/// Most steps of a chain: each holds a register.
const MOST_STEPS: usize = 96;
/// Most inputs of a chain.
const MOST_INPUTS: usize = 16;

/// A tensor that is computed when somebody reads it: the only output of the launch.
pub(super) type Deferred<H> = Arc<Launch<H>>;

/// A tensor that a chain reads.
pub(super) struct Operand<H> {
    /// Its buffer.
    pub handle: H,
    /// Whether it is stored in half precision.
    pub is_half: bool,
    /// Whether there is a copy in half precision.
    pub has_copy: bool,
}

/// A tensor that a chain computes.
#[derive(Clone, Debug)]
struct Value {
    register: Register,
    shape: Shape,
    /// Its place in the order of operations.
    at: usize,
    /// Whether a copy in half precision is wanted as well.
    wants_half: bool,
    /// Whether it is the sum of all rows of the register.
    is_sum: bool,
}

impl Value {
    fn new(register: Register, x: &TensorIr, at: usize) -> Self {
        Self { register, shape: x.shape.clone(), at, wants_half: false, is_sum: false }
    }
}

/// What a chain may hold.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The type of all tensors.
    pub dtype: DType,
    /// Whether rows of this length fit into registers, as sums over them need.
    pub fits: fn(usize) -> bool,
    /// Whether rows of this length can be summed.
    pub sums: fn(usize) -> bool,
    /// Most elements.
    pub elements: usize,
}

/// Operations on the elements of an `[rows, columns]` matrix, its rows and columns, which have not run yet. Tensors have
/// any shapes with so many elements and columns. `H` are buffers.
pub(super) struct Chain<H> {
    /// Rows and columns, once there is an operation.
    size: Option<(usize, usize)>,
    steps: Vec<Step>,
    facts: Vec<Fact>,
    scalars: Vec<f64>,
    draws: Vec<Draw>,
    inputs: Vec<(Input, Sharing, H)>,
    /// Where what an input has is, and how its rows are shared.
    loaded: ById<(Register, Sharing)>,
    /// Inputs that ended after the operation that loaded them.
    ended: Vec<TensorId>,
    values: ById<Value>,
    count: usize,
}

impl<H> Default for Chain<H> {
    fn default() -> Self {
        Self {
            size: None,
            steps: Vec::new(),
            facts: Vec::new(),
            scalars: Vec::new(),
            draws: Vec::new(),
            inputs: Vec::new(),
            loaded: ById::default(),
            ended: Vec::new(),
            values: ById::default(),
            count: 0,
        }
    }
}

impl<H: Clone + PartialEq> Chain<H> {
    /// Whether the chain is to compute this tensor.
    pub fn has(&self, id: TensorId) -> bool {
        self.values.contains_key(&id)
    }

    /// Whether the chain will store this tensor in half precision if it may: it computes the tensor from such tensors alone.
    pub fn is_half(&self, id: TensorId) -> bool {
        self.values.get(&id).is_some_and(|value| self.may_be_half(value))
    }

    /// Whether the chain is to compute this tensor as a sum of rows, which only others than the chain can read.
    pub fn is_sum(&self, id: TensorId) -> bool {
        self.values.get(&id).is_some_and(|value| value.is_sum)
    }

    /// Whether the chain sums rows.
    pub fn has_sums(&self) -> bool {
        self.values.values().any(|value| value.is_sum)
    }

    /// Nobody will read this tensor. Returns whether the chain was to compute it.
    pub fn forget(&mut self, id: TensorId) -> bool {
        self.values.remove(&id).is_some()
    }

    /// Inputs that have ended since the last call.
    pub fn take_ended(&mut self) -> Vec<TensorId> {
        std::mem::take(&mut self.ended)
    }

    /// A tensor of the chain is wanted in half precision as well, and so is the same in other shapes.
    pub fn want_half(&mut self, id: TensorId) {
        if let Some(register) = self.values.get(&id).filter(|value| !value.is_sum).map(|value| value.register) {
            let same = self.values.values_mut().filter(|value| value.register == register);
            same.for_each(|value| value.wants_half = true);
        }
    }

    /// Adds an operation if it belongs to the chain, or begins one if there is none. `operand` takes a tensor from where
    /// it is; what computes a `deferred` tensor becomes part of the chain.
    pub fn join(
        &mut self,
        (expression, out): (&Expression, &TensorIr),
        limits: Limits,
        deferred: &ById<Deferred<H>>,
        operand: impl FnMut(&TensorIr, Extent) -> Operand<H>,
    ) -> bool {
        let Some(size) = self.size_with(expression, out, limits, deferred) else { return false };
        self.resize(size);
        expression.tensors(&mut |x| {
            if x.status == TensorStatus::ReadWrite && self.loaded.contains_key(&x.id) && !self.ended.contains(&x.id) {
                self.ended.push(x.id);
            }
        });
        let mut operands = Operands { deferred, shape: &out.shape, take: operand };
        let register = self.emit(expression, &mut operands);
        self.count += 1;
        self.values.insert(out.id, Value::new(register, out, self.count));
        expression.tensors(&mut |x| {
            if x.status == TensorStatus::ReadWrite && x.id != out.id {
                self.loaded.remove(&x.id);
                self.forget(x.id);
            }
        });
        true
    }

    /// Gives a tensor of the chain another shape, if its columns remain.
    pub fn reshape(&mut self, x: &TensorIr, out: &TensorIr) -> bool {
        let Some(value) = self.values.get(&x.id) else { return false };
        if x.shape[..].last() != out.shape[..].last() {
            return false;
        }
        self.put_for(x, out, value.register, value.is_sum);
        true
    }

    /// Adds the sum over all rows of a tensor of the chain, if kernels can compute it.
    pub fn sum_rows(&mut self, x: &TensorIr, out: &TensorIr, limits: Limits) -> bool {
        let Some(value) = self.values.get(&x.id) else { return false };
        let sums = |(rows, columns)| rows > 1 && out.shape.num_elements() == columns && (limits.sums)(columns);
        if value.is_sum || !self.is_whole(value) || !self.size.is_some_and(sums) {
            return false;
        }
        self.put_for(x, out, value.register, true);
        true
    }

    /// What an operation makes of the value `x` without steps.
    fn put_for(&mut self, x: &TensorIr, out: &TensorIr, register: Register, is_sum: bool) {
        self.count += 1;
        self.values.insert(out.id, Value { is_sum, ..Value::new(register, out, self.count) });
        if x.status == TensorStatus::ReadWrite {
            self.forget(x.id);
        }
    }

    /// The size of the chain with the operation, if it fits.
    fn size_with(
        &self,
        expression: &Expression,
        out: &TensorIr,
        limits: Limits,
        deferred: &ById<Deferred<H>>,
    ) -> Option<(usize, usize)> {
        let mut wanted = out.shape.clone();
        expression.reduced(&mut |x| wanted = x.shape.clone());
        let mut wanted = size(&wanted);
        expression.tensors(&mut |x| {
            if let Some(launch) = deferred.get(&x.id) {
                wanted = (launch.rows, launch.columns);
            }
        });
        let fits = |size| self.fits(expression, out, limits, deferred, size).then_some(size);
        match self.size {
            None => fits(wanted),
            Some(own) => fits(own).or_else(|| {
                // Numbers of rows alone can be those of longer rows.
                let grows = own.1 == 1 && own.0 == wanted.0 && wanted.1 > 1;
                let is_of_rows = |fact: &Fact| fact.extent != Some(Extent::PerColumn);
                // Draws are counted by element: those of rows would be others for every column. A sum over one column, as a
                // softmax may have, would be one over all.
                let may_be_rows =
                    self.draws.is_empty() && !self.reduces() && !self.has_sums() && self.inputs_may_be_rows();
                let can_grow = grows && self.facts.iter().all(is_of_rows) && may_be_rows;
                if can_grow { fits(wanted) } else { None }
            }),
        }
    }

    fn reduces(&self) -> bool {
        self.steps.iter().any(|step| matches!(step, Step::Reduce(..)))
    }

    fn inputs_may_be_rows(&self) -> bool {
        // Numbers of rows are f32.
        self.inputs.iter().all(|(input, ..)| input.element == Element::F32)
    }

    fn resize(&mut self, size: (usize, usize)) {
        let grows = self.size.is_some_and(|own| own != size);
        self.size = Some(size);
        if grows {
            let row = |extent: Extent| if extent == Extent::Whole { Extent::PerRow } else { extent };
            self.facts.iter_mut().for_each(|fact| fact.extent = fact.extent.map(row));
            self.inputs.iter_mut().for_each(|(input, ..)| input.extent = row(input.extent));
        }
    }

    fn fits(
        &self,
        expression: &Expression,
        out: &TensorIr,
        limits: Limits,
        deferred: &ById<Deferred<H>>,
        (rows, columns): (usize, usize),
    ) -> bool {
        let extent = |x: &TensorIr| place(&x.shape, &out.shape, (rows, columns)).map(|(extent, _)| extent);
        let reduces = expression.reduces();
        let mut fits = out.dtype == limits.dtype;
        let (mut loads, mut steps) = (self.inputs.len(), self.steps.len() + 8);
        let (mut has_rows, mut of_rows) = (reduces, true);
        expression.tensors(&mut |x| {
            let extent = extent(x);
            fits &= (x.dtype == limits.dtype || x.dtype.is_bool()) && extent.is_some();
            has_rows |= !matches!(extent, Some(Extent::Whole | Extent::Single));
            of_rows &= matches!(extent, Some(Extent::PerRow | Extent::SharedPerRow | Extent::Single));
            if !self.has(x.id) && !self.loaded.contains_key(&x.id) {
                match deferred.get(&x.id) {
                    Some(launch) => {
                        fits &= (launch.rows, launch.columns) == (rows, columns);
                        loads += launch.inputs.len();
                        steps += launch.program.steps.len();
                    }
                    None => loads += 1,
                }
            }
        });
        expression.reduced(&mut |x| fits &= extent(x) == Some(Extent::Whole));
        let out_fits = match extent(out) {
            Some(Extent::Whole) => true,
            // A row's number comes from numbers of rows, or from a reduction.
            Some(Extent::PerRow) => reduces || (of_rows && !expression.draws()),
            _ => false,
        };
        fits && out_fits
            && loads <= MOST_INPUTS
            && steps < MOST_STEPS
            && (1..=limits.elements).contains(&(rows * columns))
            && (!has_rows || (limits.fits)(columns) || !(reduces || self.reduces()))
    }
}
