//! Routing of tokens on the device: the experts of each token, the tokens of each expert, and the destination of each
//! copy, all as `i32` tables. NVIDIA GPUs have kernels (`kernels_cubecl::pointwise::moe`). Elsewhere, and for sizes
//! without a kernel, the tables are computed on the host. Both give the same tables.

mod on_host;
mod runs;
pub(crate) mod tables;
#[cfg(test)]
mod tests;

pub use runs::Runs;
pub use tables::{OrderedCopies, RowOrder, RowStarts, Run, Selection, TokenCounts};

use tables::table;

use burn::tensor::{Bool, Int, Tensor, TensorData};

use super::row_map::RowMap;

/// Tokens that are counted together.
const CHUNK: usize = 64;

/// The selected experts of each token.
#[derive(Clone, Debug)]
pub struct ExpertChoice {
    /// `[tokens, top_k]`: the experts of a token, ascending, padded with -1.
    pub(crate) choice: Tensor<2, Int>,
    /// Number of experts.
    pub(crate) experts: usize,
}

/// Selects experts for the first `valid` tokens by `scores [tokens, experts]` plus `bias [experts]`: those with the
/// greatest scores. With groups, only experts of the best groups are eligible; the score of a group is the sum of its
/// two best experts. Of equal scores the first one wins; a NaN is minus infinity. Sums and comparisons are f64.
///
/// ```
/// use ops::moe::routing::{Selection, choose};
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
    if let Some(choice) = crate::cuda::routing::choose(&scores, bias.as_ref(), valid, selection) {
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
        if let Some(mask) = crate::cuda::routing::spread(&self.choice, self.experts) {
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
        if let Some((before, totals)) = crate::cuda::routing::count(&self.choice, self.experts, samples) {
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
        if let Some(maps) = crate::cuda::routing::place(&self.choice, &counted.before, starts) {
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

    /// The copies of the tokens in the order of their experts, in one launch on an NVIDIA GPU; `None` elsewhere, and for
    /// more copies than a decode step has. `weights [tokens, experts]` are the probabilities or, with `softmax`, logits over
    /// the chosen of which they are the softmax. Every token has all of its experts.
    pub fn in_order(&self, weights: &Tensor<2>, softmax: bool) -> Option<OrderedCopies> {
        assert_eq!(weights.dims(), [self.tokens(), self.experts], "routing: weights of {} tokens", self.tokens());
        #[cfg(feature = "cuda")]
        {
            crate::cuda::routing::in_order(&self.choice, weights, softmax)
        }
        #[cfg(not(feature = "cuda"))]
        {
            let _ = softmax;
            None
        }
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
        if let Some(maps) = crate::cuda::routing::place_in_order(&self.choice, counted, order) {
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
        if let Some(totals) = crate::cuda::routing::Totals::of(all.iter().map(|counted| &counted.totals)) {
            let (counts, made) = totals.read(meanwhile);
            return (sizes(counts), made);
        }
        let made = meanwhile();
        (sizes(all.iter().map(|counted| ints(&counted.totals)).collect()), made)
    }
}

fn ints<const D: usize>(x: &Tensor<D, Int>) -> Vec<i32> {
    x.clone().into_data().convert::<i32>().try_to_vec().expect("converted to i32")
}

fn floats<const D: usize>(x: &Tensor<D>) -> Vec<f64> {
    x.clone().into_data().convert::<f64>().try_to_vec().expect("converted to f64")
}
