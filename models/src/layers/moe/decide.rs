//! Which experts a rank's tokens use: decided on the host, or on the device, where the choice then stays. The host
//! knows how many tokens each expert has; the sizes of everything that follows depend on that.

use std::ops::Range;

use backend_dist::ops::moe::RowMap;
use backend_dist::ops::moe::routing::{self, ExpertChoice, RowOrder, RowStarts, Selection, TokenCounts};
use burn::tensor::{Bool, Tensor, TensorData};

use super::config::{BalanceOver, RouterConfig};
use super::routing_replay::Purpose;
use super::select::{Choice, choose, choose_freely};
use crate::micro_batch::{MicroBatch, sub_ranges};

/// A rank's own tokens, position by position and in a position sample by sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tokens {
    /// The first ones, which count; the others are padding.
    pub valid: usize,
    /// Samples of the micro-batch.
    pub samples: usize,
    /// The first of their positions among those of the tensor parallel group, and how many these are.
    own: [usize; 2],
}

impl Tokens {
    /// The tokens of `samples` samples at some of the `all` positions of a tensor parallel group.
    pub fn of(positions: Range<usize>, all: usize, samples: usize, batch: &MicroBatch) -> Self {
        let own = [positions.start, all];
        let end = batch.filled_from.unwrap_or(usize::MAX);
        let counts = |place: Range<usize>| place.end.min(end).saturating_sub(place.start);
        let valid: usize = sub_ranges(&batch.positions(all), positions).into_iter().map(counts).sum();
        Self { valid: valid * samples, samples, own }
    }

    /// The positions in the sequence that count.
    pub fn positions(self, batch: &MicroBatch) -> impl Iterator<Item = usize> {
        let [first, all] = self.own;
        let valid = first..first + self.valid / self.samples;
        sub_ranges(&batch.positions(all), valid).into_iter().flatten()
    }
}

/// The experts of a rank's tokens.
pub(super) enum Choices {
    /// On the host.
    Host(Choice),
    /// On the device.
    Device(Box<DeviceChoice>),
}

/// A choice that the host knows the counts of.
pub(super) struct DeviceChoice {
    pub chosen: ExpertChoice,
    before: TokenCounts,
    /// Tokens of each expert, before any was dropped.
    counts: Vec<usize>,
    /// Tokens that an expert takes, the first ones.
    room: Option<usize>,
}

/// A choice that the host does not know the counts of yet, of which every expert takes all that use it.
#[derive(Clone, Copy)]
pub(super) struct Uncounted<'a> {
    chosen: &'a ExpertChoice,
    before: &'a TokenCounts,
    /// `[tokens, experts]`.
    pub probs: &'a Tensor<2>,
    /// Copies of tokens in all.
    pub copies: usize,
}

impl<'a> Uncounted<'a> {
    /// The choice of `tokens` with their probabilities.
    pub fn new((chosen, before): (&'a ExpertChoice, &'a TokenCounts), probs: &'a Tensor<2>, tokens: Tokens) -> Self {
        let [_, top_k] = chosen.table().dims();
        Self { chosen, before, probs, copies: tokens.valid * top_k }
    }

    /// Copies of the tokens and of their slots, in `order`.
    pub fn place(&self, order: &RowOrder) -> (RowMap, RowMap) {
        self.chosen.place_in_order(self.before, order)
    }
}

/// What the host knows of every choice, before anything is dropped.
pub(super) struct Counts {
    /// Tokens of each expert.
    pub routed: Vec<usize>,
    /// What a load-balancing loss counts: tokens of each expert by score alone, over sequences for each sample. Empty
    /// without one.
    pub counted: Vec<f64>,
}

/// Samples that a load-balancing loss counts apart.
pub(super) fn apart(over: BalanceOver, tokens: Tokens) -> usize {
    if over == BalanceOver::Sequence { tokens.samples } else { 1 }
}

/// What experts are compared by does not decide alone: groups or a bias do too.
fn is_free(config: &RouterConfig, bias: Option<&Tensor<1>>) -> bool {
    config.groups.is_none() && bias.is_none()
}

/// Decides on the host by `scores [tokens, experts]`, without a graph; `replayed` may decide otherwise.
pub(super) fn on_host(
    scores: &Tensor<2>,
    tokens: Tokens,
    config: &RouterConfig,
    bias: Option<Tensor<1>>,
    balance: Option<BalanceOver>,
    replayed: impl Fn(Purpose, Choice) -> Choice,
) -> (Choice, Counts) {
    let [count, experts] = scores.dims();
    let (values, is_free) = (host(scores), is_free(config, bias.as_ref()));
    let sizes = [count, tokens.valid];
    let choice = choose(&values, sizes, config, bias.map(|bias| host(&bias)).as_deref());
    let choice = replayed(Purpose::Used, choice);
    let counted = balance.map(|over| {
        let samples = apart(over, tokens);
        if is_free {
            choice.counts_of(samples, experts)
        } else {
            replayed(Purpose::Counted, choose_freely(&values, sizes, config)).counts_of(samples, experts)
        }
    });
    let routed = choice.counts(experts);
    (choice, Counts { routed, counted: numbers(counted.unwrap_or_default()) })
}

