//! A chain of operations that waits to run as one kernel: what belongs to it, and what it must write.

mod facts;
mod launch;

pub use launch::{Launch, Written};

use super::expression::Expression;
use crate::mesh_backend::ids::{ById, Ids};
use burn::tensor::{DType, Shape};
use burn_ir::{TensorId, TensorIr, TensorStatus};
use facts::{Fact, extent, size};
use kernels_cubecl::fused::{Binary, Draw, Element, Extent, Input, Register, Step};

/// Most steps of a chain: each holds a register.
const MOST_STEPS: usize = 96;
/// Most inputs of a chain.
const MOST_INPUTS: usize = 16;

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
}

/// What a chain may hold.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The type of all tensors.
    pub dtype: DType,
    /// Whether rows of this length fit into registers.
    pub fits: fn(usize) -> bool,
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
    inputs: Vec<(Input, H)>,
    loaded: ById<Register>,
    /// Consumed tensors that the present operation has loaded.
    taken: Vec<TensorId>,
    values: ById<Value>,
    /// Values that are read after the chain, whether or not they are dropped before it runs.
    pinned: Ids,
    released: Vec<TensorId>,
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
            taken: Vec::new(),
            values: ById::default(),
            pinned: Ids::default(),
            released: Vec::new(),
            count: 0,
        }
    }
}

impl<H> Chain<H> {
    /// Whether the chain is to compute this tensor.
    pub fn has(&self, id: TensorId) -> bool {
        self.values.contains_key(&id)
    }

    /// Whether the chain will store this tensor in half precision if it may: it computes the tensor from such tensors alone.
    pub fn is_half(&self, id: TensorId) -> bool {
        let is_whole = |value: &Value| self.size.is_some_and(|size| extent(&value.shape, size) == Some(Extent::Whole));
        self.values.get(&id).is_some_and(|value| self.facts[value.register].is_half && is_whole(value))
    }

    /// Nobody will read this tensor, unless it is pinned. Returns whether the chain was to compute it.
    pub fn forget(&mut self, id: TensorId) -> bool {
        if !self.has(id) {
            return false;
        }
        if self.pinned.contains(&id) {
            self.released.push(id);
        } else {
            self.values.remove(&id);
        }
        true
    }

    /// A tensor of the chain is read after it, whether or not it is dropped before.
    pub fn pin(&mut self, id: TensorId) {
        self.pinned.insert(id);
    }

    /// Pinned tensors that were dropped.
    pub fn take_released(&mut self) -> Vec<TensorId> {
        std::mem::take(&mut self.released)
    }

    /// A tensor of the chain is wanted in half precision as well.
    pub fn want_half(&mut self, id: TensorId) {
        if let Some(value) = self.values.get_mut(&id) {
            value.wants_half = true;
        }
    }

    /// Adds an operation if it belongs to the chain, or begins one if there is none. `operand` takes a tensor from where
    /// it is.
    pub fn join(
        &mut self,
        (expression, out): (&Expression, &TensorIr),
        limits: Limits,
        mut operand: impl FnMut(&TensorIr, Extent) -> Operand<H>,
    ) -> bool {
        let Some(size) = self.size_with(expression, out, limits) else { return false };
        self.resize(size);
        let register = self.emit(expression, &mut operand);
        self.count += 1;
        self.values.insert(out.id, Value { register, shape: out.shape.clone(), at: self.count, wants_half: false });
        expression.tensors(&mut |x| {
            if x.status == TensorStatus::ReadWrite && x.id != out.id {
                let was_loaded = self.loaded.remove(&x.id).is_some();
                if was_loaded && !self.taken.contains(&x.id) {
                    // The chain has its buffer from an earlier operation; the tensor ends here.
                    operand(x, Extent::Whole);
                }
                self.forget(x.id);
            }
        });
        self.taken.clear();
        true
    }

    /// Gives a tensor of the chain another shape, if its columns remain.
    pub fn reshape(&mut self, x: &TensorIr, out: &TensorIr) -> bool {
        let Some(value) = self.values.get(&x.id) else { return false };
        if x.shape[..].last() != out.shape[..].last() {
            return false;
        }
        self.count += 1;
        let value = Value { shape: out.shape.clone(), at: self.count, wants_half: false, ..value.clone() };
        self.values.insert(out.id, value);
        if x.status == TensorStatus::ReadWrite {
            self.forget(x.id);
        }
        true
    }

    /// The size of the chain with the operation, if it fits.
    fn size_with(&self, expression: &Expression, out: &TensorIr, limits: Limits) -> Option<(usize, usize)> {
        let mut wanted = out.shape.clone();
        if expression.reduces() {
            expression.tensors(&mut |x| wanted = x.shape.clone());
        }
        let wanted = size(&wanted);
        let fits = |size| self.fits(expression, out, limits, size).then_some(size);
        match self.size {
            None => fits(wanted),
            Some(own) => fits(own).or_else(|| {
                // Numbers of rows alone can be those of longer rows.
                let grows = own.1 == 1 && own.0 == wanted.0 && wanted.1 > 1;
                let is_of_rows = |fact: &Fact| fact.extent != Some(Extent::PerColumn);
                // Draws are counted by element: those of rows would be others for every column.
                let may_be_rows = self.draws.is_empty() && self.inputs_may_be_rows();
                let can_grow = grows && self.facts.iter().all(is_of_rows) && may_be_rows;
                if can_grow { fits(wanted) } else { None }
            }),
        }
    }

