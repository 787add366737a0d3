//! One rule per family of operations. A rule is a function of the shapes and present placements of an operation's
//! inputs along one axis of the mesh.
//!
//! A rule chooses among the placements in which every rank computes what it will hold from what it holds. It returns
//! `None` where there is none but [`Placement::Replicate`] for all: then the operation's inputs are gathered, and every
//! rank runs it whole.

pub mod attention;
pub mod convolution;
pub mod elementwise;
pub mod indexing;
pub mod matmul;
pub mod reduce;
pub mod shape;
mod table;

pub use table::decide;

use super::Placement;
use Placement::{Partial, Replicate};

/// One input of an operation, as one axis of the mesh sees it.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// The shape: global along this axis, local along those before it.
    pub shape: &'a [usize],
    /// Where it is now.
    pub at: Placement,
    /// Whether it is a parameter that was placed, a view of one, or a matrix computed from one.
    pub weight: bool,
    /// Where activations of this shape are kept, if they have been gathered for a weight: a sum of this shape is
    /// scattered there. If it is what a part is put into: where the tensor was that such parts were taken from.
    pub home: Option<Placement>,
    /// Whether nothing reads it after this operation.
    pub ends: bool,
    /// Whether it is stored in half precision, although its type is wider.
    pub is_half: bool,
}

impl Operand<'_> {
    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One axis of the mesh, as rules see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeshAxis {
    /// Number of ranks.
    pub ranks: usize,
    /// What moves where a sharded parameter meets a sharded activation.
    pub policy: Policy,
}

/// What moves where a sharded parameter meets a sharded activation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// The activation: tensor parallelism.
    #[default]
    WeightsStay,
    /// The parameter: fully sharded data parallelism.
    WeightsMove,
}

/// What a rule asks for: the placements that the inputs must have, and those that the outputs then have.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// For each input, in the order of the rule's arguments.
    pub inputs: Vec<Placement>,
    /// For each output.
    pub outputs: Vec<Placement>,
    /// What every rank multiplies its float outputs by.
    pub scale: Option<f64>,
    /// What else the ranks do.
    pub completion: Option<Completion>,
}

/// What makes a rank's share of an operation right where placements and a factor do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// The indices are those of the whole dimension: where the rank's part of it does not have them, nothing is read or
    /// added.
    MaskIndices,
    /// The output is the maximum over the ranks.
    Max,
    /// The output is the minimum over the ranks.
    Min,
}

impl Decision {
    fn new(inputs: impl Into<Vec<Placement>>, output: Placement) -> Option<Self> {
        Some(Self { inputs: inputs.into(), outputs: vec![output], scale: None, completion: None })
    }

    fn completed(mut self, completion: Completion) -> Self {
        self.completion = Some(completion);
        self
    }

    /// All inputs whole on every rank, and so is the output.
    fn whole(inputs: usize) -> Option<Self> {
        Self::new(vec![Replicate; inputs], Replicate)
    }

    fn with_outputs(mut self, outputs: usize) -> Self {
        self.outputs.resize(outputs, self.outputs[0]);
        self
    }
}

/// The rule of operations on one tensor, in which a shard of the input along `dim` becomes one of the output along
/// `to(dim)`, and a sum of inputs becomes the sum of outputs if the operation is `linear`.
pub fn unary(x: Operand, linear: bool, to: impl Fn(usize) -> Option<usize>) -> Option<Decision> {
    let sharded = |at: Placement| Decision::new([at], at.along(to(at.dim()?)?));
    match x.at {
        Replicate => Decision::whole(1),
        Partial if linear => Decision::new([Partial], Partial),
        Partial => x.home.and_then(sharded).or_else(|| Decision::whole(1)),
        at => sharded(at),
    }
}

/// The rule of operations that treat slices along every dimension but `dim` alike and alone.
pub fn along(x: Operand, dim: usize, linear: bool) -> Option<Decision> {
    unary(x, linear, |sharded| (sharded != dim).then_some(sharded))
}

/// Whether an operand is sharded in parts, for rules that want whole dimensions.
fn is_strided(inputs: &[Operand]) -> bool {
    inputs.iter().any(|x| x.at.is_in_parts())
}
