//! Which experts a token uses, decided on the host.

use super::config::{ExpertGroups, RouterConfig};

/// The experts of some tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    top_k: usize,
    /// `top_k` for each token, ascending, then [`NONE`].
    experts: Vec<u32>,
}

const NONE: u32 = u32::MAX;

impl Choice {
    /// No experts for `tokens` tokens.
    pub fn none(tokens: usize, top_k: usize) -> Self {
        Self { top_k, experts: vec![NONE; tokens * top_k] }
    }

    /// The choice that [`Choice::into_list`] is of.
    pub fn from_list(top_k: usize, experts: Vec<u32>) -> Self {
        Self { top_k, experts }
    }

    /// `top_k` entries for each token.
    pub fn into_list(self) -> Vec<u32> {
        self.experts
    }

    /// The most experts of a token.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.experts.len() / self.top_k
    }

    /// The experts of a token, ascending.
    pub fn of(&self, token: usize) -> impl Iterator<Item = usize> + '_ {
        let experts = &self.experts[token * self.top_k..(token + 1) * self.top_k];
        experts.iter().take_while(|expert| **expert != NONE).map(|expert| *expert as usize)
    }

    /// Replaces the experts of a token.
    pub fn set(&mut self, token: usize, experts: impl IntoIterator<Item = usize>) {
        let slots = &mut self.experts[token * self.top_k..(token + 1) * self.top_k];
        slots.fill(NONE);
        slots.iter_mut().zip(experts).for_each(|(slot, expert)| *slot = expert as u32);
        slots.sort_unstable();
    }

    /// The tokens of each expert, ascending.
    pub fn by_expert(&self, experts: usize) -> Vec<Vec<usize>> {
        let mut tokens = vec![Vec::new(); experts];
        for token in 0..self.tokens() {
            self.of(token).for_each(|expert| tokens[expert].push(token));
        }
        tokens
    }

    /// The tokens of each expert, for each of `samples` samples: token `t` is of sample `t % samples`.
    pub fn counts_of(&self, samples: usize, experts: usize) -> Vec<usize> {
        let mut counts = vec![0; samples * experts];
        for token in 0..self.tokens() {
            self.of(token).for_each(|expert| counts[token % samples * experts + expert] += 1);
        }
        counts
    }

    /// Number of tokens of each expert.
    pub fn counts(&self, experts: usize) -> Vec<usize> {
        let mut counts = vec![0; experts];
        self.experts.iter().filter(|expert| **expert != NONE).for_each(|expert| counts[*expert as usize] += 1);
        counts
    }
}

/// The experts of the first `valid` of `tokens` tokens; the others have none. `scores` are `[tokens, experts]`,
/// whatever experts are compared by, and `bias` is added to them. Of experts with the same score the first one is
/// chosen.
pub(super) fn choose(
    scores: &[f64],
    [tokens, valid]: [usize; 2],
    config: &RouterConfig,
    bias: Option<&[f64]>,
) -> Choice {
    let mut choice = Choice::none(tokens, config.top_k);
    let experts = scores.len() / tokens.max(1);
    let (mut row, mut found) = (vec![0.0; experts], Vec::new());
    for token in 0..valid {
        row.copy_from_slice(&scores[token * experts..(token + 1) * experts]);
        if let Some(bias) = bias {
            row.iter_mut().zip(bias).for_each(|(score, bias)| *score += bias);
        }
        if let Some(groups) = config.groups {
            keep_best_groups(&mut row, groups, &mut found);
        }
        find_best(&row, config.top_k, &mut found);
        choice.set(token, found.iter().map(|(_, expert)| *expert));
    }
    choice
}

/// The experts by score alone, without groups or bias: what load-balancing losses count.
pub(super) fn choose_freely(scores: &[f64], sizes: [usize; 2], config: &RouterConfig) -> Choice {
    choose(scores, sizes, &RouterConfig { groups: None, ..*config }, None)
}

/// Takes the experts of all but the best groups out.
fn keep_best_groups(
    scores: &mut [f64],
    ExpertGroups { groups, top_k, best }: ExpertGroups,
    found: &mut Vec<(f64, usize)>,
) {
    let size = scores.len() / groups;
    let mut totals = Vec::with_capacity(groups);
    for group in scores.chunks_exact(size) {
        find_best(group, best.min(size), found);
        totals.push(found.iter().map(|(score, _)| score).sum());
    }
    find_best(&totals, top_k, found);
    for (group, scores) in scores.chunks_exact_mut(size).enumerate() {
        if !found.iter().any(|(_, kept)| *kept == group) {
            scores.fill(f64::NEG_INFINITY);
        }
    }
}

/// The `count` greatest values with their places, the first ones of equal values; a NaN is the smallest.
fn find_best(values: &[f64], count: usize, found: &mut Vec<(f64, usize)>) {
    found.clear();
    for (place, &value) in values.iter().enumerate() {
        let value = if value.is_nan() { f64::NEG_INFINITY } else { value };
        if found.len() == count && found.last().is_none_or(|(least, _)| value <= *least) {
            continue;
        }
        let at = found.partition_point(|(other, _)| *other >= value);
        found.truncate(count - 1);
        found.insert(at, (value, place));
    }
}

/// The places of the `count` greatest values, the first ones of equal values; a NaN is the smallest.
pub(super) fn best(values: &[f64], count: usize) -> Vec<usize> {
    let mut found = Vec::new();
    find_best(values, count, &mut found);
    found.into_iter().map(|(_, place)| place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_equal_values_is_best() {
        assert_eq!(best(&[1.0, 3.0, 3.0, 2.0, 3.0], 2), [1, 2]);
        assert_eq!(best(&[0.0, f64::NAN, -1.0], 3), [0, 2, 1]);
        assert_eq!((best(&[], 2), best(&[1.0], 0)), (vec![], vec![]));
    }

    #[test]
    fn groups_are_compared_by_their_two_best_experts() {
        let groups = Some(ExpertGroups { groups: 3, top_k: 1, best: 2 });
        let config = RouterConfig { groups, ..RouterConfig::new(2) };
        // The best expert is alone in its group; the last group has the best pair.
        let scores = [0.99, 0.01, 0.01, 0.73, 0.62, 0.01, 0.88, 0.82, 0.5];
        let chosen = |bias: Option<&[f64]>| choose(&scores, [1, 1], &config, bias).of(0).collect::<Vec<_>>();
        assert_eq!(chosen(None), [6, 7]);
        let bias = [0.0, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        assert_eq!(chosen(Some(&bias)), [0, 1]);
        assert_eq!(choose_freely(&scores, [1, 1], &config).of(0).collect::<Vec<_>>(), [0, 6]);
        // DeepSeek-V2's.
        let groups = groups.map(|groups| ExpertGroups { best: 1, ..groups });
        let config = RouterConfig { groups, ..config };
        assert_eq!(choose(&scores, [1, 1], &config, None).of(0).collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn tokens_that_do_not_count_use_nothing() {
        let choice = choose(&[1.0, 2.0, 2.0, 1.0, 0.0, 0.0], [3, 2], &RouterConfig::new(1), None);
        assert_eq!(choice.by_expert(2), [vec![1], vec![0]]);
        assert_eq!(choice.counts(2), [1, 1]);
        assert_eq!(Choice::from_list(1, choice.clone().into_list()), choice);
    }
}
