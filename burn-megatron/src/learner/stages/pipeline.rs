//! A pipeline under burn-train: its first rank reads the batches and leads, the others do what it says.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::channel;

use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::{Axis, ParallelLayout};
use backend_dist::parallelize::Plan;
use burn::tensor::Device;
use burn::train::metric::store::EventStoreClient;
use burn::train::{Learner, LearnerModel, TrainStep};
use parking_lot::Mutex;

use super::lead::Lead;
use super::lines::{Follower, Line, ended_early};
use super::orders::{Order, Reply};
use super::wire::Wire;
use super::{Division, StageRank, StagesModel};
use crate::learner::devices::host_of;
use crate::learner::ids::FirstIds;
use crate::learner::trained::Trained;
use crate::learner::zero::Units;

/// The learner that a rank begins with, and the ids of the first process.
pub(in crate::learner) type Start<M> = (Learner<M>, FirstIds);

/// The part of each rank in the pipelines of one training.
pub(in crate::learner) trait OnRank<M: LearnerModel>: Send + Sync {
    /// Pipeline ranks.
    fn ranks(&self) -> usize;

    /// Whether the ranks of a pipeline may be in several processes.
    fn crosses_processes(&self) -> bool;

    /// The first rank of a pipeline.
    fn lead(&self, start: Start<M>, device: &Device, rank: &Rank) -> Result<Box<dyn Trained<M>>, BoxError>;

    /// Another rank, to the end of the training.
    fn follow(&self, start: Start<M>, device: &Device, rank: &Rank, store: &EventStoreClient) -> Result<M, BoxError>;
}

/// All pipelines of one training.
pub(in crate::learner) struct Pipeline<M: TrainStep> {
    division: Arc<Division>,
    plan: Plan,
    zero: (u8, Units),
    ranks: usize,
    max_grad_norm: Option<f64>,
    /// Bytes of the buckets in which gradients are reduced during backward passes, if they are.
    overlap: Option<usize>,
    /// Whether data-parallel ranks begin each pass together.
    in_step: bool,
    /// Between processes; else there are lines between threads.
    wire: Option<Wire<M>>,
    /// By data-parallel rank.
    lines: Mutex<HashMap<usize, Vec<Line<M>>>>,
    /// By data-parallel and pipeline rank.
    followers: Mutex<HashMap<(usize, usize), Follower<M>>>,
}

impl<M: TrainStep> Pipeline<M> {
    pub fn new(division: Division, layout: &ParallelLayout, plan: Plan, units: Units) -> Self {
        let (mut lines, mut followers): (HashMap<usize, Vec<Line<M>>>, HashMap<_, _>) = Default::default();
        for dp in 0..layout.dp {
            for pp in 1..layout.pp {
                let ((orders, to), (from, replies)) = (channel(), channel());
                lines.entry(dp).or_default().push(Line::Threads { orders, replies });
                followers.insert((dp, pp), Follower::Threads { orders: to, replies: from });
            }
        }
        let (lines, followers) = (Mutex::new(lines), Mutex::new(followers));
        let (division, max_grad_norm) = (division.into(), None);
        Self {
            division,
            plan,
            zero: (layout.zero, units),
            ranks: layout.pp,
            max_grad_norm,
            overlap: None,
            in_step: false,
            wire: None,
            lines,
            followers,
        }
    }

    /// Clips gradients by the norm of all of them together.
    pub fn clipping(mut self, max_grad_norm: Option<f64>) -> Self {
        self.max_grad_norm = max_grad_norm;
        self
    }

    /// Reduces gradients during backward passes, in buckets of so many bytes, if they are given.
    pub fn overlapping(mut self, bucket: Option<usize>) -> Self {
        self.overlap = bucket;
        self
    }

    /// Data-parallel ranks wait for each other within passes.
    pub fn in_step(mut self, on: bool) -> Self {
        self.in_step = on;
        self
    }

    /// Sends batches and outputs between processes.
    pub fn over(mut self, wire: Option<Wire<M>>) -> Self {
        self.wire = wire;
        self
    }

    fn stage_rank(&self, (learner, ids): Start<M>, device: &Device, rank: &Rank) -> Result<StageRank<M>, BoxError>
    where
        M: StagesModel,
    {
        let stages =
            StageRank::new(learner, device, (rank, &self.plan), (self.zero.0, &self.zero.1), self.division.clone())?;
        let stages = stages.clipping(self.max_grad_norm).overlapping(self.overlap).in_step(self.in_step);
        Ok(stages.with_first_ids(ids))
    }
}

impl<M: StagesModel> OnRank<M> for Pipeline<M> {
    fn ranks(&self) -> usize {
        self.ranks
    }

    fn crosses_processes(&self) -> bool {
        self.wire.is_some()
    }

    fn lead(&self, start: Start<M>, device: &Device, rank: &Rank) -> Result<Box<dyn Trained<M>>, BoxError> {
        let lines = match self.wire {
            Some(wire) => {
                let line = |to| Line::Processes { wire, pipeline: rank.group(Axis::Pp), to };
                (1..self.ranks).map(line).collect()
            }
            None => self.lines.lock().remove(&rank.coords.dp).unwrap_or_default(),
        };
        Ok(Box::new(Lead::new(self.stage_rank(start, device, rank)?, lines)))
    }

    fn follow(&self, start: Start<M>, device: &Device, rank: &Rank, store: &EventStoreClient) -> Result<M, BoxError> {
        let follower = match self.wire {
            Some(wire) => Some(Follower::Processes { wire, pipeline: rank.group(Axis::Pp), at: host_of(device) }),
            None => self.followers.lock().remove(&(rank.coords.dp, rank.coords.pp)),
        };
        let follower = follower.expect("every rank of a pipeline starts once");
        let (mut stages, mut valid) = (self.stage_rank(start, device, rank)?, None);
        let reply = |reply| follower.reply(reply);
        loop {
            let Some(order) = follower.order() else { ended_early(&stages.groups().pp) };
            match order {
                Order::Seed(base, epoch) => stages.seed(base, epoch),
                Order::Train(batches) => {
                    valid = None;
                    let outputs = stages.train(batches);
                    if !outputs.is_empty() {
                        reply(Reply::Outputs(outputs));
                    }
                }
                Order::Step => stages.step(),
                Order::AverageStates => stages.average_states(),
                Order::BeginEvaluation => valid = Some(stages.valid_model()),
                Order::Evaluate(batch) => {
                    let model = valid.as_ref().expect("an evaluation begins before its first batch");
                    if let Some(output) = stages.evaluate(model, batch) {
                        reply(Reply::Outputs(vec![output]));
                    }
                }
                Order::Save => {
                    valid = None;
                    let (values, states) = stages.saved(store)?;
                    reply(Reply::Saved(values, states));
                }
                Order::Values => reply(Reply::Values(stages.values())),
                Order::End => return Ok(stages.learner().model()),
            }
        }
    }
}
