//! The order of stages and GEMMs, forward and backward.

use burn::backend::{Backend, Shape, TensorMetadata, tensor::FloatTensor};

use super::stages::{GateSums, GatedDeltaStages, Inputs, PassOperands, Passed, Systems, features};
use crate::kernels::LocalKernels;
use crate::ssd::stages::{Decays, SsdShape};

/// Results of the forward pass.
pub struct Answers<B: Backend> {
    /// `[s, b, h p]`.
    pub y: FloatTensor<B>,
    /// The states behind the last position, if asked for.
    pub last: Option<FloatTensor<B>>,
}

/// What the forward pass computes, and the backward pass again.
struct Chunks<B: Backend> {
    decays: Decays<B>,
    queries: FloatTensor<B>,
    values: FloatTensor<B>,
    scores: [FloatTensor<B>; 2],
    systems: Systems<B>,
    operands: PassOperands<B>,
    passed: Passed<B>,
    /// The answers of the states in front of chunks, by column.
    before: FloatTensor<B>,
}

fn transposed<B: Backend>(x: &FloatTensor<B>) -> FloatTensor<B> {
    B::float_transpose(x.clone())
}

/// Rows of a group's heads below each other, `[b, chunks, groups, rows, columns]`.
fn by_group<B: Backend>(x: &FloatTensor<B>, shape: SsdShape) -> FloatTensor<B> {
    let size = x.shape().to_vec();
    let rows = shape.heads / shape.groups * size[3];
    B::float_reshape(x.clone(), Shape::from([size[0], size[1], shape.groups, rows, size[4]].to_vec()))
}

/// The same apart.
fn by_head<B: Backend>(x: FloatTensor<B>, shape: SsdShape) -> FloatTensor<B> {
    let size = x.shape().to_vec();
    let rows = size[3] / (shape.heads / shape.groups);
    B::float_reshape(x, Shape::from([size[0], size[1], shape.heads, rows, size[4]].to_vec()))
}

/// What scores are divided by, as a factor of queries.
fn scale(shape: SsdShape) -> f64 {
    (shape.state as f64).sqrt().recip()
}

fn chunks<B: LocalKernels, S: GatedDeltaStages<B>>(inputs: &Inputs<B>, wants: [bool; 2], shape: SsdShape) -> Chunks<B> {
    let decays = S::decays(&inputs.steps, shape);
    let [of_queries, of_keys, of_values] = features(shape);
    let queries = S::units(&inputs.x, of_queries, scale(shape), shape);
    let keys = S::units(&inputs.x, of_keys, 1.0, shape);
    let values = S::operand(&inputs.x, of_values, shape);
    let scores = [&keys, &queries].map(|of| S::wide_matmul(of.clone(), transposed::<B>(&keys)));
    let systems = S::systems(&scores, &decays, inputs, shape);
    let base = B::matmul(systems.of_values.clone(), values.clone());
    let corrections = B::matmul(by_group::<B>(&systems.of_keys, shape), keys.clone());
    let operands = PassOperands::<B> { keys, corrections: by_head::<B>(corrections, shape) };
    let passed = S::pass(base, &operands, &decays, inputs.first.as_ref(), wants, shape);
    let before = B::matmul(queries.clone(), transposed::<B>(&by_group::<B>(&passed.in_front, shape)));
    Chunks { decays, queries, values, scores, systems, operands, passed, before }
}

/// The output, and the last states if asked for.
pub fn forward<B: LocalKernels, S: GatedDeltaStages<B>>(
    inputs: &Inputs<B>,
    with_last: bool,
    shape: SsdShape,
) -> Answers<B> {
    let Chunks { decays, systems, passed, before, .. } = chunks::<B, S>(inputs, [false, with_last], shape);
    let inside = B::matmul(systems.weights, passed.values);
    Answers { y: S::answers([inside, before], &decays, &inputs.x, shape), last: passed.last }
}

/// The gradients of x, β, the steps, their biases, and `a_log`, given that of the output.
pub fn backward<B: LocalKernels, S: GatedDeltaStages<B>>(
    inputs: &Inputs<B>,
    grad: FloatTensor<B>,
    shape: SsdShape,
) -> [FloatTensor<B>; 5] {
    let Chunks { decays, queries, values, scores, systems, operands, passed, before } =
        chunks::<B, S>(inputs, [true, false], shape);
    let (keys, in_front) = (&operands.keys, &passed.in_front);
    // Of the answers inside chunks, and of those of states.
    let [of_inside, of_before] = S::operands(&grad, shape.x(), &[&decays.since], shape);
    let since = S::head_dots(&of_inside, &before, shape);
    let of_weights = B::matmul(of_inside.clone(), transposed::<B>(&passed.values));
    let base = B::matmul(transposed::<B>(&systems.weights), of_inside);
    let of_states = by_head::<B>(S::wide_matmul(transposed::<B>(&of_before), queries.clone()), shape);
    let [of_behind, of_base, along] = S::pass_grads(base, of_states, in_front, &operands, &decays, shape);
    let behind = by_group::<B>(&of_behind, shape);
    let taken = B::matmul(keys.clone(), transposed::<B>(&behind));
    let until = S::head_dots(&passed.values, &taken, shape);
    // Through the inverse to the systems.
    let of_corrections = by_group::<B>(&B::matmul(of_base.clone(), in_front.clone()), shape);
    let scaled = [
        B::matmul(of_base.clone(), transposed::<B>(&values)),
        by_head::<B>(B::matmul(of_corrections.clone(), transposed::<B>(keys)), shape),
    ];
    let [of_inverse, beta, sums] = S::inverse_grads(&systems.inverse, scaled, &decays, inputs, shape);
    let right = B::matmul(of_inverse, transposed::<B>(&systems.inverse));
    let of_systems = S::wide_matmul(transposed::<B>(&systems.inverse), right);
    let [of_keys, of_queries, beta, sums] =
        S::systems_grads([of_systems, of_weights], &scores, &decays, inputs, [beta, sums], shape);
    let of_values = B::matmul(transposed::<B>(&systems.of_values), of_base);
    let in_front = by_group::<B>(in_front, shape);
    let query_sums = [B::matmul(of_queries.clone(), keys.clone()), B::matmul(of_before, in_front)];
    let left = passed.until.expect("it was asked for");
    let key_sums = [
        B::matmul(of_keys, keys.clone()),
        B::matmul(transposed::<B>(&of_queries), queries),
        B::matmul(transposed::<B>(&by_group::<B>(&systems.of_keys, shape)), of_corrections),
        B::matmul(left, behind),
    ];
    let x = S::input_grads(&inputs.x, query_sums, key_sums, of_values, scale(shape), shape);
    let [beta, steps, bias, a_log] =
        S::gates_grads(inputs, &decays, GateSums { beta, sums, until, since, along }, shape);
    [x, beta, steps, bias, a_log]
}
