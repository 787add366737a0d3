//! Routing of tokens on the device: the experts of each token, the tokens of each expert, and the destination of each
//! copy, all as `i32` tables. NVIDIA GPUs have kernels (`kernels_cubecl::pointwise::moe`). Elsewhere, and for sizes
//! without a kernel, the tables are computed on the host. Both give the same tables.

mod on_host;
mod runs;
#[cfg(test)]
mod tests;

pub use runs::{Run, Runs};

use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};

use super::row_map::RowMap;

/// Tokens that are counted together.
const CHUNK: usize = 64;

/// How a token selects experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Experts of a token.
    pub top_k: usize,
    /// Number of groups of neighbouring experts, and of the groups that a token may use.
    pub groups: Option<[usize; 2]>,
}

/// The selected experts of each token.
#[derive(Clone, Debug)]
pub struct ExpertChoice {
    /// `[tokens, top_k]`: the experts of a token, ascending, padded with -1.
    pub(in crate::ops) choice: Tensor<2, Int>,
    /// Number of experts.
    pub(in crate::ops) experts: usize,
}

/// The number of tokens of each expert.
#[derive(Clone, Debug)]
pub struct TokenCounts {
    /// `[chunks, samples · experts]`: tokens of a sample before each chunk of 64 tokens.
    pub(in crate::ops) before: Tensor<2, Int>,
    /// `[samples · experts]`.
    pub(in crate::ops) totals: Tensor<1, Int>,
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

/// Selects experts for the first `valid` tokens by `scores [tokens, experts]` plus `bias [experts]`: those with the
/// greatest scores. With groups, only experts of the best groups are eligible; the score of a group is the sum of its
/// two best experts. Of equal scores the first one wins; a NaN is minus infinity. Sums and comparisons are f64.
///
/// ```
/// use backend_dist::ops::moe::routing::{Selection, choose};
/// use burn::tensor::{Device, Tensor};
///
/// let scores = Tensor::from_data([[0.1, 0.7, 0.2], [0.5, 0.1, 0.4]], &Device::flex());
/// let experts = choose(scores, None, 2, Selection { top_k: 2, groups: None });
/// assert_eq!(experts.table().into_data().iter::<i64>().collect::<Vec<_>>(), [1, 2, 0, 2]);
/// ```
///
/// # Panics
/// If the sizes contradict each other.
pub fn choose(scores: Tensor<2>, bias: Option<Tensor<1>>, valid: usize, selection: Selection) -> ExpertChoice {
    let [tokens, experts] = scores.dims();
    let Selection { top_k, groups } = selection;
    assert!(valid <= tokens && tokens > 0, "routing: {valid} of {tokens} tokens count");
    assert!((1..=experts).contains(&top_k), "routing: {top_k} of {experts} experts");
    if let Some([groups, top]) = groups {
        let divided = groups > 0 && experts.is_multiple_of(groups) && (1..=groups).contains(&top);
        assert!(divided && top_k <= experts / groups * top, "routing: {top} of {groups} groups of {experts} experts");
    }
    let scores = scores.without_autodiff();
    let bias = bias.map(Tensor::without_autodiff);
    #[cfg(feature = "cuda")]
    if let Some(choice) = crate::ops::cuda::routing::choose(&scores, bias.as_ref(), valid, selection) {
        return ExpertChoice { choice, experts };
    }
    let (device, bias) = (scores.device(), bias.map(|bias| floats(&bias)));
    let choice = on_host::choose(&floats(&scores), [tokens, experts, valid], bias.as_deref(), selection);
    ExpertChoice { choice: table(choice, [tokens, top_k], &device), experts }
}

impl ExpertChoice {
    /// The selection `table [tokens, top_k]` of `experts` experts, ascending for every token, padded with -1.
    pub fn of(choice: Tensor<2, Int>, experts: usize) -> Self {
        Self { choice, experts }
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.choice.dims()[0]
    }

    /// `[tokens, top_k]`: the experts of a token, ascending, padded with -1.
    pub fn table(&self) -> Tensor<2, Int> {
        self.choice.clone()
    }

    /// `[tokens, experts]`: whether a token does not use an expert.
    pub fn unused(&self) -> Tensor<2, Bool> {
        let [tokens, top_k] = self.choice.dims();
        #[cfg(feature = "cuda")]
        if let Some(mask) = crate::ops::cuda::routing::spread(&self.choice, self.experts) {
            return mask.equal_elem(0);
        }
        let mut others = vec![true; tokens * self.experts];
        for (at, expert) in ints(&self.choice).into_iter().enumerate().filter(|(_, expert)| *expert >= 0) {
            others[at / top_k * self.experts + expert as usize] = false;
        }
        Tensor::from_data(TensorData::new(others, [tokens, self.experts]), &self.choice.device())
    }

