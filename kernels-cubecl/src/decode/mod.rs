//! One new token for each of many sequences whose keys and values are in pages: the attention of a decode step.
//!
//! The keys of all sequences are one buffer `[pages, block_size, kv_heads, head_dim]`, the values another. Row `s` of the
//! block table lists the pages of sequence `s`: its position `p` is in page `table[s][p / block_size]` (Kwon et al.,
//! PagedAttention, 2023). Lengths and tables are read on the device, so one recorded launch serves every step.
#[cfg(feature = "cuda")]
pub mod append;
#[cfg(feature = "cuda")]
pub mod attention;
#[cfg(feature = "cuda")]
pub mod copies;
pub mod draw;
#[cfg(feature = "cuda")]
pub mod few_rows;
#[cfg(feature = "cuda")]
mod few_rows_mma;
#[cfg(feature = "cuda")]
pub mod likeliest;
#[cfg(feature = "cuda")]
pub mod merge;
#[cfg(feature = "cuda")]
mod rows;

#[cfg(feature = "cuda")]
pub use append::{NewAngles, append};
#[cfg(feature = "cuda")]
pub use attention::attention;
#[cfg(feature = "cuda")]
pub use likeliest::likeliest;

/// Longest row of logits: an index is exact in fp32.
const LONGEST: usize = 1 << 24;

/// Whether there is a kernel for rows of so many logits: a multiple of 8 that fp32 counts exactly.
pub fn has_likeliest(columns: usize) -> bool {
    columns.is_multiple_of(8) && (8..=LONGEST).contains(&columns)
}

/// Sizes of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeShape {
    /// Sequences, each with one new token.
    pub sequences: usize,
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and of values.
    pub kv_heads: usize,
    /// Length of a head.
    pub head_dim: usize,
    /// Positions of a page.
    pub block_size: usize,
    /// Pages of the cache.
    pub pages: usize,
    /// Pages of the longest possible sequence: the length of a row of the block table.
    pub max_blocks: usize,
}

impl DecodeShape {
    /// Whether there are kernels for this shape: heads of up to 256 numbers, a multiple of 8, and positions that fit into
    /// 31 bits.
    pub fn has_kernel(&self) -> bool {
        let Self { sequences, heads, kv_heads, head_dim, block_size, pages, max_blocks } = *self;
        let most = i32::MAX as usize;
        let within = |product: &[usize], most: usize| {
            product.iter().try_fold(1, |a: usize, b| a.checked_mul(*b)).is_some_and(|n| (1..=most).contains(&n))
        };
        head_dim.is_multiple_of(8)
            && within(&[head_dim], 256)
            && within(&[heads], u16::MAX.into())
            && kv_heads > 0
            && heads.is_multiple_of(kv_heads)
            && within(&[sequences], u16::MAX.into())
            && within(&[sequences, max_blocks], most)
            && within(&[pages, block_size, kv_heads, head_dim / 8], most)
    }

    #[cfg(feature = "cuda")]
    fn refused(&self) -> Result<(), crate::pointwise::PointwiseError> {
        match self.has_kernel() {
            true => Ok(()),
            false => Err(crate::pointwise::PointwiseError::Shape { shape: format!("{self:?}") }),
        }
    }

    /// Vectors of a head.
    #[cfg(feature = "cuda")]
    fn vectors(&self) -> usize {
        self.head_dim / 8
    }

    /// Vectors of the packed projection `[sequences, heads + 2 kv_heads, head_dim]`.
    #[cfg(feature = "cuda")]
    fn packed(&self) -> usize {
        self.sequences * (self.heads + 2 * self.kv_heads) * self.vectors()
    }

    /// Vectors of the pages.
    #[cfg(feature = "cuda")]
    fn paged(&self) -> usize {
        self.pages * self.block_size * self.kv_heads * self.vectors()
    }
}

/// Most copies of tokens in a step: their experts are in shared memory.
pub const MOST_COPIES: usize = 4096;

/// Rows that a plane of `few_rows` computes at the same time.
#[cfg(feature = "cuda")]
const MOST_ROWS: usize = 4;

/// Features that a plane of `few_rows` may have.
const MOST_FEATURES: usize = 4;

/// Sizes of a layer `x [rows, inner] · wᵀ` of matrices `w [groups · features, inner]`, one below the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FewRows {
    /// Rows of all groups.
    pub rows: usize,
    /// Matrices.
    pub groups: usize,
    /// Rows of a matrix.
    pub features: usize,
    /// Columns of a matrix.
    pub inner: usize,
}

impl FewRows {
    /// Whether there is a kernel: the columns fill the vectors of 32 units, and vectors are numbered in 31 bits.
    pub fn has_kernel(&self) -> bool {
        let Self { rows, groups, features, inner } = *self;
        let counted = |a: usize, b: usize| a.checked_mul(b).is_some_and(|n| (1..=i32::MAX as usize).contains(&n));
        inner.is_multiple_of(8 * 32)
            && (1..=u16::MAX.into()).contains(&groups)
            && features.is_multiple_of(MOST_FEATURES)
            && counted(groups * features, inner / 8)
            && counted(rows, features.max(inner / 8))
    }
}

/// The rows of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rows {
    /// All are multiplied with the only matrix.
    All,
    /// Row `i` is multiplied with matrix `slots[i] mod groups`; these ascend.
    Grouped,
    /// The same, and it is row `slots[i] / groups` of `x`.
    Gathered,
}
