//! What an operation needs on a mesh of several axes: the rules of its axes, one after the other.

use super::Placement::{self, Partial, Replicate, Varying};
use super::by_tensor::ByTensor;
use super::localize::localize;
use super::rules::{Completion, Decision, MeshAxis, Operand, decide};
use burn::tensor::{DType, Shape};
use burn_ir::{
    BaseOperationIr, FloatOperationIr, ModuleOperationIr, NumericOperationIr, OperationIr, SliceAssignOpIr, TensorId,
    TensorIr, TensorStatus,
};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};

/// Where a tensor is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorState {
    /// Its placement along every axis. A dimension sharded along several axes is divided by the first of them first.
    pub at: Vec<Placement>,
    /// Whether it is a parameter that was placed, a view of one, or a matrix computed from one.
    pub weight: bool,
}

/// The part of a plan that concerns one axis.
#[derive(Clone, Debug, PartialEq)]
struct AxisPlan {
    placements: ByTensor<Placement>,
    scale: Option<f64>,
    completion: Option<Completion>,
    /// Whether a sharded input is gathered because there is no rule, or none for these shapes.
    pub fell_back: bool,
}

/// What every rank does for one operation.
#[derive(Clone, Debug, PartialEq)]
pub struct OpPlan {
    /// The operation in the shapes that one rank holds.
    pub local: OperationIr,
    /// Where each input must be.
    pub inputs: ByTensor<Vec<Placement>>,
    /// Where each output is then.
    pub outputs: Vec<(TensorId, TensorState)>,
    /// What the float outputs are multiplied by.
    pub scale: Option<f64>,
    /// What else the ranks do, and along which axis.
    pub completion: Option<(usize, Completion)>,
    /// Whether a sharded input is gathered along some axis because there is no rule, or none for these shapes.
    pub fell_back: bool,
}

/// Where activations are kept that were gathered for a weight, by axis and shape. Where the forward pass gathers, the
/// backward pass reduces and scatters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Homes {
    at: HashMap<(usize, Shape), Placement>,
    /// Where tensors were in parts that parts were taken from.
    in_parts: HashMap<(usize, Shape), Vec<Placement>>,
    sequence: bool,
    /// Shapes of parameters of three dimensions.
    parameters: HashSet<Shape>,
}

/// Dimensions of tokens in activations `[batch, sequence, features]`. The first is tried first: what ranks hold of it lies
/// together, so that a gather is the whole tensor without a copy.
const TOKENS: [usize; 2] = [0, 1];

impl Homes {
    /// Sequence parallelism along the first axis: activations of three dimensions that are sums are scattered by tokens,
    /// whether they have been gathered before or not.
    pub fn with_sequence(mut self, sequence: bool) -> Self {
        self.sequence = sequence;
        self
    }

    /// Sums of this shape may be gradients of a parameter.
    pub fn note_parameter(&mut self, shape: &Shape) {
        if shape.num_dims() == 3 && !self.parameters.contains(shape) {
            self.parameters.insert(shape.clone());
        }
    }

    /// Whether sums of this shape are activations for sequence parallelism, and `ranks` ranks divide neither their samples nor
    /// their sequence.
    pub fn leaves_whole(&self, shape: &Shape, ranks: usize) -> bool {
        let is_activation = shape.num_dims() == 3 && !self.parameters.contains(shape);
        self.sequence && ranks > 1 && is_activation && token_shard(shape, ranks).is_none()
    }

    /// Where sequence parallelism places the output of `op` if that is a table's rows, on an axis of `ranks` ranks.
    pub fn of_embedding(&self, op: &OperationIr, ranks: usize) -> Option<(TensorIr, Placement)> {
        match op {
            OperationIr::Module(ModuleOperationIr::Embedding(op)) if self.sequence => {
                token_shard(&op.out.shape, ranks).map(|at| (op.out.clone(), at))
            }
            _ => None,
        }
    }

    /// Whether `op` adds to zeros in the shape of something sharded that was gathered from: its gradient.
    pub fn has_scatter(&self, op: &OperationIr) -> bool {
        match op {
            OperationIr::BaseFloat(BaseOperationIr::Scatter(op)) => {
                self.at.iter().any(|((_, shape), at)| *shape == op.tensor.shape && *at == Placement::Shard(op.dim))
            }
            _ => false,
        }
    }

