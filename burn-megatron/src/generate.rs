//! Text from a trained model, token by token: the whole window goes through the model for every new token.

use backend_dist::launch::Rank;
use burn::tensor::{DType, Int, Tensor, TensorData};
use models::CausalLm;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the likeliest token, 1 draws from the model's distribution, more flattens it.
    pub temperature: f64,
    /// Draw among so many likeliest tokens only; `None` among all.
    pub top_k: Option<usize>,
    /// Seed of the draws; the same seed gives the same text in every layout.
    pub seed: u64,
}

impl Default for Sampling {
    /// Temperature 0.8 among the 50 likeliest tokens.
    fn default() -> Self {
        Self { temperature: 0.8, top_k: Some(50), seed: 1 }
    }
}

/// Continues `prompt` by `new_tokens` tokens and returns the new ones.
///
/// The model sees at most the last `window` tokens. All tensor-parallel ranks of a model make the same call and get the
/// same tokens. `model` may be one with or without autodiff; the latter is faster.
///
/// # Panics
/// If the prompt or the window is empty.
pub fn generate<M: CausalLm>(
    rank: &Rank,
    model: &M,
    prompt: &[i64],
    new_tokens: usize,
    window: usize,
    sampling: &Sampling,
) -> Vec<i64> {
    assert!(!prompt.is_empty() && window > 0, "generation needs a prompt and a window of at least one token");
    let layout = rank.mesh.layout();
    let multiple = if layout.sequence_parallel() { layout.tp } else { 1 };
    let mut tokens = prompt.to_vec();
    for index in 0..new_tokens {
        let seen = &tokens[tokens.len().saturating_sub(window)..];
        let last = seen.len() - 1;
        // A causal model does not see what follows, so padding changes nothing before it.
        let mut row = seen.to_vec();
        row.resize(seen.len().next_multiple_of(multiple), 0);
        let shape = [1, row.len()];
        let input = Tensor::<2, Int>::from_data(TensorData::new(row, shape), (&rank.device, DType::I64));
        let logits = model.logits(input).slice([0..1, last..last + 1]).into_data();
        let logits: Vec<f64> = logits.iter::<f64>().collect();
        tokens.push(choose(&logits, sampling, uniform(sampling.seed, index as u64)) as i64);
    }
    tokens.split_off(prompt.len())
}

/// Index of the chosen token, given a number drawn from `[0, 1)`.
fn choose(logits: &[f64], sampling: &Sampling, draw: f64) -> usize {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    if sampling.temperature <= 0.0 {
        return order[0];
    }
    order.truncate(sampling.top_k.unwrap_or(logits.len()).max(1));
    let weight = |&token: &usize| ((logits[token] - logits[order[0]]) / sampling.temperature).exp();
    let total: f64 = order.iter().map(weight).sum();
    let mut left = draw * total;
    for token in &order {
        left -= weight(token);
        if left < 0.0 {
            return *token;
        }
    }
    order[order.len() - 1]
}

/// A number in `[0, 1)` for an index: SplitMix64 (Steele, Lea and Flood, 2014).
fn uniform(seed: u64, index: u64) -> f64 {
    let mut z = seed.wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f64; 4] = [0.0, 2.0, 1.0, -30.0];

    #[test]
    fn greedy_takes_the_likeliest() {
        let greedy = Sampling { temperature: 0.0, top_k: None, seed: 0 };
        assert_eq!(choose(&LOGITS, &greedy, 0.99), 1);
    }

    #[test]
    fn draws_follow_the_softmax_over_the_likeliest() {
        let sampling = Sampling { temperature: 1.0, top_k: Some(2), seed: 0 };
        let mut counts = [0; 4];
        for index in 0..20_000 {
            counts[choose(&LOGITS, &sampling, uniform(7, index))] += 1;
        }
        let share = counts[1] as f64 / 20_000.0;
        let expected = 1.0 / (1.0 + (-1.0f64).exp());
        assert!((share - expected).abs() < 0.01, "{share} instead of {expected}");
        assert_eq!((counts[0], counts[3]), (0, 0));
    }
}
