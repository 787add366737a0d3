//! How a model is sharded over the ranks of a logical device.

use backend_dist::comm::Group;
use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::{Axis, ParallelLayout};
use backend_dist::parallelize::{Plan, PlanError, check, parallelize_on};
use burn::module::{Module, ModuleDisplay};
use burn::tensor::Device;

/// How a model is sharded over the tensor-parallel ranks, and computes there.
#[derive(Clone)]
pub(crate) struct TensorParallel<M> {
    pub ranks: usize,
    /// Whether activations are sharded along the sequence.
    pub sequence: bool,
    plan: Plan,
    check: fn(&M, &Plan, usize, bool) -> Result<(), PlanError>,
    place: fn(M, &Device, &Rank, &Plan) -> Result<M, PlanError>,
}

impl<M: Module + ModuleDisplay> TensorParallel<M> {
    /// Of a layout; `None` if it has no such ranks, and Burn's own device does.
    pub fn new(layout: &ParallelLayout, plan: &Plan, is_logical: bool) -> Option<Self> {
        let (ranks, sequence, plan) = (layout.tp.max(1), layout.sequence_parallel(), plan.clone());
        (is_logical || ranks > 1).then_some(Self {
            ranks,
            sequence,
            plan,
            check: check::<M>,
            place: parallelize_on::<M>,
        })
    }
}

impl<M> TensorParallel<M> {
    /// Whether the plan fits the model.
    pub fn check(&self, model: &M) -> Result<(), PlanError> {
        (self.check)(model, &self.plan, self.ranks, self.sequence)
    }

    /// For a rank that leads the others.
    pub fn on(&self, rank: &Rank) -> Placing<M> {
        Placing { rank: rank.clone(), plan: self.plan.clone(), place: self.place }
    }
}

/// How a rank places a model.
pub(super) struct Placing<M> {
    rank: Rank,
    plan: Plan,
    place: fn(M, &Device, &Rank, &Plan) -> Result<M, PlanError>,
}

impl<M> Placing<M> {
    /// The model on the logical device `device`.
    pub fn place(&self, model: M, device: &Device) -> Result<M, BoxError> {
        Ok((self.place)(model, device, &self.rank, &self.plan)?)
    }

    /// The ranks among which its parameters are sharded.
    pub fn group(&self) -> Group {
        self.rank.group(Axis::Tp)
    }
}
