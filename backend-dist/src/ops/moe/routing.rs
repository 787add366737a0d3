//! Routing of tokens without their numbers on the host: which experts a token uses, how many tokens each expert has,
//! and where their copies stand. Everything is a table of `i32`. NVIDIA GPUs have kernels
//! (`kernels_cubecl::pointwise::experts`); elsewhere, and for sizes without a kernel, the tables come to the host and
//! go back. Both give the same tables.

mod on_host;
mod runs;
#[cfg(test)]
mod tests;

pub use runs::{Run, Runs};

use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};

use super::rows::RowMap;

/// Tokens whose experts are counted together.
const CHUNK: usize = 64;

/// How a token chooses experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Experts of a token.
    pub top_k: usize,
    /// Groups of neighbouring experts, and how many of them a token may use.
    pub groups: Option<[usize; 2]>,
}

/// A choice of experts.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// `[tokens, top_k]`: the experts of a token, ascending, then -1.
    pub(in crate::ops) choice: Tensor<2, Int>,
    /// Experts to choose from.
    pub(in crate::ops) experts: usize,
}

/// How many tokens use an expert.
#[derive(Clone, Debug)]
pub struct Counted {
    /// `[chunks, samples · experts]`: tokens of a sample in front of a chunk of 64 of them.
    pub(in crate::ops) before: Tensor<2, Int>,
    /// `[samples · experts]`.
    pub(in crate::ops) totals: Tensor<1, Int>,
}

/// Where the rows of experts stand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Starts {
    /// `[parts, experts]`: the first row of an expert for each of the members that share it, ascending with the part;
    /// `None` if no row is made.
    pub rows: Vec<Option<usize>>,
    /// Members that share an expert.
    pub parts: usize,
    /// Neighbouring experts that the same members share.
    pub each: usize,
    /// Tokens that an expert takes, the first ones; `None` is all of them.
    pub room: Option<usize>,
    /// Rows in all.
    pub count: usize,
}

/// Rows of experts one behind the other without gaps: by piece of every member's experts, member, part, and expert. So
/// they can stand before the host knows the counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// Members that share an expert.
    pub parts: usize,
    /// Neighbouring experts that the same members share.
    pub each: usize,
    /// Pieces of a member's experts: piece `i` is the experts from `each i / pieces` to `each (i + 1) / pieces` of
    /// them.
    pub pieces: usize,
    /// Rows in all.
    pub count: usize,
}

impl Order {
    /// Where the rows of each expert begin if `counts[e]` tokens use it.
    pub fn starts(&self, counts: &[usize]) -> Starts {
        let (Self { parts, each, pieces, count }, experts) = (*self, counts.len());
        let mut rows = vec![None; parts * experts];
        let mut start = 0;
        for (piece, member) in (0..pieces).flat_map(|piece| (0..experts / each).map(move |member| (piece, member))) {
            let bound = |piece| member * each + each * piece / pieces;
            for part in 0..parts {
                for expert in bound(piece)..bound(piece + 1) {
                    rows[part * experts + expert] = Some(start);
                    start += counts[expert];
                }
            }
        }
        Starts { rows, parts, each, room: None, count }
    }
}

/// Chooses experts for the first `valid` tokens by `scores [tokens, experts]`, to which `bias [experts]` is added:
/// those with the greatest scores. With groups only the experts of the best groups count, where a group is as good as
/// the sum of its two best experts. Of equal values the first one is better, a NaN is minus infinity. Sums and
/// comparisons are f64.
///
/// # Panics
/// If the sizes contradict each other.
pub fn choose(scores: Tensor<2>, bias: Option<Tensor<1>>, valid: usize, how: Selection) -> Chosen {
    let [tokens, experts] = scores.dims();
    let Selection { top_k, groups } = how;
    assert!(valid <= tokens && tokens > 0, "routing: {valid} of {tokens} tokens count");
    assert!((1..=experts).contains(&top_k), "routing: {top_k} of {experts} experts");
    if let Some([groups, top]) = groups {
        let divided = groups > 0 && experts.is_multiple_of(groups) && (1..=groups).contains(&top);
        assert!(divided && top_k <= experts / groups * top, "routing: {top} of {groups} groups of {experts} experts");
    }
    let scores = scores.without_autodiff();
    let bias = bias.map(Tensor::without_autodiff);
    #[cfg(feature = "cuda")]
    if let Some(choice) = crate::ops::cuda::routing::choose(&scores, bias.as_ref(), valid, how) {
        return Chosen { choice, experts };
    }
    let (device, bias) = (scores.device(), bias.map(|bias| floats(&bias)));
    let choice = on_host::choose(&floats(&scores), [tokens, experts, valid], bias.as_deref(), how);
    Chosen { choice: table(choice, [tokens, top_k], &device), experts }
}

impl Chosen {
    /// A choice of `experts` experts: `choice [tokens, top_k]`, ascending for every token, then -1.
    pub fn of(choice: Tensor<2, Int>, experts: usize) -> Self {
        Self { choice, experts }
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.choice.dims()[0]
    }

    /// `[tokens, top_k]`: the experts of a token, ascending, then -1.
    pub fn table(&self) -> Tensor<2, Int> {
        self.choice.clone()
    }

    /// `[tokens, experts]`: whether a token does not use an expert.
    pub fn others(&self) -> Tensor<2, Bool> {
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

    /// The tokens of each expert, for each of `samples` samples: token `t` is of sample `t % samples`.
    ///
    /// # Panics
    /// If the samples do not divide the tokens.
    pub fn count(&self, samples: usize) -> Counted {
        let tokens = self.tokens();
        assert!(samples > 0 && tokens.is_multiple_of(samples), "routing: {tokens} tokens of {samples} samples");
        #[cfg(feature = "cuda")]
        if let Some((before, totals)) = crate::ops::cuda::routing::count(&self.choice, self.experts, samples) {
            return Counted { before, totals };
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
        Counted { before: table(before, [chunks, width], &device), totals }
    }

    /// The maps that make rows of copies of tokens, and of their slots: slot `token · experts + expert`. Tokens of an
    /// expert stand in their order; rows without a token are zero. `counted` is [`Chosen::count`] of one sample.
    ///
    /// # Panics
    /// If the sizes contradict each other.
    pub fn place(&self, counted: &Counted, starts: &Starts) -> (RowMap, RowMap) {
        let ([tokens, top_k], experts) = (self.choice.dims(), self.experts);
        let Starts { ref rows, parts, each, count, .. } = *starts;
        assert_eq!(rows.len(), parts * experts, "routing: rows of {parts} parts of {experts} experts");
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
        let copies = map(placed.tokens_of, placed.of_tokens, tokens, top_k * parts);
        (copies, map(placed.slots_of, placed.of_slots, tokens * experts, parts))
    }

    /// [`Chosen::place`] where the rows stand in `order`, which NVIDIA GPUs do without the host's knowing the counts.
    /// Rows behind the last of `order` are left out.
    ///
    /// # Panics
    /// If the sizes contradict each other.
    pub fn place_in_order(&self, counted: &Counted, order: &Order) -> (RowMap, RowMap) {
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

impl Counted {
    /// The counts on the host, `[samples, experts]` of each, and what `meanwhile` gives: work that it issues need not
    /// be done when the counts arrive. Waits for the device.
    ///
    /// # Panics
    /// If the device failed.
    pub fn read<T>(all: &[&Counted], meanwhile: impl FnOnce() -> T) -> (Vec<Vec<usize>>, T) {
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
