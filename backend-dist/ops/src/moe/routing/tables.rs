//! What routing computes on either side, the host or a GPU.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::moe::RowMap;

/// How a token selects experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Experts of a token.
    pub top_k: usize,
    /// Number of groups of neighbouring experts, and of the groups that a token may use.
    pub groups: Option<[usize; 2]>,
}

/// The number of tokens of each expert.
#[derive(Clone, Debug)]
pub struct TokenCounts {
    /// `[chunks, samples · experts]`: tokens of a sample before each chunk of 64 tokens.
    pub(crate) before: Tensor<2, Int>,
    /// `[samples · experts]`.
    pub(crate) totals: Tensor<1, Int>,
}

/// Copies of tokens in the order of their experts.
#[derive(Clone, Debug)]
pub struct OrderedCopies {
    /// From tokens to copies.
    pub map: RowMap,
    /// `[copies, 1]`: `token · experts + expert`.
    pub slots: Tensor<2, Int>,
    /// `[copies]`, fp32.
    pub probabilities: Tensor<1>,
}

/// The destinations of permuted tokens: where the rows of each expert begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowStarts {
    /// `[shards, experts]`: the first row of an expert for each of the members that share it, ascending with the shard;
    /// `None` if it has no rows.
    pub rows: Vec<Option<usize>>,
    /// Members that share an expert.
    pub shards: usize,
    /// Neighbouring experts that the same members share.
    pub each: usize,
    /// Capacity of an expert, which takes its first tokens; `None` is unlimited.
    pub capacity: Option<usize>,
    /// Number of rows.
    pub count: usize,
}

/// An order of permuted tokens without gaps: by chunk of every member's experts, member, shard, and expert. It can be
/// applied before the host knows the counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowOrder {
    /// Members that share an expert.
    pub shards: usize,
    /// Neighbouring experts that the same members share.
    pub each: usize,
    /// Chunks of a member's experts: chunk `i` is the experts from `each i / chunks` to `each (i + 1) / chunks` of
    /// them.
    pub chunks: usize,
    /// Number of rows.
    pub count: usize,
}

impl RowOrder {
    /// The first row of each expert if `counts[e]` tokens use it.
    pub fn starts(&self, counts: &[usize]) -> RowStarts {
        let (Self { shards, each, chunks, count }, experts) = (*self, counts.len());
        let mut rows = vec![None; shards * experts];
        let mut start = 0;
        for (chunk, member) in (0..chunks).flat_map(|chunk| (0..experts / each).map(move |member| (chunk, member))) {
            let bound = |chunk| member * each + each * chunk / chunks;
            for shard in 0..shards {
                for expert in bound(chunk)..bound(chunk + 1) {
                    rows[shard * experts + expert] = Some(start);
                    start += counts[expert];
                }
            }
        }
        RowStarts { rows, shards, each, capacity: None, count }
    }
}

/// Consecutive rows that are copied to consecutive rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first output row.
    pub to: usize,
    /// The input row that it is a copy of.
    pub from: usize,
    /// Number of rows.
    pub len: usize,
}

/// A table on the device.
pub(crate) fn table(values: Vec<i32>, shape: [usize; 2], device: &Device) -> Tensor<2, Int> {
    let device = device.clone().without_autodiff();
    Tensor::from_data(TensorData::new(values, shape), (&device, DType::I32))
}
