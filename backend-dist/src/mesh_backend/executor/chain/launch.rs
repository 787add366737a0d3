//! What a chain gives to the device.

use super::Chain;
use burn::tensor::{DType, Shape};
use burn_ir::TensorId;
use kernels_cubecl::fused::{Draw, Element, Extent, Output, Program, Register, Step};

/// One launch.
pub struct Launch<H> {
    /// The type of what is not in half precision.
    pub dtype: DType,
    pub program: Program,
    pub rows: usize,
    pub columns: usize,
    pub inputs: Vec<H>,
    pub scalars: Vec<f64>,
    pub draws: Vec<Draw>,
    pub outputs: Vec<Written>,
    /// Tensors that are one of the outputs in another shape.
    pub others: Vec<(usize, Written)>,
}

/// A tensor that a launch writes.
pub struct Written {
    pub id: TensorId,
    pub shape: Shape,
    pub is_half: bool,
    /// Whether it is a copy of another output in half precision.
    pub is_copy: bool,
}

impl<H> Chain<H> {
    /// The launch that computes what somebody may still read, and an empty chain. `keeps_half` says whether values that
    /// come from half precision alone are stored so.
    pub fn take(&mut self, dtype: DType, keeps_half: bool) -> Option<Launch<H>> {
        let released = std::mem::take(&mut self.released);
        let chain = std::mem::take(self);
        self.released = released;
        let (rows, columns) = chain.size?;
        let mut values: Vec<_> = chain.values.iter().collect();
        values.sort_by_key(|(_, value)| value.at);
        if values.is_empty() {
            return None;
        }
        let mut needed = vec![false; chain.steps.len()];
        values.iter().for_each(|(_, value)| needed[value.register] = true);
        for (register, step) in chain.steps.iter().enumerate().rev() {
            if needed[register] {
                operands(step).into_iter().flatten().for_each(|x| needed[x] = true);
            }
        }
        let mut program = Program::default();
        let mut renamed = vec![usize::MAX; chain.steps.len()];
        let (mut inputs, mut scalars, mut draws) = (Vec::new(), Vec::new(), Vec::new());
        let mut handles: Vec<_> = chain.inputs.into_iter().map(Some).collect();
        for (register, step) in chain.steps.iter().enumerate().filter(|(register, _)| needed[*register]) {
            let step = match *step {
                Step::Load(input) => {
                    let (input, handle) = handles[input].take().expect("an input is loaded once");
                    program.inputs.push(input);
                    inputs.push(handle);
                    Step::Load(inputs.len() - 1)
                }
                Step::Scalar(scalar) => {
                    scalars.push(chain.scalars[scalar]);
                    Step::Scalar(scalars.len() - 1)
                }
                Step::Bernoulli(draw) => {
                    draws.push(chain.draws[draw]);
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
            let is_whole = value.shape.num_elements() == rows * columns;
            let stored_half = keeps_half && is_whole && chain.facts[value.register].is_half;
            let mut write = |is_half, is_copy| {
                let output = Output {
                    register: renamed[value.register],
                    extent: if is_whole { Extent::Whole } else { Extent::PerRow },
                    element: if is_half { Element::Half } else { Element::F32 },
                };
                let written = Written { id: *id, shape: value.shape.clone(), is_half, is_copy };
                match program.outputs.iter().position(|other| *other == output) {
                    Some(same) => others.push((same, written)),
                    None => {
                        program.outputs.push(output);
                        outputs.push(written);
                    }
                }
            };
            write(stored_half, false);
            let wants_half = value.wants_half || chain.facts[value.register].has_copy;
            if wants_half && is_whole && !stored_half {
                write(true, true);
            }
        }
        Some(Launch { dtype, program, rows, columns, inputs, scalars, draws, outputs, others })
    }
}

fn operands(step: &Step) -> [Option<Register>; 2] {
    match *step {
        Step::Load(_) | Step::Scalar(_) | Step::Bernoulli(_) => [None, None],
        Step::Unary(_, x) | Step::Reduce(_, x) => [Some(x), None],
        Step::Binary(_, a, b) => [Some(a), Some(b)],
    }
}