fn selection(config: &RouterConfig) -> Selection {
    Selection { top_k: config.top_k, groups: config.groups.map(|groups| [groups.groups, groups.top_k]) }
}

/// Decides on the device for the first `valid` tokens.
pub(super) fn uncounted(
    scores: &Tensor<2>,
    valid: usize,
    config: &RouterConfig,
    bias: Option<Tensor<1>>,
) -> ExpertChoice {
    let bias = bias.map(|bias| bias.without_autodiff().cast(scores.dtype()));
    routing::choose(scores.clone(), bias, valid, selection(config))
}

/// Decides on the device; `meanwhile` is computed from the choice before the host waits for the counts.
pub(super) fn on_device<T>(
    scores: &Tensor<2>,
    tokens: Tokens,
    config: &RouterConfig,
    bias: Option<Tensor<1>>,
    balance: Option<BalanceOver>,
    meanwhile: impl FnOnce((&ExpertChoice, &TokenCounts)) -> T,
) -> (DeviceChoice, Counts, T) {
    let is_free = is_free(config, bias.as_ref());
    let (how, chosen) = (selection(config), uncounted(scores, tokens.valid, config, bias));
    let before = chosen.count(1);
    let counted = balance.and_then(|over| match apart(over, tokens) {
        1 if is_free => None,
        samples if is_free => Some(chosen.count(samples)),
        samples => {
            let how = Selection { groups: None, ..how };
            Some(routing::choose(scores.clone(), None, tokens.valid, how).count(samples))
        }
    });
    let all: Vec<&TokenCounts> = [Some(&before), counted.as_ref()].into_iter().flatten().collect();
    let (counts, made) = TokenCounts::read(&all, || meanwhile((&chosen, &before)));
    let mut counts = counts.into_iter();
    let routed = counts.next().expect("the counts of the choice");
    let counted = match balance {
        Some(_) => numbers(counts.next().unwrap_or_else(|| routed.clone())),
        None => Vec::new(),
    };
    let choice = DeviceChoice { chosen, before, counts: routed.clone(), room: None };
    (choice, Counts { routed, counted }, made)
}

fn numbers(counts: Vec<usize>) -> Vec<f64> {
    counts.into_iter().map(|count| count as f64).collect()
}

impl DeviceChoice {
    /// Leaves the first `room` tokens to each expert.
    pub fn drop_last(&mut self, room: usize) {
        self.room = Some(room);
    }

    /// How many tokens each expert gets, or as many as it is padded to.
    pub fn counts(&self, pad_to: Option<usize>) -> Vec<usize> {
        let left = self.counts.iter().map(|count| self.room.map_or(*count, |room| room.min(*count)));
        left.map(|count| pad_to.map_or(count, |room| count.max(room))).collect()
    }

    /// Copies of the tokens and of their slots, where `starts` puts them.
    pub fn place(&self, starts: RowStarts) -> (RowMap, RowMap) {
        self.chosen.place(&self.before, &RowStarts { capacity: self.room, ..starts })
    }
}

/// `[tokens, experts]` on the device of `like`: whether a token does not use an expert.
pub(super) fn others(choice: &Choice, like: &Tensor<2>) -> Tensor<2, Bool> {
    let [tokens, experts] = like.dims();
    let mut others = vec![true; tokens * experts];
    (0..tokens).for_each(|token| choice.of(token).for_each(|expert| others[token * experts + expert] = false));
    Tensor::from_data(TensorData::new(others, [tokens, experts]), &like.device())
}

pub(super) fn host<const D: usize>(x: &Tensor<D>) -> Vec<f64> {
    x.clone().into_data().convert::<f64>().try_to_vec().expect("converted to f64")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fills_a_sequence_up_does_not_count() {
        let batch = |filled_from| MicroBatch { filled_from, ..MicroBatch::default() };
        let of = |positions, filled_from| {
            let (batch, samples) = (batch(filled_from), 2);
            let tokens = Tokens::of(positions, 8, samples, &batch);
            (tokens.valid, tokens.positions(&batch).collect::<Vec<_>>())
        };
        assert_eq!(of(0..4, None), (8, vec![0, 1, 2, 3]));
        assert_eq!(of(4..8, Some(5)), (2, vec![4]));
        assert_eq!(of(4..8, Some(3)), (0, vec![]));
        // Positions after the last one.
        assert_eq!(of(6..9, None), (4, vec![6, 7]));
    }
}
