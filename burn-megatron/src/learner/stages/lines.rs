//! The lines between the first rank of a pipeline and the others: from thread to thread, or between processes.

use std::sync::mpsc::{Receiver, Sender};

use backend_dist::comm::Group;
use burn::tensor::Device;
use burn::train::TrainStep;

use super::orders::{Order, Reply};
use super::wire::Wire;

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
    Threads {
        orders: Receiver<Order<M::Input>>,
        replies: Sender<Reply<M::Output>>,
    },
    /// Batches come on the device `at`.
    Processes {
        wire: Wire<M>,
        pipeline: Group,
        at: Device,
    },
}

impl<M: TrainStep> Follower<M> {
    /// The next order, if the first rank is still there; waits for it.
    pub fn order(&self) -> Option<Order<M::Input>> {
        match self {
            Self::Threads { orders, .. } => orders.recv().ok(),
            Self::Processes { wire, pipeline, at } => Some((wire.receive_order)(pipeline, at)),
        }
    }

    /// Tells the first rank, which waits for it.
    pub fn reply(&self, reply: Reply<M::Output>) {
        match self {
            Self::Threads { replies, .. } => drop(replies.send(reply)),
            Self::Processes { wire, pipeline, .. } => (wire.send_reply)(reply, pipeline),
        }
    }
}

/// Ends with the failure of the rank that has gone.
pub(super) fn ended_early(pipeline: &Group) -> ! {
    pipeline.barrier();
    panic!("a rank of the pipeline ended before the training");
}
