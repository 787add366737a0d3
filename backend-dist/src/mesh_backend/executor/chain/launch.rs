//! What a chain gives to the device.

use super::split::{Origin, Split};
use super::{Chain, Deferred, Value, facts::place};
use burn::tensor::{DType, Shape};
use burn_ir::TensorId;
use kernels_cubecl::fused::{Draw, Element, Extent, Output, Program, Register, Sharing, Step};
use std::sync::Arc;

/// One launch.
#[derive(Clone)]
pub struct Launch<H> {
    /// The type of what is not in half precision.
    pub dtype: DType,
    pub program: Program,
    pub rows: usize,
    pub columns: usize,
    pub inputs: Vec<H>,
    /// Of those inputs whose rows are shared.
    pub shares: Vec<Sharing>,
    pub scalars: Vec<f64>,
    pub draws: Vec<Draw>,
    pub outputs: Vec<Written>,
    /// Tensors that are one of the outputs in another shape.
    pub others: Vec<(usize, Written)>,
}

/// The launch of a chain, and those of values that are remade from its outputs.
pub type Taken<H> = (Launch<H>, Vec<Launch<Origin<H>>>);

/// A tensor that a launch writes.
#[derive(Clone)]
pub struct Written {
    /// `None` for what only remade values read.
    pub id: Option<TensorId>,
    pub shape: Shape,
    pub is_half: bool,
    /// Whether it is a copy of another output in half precision.
    pub is_copy: bool,
}

impl<H> Launch<H> {
    /// How rows share an input, if they do.
    pub(super) fn sharing(&self, input: usize) -> Sharing {
        let is_shared = |number: usize| self.program.inputs[number].extent.is_shared();
        let before = (0..input).filter(|number| is_shared(*number)).count();
        if is_shared(input) { self.shares[before] } else { Sharing::default() }
    }

    /// The same with other inputs.
    pub fn with_inputs<T>(self, input: impl FnMut(H) -> T) -> Launch<T> {
        let Self { dtype, program, rows, columns, inputs, shares, scalars, draws, outputs, others } = self;
        let inputs = inputs.into_iter().map(input).collect();
        Launch { dtype, program, rows, columns, inputs, shares, scalars, draws, outputs, others }
    }

    /// Whether the rows of an input are those of a tensor of this shape, broadcast to `whole`.
    pub fn broadcasts(&self, input: usize, shape: &Shape, whole: &Shape) -> bool {
        let (extent, sharing) = (self.program.inputs[input].extent, self.sharing(input));
        place(shape, whole, (self.rows, self.columns)) == Some((extent, sharing))
    }
}

impl<H: Clone> Chain<H> {
    /// The launch that computes what somebody may still read, those of values that are remade from its outputs, and an empty
    /// chain. `keeps_half` says whether values that come from half precision alone are stored so; the `wanted` value is
    /// stored.
    pub fn take(&mut self, dtype: DType, keeps_half: bool, wanted: Option<TensorId>) -> Option<Taken<H>> {
        let chain = self.end();
        let mut values: Vec<_> = chain.values.iter().collect();
        values.sort_by_key(|(_, value)| value.at);
        let split = chain.split(&values, keeps_half, wanted);
        let (launch, renamed) = chain.launch(values, &split, dtype, keeps_half)?;
        let place = |register: Register, extent| {
            let output = Output { register: renamed[register], extent, element: Element::F32 };
            launch.program.outputs.iter().position(|other| *other == output).expect("what is stored is an output")
        };
        let remade = split.remade.iter().map(|remade| chain.remake(remade, &split, place, dtype)).collect();
        Some((launch, remade))
    }

    /// The launch that computes one tensor, without a copy of it.
    pub fn launch_of(&self, id: TensorId, dtype: DType, keeps_half: bool) -> Option<Launch<H>> {
        let value = Value { wants_half: false, ..self.values.get(&id)?.clone() };
        self.launch(vec![(&id, &value)], &Split::default(), dtype, keeps_half).map(|(launch, _)| launch)
    }

    /// For each tensor the launch that computes it, and an empty chain.
    pub fn defer(&mut self, dtype: DType, keeps_half: bool) -> Vec<(TensorId, Deferred<H>)> {
        let chain = self.end();
        let launch = |id: &TensorId| chain.launch_of(*id, dtype, keeps_half).map(|launch| (*id, Arc::new(launch)));
        chain.values.keys().filter_map(launch).collect()
    }

