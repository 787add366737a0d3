//! Experts with limited room, after Megatron-LM's `apply_router_token_dropping` in
//! `megatron/core/transformer/moe/moe_utils.py`.

use super::config::{Capacity, DropPolicy};
use super::select::{Choice, best};

/// The most tokens that each of `experts` experts takes of `tokens` tokens of a rank: `ceil(tokens top_k / experts
/// factor)`.
pub(super) fn room(tokens: usize, top_k: usize, experts: usize, capacity: &Capacity) -> usize {
    ((tokens * top_k) as f64 / experts as f64 * capacity.factor).ceil() as usize
}

/// Takes from each expert the tokens that it has no room for: those with the lowest `probability(token, expert)`, or
/// the last ones.
pub(super) fn drop_tokens(
    choice: &mut Choice,
    experts: usize,
    room: usize,
    policy: DropPolicy,
    probability: impl Fn(usize, usize) -> f64,
) {
    for (expert, tokens) in choice.by_expert(experts).into_iter().enumerate() {
        if tokens.len() <= room {
            continue;
        }
        let mut stays = vec![false; tokens.len()];
        match policy {
            DropPolicy::Position => stays[..room].fill(true),
            DropPolicy::Probs => {
                let probabilities: Vec<f64> = tokens.iter().map(|token| probability(*token, expert)).collect();
                best(&probabilities, room).into_iter().for_each(|place| stays[place] = true);
            }
        }
        for (&token, _) in tokens.iter().zip(&stays).filter(|(_, stays)| !**stays) {
            let left: Vec<usize> = choice.of(token).filter(|other| *other != expert).collect();
            choice.set(token, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_to_the_first(tokens: usize) -> Choice {
        let mut choice = Choice::none(tokens, 2);
        (0..tokens).for_each(|token| choice.set(token, [0, 1 + token % 2]));
        choice
    }

    #[test]
    fn room_is_rounded_up() {
        let capacity = |factor| Capacity { factor, policy: DropPolicy::Probs, pad: false };
        assert_eq!(room(10, 2, 8, &capacity(1.0)), 3);
        assert_eq!(room(10, 2, 8, &capacity(1.5)), 4);
    }

    #[test]
    fn the_last_or_the_least_probable_are_dropped() {
        let probability = |token: usize, _| [0.5, 0.9, 0.1, 0.9][token];
        for (policy, left) in [(DropPolicy::Position, [0, 1]), (DropPolicy::Probs, [1, 3])] {
            let mut choice = all_to_the_first(4);
            drop_tokens(&mut choice, 3, 2, policy, probability);
            assert_eq!(choice.by_expert(3), [left.to_vec(), vec![0, 2], vec![1, 3]], "{policy:?}");
        }
        let mut choice = all_to_the_first(4);
        drop_tokens(&mut choice, 3, 4, DropPolicy::Position, probability);
        assert_eq!(choice, all_to_the_first(4));
    }
}
