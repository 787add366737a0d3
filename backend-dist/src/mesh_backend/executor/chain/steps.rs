//! The steps that an operation adds to a chain.

use super::facts::{Fact, place};
use super::{Chain, Deferred, Launch, Operand};
use crate::mesh_backend::executor::expression::Expression;
use crate::mesh_backend::ids::ById;
use burn::tensor::Shape;
use burn_ir::TensorIr;
use kernels_cubecl::fused::{Binary, Draw, Element, Extent, Input, Register, Sharing, Step};

/// Where the tensors of an operation come from.
pub(super) struct Operands<'a, H, F> {
    pub deferred: &'a ById<Deferred<H>>,
    /// The shape that they are broadcast to.
    pub shape: &'a Shape,
    pub take: F,
}

impl<H: Clone + PartialEq> Chain<H> {
    pub(super) fn emit<F: FnMut(&TensorIr, Extent) -> Operand<H>>(
        &mut self,
        expression: &Expression,
        operands: &mut Operands<H, F>,
    ) -> Register {
        match expression {
            Expression::Tensor(x) | Expression::Mask(x) => self.load(x, operands),
            Expression::Number(x) => self.scalar(*x),
            Expression::Bernoulli(draw) => self.draw(*draw),
            Expression::Unary(f, x) => {
                let x = self.emit(x, operands);
                self.compute(Step::Unary(*f, x))
            }
            Expression::Binary(f, a, b) => {
                let (a, b) = (self.emit(a, operands), self.emit(b, operands));
                // What an optimizer writes in place of a parameter is wanted as the parameter was.
                let is_update =
                    matches!(f, Binary::Add | Binary::Sub) || (*f == Binary::Mul && self.facts[b].extent.is_none());
                let has_copy = is_update && self.facts[a].has_copy;
                let register = self.compute(Step::Binary(*f, a, b));
                self.facts[register].has_copy |= has_copy;
                register
            }
            Expression::Reduce(f, x) => {
                let x = self.emit(x, operands);
                self.compute(Step::Reduce(*f, x))
            }
        }
    }

    fn load<F: FnMut(&TensorIr, Extent) -> Operand<H>>(
        &mut self,
        x: &TensorIr,
        operands: &mut Operands<H, F>,
    ) -> Register {
        if let Some(value) = self.values.get(&x.id) {
            return value.register;
        }
        let size = self.size.expect("the chain has a size");
        let (extent, sharing) = place(&x.shape, operands.shape, size).expect("the operation fits");
        if let Some((register, _)) = self.loaded.get(&x.id).filter(|(_, other)| *other == sharing) {
            return *register;
        }
        let register = match operands.deferred.get(&x.id) {
            Some(launch) => self.inline(launch),
            None => {
                let Operand { handle, is_half, has_copy } = (operands.take)(x, extent);
                let element = if is_half { Element::Half } else { Element::F32 };
                let register = self.input(Input { extent, element }, sharing, handle);
                self.facts[register].has_copy = has_copy;
                register
            }
        };
        self.loaded.insert(x.id, (register, sharing));
        register
    }

    /// The steps of another launch, as part of this chain.
    fn inline(&mut self, launch: &Launch<H>) -> Register {
        let mut registers = Vec::with_capacity(launch.program.steps.len());
        for step in &launch.program.steps {
            let register = match *step {
                Step::Load(input) => {
                    let (kind, handle) = (launch.program.inputs[input], launch.inputs[input].clone());
                    self.input(kind, launch.sharing(input), handle)
                }
                Step::Scalar(scalar) => self.scalar(launch.scalars[scalar]),
                Step::Bernoulli(draw) => self.draw(launch.draws[draw]),
                Step::Unary(f, x) => self.compute(Step::Unary(f, registers[x])),
                Step::Binary(f, a, b) => self.compute(Step::Binary(f, registers[a], registers[b])),
                Step::Reduce(f, x) => self.compute(Step::Reduce(f, registers[x])),
            };
            registers.push(register);
        }
        registers[launch.program.outputs[0].register]
    }

    fn input(&mut self, input: Input, sharing: Sharing, handle: H) -> Register {
        let number = place_in(&mut self.inputs, (input, sharing, handle));
        self.compute(Step::Load(number))
    }

    /// Numbers are not shared: which of them are equal may change from launch to launch, and with it the kernel.
    fn scalar(&mut self, x: f64) -> Register {
        self.scalars.push(x);
        self.compute(Step::Scalar(self.scalars.len() - 1))
    }

    fn draw(&mut self, draw: Draw) -> Register {
        let number = place_in(&mut self.draws, draw);
        self.compute(Step::Bernoulli(number))
    }

    /// The register of a step, which is computed once however often it is asked for.
    fn compute(&mut self, step: Step) -> Register {
        if let Some(register) = self.steps.iter().position(|other| *other == step) {
            return register;
        }
        let fact = Fact::of(step, &self.facts, |input| self.inputs[input].0);
        self.facts.push(fact);
        self.steps.push(step);
        self.steps.len() - 1
    }
}

/// Where `x` is in a list that has it once.
fn place_in<T: PartialEq>(list: &mut Vec<T>, x: T) -> usize {
    let known = list.iter().position(|other| *other == x);
    known.unwrap_or_else(|| {
        list.push(x);
        list.len() - 1
    })
}
