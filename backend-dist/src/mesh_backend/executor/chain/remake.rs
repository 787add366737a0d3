//! The launches of values that are remade.

use super::split::{Origin, Split};
use super::{Chain, Launch, Written};
use burn::tensor::DType;
use burn_ir::TensorId;
use kernels_cubecl::fused::{Element, Extent, Input, Output, Program, Register, Step};

impl<H: Clone> Chain<H> {
    /// The launch that remakes a value; `output` is the number of the output that is a stored register.
    pub(super) fn remake(
        &self,
        (id, path): &(TensorId, Vec<Register>),
        split: &Split,
        output: impl Fn(Register, Extent) -> usize,
        dtype: DType,
    ) -> Launch<Origin<H>> {
        let (rows, columns) = self.size.expect("a chain with values has a size");
        let mut program = Program::default();
        let (mut inputs, mut shares, mut scalars) = (Vec::new(), Vec::new(), Vec::new());
        let place = |register: Register| path.iter().position(|other| *other == register).expect("it was traced");
        for register in path {
            let extent = if self.is_row(*register) { Extent::PerRow } else { Extent::Whole };
            let is_output = extent == Extent::PerRow || split.stored.contains(register);
            program.steps.push(match self.steps[*register] {
                _ if is_output => {
                    inputs.push(Origin::Output(output(*register, extent)));
                    program.inputs.push(Input { extent, element: Element::F32 });
                    Step::Load(inputs.len() - 1)
                }
                Step::Load(input) => {
                    let (input, sharing, handle) = &self.inputs[input];
                    if input.extent.is_shared() {
                        shares.push(*sharing);
                    }
                    inputs.push(Origin::Input(handle.clone()));
                    program.inputs.push(*input);
                    Step::Load(inputs.len() - 1)
                }
                Step::Scalar(scalar) => {
                    scalars.push(self.scalars[scalar]);
                    Step::Scalar(scalars.len() - 1)
                }
                Step::Unary(f, x) => Step::Unary(f, place(x)),
                Step::Binary(f, a, b) => Step::Binary(f, place(a), place(b)),
                Step::Reduce(..) | Step::Bernoulli(_) => unreachable!("no value is remade by these"),
            });
        }
        program.scalars = scalars.len();
        program.outputs = vec![Output { register: path.len() - 1, extent: Extent::Whole, element: Element::F32 }];
        let shape = self.values[id].shape.clone();
        let outputs = vec![Written { id: Some(*id), shape, is_half: false, is_copy: false }];
        Launch {
            dtype,
            program,
            rows,
            columns,
            inputs,
            shares,
            scalars,
            draws: Vec::new(),
            outputs,
            others: Vec::new(),
        }
    }
}
