//! Ranks that do what another does. One rank, the leader, runs a program; the others get what its interpreter is told,
//! in the same order, from a channel or from another process.

use super::{across::Across, command::Command, interpreter::Interpret};
use crate::logical::TensorState;
use burn::tensor::TensorData;
use burn_ir::{OperationIr, TensorId, TensorIr};
use ranks::comm::Group;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::time::{Duration, Instant};

/// What an interpreter is told.
#[derive(Clone, Serialize, Deserialize)]
pub(super) enum Message {
    /// Run an operation, or obey the command that it carries.
    Run(Box<OperationIr>, Option<Command>),
    /// Take part in a read.
    Gather(TensorIr),
    /// Here is a tensor.
    Data(TensorId, TensorData),
    /// Forget tensors.
    Drop(Vec<TensorId>),
    /// Begin the stream of random numbers.
    Seed(u64),
    /// Collectives with ranks that have other tensors.
    Across(Across),
    /// What collectives give of which this is the first output is about to be used.
    Wait(TensorId),
    /// Another name for what the rank holds.
    Alias { x: TensorId, out: TensorId, state: TensorState },
    /// Make a tensor whole on every rank.
    Whole(TensorIr),
    /// The program has ended.
    End,
    /// The program has failed.
    Failed,
}

impl Message {
    /// Does what the message says.
    pub fn obey(self, interpreter: &mut dyn Interpret) {
        match self {
            Self::Run(mut op, command) => interpreter.run(&mut op, command),
            Self::Gather(tensor) => interpreter.gather(tensor),
            Self::Data(id, data) => interpreter.register_data(id, data),
            Self::Drop(tensors) => tensors.into_iter().for_each(|id| interpreter.drop_tensor(id)),
            Self::Seed(seed) => interpreter.seed(seed),
            Self::Across(across) => {
                let outs = across.outs();
                interpreter.across(across)();
                interpreter.arrived(&outs);
            }
            Self::Wait(first) => interpreter.wait(first),
            Self::Whole(tensor) => interpreter.make_whole(tensor),
            Self::Alias { x, out, state } => interpreter.alias(x, out, state),
            Self::End | Self::Failed => unreachable!("a follower ends before it obeys"),
        }
    }
}

/// A leader's way to its followers.
#[derive(Clone, Default)]
pub(super) struct Followers(Arc<[Sender<Message>]>);

impl Followers {
    pub fn new(followers: Vec<Sender<Message>>) -> Self {
        Self(followers.into())
    }

    pub fn are_none(&self) -> bool {
        self.0.is_empty()
    }

    pub fn tell(&self, message: impl Fn() -> Message) {
        // One that has failed says so to the world, which the leader learns in its next collective.
        self.0.iter().for_each(|follower| drop(follower.send(message())));
    }
}

/// How long a thread looks for work before it sleeps: the next operation of a program comes within microseconds, and
/// waking a thread takes as long.
const BRIEFLY: Duration = Duration::from_micros(50);

/// What comes next; `None` when nobody is there to send. Before a longer wait `hand_over` gives the device what is queued, for
/// which others may wait.
pub(super) fn next<T>(queue: &Receiver<T>, hand_over: impl FnOnce()) -> Option<T> {
    let mut since = None;
    loop {
        match queue.try_recv() {
            Ok(job) => return Some(job),
            Err(TryRecvError::Disconnected) => return None,
            Err(TryRecvError::Empty) if since.get_or_insert_with(Instant::now).elapsed() < BRIEFLY => {
                std::thread::yield_now();
            }
            Err(TryRecvError::Empty) => {
                hand_over();
                return queue.recv().ok();
            }
        }
    }
}

/// From where a follower hears its leader.
pub(super) enum Leader {
    /// A thread of this process.
    Here(Receiver<Message>),
    /// The first rank of the group, in another process, and what has come of its messages.
    Elsewhere(Group, VecDeque<Message>),
}

impl Leader {
    fn next(&mut self, hand_over: impl FnOnce()) -> Option<Message> {
        match self {
            Self::Here(queue) => next(queue, hand_over),
            Self::Elsewhere(group, arrived) => {
                if arrived.is_empty() {
                    hand_over();
                    *arrived = group.receive_host::<Vec<Message>>(0).into();
                }
                arrived.pop_front()
            }
        }
    }
}

/// Sends what comes from the queue to member `to`, in another process, until the program has ended: all that waits at
/// once, because an operation of its own message would take longer to send than to run.
pub(super) fn forward(queue: &Receiver<Message>, to: usize, group: &Group) {
    while let Ok(first) = queue.recv() {
        let messages: Vec<Message> = std::iter::once(first).chain(queue.try_iter()).collect();
        let is_last = matches!(messages.last(), Some(Message::End | Message::Failed));
        group.send_host(messages, to);
        if is_last {
            return;
        }
    }
}

/// Does what the leader says until its program ends. Whether that ended well.
pub(super) fn follow(interpreter: &mut dyn Interpret, mut leader: Leader) -> bool {
    loop {
        match leader.next(|| interpreter.hand_over()) {
            Some(Message::End) => return true,
            Some(Message::Failed) | None => return false,
            Some(message) => message.obey(interpreter),
        }
    }
}