    /// An empty chain in place of this.
    fn end(&mut self) -> Self {
        std::mem::take(self)
    }

    /// The launch, and the chain's registers as its program numbers them.
    fn launch(
        &self,
        values: Vec<(&TensorId, &Value)>,
        split: &Split,
        dtype: DType,
        keeps_half: bool,
    ) -> Option<(Launch<H>, Vec<Register>)> {
        let (rows, columns) = self.size?;
        if values.is_empty() {
            return None;
        }
        let mut needed = vec![false; self.steps.len()];
        let wants_copy = |value: &Value| value.wants_half || self.facts[value.register].has_copy;
        let is_written = |(id, value): &&(&TensorId, &Value)| !split.is_remade(**id) || wants_copy(value);
        values.iter().filter(is_written).for_each(|(_, value)| needed[value.register] = true);
        split.rows.iter().for_each(|register| needed[*register] = true);
        for (register, step) in self.steps.iter().enumerate().rev() {
            if needed[register] {
                operands(step).into_iter().flatten().for_each(|x| needed[x] = true);
            }
        }
        let mut program = Program::default();
        let mut renamed = vec![usize::MAX; self.steps.len()];
        let (mut inputs, mut shares) = (Vec::new(), Vec::new());
        let (mut scalars, mut draws) = (Vec::new(), Vec::new());
        for (register, step) in self.steps.iter().enumerate().filter(|(register, _)| needed[*register]) {
            let step = match *step {
                Step::Load(input) => {
                    let (input, sharing, handle) = &self.inputs[input];
                    program.inputs.push(*input);
                    if input.extent.is_shared() {
                        shares.push(*sharing);
                    }
                    inputs.push(handle.clone());
                    Step::Load(inputs.len() - 1)
                }
                Step::Scalar(scalar) => {
                    scalars.push(self.scalars[scalar]);
                    Step::Scalar(scalars.len() - 1)
                }
                Step::Bernoulli(draw) => {
                    draws.push(self.draws[draw]);
                    Step::Bernoulli(draws.len() - 1)
                }
                Step::Unary(f, x) => Step::Unary(f, renamed[x]),
                Step::Binary(f, a, b) => Step::Binary(f, renamed[a], renamed[b]),
                Step::Reduce(f, x) => Step::Reduce(f, renamed[x]),
            };
            renamed[register] = program.steps.len();
            program.steps.push(step);
        }
        (program.scalars, program.draws) = (scalars.len(), draws.len());
        let (mut outputs, mut others) = (Vec::new(), Vec::new());
        for (id, value) in values {
            let is_whole = !value.is_sum && value.shape.num_elements() == rows * columns;
            let stored_half = keeps_half && self.may_be_half(value);
            let mut write = |is_half, is_copy| {
                let output = Output {
                    register: renamed[value.register],
                    extent: match value.is_sum {
                        true => Extent::PerColumn,
                        false if is_whole => Extent::Whole,
                        false => Extent::PerRow,
                    },
                    element: if is_half { Element::Half } else { Element::F32 },
                };
                let written = Written { id: Some(*id), shape: value.shape.clone(), is_half, is_copy };
                match program.outputs.iter().position(|other| *other == output) {
                    Some(same) => others.push((same, written)),
                    None => {
                        program.outputs.push(output);
                        outputs.push(written);
                    }
                }
            };
            if !split.is_remade(*id) {
                write(stored_half, false);
            }
            if wants_copy(value) && is_whole && !stored_half {
                write(true, true);
            }
        }
        for register in &split.rows {
            let output = Output { register: renamed[*register], extent: Extent::PerRow, element: Element::F32 };
            if !program.outputs.contains(&output) {
                program.outputs.push(output);
                outputs.push(Written { id: None, shape: Shape::from([rows, 1]), is_half: false, is_copy: false });
            }
        }
        let launch = Launch { dtype, program, rows, columns, inputs, shares, scalars, draws, outputs, others };
        Some((launch, renamed))
    }
}

fn operands(step: &Step) -> [Option<Register>; 2] {
    match *step {
        Step::Load(_) | Step::Scalar(_) | Step::Bernoulli(_) => [None, None],
        Step::Unary(_, x) | Step::Reduce(_, x) => [Some(x), None],
        Step::Binary(_, a, b) => [Some(a), Some(b)],
    }
}
