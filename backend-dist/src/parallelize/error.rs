//! Why a plan does not fit a module.

use ranks::mesh::Axis;

/// Why a [plan](super::Plan) does not fit a module.
///
/// ```
/// use backend_dist::{launch::launch, mesh::{Axis, Mesh}, mesh_backend::LogicalDevice};
/// use backend_dist::parallelize::{Plan, PlanError, parallelize};
/// use burn::nn::transformer::TransformerEncoderConfig;
/// use burn::tensor::Device;
///
/// launch(&Mesh::new("TP2".parse()?)?, &[Device::flex()], |rank| {
///     // Three heads cannot be on two ranks.
///     let model = TransformerEncoderConfig::new(6, 16, 3, 1).init(&rank.logical_device(&[Axis::Tp]));
///     let error = parallelize(model, &rank, &Plan::auto()).err();
///     assert!(matches!(error, Some(PlanError::Heads { heads: 3, legal: 1, .. })));
///     Ok(())
/// })?;
/// # Ok::<(), backend_dist::launch::BoxError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum PlanError {
    /// A pattern, or an alternative of one, that no parameter's path matches.
    #[error(
        "plan: pattern `{pattern}` matches no parameter; the nearest is `{nearest}`. A path contains a pattern as it is, but for \
         `|` between alternatives and `*` for any characters"
    )]
    Unmatched { pattern: String, nearest: String },
    /// The ranks do not divide a parameter's dimension.
    #[error(
        "plan: `{path}` has {size} elements along dimension {dim}, which {ranks} ranks of axis {axis} do not divide; {}, or \
         .replicate(\"{path}\") after {}", sizes(*below, *above), by(pattern)
    )]
    Size {
        path: String,
        dim: usize,
        size: usize,
        ranks: usize,
        axis: Axis,
        below: usize,
        above: usize,
        /// That the path contains; `None` if it is sharded by its type.
        pattern: Option<String>,
    },
    /// The parts of a parameter's dimension are not those of the plan.
    #[error(
        "plan: `{path}` has {size} elements along dimension {dim}; the plan has parts of {parts:?} for it, {} in sum. Parts have \
         one element or more, and at most eight may differ", parts.iter().sum::<usize>()
    )]
    Parts { path: String, dim: usize, size: usize, parts: Vec<usize> },
    /// The ranks do not divide a part of a parameter's dimension.
    #[error(
        "plan: `{path}` has parts of {parts:?} elements along dimension {dim}, and {ranks} ranks of axis {axis} do not divide \
         {part}; these parts can be on {legal} ranks"
    )]
    Part { path: String, dim: usize, part: usize, parts: Vec<usize>, ranks: usize, axis: Axis, legal: usize },
    /// The ranks do not divide the heads of attention.
    #[error(
        "plan: `{path}` has {heads} heads (`{attribute}`), which {ranks} ranks of axis {axis} do not divide; \
         {heads} heads can be on {legal} ranks"
    )]
    Heads { path: String, attribute: String, heads: usize, ranks: usize, axis: Axis, legal: usize },
    /// A parameter has no dimension to shard.
    #[error("plan: `{path}` has shape {shape:?}, which has no dimension to shard by {style}")]
    Rank { path: String, shape: Vec<usize>, style: &'static str },
    /// Nothing is sharded.
    #[error(
        "plan: no parameter is sharded over the {ranks} ranks of axis {axis}: none is of a type that Plan::auto() knows; name \
         layers with .columns(\"..\") and .rows(\"..\"), or leave the axis out"
    )]
    Nothing { ranks: usize, axis: Axis },
    /// Sequence parallelism has nothing to begin with.
    #[error(
        "plan: sequence parallelism over the {ranks} ranks of axis {axis} begins with an embedding, or with a matrix sharded by \
         rows, and the plan shards none; name one with .rows(\"..\"), or leave SP out"
    )]
    Sequence { ranks: usize, axis: Axis },
}

fn sizes(below: usize, above: usize) -> String {
    if below == above {
        format!("the nearest size is {above}")
    } else {
        format!("the nearest sizes are {below} and {above}")
    }
}

fn by(pattern: &Option<String>) -> String {
    pattern.as_ref().map_or("Plan::auto()".into(), |pattern| format!("pattern `{pattern}`, which the path contains"))
}
