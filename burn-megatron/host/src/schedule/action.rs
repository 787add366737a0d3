//! What a rank does in a training step, one action after the other.

use std::fmt;

/// A pass of one micro-batch through one model chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// The forward pass; its activations are saved for the backward.
    Forward,
    /// The whole backward pass: gradients of the input and of the weights.
    Backward,
    /// Only the gradient of the chunk's input, which the stage before waits for (B in the Zero Bubble paper).
    BackwardInput,
    /// Only the gradients of the weights, which nobody waits for (W in the Zero Bubble paper).
    BackwardWeight,
}

impl Pass {
    /// One letter, as in the drawings: `F`, `B`, `I`, `W`.
    pub fn letter(self) -> char {
        match self {
            Pass::Forward => 'F',
            Pass::Backward => 'B',
            Pass::BackwardInput => 'I',
            Pass::BackwardWeight => 'W',
        }
    }

    /// In words, for legends.
    pub fn name(self) -> &'static str {
        match self {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
            Pass::BackwardInput => "backward, input",
            Pass::BackwardWeight => "backward, weights",
        }
    }

    /// Whether the pass is the last to need the activations of its forward.
    pub fn frees_activations(self) -> bool {
        matches!(self, Pass::Backward | Pass::BackwardWeight)
    }
}

/// A pass of a micro-batch through a chunk of this rank. The chunks of a rank are numbered in the order of the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the fields are named after what they hold")]
pub struct Work {
    pub pass: Pass,
    pub chunk: usize,
    pub micro_batch: usize,
}

/// What one stage hands to its neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Payload {
    /// The output of a forward pass, for the next stage.
    Activation,
    /// The gradient of a chunk's input, for the stage before.
    Gradient,
}

/// One tensor between two ranks, as one of them sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Transfer {
    /// What is sent.
    pub payload: Payload,
    /// The chunk of *this* rank that computed it or will use it.
    pub chunk: usize,
    /// The micro-batch it belongs to.
    pub micro_batch: usize,
    /// The pipeline rank at the other end.
    pub peer: usize,
    /// The number of this tensor in the step, the same at both ends and for no other tensor of the step.
    pub tag: usize,
}

/// One entry in a rank's list.
///
/// `Send` and `Recv` may block until the other end is there (rendezvous); the order of the lists then still cannot
/// deadlock. Where the transport can, `Send` only starts the transfer, `Recv` only posts its buffer, and the pass that
/// uses the tensor waits. Neighbouring transfers of a list may be issued as one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Compute.
    Compute(Work),
    /// Send a tensor to the rank of a neighbouring stage.
    Send(Transfer),
    /// Receive a tensor from the rank of a neighbouring stage.
    Recv(Transfer),
    /// The chunk has seen its last micro-batch: its gradients can be reduced over the data-parallel ranks.
    ReduceGrads {
        /// Chunk of this rank.
        chunk: usize,
    },
    /// Everything that needs all gradients, then the optimizer. Last in every list.
    Step,
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of micro-batch {} in chunk {}", self.pass.name(), self.micro_batch, self.chunk)
    }
}

impl fmt::Display for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Payload::Activation => "activation",
            Payload::Gradient => "gradient",
        })
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Action::Compute(work) => work.fmt(f),
            Action::Send(t) => write!(f, "send {} of micro-batch {} to rank {}", t.payload, t.micro_batch, t.peer),
            Action::Recv(t) => write!(f, "receive {} of micro-batch {} from rank {}", t.payload, t.micro_batch, t.peer),
            Action::ReduceGrads { chunk } => write!(f, "reduce the gradients of chunk {chunk}"),
            Action::Step => f.write_str("step"),
        }
    }
}
