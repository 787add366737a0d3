//! What the stages of a pipeline hand to each other, by the schedule.

use std::collections::{HashMap, VecDeque};

use crate::schedule::{Input, Pass, Payload, Transfer, Work};

/// How activations and gradients get from rank to rank.
pub(crate) trait Link<Value> {
    /// A receive that was announced.
    type Incoming;

    /// Sends to the rank `to` of the pipeline. Does not wait.
    fn send(&self, value: Value, to: usize);

    /// Announces a receive.
    fn announce(&self, transfer: &Transfer) -> Self::Incoming;

    /// Waits for it.
    fn receive(&self, transfer: &Transfer, incoming: Self::Incoming) -> Value;
}

/// Activations and gradients of one step on one rank.
pub(crate) struct P2pCommunicator<Value, L: Link<Value>> {
    link: L,
    /// Results of this rank's passes, until they are sent or used here.
    outputs: HashMap<(Payload, usize, usize), Value>,
    /// Announced by the schedule, in the order in which the senders send.
    expected: VecDeque<(Transfer, L::Incoming)>,
    /// By tag: received before it was needed.
    early: HashMap<usize, Value>,
}

impl<Value, L: Link<Value>> P2pCommunicator<Value, L> {
    pub fn new(link: L) -> Self {
        Self { link, outputs: HashMap::new(), expected: VecDeque::new(), early: HashMap::new() }
    }

    /// Keeps the result of a pass.
    pub fn put(&mut self, work: Work, result: Value) {
        self.outputs.insert((payload(work.pass), work.chunk, work.micro_batch), result);
    }

    /// Sends a result. Does not wait.
    pub fn send(&mut self, transfer: &Transfer) {
        let result = self.outputs.remove(&(transfer.payload, transfer.chunk, transfer.micro_batch));
        self.link.send(result.expect("the schedule sends results of passes"), transfer.peer);
    }

    /// Announces what a peer will send.
    pub fn expect(&mut self, transfer: Transfer) {
        self.expected.push_back((transfer, self.link.announce(&transfer)));
    }

    /// The input of a pass, from this rank or another; waits for it.
    pub fn take(&mut self, input: Input) -> Value {
        let wanted = match input {
            Input::Local(work) => {
                let result = self.outputs.remove(&(payload(work.pass), work.chunk, work.micro_batch));
                return result.expect("the schedule orders passes of a rank");
            }
            Input::Remote(transfer) => transfer,
        };
        // Those of one sender arrive in the order in which it sent them.
        while !self.early.contains_key(&wanted.tag) {
            let next = self.expected.iter().position(|(other, _)| other.peer == wanted.peer);
            let next = next.and_then(|index| self.expected.remove(index));
            let (transfer, incoming) = next.expect("the schedule announces transfers");
            self.early.insert(transfer.tag, self.link.receive(&transfer, incoming));
        }
        self.early.remove(&wanted.tag).expect("it was just received")
    }

    /// Whether nothing is under way.
    pub fn is_empty(&self) -> bool {
        self.outputs.is_empty() && self.expected.is_empty() && self.early.is_empty()
    }
}

fn payload(pass: Pass) -> Payload {
    match pass {
        Pass::Forward => Payload::Activation,
        _ => Payload::Gradient,
    }
}
