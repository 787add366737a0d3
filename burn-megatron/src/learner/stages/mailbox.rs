//! Activations and gradients between the stages of a pipeline.

use std::collections::{HashMap, VecDeque};

use backend_dist::comm::Group;
use burn::tensor::Device;

use super::Activation;
use crate::schedule::{Input, Pass, Payload, Transfer, Work};

/// Those of one step on one rank.
pub(super) struct Mailbox<A> {
    pipeline: Group,
    device: Device,
    /// Results of this rank's passes, until they are sent or used here.
    outputs: HashMap<(Payload, usize, usize), A>,
    /// Announced by the schedule, in the order in which the senders send.
    expected: VecDeque<Transfer>,
    /// By tag: received before it was needed.
    early: HashMap<usize, A>,
}

impl<A: Activation> Mailbox<A> {
    /// Between the ranks of `pipeline`; what arrives is put on `device`.
    pub fn new(pipeline: Group, device: Device) -> Self {
        Self { pipeline, device, outputs: HashMap::new(), expected: VecDeque::new(), early: HashMap::new() }
    }

    /// Keeps the result of a pass.
    pub fn put(&mut self, work: Work, result: A) {
        self.outputs.insert((payload(work.pass), work.chunk, work.micro_batch), result);
    }

    /// Sends a result. Does not wait.
    pub fn send(&mut self, transfer: &Transfer) {
        let result = self.outputs.remove(&(transfer.payload, transfer.chunk, transfer.micro_batch));
        result.expect("the schedule sends results of passes").send(transfer.peer, &self.pipeline);
    }

    /// Announces what a peer will send.
    pub fn expect(&mut self, transfer: Transfer) {
        self.expected.push_back(transfer);
    }

    /// The input of a pass, from this rank or another; waits for it.
    pub fn take(&mut self, input: Input) -> A {
        let wanted = match input {
            Input::Local(work) => {
                let result = self.outputs.remove(&(payload(work.pass), work.chunk, work.micro_batch));
                return result.expect("the schedule orders passes of a rank");
            }
            Input::Remote(transfer) => transfer,
        };
        // Those of one sender arrive in the order in which it sent them.
        while !self.early.contains_key(&wanted.tag) {
            let next = self.expected.iter().position(|other| other.peer == wanted.peer);
            let next = next.and_then(|index| self.expected.remove(index)).expect("the schedule announces transfers");
            self.early.insert(next.tag, A::receive(next.peer, &self.device, &self.pipeline));
        }
        self.early.remove(&wanted.tag).expect("it was just received")
    }
}

fn payload(pass: Pass) -> Payload {
    match pass {
        Pass::Forward => Payload::Activation,
        _ => Payload::Gradient,
    }
}
