//! Buffers that another stream uses independently of the compute stream.

use crate::abandoned;
use burn_cubecl::tensor::CubeTensor;
use cubecl::server::BufferBinding;

/// A buffer that is neither reused nor moved while this value lives.
///
/// CubeCL reuses memory, writes in place and moves allocations to other pages in the order of the compute stream,
/// regardless of the communicator's stream. The handle in the tensor prevents reuse and writes in place; the binding
/// prevents moves.
pub struct PinnedBuffer {
    /// What it is the buffer of.
    pub tensor: CubeTensor,
    _address: BufferBinding,
}

impl PinnedBuffer {
    /// Of this tensor.
    pub fn new(tensor: CubeTensor) -> Self {
        Self { _address: tensor.handle.clone().binding(), tensor }
    }

    /// The run has failed: nobody knows when others have done with it. It is freed when its GPU has come to rest.
    pub fn abandon(self) {
        abandoned::keep(usize::from(self.tensor.client.service_id().device.index_id), self);
    }
}
