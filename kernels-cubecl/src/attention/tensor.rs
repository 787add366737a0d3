//! A tensor of an attention call.
use super::error::AttentionError;
use cubecl::server::Handle;

/// A tensor of 16-bit numbers, `[seq, batch, heads, head_dim]`, on the device.
#[derive(Clone, Debug)]
pub struct Tensor4 {
    /// The buffer.
    pub handle: Handle,
    /// Its shape.
    pub shape: [usize; 4],
    /// Elements from one index to the next of the first three dimensions; the last is contiguous.
    pub strides: [usize; 3],
}

impl Tensor4 {
    /// A tensor without gaps.
    pub fn contiguous(handle: Handle, shape: [usize; 4]) -> Self {
        let [_, b, h, d] = shape;
        Self { handle, shape, strides: [b * h * d, h * d, d] }
    }

    /// Elements from the first to the last, gaps included.
    pub(super) fn extent(&self) -> usize {
        (0..3).map(|i| (self.shape[i] - 1) * self.strides[i]).sum::<usize>() + self.shape[3]
    }

    pub(super) fn check(&self, name: &'static str, expected: [usize; 4]) -> Result<(), AttentionError> {
        if self.shape != expected {
            return Err(AttentionError::Shape { name, found: self.shape, expected });
        }
        if self.strides.iter().any(|s| s % 8 != 0) {
            return Err(AttentionError::Strides { name, strides: self.strides });
        }
        let (found, expected) = (self.handle.size_in_used(), 2 * self.extent() as u64);
        if found < expected { Err(AttentionError::Buffer { name, found, expected }) } else { Ok(()) }
    }
}
