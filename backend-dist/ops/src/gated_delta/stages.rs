//! What is between the GEMMs of the rule, besides the stages of state-space duality.
//!
//! Sizes and orders of dimensions are theirs: heads are those of values and groups those of keys; states are `[b, chunks, h,
//! p, n]`, so that those of a group's heads are neighbouring rows.

use burn::backend::{Backend, tensor::FloatTensor};

use crate::kernels::LocalKernels;
use crate::ssd::stages::{Decays, Features, SsdShape, SsdStages, StepInputs};

/// The tensors of a call.
#[derive(Clone, Debug)]
pub struct Inputs<B: Backend> {
    /// Queries, keys and values, `[s, b, features]`.
    pub x: FloatTensor<B>,
    /// β before its sigmoid, `[s, b, h]`.
    pub beta: FloatTensor<B>,
    /// What decays follow from.
    pub steps: StepInputs<B>,
    /// The states in front of the sequence, `[b, h, p, n]`.
    pub first: Option<FloatTensor<B>>,
}

/// Where queries, keys and values are among a position's features.
pub fn features(shape: SsdShape) -> [Features; 3] {
    let keys = shape.groups * shape.state;
    let of_keys = |first| Features { first, heads: shape.groups, each: shape.state };
    [of_keys(0), of_keys(keys), Features { first: 2 * keys, ..shape.x() }]
}

/// `[b, chunks, h, chunk, chunk]` each, with `T` the inverse of a chunk's triangular system.
#[derive(Clone, Debug)]
pub struct Systems<B: Backend> {
    /// `T`.
    pub inverse: FloatTensor<B>,
    /// `T diag(β)`.
    pub of_values: FloatTensor<B>,
    /// `−T diag(β since)`.
    pub of_keys: FloatTensor<B>,
    /// What queries take from positions of their chunk: scores, decayed.
    pub weights: FloatTensor<B>,
}

/// What reads and writes states.
#[derive(Clone, Debug)]
pub struct PassOperands<B: Backend> {
    /// By group, `[b, chunks, groups, chunk, n]`.
    pub keys: FloatTensor<B>,
    /// `−T diag(β since) K`, `[b, chunks, h, chunk, n]`.
    pub corrections: FloatTensor<B>,
}

/// Results of [`pass`](GatedDeltaStages::pass).
#[derive(Clone, Debug)]
pub struct Passed<B: Backend> {
    /// The states in front of chunks.
    pub in_front: FloatTensor<B>,
    /// The values without what states answer, by head.
    pub values: FloatTensor<B>,
    /// What is left of them behind their chunk, by column, if asked for.
    pub until: Option<FloatTensor<B>>,
    /// The states behind the last position, `[b, h, p, n]`, in at least fp32, if asked for.
    pub last: Option<FloatTensor<B>>,
}

/// Sums that gradients of β and of decays are made of, `[b, chunks, h, chunk]` but the last.
#[derive(Clone, Debug)]
pub struct GateSums<B: Backend> {
    /// The gradient of β.
    pub beta: FloatTensor<B>,
    /// Of the sums of logarithms through systems and weights.
    pub sums: FloatTensor<B>,
    /// Of `until`.
    pub until: FloatTensor<B>,
    /// Of `since` through the answers of states.
    pub since: FloatTensor<B>,
    /// Of the share of a head's state that each chunk leaves, perhaps in parts.
    pub along: FloatTensor<B>,
}

/// The stages of one implementation. Operands of GEMMs have the type in which these multiply.
pub trait GatedDeltaStages<B: LocalKernels>: SsdStages<B> {
    /// Queries or keys by group, divided by their length and times `scale`.
    fn units(x: &FloatTensor<B>, of: Features, scale: f64, shape: SsdShape) -> FloatTensor<B>;

    /// From the scores of keys with keys and of queries with keys, `[b, chunks, groups, chunk, chunk]`.
    fn systems(scores: &[FloatTensor<B>; 2], decays: &Decays<B>, inputs: &Inputs<B>, shape: SsdShape) -> Systems<B>;

    /// The states in front of chunks, one after the other; `base` are the values as if these were zero. Training asks for
    /// `until`, decoding for the last states.
    fn pass(
        base: FloatTensor<B>,
        operands: &PassOperands<B>,
        decays: &Decays<B>,
        first: Option<&FloatTensor<B>>,
        until_and_last: [bool; 2],
        shape: SsdShape,
    ) -> Passed<B>;

    /// The output `[s, b, h p]` from the answers of a position's chunk, by head, and of the state in front of it, by column.
    fn answers(answers: [FloatTensor<B>; 2], decays: &Decays<B>, x: &FloatTensor<B>, shape: SsdShape)
    -> FloatTensor<B>;

    /// From the gradient of the values through their chunk and of the states in front of chunks through their answers: those
    /// of the states behind chunks, of the values, and of the share of a head's state that each chunk leaves, perhaps in
    /// parts.
    fn pass_grads(
        base: FloatTensor<B>,
        of_states: FloatTensor<B>,
        in_front: &FloatTensor<B>,
        operands: &PassOperands<B>,
        decays: &Decays<B>,
        shape: SsdShape,
    ) -> [FloatTensor<B>; 3];

    /// Dot products over a head's features of a tensor by head and one by column.
    fn head_dots(by_head: &FloatTensor<B>, by_column: &FloatTensor<B>, shape: SsdShape) -> FloatTensor<B>;

    /// From the gradients of `T diag(β)` and `−T diag(β since)`: that of `T` as such, and of β and the logarithm of `since`.
    fn inverse_grads(
        inverse: &FloatTensor<B>,
        scaled: [FloatTensor<B>; 2],
        decays: &Decays<B>,
        inputs: &Inputs<B>,
        shape: SsdShape,
    ) -> [FloatTensor<B>; 3];

    /// From `Tᵀ (gradient of T) Tᵀ` and the gradient of the weights: those of the scores of keys, once for both factors, and
    /// of queries; and with them, added to `sums`, those of β and of the sums of logarithms.
    fn systems_grads(
        grads: [FloatTensor<B>; 2],
        scores: &[FloatTensor<B>; 2],
        decays: &Decays<B>,
        inputs: &Inputs<B>,
        sums: [FloatTensor<B>; 2],
        shape: SsdShape,
    ) -> [FloatTensor<B>; 4];

    /// The gradient of queries, keys and values, `[s, b, features]`, from summands by group of those of what
    /// [`units`](Self::units) makes of queries and of keys, and that of values by head.
    fn input_grads(
        x: &FloatTensor<B>,
        queries: [FloatTensor<B>; 2],
        keys: [FloatTensor<B>; 4],
        values: FloatTensor<B>,
        scale: f64,
        shape: SsdShape,
    ) -> FloatTensor<B>;

    /// The gradients of β and of the steps before their functions, of the steps' biases, and of `a_log`.
    fn gates_grads(inputs: &Inputs<B>, decays: &Decays<B>, sums: GateSums<B>, shape: SsdShape) -> [FloatTensor<B>; 4];
}
