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
        self.about().0
    }

    /// The kind of work.
    pub fn category(self) -> Category {
        self.about().1
    }

    fn about(self) -> (&'static str, Category) {
        match self {
            SpanKind::Forward => ("forward", Category::Compute),
            SpanKind::Backward => ("backward", Category::Compute),
            SpanKind::BackwardInput => ("backward, input", Category::Compute),
            SpanKind::BackwardWeight => ("backward, weights", Category::Compute),
            SpanKind::Recompute => ("recompute", Category::Compute),
            SpanKind::Send => ("send", Category::Communication),
            SpanKind::Receive => ("receive", Category::Communication),
            SpanKind::GatherParameters => ("gather parameters", Category::Communication),
            SpanKind::ReduceGradients => ("reduce gradients", Category::Communication),
            SpanKind::PartialSums => ("partial sums", Category::Communication),
            SpanKind::AllGather => ("all-gather", Category::Communication),
            SpanKind::ReduceScatter => ("reduce-scatter", Category::Communication),
            SpanKind::AllReduce => ("all-reduce", Category::Communication),
            SpanKind::Collective => ("collective", Category::Communication),
            SpanKind::Norm => ("norm", Category::Optimizer),
            SpanKind::Update => ("update", Category::Optimizer),
            SpanKind::Data => ("data", Category::Other),
            SpanKind::Wait => ("wait", Category::Other),
            SpanKind::Step => ("step", Category::Other),
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
