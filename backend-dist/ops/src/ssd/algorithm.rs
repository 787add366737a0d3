//! The order of stages and GEMMs, forward and backward.

use burn::backend::{Backend, tensor::FloatTensor};

use super::stages::{Combined, InputSums, SsdShape, SsdStages, StepInputs};
use crate::kernels::LocalKernels;

/// Results of the forward pass.
pub struct Answers<B: Backend> {
    /// `[s, b, h p]`.
    pub y: FloatTensor<B>,
    /// The states in front of chunks, by column, for the backward pass.
    pub in_front: FloatTensor<B>,
    /// The states behind the last position.
    pub last: FloatTensor<B>,
}

/// Gradients of the inputs.
pub struct Gradients<B: Backend> {
    /// `[s, b, features]`.
    pub x: FloatTensor<B>,
    /// Of step sizes, their biases, `a_log`, and D.
    pub of_heads: [FloatTensor<B>; 4],
}

/// The output and the states.
pub fn forward<B: LocalKernels, S: SsdStages<B>>(
    steps: &StepInputs<B>,
    inputs: &Combined<B>,
    first: Option<FloatTensor<B>>,
    shape: SsdShape,
) -> Answers<B> {
    let decays = S::decays(steps, shape);
    let [b, c] = shape.grouped().map(|of| S::operand(&inputs.x, of, shape));
    let scores = S::wide_matmul(c.clone(), B::float_transpose(b.clone()));
    let weights = S::weights(&scores, &decays, steps, shape);
    let [x, taken] = S::operands(&inputs.x, shape.x(), &[&decays.steps, &decays.until], shape);
    let inside = B::matmul(weights, x);
    let summands = S::wide_matmul(B::float_transpose(b), taken);
    let [in_front, last] = S::states(summands, &decays, inputs, first, shape);
    let before = B::matmul(c, in_front.clone());
    Answers { y: S::combine([inside, before], &decays, inputs, shape), in_front, last }
}

/// The gradients, given that of the output. All but the states is recomputed.
pub fn backward<B: LocalKernels, S: SsdStages<B>>(
    steps: &StepInputs<B>,
    inputs: &Combined<B>,
    in_front: &FloatTensor<B>,
    grad: FloatTensor<B>,
    shape: SsdShape,
) -> Gradients<B> {
    let transposed = |x: &FloatTensor<B>| B::float_transpose(x.clone());
    let decays = S::decays(steps, shape);
    let [b, c] = shape.grouped().map(|of| S::operand(&inputs.x, of, shape));
    let scores = S::wide_matmul(c.clone(), transposed(&b));
    // Of the answers inside chunks, and of those of states.
    let [of_inside, of_before] = S::operands(&grad, shape.x(), &[&decays.since], shape);
    let [x, taken_in] = S::operands(&inputs.x, shape.x(), &[&decays.steps, &decays.until], shape);
    let weights = S::weights(&scores, &decays, steps, shape);
    let inside = B::matmul(B::float_transpose(weights), of_inside.clone());
    let of_weights = B::matmul(of_inside, B::float_transpose(x));
    let [of_scores, later, earlier] = S::weights_grads(of_weights, &scores, &decays, steps, shape);
    let of_states = S::wide_matmul(transposed(&c), of_before.clone());
    let [of_summands, along] = S::states_grads(in_front, of_states, &decays, shape);
    let sums = InputSums {
        before: B::matmul(c.clone(), in_front.clone()),
        inside,
        taken: B::matmul(b.clone(), of_summands.clone()),
        b: [B::matmul(taken_in, B::float_transpose(of_summands)), B::matmul(transposed(&of_scores), c)],
        c: [B::matmul(of_before, transposed(in_front)), B::matmul(of_scores, b)],
    };
    let (x, combined) = S::combine_grads(&grad, sums, &decays, inputs, shape);
    Gradients { x, of_heads: S::decays_grads(steps, &decays, [later, earlier], combined, along, shape) }
}