    /// The number of tokens of each expert, for each of `samples` samples: token `t` belongs to sample `t % samples`.
    ///
    /// # Panics
    /// If the samples do not divide the tokens.
    pub fn count(&self, samples: usize) -> TokenCounts {
        let tokens = self.tokens();
        assert!(samples > 0 && tokens.is_multiple_of(samples), "routing: {tokens} tokens of {samples} samples");
        #[cfg(feature = "cuda")]
        if let Some((before, totals)) = crate::ops::cuda::routing::count(&self.choice, self.experts, samples) {
            return TokenCounts { before, totals };
        }
        let (top_k, width, device) = (self.choice.dims()[1], samples * self.experts, self.choice.device());
        let (mut before, mut totals) = (Vec::new(), vec![0; width]);
        for chunk in ints(&self.choice).chunks(CHUNK * samples * top_k) {
            before.extend_from_slice(&totals);
            for (at, expert) in chunk.iter().enumerate().filter(|(_, expert)| **expert >= 0) {
                totals[at / top_k % samples * self.experts + *expert as usize] += 1;
            }
        }
        let chunks = before.len() / width;
        let totals = table(totals, [1, width], &device).reshape([width]);
        TokenCounts { before: table(before, [chunks, width], &device), totals }
    }

    /// The maps that permute copies of tokens, and of their slots (slot `token · experts + expert`), to the rows of
    /// experts. Tokens of an expert keep their order; rows without a token are zero. `counted` is
    /// [`ExpertChoice::count`] of one sample.
    ///
    /// # Panics
    /// If the sizes contradict each other.
    pub fn place(&self, counted: &TokenCounts, starts: &RowStarts) -> (RowMap, RowMap) {
        let ([tokens, top_k], experts) = (self.choice.dims(), self.experts);
        let RowStarts { ref rows, shards, each, count, .. } = *starts;
        assert_eq!(rows.len(), shards * experts, "routing: rows of {shards} shards of {experts} experts");
        assert!(each > 0 && count > 0, "routing: {count} rows, {each} experts a member");
        let found = counted.before.dims();
        assert_eq!(found, [tokens.div_ceil(CHUNK), experts], "routing: counts of {tokens} tokens' {experts} experts");
        #[cfg(feature = "cuda")]
        if let Some(maps) = crate::ops::cuda::routing::place(&self.choice, &counted.before, starts) {
            return maps;
        }
        let device = self.choice.device();
        let placed = on_host::place(&ints(&self.choice), [tokens, top_k, experts], starts);
        let map = |to, back, inputs: usize, terms: usize| {
            RowMap::of_tables(table(to, [count, 1], &device), table(back, [inputs, terms], &device))
        };
        let copies = map(placed.tokens_of, placed.of_tokens, tokens, top_k * shards);
        (copies, map(placed.slots_of, placed.of_slots, tokens * experts, shards))
    }

    /// [`ExpertChoice::place`] with the rows in `order`, which NVIDIA GPUs compute without the counts on the host. Rows
    /// after the last of `order` are dropped.
    ///
    /// # Panics
    /// If the sizes contradict each other.
    pub fn place_in_order(&self, counted: &TokenCounts, order: &RowOrder) -> (RowMap, RowMap) {
        let found = counted.before.dims();
        let expected = [self.tokens().div_ceil(CHUNK), self.experts];
        assert!(
            found == expected && order.each > 0 && self.experts.is_multiple_of(order.each) && order.count > 0,
            "routing: counts {found:?} of {} tokens' {} experts, {order:?}",
            self.tokens(),
            self.experts
        );
        #[cfg(feature = "cuda")]
        if let Some(maps) = crate::ops::cuda::routing::place_in_order(&self.choice, counted, order) {
            return maps;
        }
        let counts: Vec<usize> = ints(&counted.totals).into_iter().map(|count| count as usize).collect();
        self.place(counted, &order.starts(&counts))
    }
}

impl TokenCounts {
    /// The counts on the host, `[samples, experts]` of each, and the result of `meanwhile`. Work that `meanwhile`
    /// launches need not be finished when the counts arrive. Waits for the device.
    ///
    /// # Panics
    /// If the device failed.
    pub fn read<T>(all: &[&TokenCounts], meanwhile: impl FnOnce() -> T) -> (Vec<Vec<usize>>, T) {
        let sizes = |counts: Vec<Vec<i32>>| {
            let size = |count: i32| usize::try_from(count).expect("a count");
            counts.into_iter().map(|counts| counts.into_iter().map(size).collect()).collect()
        };
        #[cfg(feature = "cuda")]
        if let Some(totals) = crate::ops::cuda::routing::Totals::of(all.iter().map(|counted| &counted.totals)) {
            let (counts, made) = totals.read(meanwhile);
            return (sizes(counts), made);
        }
        let made = meanwhile();
        (sizes(all.iter().map(|counted| ints(&counted.totals)).collect()), made)
    }
}

pub(in crate::ops) fn table(values: Vec<i32>, shape: [usize; 2], device: &Device) -> Tensor<2, Int> {
    let device = device.clone().without_autodiff();
    Tensor::from_data(TensorData::new(values, shape), (&device, DType::I32))
}

fn ints<const D: usize>(x: &Tensor<D, Int>) -> Vec<i32> {
    x.clone().into_data().convert::<i32>().try_to_vec().expect("converted to i32")
}

fn floats<const D: usize>(x: &Tensor<D>) -> Vec<f64> {
    x.clone().into_data().convert::<f64>().try_to_vec().expect("converted to f64")
}
