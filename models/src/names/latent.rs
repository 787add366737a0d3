//! Latent attention under other systems' names, and where they have the matrix rows of its projections.
//!
//! Hugging Face and Megatron-LM order a head `[not rotated | rotated]` and rotate neighbours with each other; ours is
//! `[rotated | not rotated]`, and the first half of the rotated features is rotated with the second. Scores are the
//! same.

use std::ops::Range;

use super::{Foreign, NameMap};
use crate::layers::MlaConfig;

/// The tensors of latent attention; `called` has other systems' names of Hugging Face's parts.
pub(crate) fn latent(
    map: &mut NameMap,
    config: &MlaConfig,
    ours: &str,
    theirs: &str,
    called: impl Fn(&'static str) -> &'static str,
) {
    let MlaConfig { hidden, heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, .. } = *config;
    let queries = heads * (qk_nope_head_dim + qk_rope_head_dim);
    let mut add = |part: &'static str, shape: &[usize], rows| {
        let (name, shape) = (format!("{theirs}.{}.weight", called(part)), shape.to_vec());
        map.add(format!("{ours}.{part}.weight"), Foreign { name, transposed: false, rows, stack: None, shape });
    };
    match config.q_lora_rank {
        Some(rank) => {
            add("q_a_proj", &[rank, hidden], None);
            add("q_a_layernorm", &[rank], None);
            add("q_b_proj", &[queries, rank], Some(query_rows(config)));
        }
        None => add("q_proj", &[queries, hidden], Some(query_rows(config))),
    }
    add("kv_a_proj_with_mqa", &[kv_lora_rank + qk_rope_head_dim, hidden], Some(latent_rows(config)));
    add("kv_a_layernorm", &[kv_lora_rank], None);
    add("kv_b_proj", &[heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank], None);
    add("o_proj", &[hidden, heads * v_head_dim], None);
}

/// Matrix rows of the queries' projection, head by head.
fn query_rows(config: &MlaConfig) -> Vec<Range<usize>> {
    let (plain, rotated) = (config.qk_nope_head_dim, config.qk_rope_head_dim);
    let head = |head: usize| {
        let start = head * (plain + rotated);
        let mut rows = rotated_rows(config, start + plain);
        rows.push(start..start + plain);
        rows
    };
    (0..config.heads).flat_map(head).collect()
}

/// Matrix rows of the projection to the latent of keys and values, and to the shared key.
fn latent_rows(config: &MlaConfig) -> Vec<Range<usize>> {
    let mut rows = Vec::from([0..config.kv_lora_rank]);
    rows.extend(rotated_rows(config, config.kv_lora_rank));
    rows
}

/// The rotated matrix rows from `start` on: of each pair the first, then of each pair the second.
fn rotated_rows(config: &MlaConfig, start: usize) -> Vec<Range<usize>> {
    let end = start + config.qk_rope_head_dim;
    match config.interleaved {
        true => (start..end).step_by(2).chain((start + 1..end).step_by(2)).map(|row| row..row + 1).collect(),
        false => Vec::from([start..end]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DeepSeekV3Config;

    #[test]
    fn halves_are_pairs() {
        let config = crate::sized! { DeepSeekV3Config::tiny();
            num_attention_heads: 2, qk_nope_head_dim: 3, qk_rope_head_dim: 4, kv_lora_rank: 5
        };
        let config = config.latent_attention();
        let flat = |rows: Vec<Range<usize>>| rows.into_iter().flatten().collect::<Vec<_>>();
        assert_eq!(flat(query_rows(&config)), [3, 5, 4, 6, 0, 1, 2, 10, 12, 11, 13, 7, 8, 9]);
        assert_eq!(flat(latent_rows(&config)), [0, 1, 2, 3, 4, 5, 7, 6, 8]);
        let halves = MlaConfig { interleaved: false, ..config };
        assert_eq!(flat(latent_rows(&halves)), [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    }
}