    fn inputs_may_be_rows(&self) -> bool {
        // Numbers of rows are f32.
        self.inputs.iter().all(|(input, _)| input.element == Element::F32)
    }

    fn resize(&mut self, size: (usize, usize)) {
        let grows = self.size.is_some_and(|own| own != size);
        self.size = Some(size);
        if grows {
            let row = |extent: Extent| if extent == Extent::Whole { Extent::PerRow } else { extent };
            self.facts.iter_mut().for_each(|fact| fact.extent = fact.extent.map(row));
            self.inputs.iter_mut().for_each(|(input, _)| input.extent = row(input.extent));
        }
    }

    fn fits(&self, expression: &Expression, out: &TensorIr, limits: Limits, (rows, columns): (usize, usize)) -> bool {
        let extent = |x: &TensorIr| extent(&x.shape, (rows, columns));
        let reduces = expression.reduces();
        let mut fits = out.dtype == limits.dtype && self.steps.len() + 8 < MOST_STEPS;
        let (mut loads, mut has_rows, mut of_rows) = (0, reduces, true);
        expression.tensors(&mut |x| {
            let extent = extent(x);
            fits &= x.dtype == limits.dtype && extent.is_some() && (!reduces || extent == Some(Extent::Whole));
            has_rows |= matches!(extent, Some(Extent::PerRow | Extent::PerColumn));
            of_rows &= matches!(extent, Some(Extent::PerRow | Extent::Single));
            loads += usize::from(!self.has(x.id) && !self.loaded.contains_key(&x.id));
        });
        let out_fits = match extent(out) {
            Some(Extent::Whole) => true,
            // A row's number comes from numbers of rows, or from a reduction.
            Some(Extent::PerRow) => reduces || (of_rows && !matches!(expression, Expression::Bernoulli(_))),
            _ => false,
        };
        fits && out_fits
            && loads + self.inputs.len() <= MOST_INPUTS
            && (1..=limits.elements).contains(&(rows * columns))
            && (!has_rows || (limits.fits)(columns))
    }

    fn emit(&mut self, expression: &Expression, operand: &mut impl FnMut(&TensorIr, Extent) -> Operand<H>) -> Register {
        match expression {
            Expression::Tensor(x) => self.load(x, operand),
            Expression::Number(x) => {
                let scalar = self.scalars.len();
                self.scalars.push(*x);
                self.push(Step::Scalar(scalar), Fact { extent: None, is_half: true, has_copy: false })
            }
            Expression::Bernoulli(draw) => {
                self.draws.push(*draw);
                // Zeros and ones are exact in every type.
                let fact = Fact { extent: Some(Extent::Whole), is_half: true, has_copy: false };
                self.push(Step::Bernoulli(self.draws.len() - 1), fact)
            }
            Expression::Unary(f, x) => {
                let x = self.emit(x, operand);
                self.push(Step::Unary(*f, x), Fact { has_copy: false, ..self.facts[x] })
            }
            Expression::Binary(f, a, b) => {
                let (a, b) = (self.emit(a, operand), self.emit(b, operand));
                let mut fact = self.facts[a].with(self.facts[b]);
                // What an optimizer writes in place of a parameter is wanted as the parameter was.
                let is_update =
                    matches!(f, Binary::Add | Binary::Sub) || (*f == Binary::Mul && self.facts[b].extent.is_none());
                fact.has_copy = is_update && self.facts[a].has_copy;
                self.push(Step::Binary(*f, a, b), fact)
            }
            Expression::Reduce(f, x) => {
                let x = self.load(x, operand);
                self.push(Step::Reduce(*f, x), Fact { extent: Some(Extent::PerRow), is_half: false, has_copy: false })
            }
        }
    }

    fn load(&mut self, x: &TensorIr, operand: &mut impl FnMut(&TensorIr, Extent) -> Operand<H>) -> Register {
        if let Some(value) = self.values.get(&x.id) {
            return value.register;
        }
        if let Some(register) = self.loaded.get(&x.id) {
            return *register;
        }
        let size = self.size.expect("the chain has a size");
        let extent = extent(&x.shape, size).expect("the operation fits");
        let Operand { handle, is_half, has_copy } = operand(x, extent);
        let element = if is_half { Element::Half } else { Element::F32 };
        let input = self.inputs.len();
        self.inputs.push((Input { extent, element }, handle));
        let register = self.push(Step::Load(input), Fact { extent: Some(extent), is_half, has_copy });
        self.loaded.insert(x.id, register);
        if x.status == TensorStatus::ReadWrite {
            self.taken.push(x.id);
        }
        register
    }

    fn push(&mut self, step: Step, fact: Fact) -> Register {
        self.steps.push(step);
        self.facts.push(fact);
        self.steps.len() - 1
    }
}
