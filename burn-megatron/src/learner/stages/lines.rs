//! What the first rank of a pipeline and the others tell each other: from thread to thread, or between processes.

use std::sync::mpsc::{Receiver, Sender};

use backend_dist::comm::Group;
use burn::tensor::Bytes;
use burn::train::TrainStep;
use serde::{Deserialize, Serialize};

use super::values::Values;
use super::wire::Wire;

/// What the first rank tells another.
#[derive(Clone, Serialize, Deserialize)]
pub(super) enum Order<I> {
    Seed(u64, usize),
    Train(Vec<I>),
    Step,
    AverageStates,
    BeginEvaluation,
    Evaluate(I),
    /// Send what you save.
    Save,
    /// Send the values that you save.
    Values,
    End,
}

impl<I> Order<I> {
    /// The same with other batches.
    pub fn map<J>(self, of: impl Fn(I) -> J) -> Order<J> {
        match self {
            Self::Seed(base, epoch) => Order::Seed(base, epoch),
            Self::Train(batches) => Order::Train(batches.into_iter().map(of).collect()),
            Self::Step => Order::Step,
            Self::AverageStates => Order::AverageStates,
            Self::BeginEvaluation => Order::BeginEvaluation,
            Self::Evaluate(batch) => Order::Evaluate(of(batch)),
            Self::Save => Order::Save,
            Self::Values => Order::Values,
            Self::End => Order::End,
        }
    }
}

/// What another rank tells the first.
#[derive(Clone, Serialize, Deserialize)]
pub(super) enum Reply<O> {
    Outputs(Vec<O>),
    Saved(Values, Bytes),
    Values(Values),
}

impl<O> Reply<O> {
    /// The same with other outputs.
    pub fn map<P>(self, of: impl Fn(O) -> P) -> Reply<P> {
        match self {
            Self::Outputs(outputs) => Reply::Outputs(outputs.into_iter().map(of).collect()),
            Self::Saved(values, states) => Reply::Saved(values, states),
            Self::Values(values) => Reply::Values(values),
        }
    }
}

/// The first rank's line to another.
pub(super) enum Line<M: TrainStep> {
    Threads { orders: Sender<Order<M::Input>>, replies: Receiver<Reply<M::Output>> },
    Processes { wire: Wire<M>, pipeline: Group, to: usize },
}

impl<M: TrainStep> Line<M> {
    /// Whether the other rank is still there.
    pub fn tell(&self, order: Order<M::Input>) -> bool {
        match self {
            Self::Threads { orders, .. } => orders.send(order).is_ok(),
            Self::Processes { wire, pipeline, to } => {
                (wire.send_order)(order, *to, pipeline);
                true
            }
        }
    }

    /// What the other rank replies, if it is still there; waits for it.
    pub fn reply(&self) -> Option<Reply<M::Output>> {
        match self {
            Self::Threads { replies, .. } => replies.recv().ok(),
            Self::Processes { wire, pipeline, to } => Some((wire.receive_reply)(*to, pipeline)),
        }
    }
}

/// Another rank's line to the first.
pub(super) enum Follower<M: TrainStep> {
    Threads { orders: Receiver<Order<M::Input>>, replies: Sender<Reply<M::Output>> },
    Processes { wire: Wire<M>, pipeline: Group },
}

impl<M: TrainStep> Follower<M> {
    /// The next order, if the first rank is still there; waits for it.
    pub fn order(&self) -> Option<Order<M::Input>> {
        match self {
            Self::Threads { orders, .. } => orders.recv().ok(),
            Self::Processes { wire, pipeline } => Some((wire.receive_order)(pipeline)),
        }
    }

    /// Tells the first rank, which waits for it.
    pub fn reply(&self, reply: Reply<M::Output>) {
        match self {
            Self::Threads { replies, .. } => drop(replies.send(reply)),
            Self::Processes { wire, pipeline } => (wire.send_reply)(reply, pipeline),
        }
    }
}
