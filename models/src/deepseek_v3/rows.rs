//! Where other systems have the matrix rows of a latent attention's projections.
//!
//! Hugging Face and Megatron-LM order a head `[not rotated | rotated]` and rotate neighbours with each other; ours is
//! `[rotated | not rotated]`, and the first half of the rotated features is rotated with the second. Scores are the
//! same.

use std::ops::Range;

use super::config::DeepSeekV3Config;

/// Matrix rows of the queries' projection, head by head.
pub(super) fn queries(config: &DeepSeekV3Config) -> Vec<Range<usize>> {
    let (plain, rotated) = (config.qk_nope_head_dim, config.qk_rope_head_dim);
    let head = |head: usize| {
        let start = head * (plain + rotated);
        let mut rows = rotated_rows(config, start + plain);
        rows.push(start..start + plain);
        rows
    };
    (0..config.num_attention_heads).flat_map(head).collect()
}

/// Matrix rows of the projection to the latent of keys and values, and to the shared key.
pub(super) fn latent(config: &DeepSeekV3Config) -> Vec<Range<usize>> {
    let mut rows = Vec::from([0..config.kv_lora_rank]);
    rows.extend(rotated_rows(config, config.kv_lora_rank));
    rows
}

/// The rotated matrix rows from `start` on: of each pair the first, then of each pair the second.
fn rotated_rows(config: &DeepSeekV3Config, start: usize) -> Vec<Range<usize>> {
    let end = start + config.qk_rope_head_dim;
    match config.rope_interleave {
        true => (start..end).step_by(2).chain((start + 1..end).step_by(2)).map(|row| row..row + 1).collect(),
        false => Vec::from([start..end]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_pairs() {
        let config = DeepSeekV3Config {
            num_attention_heads: 2,
            qk_nope_head_dim: 3,
            qk_rope_head_dim: 4,
            kv_lora_rank: 5,
            ..DeepSeekV3Config::tiny()
        };
        let flat = |rows: Vec<Range<usize>>| rows.into_iter().flatten().collect::<Vec<_>>();
        assert_eq!(flat(queries(&config)), [3, 5, 4, 6, 0, 1, 2, 10, 12, 11, 13, 7, 8, 9]);
        assert_eq!(flat(latent(&config)), [0, 1, 2, 3, 4, 5, 7, 6, 8]);
        let halves = DeepSeekV3Config { rope_interleave: false, ..config };
        assert_eq!(flat(latent(&halves)), [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    }
}
