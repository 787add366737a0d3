//! What is between the GEMMs of the recurrence.
//!
//! Numbers of a position and head are `[b, chunks, h, chunk]`; tensors by head have one more dimension, tensors by
//! column are `[b, chunks, groups, chunk or state, h/groups p]`.

use burn::backend::{Backend, tensor::FloatTensor as Float};

use super::SsdHeads;
use crate::kernels::LocalKernels;

/// Sizes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SsdShape {
    /// Positions.
    pub seq: usize,
    /// Sequences.
    pub samples: usize,
    /// Heads.
    pub heads: usize,
    /// Groups of heads.
    pub groups: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Features of a state.
    pub state: usize,
    /// Positions of a chunk.
    pub chunk: usize,
}

/// Neighbouring features of a position: of heads, or of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// The first one.
    pub first: usize,
    /// Heads or groups.
    pub heads: usize,
    /// Features of each.
    pub each: usize,
}

impl Features {
    /// One past the last.
    pub fn end(&self) -> usize {
        self.first + self.heads * self.each
    }
}

impl SsdShape {
    /// Of chunks of at most `chunk` positions, a power of two.
    pub fn new([seq, samples]: [usize; 2], heads: SsdHeads, chunk: usize) -> Self {
        let SsdHeads { heads, groups, head_dim, state, .. } = heads;
        Self { seq, samples, heads, groups, head_dim, state, chunk: chunk.min(seq.next_power_of_two()) }
    }

    /// Chunks of a sequence, of which the last one is padded.
    pub fn chunks(&self) -> usize {
        self.seq.div_ceil(self.chunk)
    }

    /// Features of all heads.
    pub fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Those of x.
    pub fn x(&self) -> Features {
        Features { first: 0, heads: self.heads, each: self.head_dim }
    }

    /// Those of B and of C.
    pub fn grouped(&self) -> [Features; 2] {
        let of = |first| Features { first, heads: self.groups, each: self.state };
        [of(self.inner()), of(self.inner() + self.groups * self.state)]
    }
}

/// What step sizes and decays follow from.
#[derive(Clone, Debug)]
pub struct StepInputs<B: Backend> {
    /// Before bias and softplus, `[s, b, h]`.
    pub raw: Float<B>,
    /// `[h]`.
    pub bias: Float<B>,
    /// `[h]`.
    pub a_log: Float<B>,
    /// `[s, b]`.
    pub ages: Option<Float<B>>,
    /// Smallest and largest step.
    pub limits: [f64; 2],
}

/// Numbers of each position and head, in at least fp32.
#[derive(Clone, Debug)]
pub struct Decays<B: Backend> {
    /// Step sizes Δ; padding has zero.
    pub steps: Float<B>,
    /// Sums of Δ A from the beginning of the chunk.
    pub sums: Float<B>,
    /// The share of what a position adds that is left behind its chunk; zero if another document begins.
    pub until: Float<B>,
    /// The share of the state in front of the chunk that is left behind a position; zero if another document begins.
    pub since: Float<B>,
}

/// The inputs that are not step sizes.
#[derive(Clone, Debug)]
pub struct Combined<B: Backend> {
    /// x, B and C, `[s, b, features]`.
    pub x: Float<B>,
    /// D, `[h]`.
    pub skip: Float<B>,
}

/// What the gradients of x, B and C are summed of.
#[derive(Debug)]
pub struct InputSums<B: Backend> {
    /// The answers of the states in front of chunks, by column.
    pub before: Float<B>,
    /// Of x through the positions of its chunk, by head.
    pub inside: Float<B>,
    /// B times the gradient of what chunks add to the state, by column.
    pub taken: Float<B>,
    /// Of B, by group.
    pub b: [Float<B>; 2],
    /// Of C, by group.
    pub c: [Float<B>; 2],
}

/// The stages of one implementation. Operands of GEMMs have the type in which these multiply.
pub trait SsdStages<B: LocalKernels> {
    /// A GEMM whose result is at least fp32.
    fn wide_matmul(a: Float<B>, b: Float<B>) -> Float<B> {
        B::matmul(a, b)
    }

    /// Step sizes and decays.
    fn decays(inputs: &StepInputs<B>, shape: SsdShape) -> Decays<B>;

    /// Features of `x [s, b, ..]` by head.
    fn operand(x: &Float<B>, of: Features, shape: SsdShape) -> Float<B>;

    /// The same, and times the factors by column.
    fn operands(x: &Float<B>, of: Features, factors: &[&Float<B>], shape: SsdShape) -> [Float<B>; 2];

    /// What positions of a chunk take from each other, `[b, chunks, h, chunk, chunk]`, from `scores [b, chunks, groups,
    /// chunk, chunk]`: decayed, times step sizes, and zero for later positions and other documents.
    fn weights(scores: &Float<B>, decays: &Decays<B>, inputs: &StepInputs<B>, shape: SsdShape) -> Float<B>;

    /// The states in front of chunks from what chunks add, by column, and the states behind the last one, `[b, groups, n,
    /// h/groups p]`, in at least fp32.
    fn states(
        summands: Float<B>,
        decays: &Decays<B>,
        inputs: &Combined<B>,
        first: Option<Float<B>>,
        shape: SsdShape,
    ) -> [Float<B>; 2];

    /// The output `[s, b, h p]` from the answers of a position's chunk, by head, and of the state in front of it, by column.
    fn combine(answers: [Float<B>; 2], decays: &Decays<B>, inputs: &Combined<B>, shape: SsdShape) -> Float<B>;

    /// From the gradient of the weights: that of the scores, and sums of gradient times weight over the positions that a
    /// position sees and, without its step size, over those that see it, the latter perhaps in parts.
    fn weights_grads(
        grad: Float<B>,
        scores: &Float<B>,
        decays: &Decays<B>,
        inputs: &StepInputs<B>,
        shape: SsdShape,
    ) -> [Float<B>; 3];

    /// From the gradient of the states in front of chunks: that of what chunks add, and of the share of a head's state that
    /// each chunk leaves, perhaps in parts.
    fn states_grads(in_front: &Float<B>, grad: Float<B>, decays: &Decays<B>, shape: SsdShape) -> [Float<B>; 2];

    /// The gradient of x, B and C, `[s, b, features]`, and sums over a head's features: of x times `taken`, of the gradient
    /// of the output times `before`, and times x.
    fn combine_grads(
        grad: &Float<B>,
        sums: InputSums<B>,
        decays: &Decays<B>,
        inputs: &Combined<B>,
        shape: SsdShape,
    ) -> (Float<B>, [Float<B>; 3]);

    /// The gradients of the step sizes before their function, their biases, `a_log`, and D, from the sums of
    /// [`weights_grads`](Self::weights_grads), [`combine_grads`](Self::combine_grads) and
    /// [`states_grads`](Self::states_grads).
    fn decays_grads(
        inputs: &StepInputs<B>,
        decays: &Decays<B>,
        weights: [Float<B>; 2],
        combined: [Float<B>; 3],
        along: Float<B>,
        shape: SsdShape,
    ) -> [Float<B>; 4];
}
