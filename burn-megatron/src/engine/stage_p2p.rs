//! Point-to-point communication between pipeline stages.

use crate::schedule::{Input, Pass, Payload, Transfer, Work};
use backend_dist::collective::{Incoming, send, start_recv};
use backend_dist::comm::Group;
use burn::tensor::{DType, Device, Tensor};
use std::collections::{HashMap, VecDeque};

/// Activations and gradients on their way from one stage to its neighbour.
pub(super) struct StageP2p {
    pipeline: Group,
    device: Device,
    /// By micro-batch.
    shapes: Vec<[usize; 3]>,
    dtype: DType,
    /// Receives begin when they are announced.
    posts: bool,
    /// Outputs of this rank's passes, until they are sent or used here.
    outputs: HashMap<(Payload, usize, usize), Tensor<3>>,
    /// Receives that the schedule has announced, in the order in which the senders send. Between GPUs a posted receive
    /// overlaps with the passes.
    expected: VecDeque<(Transfer, Option<Incoming<3>>)>,
    /// By tag: received before it was needed.
    early: HashMap<usize, Tensor<3>>,
}

impl StageP2p {
    /// Tensors of `dtype`, of one of `shapes` for each micro-batch, between the ranks of `pipeline`.
    ///
    /// `posts`: receives begin when they are announced, not when their tensor is needed. A receive that has begun keeps
    /// a GPU busy until the peer has sent, which it may do long after this rank's next passes. Nothing may then have to
    /// wait for an idle GPU, as the driver does when it loads kernels that need more local memory than any before: not
    /// before all kernels have run once.
    pub fn new(pipeline: Group, device: Device, shapes: Vec<[usize; 3]>, dtype: DType, posts: bool) -> Self {
        let (outputs, expected, early) = Default::default();
        Self { pipeline, device, shapes, dtype, posts, outputs, expected, early }
    }

    /// Stores the output of `work`.
    pub fn put(&mut self, work: Work, tensor: Tensor<3>) {
        self.outputs.insert((payload(work.pass), work.chunk, work.micro_batch), tensor);
    }

    /// Sends a stored output. Does not wait.
    pub fn send(&mut self, transfer: &Transfer) {
        let output = self.outputs.remove(&(transfer.payload, transfer.chunk, transfer.micro_batch));
        send(output.expect("the schedule sends outputs of passes"), transfer.peer, &self.pipeline);
    }

    /// Announces a receive, whose tensor is taken when a pass needs it.
    pub fn expect(&mut self, transfer: Transfer) {
        let incoming = self.posts.then(|| self.receive(transfer));
        self.expected.push_back((transfer, incoming));
    }

    fn receive(&self, Transfer { micro_batch, peer, .. }: Transfer) -> Incoming<3> {
        start_recv(self.shapes[micro_batch], self.dtype, &self.device, peer, &self.pipeline)
    }

    /// The input of a pass, from this rank or another; waits for it.
    pub fn take(&mut self, input: Input) -> Tensor<3> {
        let wanted = match input {
            Input::Local(work) => {
                let output = self.outputs.remove(&(payload(work.pass), work.chunk, work.micro_batch));
                return output.expect("the schedule orders passes of a rank");
            }
            Input::Remote(transfer) => transfer,
        };
        // Tensors of one sender arrive in the order in which it sent them.
        while !self.early.contains_key(&wanted.tag) {
            let next = self.expected.iter().position(|(other, _)| other.peer == wanted.peer);
            let next = next.and_then(|index| self.expected.remove(index));
            let (transfer, incoming) = next.expect("the schedule announces transfers");
            let incoming = incoming.unwrap_or_else(|| self.receive(transfer));
            self.early.insert(transfer.tag, incoming.wait());
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
