//! Buffers that another stream uses after the compute stream has gone on.

use burn_cubecl::tensor::CubeTensor;
use cubecl::server::BufferBinding;

/// A buffer that stays as and where it is while this lives.
///
/// CubeCL hands memory out again, writes in place and moves allocations to other pages in the order of the compute
/// stream, which knows nothing of what the communicator's stream still does. The handle in the tensor keeps the memory
/// from being handed out and written in place; the binding keeps it from being moved.
pub(crate) struct Held {
    pub(crate) tensor: CubeTensor,
    _address: BufferBinding,
}

impl Held {
    pub(crate) fn new(tensor: CubeTensor) -> Self {
        Self { _address: tensor.handle.clone().binding(), tensor }
    }
}
