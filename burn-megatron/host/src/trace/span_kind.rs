//! The kinds of spans of a timeline.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a rank did in a span of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the variants are named after what they stand for")]
pub enum SpanKind {
    Forward,
    /// The whole backward: gradients of input and weights.
    Backward,
    BackwardInput,
    BackwardWeight,
    /// A forward that is recomputed inside a backward.
    Recompute,
    Send,
    Receive,
    GatherParameters,
    ReduceGradients,
    /// Sums over tensor-parallel ranks of gradients that are partial there.
    PartialSums,
    /// All-gather of activations or their gradients over tensor-parallel ranks; the next two likewise.
    AllGather,
    ReduceScatter,
    AllReduce,
    /// Any other collective.
    Collective,
    Norm,
    Update,
    /// Reading the sequences of the batch.
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

impl SpanKind {
    /// Everything.
    pub const ALL: [SpanKind; 19] = [
        SpanKind::Forward,
        SpanKind::Backward,
        SpanKind::BackwardInput,
        SpanKind::BackwardWeight,
        SpanKind::Recompute,
        SpanKind::Send,
        SpanKind::Receive,
        SpanKind::GatherParameters,
        SpanKind::ReduceGradients,
        SpanKind::PartialSums,
        SpanKind::AllGather,
        SpanKind::ReduceScatter,
        SpanKind::AllReduce,
        SpanKind::Collective,
        SpanKind::Norm,
        SpanKind::Update,
        SpanKind::Data,
        SpanKind::Wait,
        SpanKind::Step,
    ];

    /// In words, as the timeline shows it.
    pub fn name(self) -> &'static str {
        match self {
            SpanKind::Forward => "forward",
            SpanKind::Backward => "backward",
            SpanKind::BackwardInput => "backward, input",
            SpanKind::BackwardWeight => "backward, weights",
            SpanKind::Recompute => "recompute",
            SpanKind::Send => "send",
            SpanKind::Receive => "receive",
            SpanKind::GatherParameters => "gather parameters",
            SpanKind::ReduceGradients => "reduce gradients",
            SpanKind::PartialSums => "partial sums",
            SpanKind::AllGather => "all-gather",
            SpanKind::ReduceScatter => "reduce-scatter",
            SpanKind::AllReduce => "all-reduce",
            SpanKind::Collective => "collective",
            SpanKind::Norm => "norm",
            SpanKind::Update => "update",
            SpanKind::Data => "data",
            SpanKind::Wait => "wait",
            SpanKind::Step => "step",
        }
    }

    /// The kind of work.
    pub fn category(self) -> Category {
        match self {
            SpanKind::Forward
            | SpanKind::Backward
            | SpanKind::BackwardInput
            | SpanKind::BackwardWeight
            | SpanKind::Recompute => Category::Compute,
            SpanKind::Send
            | SpanKind::Receive
            | SpanKind::GatherParameters
            | SpanKind::ReduceGradients
            | SpanKind::PartialSums => Category::Communication,
            SpanKind::AllGather | SpanKind::ReduceScatter | SpanKind::AllReduce | SpanKind::Collective => {
                Category::Communication
            }
            SpanKind::Norm | SpanKind::Update => Category::Optimizer,
            SpanKind::Data | SpanKind::Wait | SpanKind::Step => Category::Other,
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

impl fmt::Display for SpanKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
