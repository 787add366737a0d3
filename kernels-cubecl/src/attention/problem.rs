//! What the kernels are asked for, and whether they can.
use crate::tiling::QUERY_ROWS;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Why a call was refused. Nothing has been launched then.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttentionError {
    /// The device has no warpgroup MMA or no tensor maps, or CubeCL was built without its LLVM compiler.
    #[error("this device (or this build of CubeCL) has no warpgroup MMA on bf16; these kernels need a Hopper GPU")]
    Device,
    /// A head dimension without a kernel.
    #[error("head dimension {0}: the kernels exist for 64 and 128")]
    HeadDim(usize),
    /// Query heads that do not divide among the key heads.
    #[error("{heads} query heads do not divide among {kv_heads} key heads")]
    Heads {
        /// Query heads.
        heads: usize,
        /// Key heads.
        kv_heads: usize,
    },
    /// A dimension of length zero.
    #[error("{0} is zero")]
    Empty(&'static str),
    /// Causal attention in which the first queries see no key.
    #[error("causal attention of {queries} queries on {keys} keys: the first queries would see no key")]
    MoreQueriesThanKeys {
        /// Length of the query sequence.
        queries: usize,
        /// Length of the key sequence.
        keys: usize,
    },
    /// A tensor of another shape than the problem says.
    #[error("{name} has shape {found:?}, the problem asks for {expected:?} [seq, batch, heads, head_dim]")]
    Shape {
        /// Which tensor.
        name: &'static str,
        /// Its shape.
        found: [usize; 4],
        /// The right one.
        expected: [usize; 4],
    },
    /// Strides the copy engine cannot follow.
    #[error("{name} has strides {strides:?}: each must be a multiple of 8 elements (16 bytes)")]
    Strides {
        /// Which tensor.
        name: &'static str,
        /// Its strides.
        strides: [usize; 3],
    },
    /// A buffer too small for what it should hold.
    #[error("the buffer of {name} has {found} bytes, {expected} are needed")]
    Buffer {
        /// Which tensor.
        name: &'static str,
        /// Its bytes.
        found: u64,
        /// The bytes needed.
        expected: u64,
    },
}

/// The sizes of an attention call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Length of the query sequence.
    pub queries: usize,
    /// Length of the key and value sequence.
    pub keys: usize,
    /// Length of a query, key and value: 64 or 128.
    pub head_dim: usize,
    /// Query `i` sees the keys up to `i + keys - queries`.
    pub causal: bool,
}

impl AttentionShape {
    /// `queries` rounded up to whole blocks: the row length of the statistics.
    pub fn padded_queries(&self) -> usize {
        self.queries.next_multiple_of(QUERY_ROWS)
    }

    /// Numbers in a statistics buffer, fp32 `[batch, heads, padded_queries]`.
    pub fn statistics_len(&self) -> usize {
        self.batch * self.heads * self.padded_queries()
    }

    /// Shape of `q`, `out` and their gradients.
    pub fn query_shape(&self) -> [usize; 4] {
        [self.queries, self.batch, self.heads, self.head_dim]
    }

    /// Shape of `k`, `v` and their gradients.
    pub fn key_shape(&self) -> [usize; 4] {
        [self.keys, self.batch, self.kv_heads, self.head_dim]
    }

    /// Floating-point operations of the forward pass, two matrix products of what the mask leaves (half when causal).
    /// The backward pass is counted as 2.5 times as many, whatever it recomputes.
    pub fn forward_flops(&self) -> f64 {
        let pairs = match self.causal {
            false => self.queries as f64 * self.keys as f64,
            true => self.queries as f64 * (self.keys as f64 - self.queries as f64 / 2.0),
        };
        4.0 * (self.batch * self.heads * self.head_dim) as f64 * pairs
    }

    /// Whether the device of `client` has kernels for these sizes.
    ///
    /// # Errors
    /// What is in the way.
    pub fn check(&self, client: &Client) -> Result<(), AttentionError> {
        if client.features().matmul.wgmma.is_empty() {
            return Err(AttentionError::Device);
        }
        self.check_sizes()
    }

    fn check_sizes(&self) -> Result<(), AttentionError> {
        let sizes = [
            ("batch", self.batch),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("queries", self.queries),
            ("keys", self.keys),
        ];
        if let Some((name, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(AttentionError::Empty(name));
        }
        if ![64, 128].contains(&self.head_dim) {
            return Err(AttentionError::HeadDim(self.head_dim));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(AttentionError::Heads { heads: self.heads, kv_heads: self.kv_heads });
        }
        if self.causal && self.queries > self.keys {
            return Err(AttentionError::MoreQueriesThanKeys { queries: self.queries, keys: self.keys });
        }
        Ok(())
    }

    pub(super) fn check_statistics(&self, name: &'static str, handle: &Handle) -> Result<(), AttentionError> {
        let (found, expected) = (handle.size_in_used(), 4 * self.statistics_len() as u64);
        if found < expected { Err(AttentionError::Buffer { name, found, expected }) } else { Ok(()) }
    }
}

/// A bf16 tensor `[seq, batch, heads, head_dim]` on the device.
#[derive(Clone, Debug)]
pub struct Tensor4 {
    /// Where it lies.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> AttentionShape {
        AttentionShape { batch: 2, heads: 8, kv_heads: 2, queries: 300, keys: 300, head_dim: 128, causal: true }
    }

    #[test]
    fn what_no_kernel_computes_is_refused() {
        assert_eq!(shape().check_sizes(), Ok(()));
        assert_eq!(AttentionShape { head_dim: 96, ..shape() }.check_sizes(), Err(AttentionError::HeadDim(96)));
        assert_eq!(
            AttentionShape { kv_heads: 3, ..shape() }.check_sizes(),
            Err(AttentionError::Heads { heads: 8, kv_heads: 3 })
        );
        assert_eq!(
            AttentionShape { keys: 299, ..shape() }.check_sizes(),
            Err(AttentionError::MoreQueriesThanKeys { queries: 300, keys: 299 })
        );
        assert_eq!(AttentionShape { causal: false, keys: 299, ..shape() }.check_sizes(), Ok(()));
        assert_eq!(AttentionShape { batch: 0, ..shape() }.check_sizes(), Err(AttentionError::Empty("batch")));
    }

    #[test]
    fn statistics_have_whole_blocks_of_rows() {
        assert_eq!(shape().padded_queries(), 384);
        assert_eq!(shape().statistics_len(), 2 * 8 * 384);
    }

    #[test]
    fn a_causal_pass_counts_half_the_pairs() {
        let full = AttentionShape { causal: false, ..shape() }.forward_flops();
        assert_eq!(shape().forward_flops(), full / 2.0);
        assert_eq!(full, 4.0 * 2.0 * 8.0 * 128.0 * 300.0 * 300.0);
    }
}
