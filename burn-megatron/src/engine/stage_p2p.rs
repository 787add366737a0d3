//! Point-to-point communication between pipeline stages.

use super::p2p_communicator::Link;
use crate::schedule::Transfer;
use backend_dist::collective::{Incoming, send, start_recv};
use backend_dist::comm::Group;
use burn::tensor::{DType, Device, Tensor};

/// Tensors of `dtype` between the ranks of `pipeline`.
pub(super) struct StageP2p {
    pub pipeline: Group,
    pub device: Device,
    /// By micro-batch.
    pub shapes: Vec<[usize; 3]>,
    pub dtype: DType,
    /// Receives begin when they are announced, not when their tensor is needed, which overlaps with the passes between
    /// GPUs. A receive that has begun keeps a GPU busy until the peer has sent, which it may do long after this rank's
    /// next passes. Nothing may then have to wait for an idle GPU, as the driver does when it loads kernels that need
    /// more local memory than any before: not before all kernels have run once.
    pub posts: bool,
}

impl StageP2p {
    fn start(&self, transfer: &Transfer) -> Incoming<3> {
        let shape = self.shapes[transfer.micro_batch];
        start_recv(shape, self.dtype, &self.device, transfer.peer, &self.pipeline)
    }
}

impl Link<Tensor<3>> for StageP2p {
    type Incoming = Option<Incoming<3>>;

    fn send(&self, tensor: Tensor<3>, to: usize) {
        send(tensor, to, &self.pipeline);
    }

    fn announce(&self, transfer: &Transfer) -> Option<Incoming<3>> {
        self.posts.then(|| self.start(transfer))
    }

    fn receive(&self, transfer: &Transfer, incoming: Option<Incoming<3>>) -> Tensor<3> {
        incoming.unwrap_or_else(|| self.start(transfer)).wait()
    }
}
