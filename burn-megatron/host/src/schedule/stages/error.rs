//! Why layers cannot be divided as asked.

use layouts::mesh::Nearest;
use thiserror::Error;

use super::StageLayout;

/// Why layers cannot be divided as asked. Keys are named as their flags are spelled.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the fields are the values in the messages")]
pub enum StageError {
    /// Layers that do not divide equally.
    #[error("{key} {layers}{also} do not divide over {over}; nearest legal: {key} {nearest}{}", or_layout(layout))]
    NotEqual {
        key: &'static str,
        layers: usize,
        /// What else is counted as a layer.
        also: &'static str,
        over: String,
        nearest: Nearest,
        /// A division into nearly equal stages.
        layout: Option<StageLayout>,
    },
    /// More layers on the first and last rank than there are.
    #[error("{key} {value} is more than the {left} layers that are left; nearest legal: {left}")]
    TooMany { key: &'static str, value: usize, left: usize },
    /// Layers that no rank is left for.
    #[error(
        "first-stage-layers and last-stage-layers leave {left} of {layers} layers for no rank in between; nearest \
         legal: last-stage-layers {last}"
    )]
    NobodyLeft { left: usize, layers: usize, last: usize },
    /// A first and a last rank need two ranks.
    #[error("{key} {value} needs pipeline-parallel 2 or more; with one rank leave it out")]
    OneRank { key: &'static str, value: usize },
    /// Two ways to say where the ends of the model weigh.
    #[error("{key} cannot be used together with {other}; leave one of them out")]
    Together { key: &'static str, other: &'static str },
    /// A character that means nothing.
    #[error(
        "pipeline-layout `{text}`: {problem} at character {at}; legal: E t m L | , and x*n or (x|y)*n with a number"
    )]
    Syntax { text: String, at: usize, problem: String },
    /// Stages that cannot be assigned to the ranks.
    #[error(
        "pipeline-layout `{text}` has {stages} stages, no multiple of pipeline-parallel {ranks}; nearest legal: {nearest}"
    )]
    Stages { text: String, stages: usize, ranks: usize, nearest: Nearest },
    /// Other chunks per rank than asked for.
    #[error(
        "pipeline-layout `{text}` has {chunks} stages per rank, virtual-pipeline is {asked}; nearest legal: {chunks}"
    )]
    Chunks { text: String, chunks: usize, asked: usize },
    /// Another model.
    #[error("pipeline-layout `{text}` has {found} `{letter}`, the model has {wanted}")]
    Count { text: String, letter: char, found: usize, wanted: usize },
    /// Something at the wrong position.
    #[error("pipeline-layout `{text}`: {rule}")]
    Place { text: String, rule: &'static str },
}

fn or_layout(layout: &Option<StageLayout>) -> String {
    layout.as_ref().map_or(String::new(), |layout| format!(", or pipeline-layout {layout}"))
}