    /// Notes the activations that `op` gathers for a weight according to `plan`, and those in parts that it takes parts of.
    /// Whether that is new.
    pub fn note<'s>(&mut self, op: &OperationIr, state: impl Fn(TensorId) -> &'s TensorState, plan: &OpPlan) -> bool {
        let mut is_new = false;
        let mut keep = |axis, shape: &Shape, at| is_new |= self.at.insert((axis, shape.clone()), at) != Some(at);
        if let (OperationIr::BaseFloat(BaseOperationIr::Gather(op)), Some((axis, _))) = (op, plan.completion) {
            keep(axis, &op.tensor.shape, Placement::Shard(op.dim));
        }
        if let OperationIr::Float(_, FloatOperationIr::Matmul(op)) = op
            && state(op.rhs.id).weight
            && !state(op.lhs.id).weight
        {
            let activation = &op.lhs;
            let gathered = state(activation.id).at.iter().zip(&plan.inputs[activation.id]).enumerate();
            for (axis, (from, to)) in gathered {
                // Features are gathered for the contraction, which is not for the whole forward pass.
                let is_kept = from.dim().is_some_and(|dim| dim + 1 < activation.shape.num_dims());
                if is_kept && *to == Replicate {
                    keep(axis, &activation.shape, *from);
                }
            }
        }
        if let OperationIr::BaseFloat(BaseOperationIr::Slice(op)) = op {
            for (axis, at) in plan.inputs[op.tensor.id].iter().enumerate().filter(|(_, at)| at.is_in_parts()) {
                let known = self.in_parts.entry((axis, op.tensor.shape.clone())).or_default();
                if !known.contains(at) {
                    known.push(*at);
                    is_new = true;
                }
            }
        }
        is_new
    }

    /// Where the tensor was of which a part was taken that is put back by `op`, and is at `value`.
    fn of_part(&self, axis: usize, op: &SliceAssignOpIr, value: Placement) -> Option<Placement> {
        let known = self.in_parts.get(&(axis, op.tensor.shape.clone()))?;
        known.iter().find(|at| at.sliced(&op.tensor.shape, &op.ranges) == Some(value)).copied()
    }

    fn of(&self, axis: usize, shape: &Shape, ranks: usize) -> Option<Placement> {
        // Most programs gather no activations.
        let noted = if self.at.is_empty() { None } else { self.at.get(&(axis, shape.clone())).copied() };
        noted.or_else(|| if self.sequence && axis == 0 { token_shard(shape, ranks) } else { None })
    }
}

/// `[batch, sequence, features]` sharded by samples if the ranks divide these, else along the sequence if they divide it.
fn token_shard(shape: &Shape, ranks: usize) -> Option<Placement> {
    if ranks == 1 || shape.num_dims() != 3 {
        return None;
    }
    TOKENS.map(Placement::Shard).into_iter().find(|at| at.local_shape(shape, ranks).is_some())
}

/// The plan of `op`, whose inputs are in the states that `state` gives, and `is_half` if they are stored in half
/// precision although their type is wider.
pub fn plan<'s>(
    op: &OperationIr,
    state: impl Fn(TensorId) -> &'s TensorState,
    is_half: impl Fn(TensorId) -> bool,
    axes: &[MeshAxis],
    homes: &Homes,
) -> OpPlan {
    let mut local = op.clone();
    let mut inputs: ByTensor<Vec<Placement>> = op.inputs().map(|x| (x.id, Vec::with_capacity(axes.len()))).collect();
    let weight = makes_weights(op, |id| state(id).weight);
    let output = |x: &TensorIr| (x.id, TensorState { at: Vec::with_capacity(axes.len()), weight });
    let mut outputs: Vec<_> = op.outputs().map(output).collect();
    let (mut scale, mut completion, mut fell_back) = (None, None, false);
    for (i, axis) in axes.iter().enumerate() {
        let known = |x: &TensorIr| {
            let TensorState { at, weight } = state(x.id);
            let home = match op {
                OperationIr::BaseFloat(BaseOperationIr::SliceAssign(op)) => {
                    homes.of_part(i, op, state(op.value.id).at[i])
                }
                _ => homes.of(i, &x.shape, axis.ranks),
            };
            (x.id, Known { at: at[i], weight: *weight, home, is_half: at[i] == Partial && is_half(x.id) })
        };
        let known: ByTensor<Known> = op.inputs().map(known).collect();
        let decided = along_axis(&local, &known, axis, completion.is_none());
        completion = completion.or(decided.completion.map(|completion| (i, completion)));
        for (id, placements) in inputs.iter_mut() {
            placements.push(decided.placements[id]);
        }
        for (id, state) in &mut outputs {
            state.at.push(decided.placements[*id]);
        }
        scale = decided.scale.map(|factor| factor * scale.unwrap_or(1.0)).or(scale);
        fell_back |= decided.fell_back;
        localize(&mut local, &decided.placements, axis.ranks);
    }
    OpPlan { local, inputs, outputs, scale, completion, fell_back }
}

