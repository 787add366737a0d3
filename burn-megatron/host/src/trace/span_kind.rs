//! The kinds of spans of a timeline.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The kinds, with the name in the timeline and the kind of work of each.
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident $name:literal $category:ident,)*) => {
        /// What a rank did in a span of time.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[allow(missing_docs, reason = "the variants are named after what they stand for")]
        pub enum SpanKind {
            $($(#[$doc])* $kind,)*
        }

        impl SpanKind {
            /// Everything.
            pub const ALL: [Self; 19] = [$(Self::$kind),*];

            fn about(self) -> (&'static str, Category) {
                match self {
                    $(Self::$kind => ($name, Category::$category),)*
                }
            }
        }
    };
}

kinds! {
    Forward "forward" Compute,
    /// The whole backward: gradients of input and weights.
    Backward "backward" Compute,
    BackwardInput "backward, input" Compute,
    BackwardWeight "backward, weights" Compute,
    /// A forward that is recomputed inside a backward.
    Recompute "recompute" Compute,
    Send "send" Communication,
    Receive "receive" Communication,
    GatherParameters "gather parameters" Communication,
    ReduceGradients "reduce gradients" Communication,
    /// Sums over tensor-parallel ranks of gradients that are partial there.
    PartialSums "partial sums" Communication,
    /// All-gather of activations or their gradients over tensor-parallel ranks; the next two likewise.
    AllGather "all-gather" Communication,
    ReduceScatter "reduce-scatter" Communication,
    AllReduce "all-reduce" Communication,
    /// Any other collective.
    Collective "collective" Communication,
    Norm "norm" Optimizer,
    Update "update" Optimizer,
    /// Reading the sequences of the batch.
    Data "data" Other,
    /// Waiting for something that has no name of its own.
    Wait "wait" Other,
    /// A whole training step, around everything else.
    Step "step" Other,
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
    /// In words, as the timeline shows it.
    pub fn name(self) -> &'static str {
        self.about().0
    }

    /// The kind of work.
    pub fn category(self) -> Category {
        self.about().1
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
