//! What a span of time was spent on.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a rank did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the variants are named after what they stand for")]
pub enum What {
    Forward,
    /// The whole backward: gradients of input and weights.
    Backward,
    BackwardInput,
    BackwardWeight,
    /// A forward that is run again inside a backward.
    Recompute,
    Send,
    Receive,
    GatherParameters,
    ReduceGradients,
    /// Sums over tensor-parallel ranks of gradients that are partial there.
    PartialSums,
    /// Of activations or their gradients over tensor-parallel ranks, as are the next two.
    AllGather,
    ReduceScatter,
    AllReduce,
    /// Any other exchange.
    Exchange,
    Norm,
    Update,
    /// Getting the rows of the batch.
    Data,
    /// Waiting for something that has no name of its own.
    Wait,
    /// A whole training step, around everything else.
    Step,
}

/// Which kind of work that is; the colours of the timeline and the bubble depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the variants are named after what they stand for")]
pub enum Category {
    Compute,
    Communication,
    Optimizer,
    /// Neither of them.
    Other,
}

impl What {
    /// Everything.
    pub const ALL: [What; 19] = [
        What::Forward,
        What::Backward,
        What::BackwardInput,
        What::BackwardWeight,
        What::Recompute,
        What::Send,
        What::Receive,
        What::GatherParameters,
        What::ReduceGradients,
        What::PartialSums,
        What::AllGather,
        What::ReduceScatter,
        What::AllReduce,
        What::Exchange,
        What::Norm,
        What::Update,
        What::Data,
        What::Wait,
        What::Step,
    ];

    /// In words, as the timeline shows it.
    pub fn name(self) -> &'static str {
        match self {
            What::Forward => "forward",
            What::Backward => "backward",
            What::BackwardInput => "backward, input",
            What::BackwardWeight => "backward, weights",
            What::Recompute => "recompute",
            What::Send => "send",
            What::Receive => "receive",
            What::GatherParameters => "gather parameters",
            What::ReduceGradients => "reduce gradients",
            What::PartialSums => "partial sums",
            What::AllGather => "all-gather",
            What::ReduceScatter => "reduce-scatter",
            What::AllReduce => "all-reduce",
            What::Exchange => "exchange",
            What::Norm => "norm",
            What::Update => "update",
            What::Data => "data",
            What::Wait => "wait",
            What::Step => "step",
        }
    }

    /// The kind of work.
    pub fn category(self) -> Category {
        match self {
            What::Forward | What::Backward | What::BackwardInput | What::BackwardWeight | What::Recompute => {
                Category::Compute
            }
            What::Send | What::Receive | What::GatherParameters | What::ReduceGradients | What::PartialSums => {
                Category::Communication
            }
            What::AllGather | What::ReduceScatter | What::AllReduce | What::Exchange => Category::Communication,
            What::Norm | What::Update => Category::Optimizer,
            What::Data | What::Wait | What::Step => Category::Other,
        }
    }
}

impl Category {
    /// Lower case, as the trace format wants it.
    pub fn name(self) -> &'static str {
        match self {
            Category::Compute => "compute",
            Category::Communication => "communication",
            Category::Optimizer => "optimizer",
            Category::Other => "other",
        }
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