/// What is known of an input along one axis.
struct Known {
    at: Placement,
    weight: bool,
    home: Option<Placement>,
    is_half: bool,
}

/// The plan along one axis, which `may_complete` the rank's share of the operation.
fn along_axis(op: &OperationIr, known: &ByTensor<Known>, axis: &MeshAxis, may_complete: bool) -> AxisPlan {
    let whole = |fell_back| AxisPlan {
        placements: op.inputs().chain(op.outputs()).map(|x| (x.id, Replicate)).collect(),
        scale: None,
        completion: None,
        fell_back,
    };
    if known.values().all(|x| x.at == Replicate && x.home.is_none()) {
        return whole(false);
    }
    if known.values().any(|x| x.at == Varying) {
        // Every rank computes with its own.
        let own = |x: &TensorIr| if known[x.id].at == Varying { Varying } else { Replicate };
        let inputs = op.inputs().map(|x| (x.id, own(x)));
        let placements = inputs.chain(op.outputs().map(|x| (x.id, Varying))).collect();
        return AxisPlan { placements, scale: None, completion: None, fell_back: false };
    }
    let operand = |x| operand(x, &known[x.id]);
    let possible = |decision: &Decision| may_complete || decision.completion.is_none();
    match decide(op, &operand, axis).filter(possible).and_then(|decision| assigned(op, decision, axis.ranks)) {
        Some(plan) => plan,
        None => whole(axis.ranks > 1 && known.values().any(|x| x.at.is_shard())),
    }
}

fn operand<'a>(x: &'a TensorIr, &Known { at, weight, home, is_half }: &Known) -> Operand<'a> {
    Operand { shape: &x.shape, at, weight, home, ends: x.status == TensorStatus::ReadWrite, is_half }
}

/// The decision by tensor, if it can be carried out: sizes divide, a tensor that is two inputs is wanted in one
/// placement, and sums are of numbers.
fn assigned(op: &OperationIr, decision: Decision, ranks: usize) -> Option<AxisPlan> {
    // What is looked up in another rank's part is made zero, and added up: numbers only.
    let is_float = || op.outputs().all(|out| out.dtype.is_float());
    if decision.completion == Some(Completion::MaskIndices) && !is_float() {
        return None;
    }
    let mut placements = ByTensor::default();
    let wanted = decision.inputs.iter().chain(&decision.outputs).copied();
    for (x, placement) in op.inputs().chain(op.outputs()).zip(wanted) {
        let is_possible = match placement {
            Replicate => true,
            Partial => !x.dtype.is_bool() && !matches!(x.dtype, DType::QFloat(_)),
            _ => !matches!(x.dtype, DType::QFloat(_)) && placement.local_shape(&x.shape, ranks).is_some(),
        };
        if !is_possible || placements.add(x.id, placement).is_some_and(|other| *other != placement) {
            return None;
        }
    }
    let is_complete = op.inputs().chain(op.outputs()).all(|x| placements.get(x.id).is_some());
    let Decision { scale, completion, .. } = decision;
    is_complete.then_some(AxisPlan { placements, scale, completion, fell_back: false })
}

/// Whether the outputs of `op` are weights, of whose inputs `is_weight` says whether they are.
///
/// A view of a weight is one, and its values in another type. So is a matrix that is computed element by element from one of
/// its shape with factors, rows, or another matrix, as an adapted weight `m / ‖W + s A B‖ (W + s A B)`, or one after an
/// update. A matrix of one row is taken for an activation with a bias.
pub(crate) fn makes_weights(op: &OperationIr, is_weight: impl Fn(TensorId) -> bool) -> bool {
    use BaseOperationIr as Op;
    use NumericOperationIr as Numeric;
    let of_matrix = |x: &TensorIr, out: &TensorIr| {
        x.shape == out.shape && x.shape.num_dims() == 2 && x.shape[0] > 1 && is_weight(x.id)
    };
    match op {
        OperationIr::BaseFloat(
            Op::Reshape(_)
            | Op::SwapDims(_)
            | Op::Permute(_)
            | Op::Expand(_)
            | Op::Slice(_)
            | Op::Cast(_)
            | Op::Flip(_),
        ) => op.inputs().any(|x| is_weight(x.id)),
        OperationIr::NumericFloat(_, Numeric::Add(op) | Numeric::Sub(op) | Numeric::Mul(op) | Numeric::Div(op)) => {
            of_matrix(&op.lhs, &op.out) || of_matrix(&op.rhs, &op.out)
        }
        OperationIr::NumericFloat(_, Numeric::MulScalar(op) | Numeric::DivScalar(op)) => of_matrix(&op.lhs, &op.out),
        _ => false,
    }
}
