//! The tables computed on the host, equal to those of the kernels.

use super::{RowStarts, Selection};

/// As [`choose`](super::choose).
pub fn choose(
    scores: &[f64],
    [tokens, experts, valid]: [usize; 3],
    bias: Option<&[f64]>,
    Selection { top_k, groups }: Selection,
) -> Vec<i32> {
    let ordered = |value: f64| if value.is_nan() { f64::NEG_INFINITY } else { value };
    let mut choice = vec![-1; tokens * top_k];
    for (scores, choice) in scores.chunks(experts).zip(choice.chunks_mut(top_k)).take(valid) {
        let added = |(expert, score): (usize, &f64)| ordered(score + bias.map_or(0.0, |bias| bias[expert]));
        let mut scores: Vec<f64> = scores.iter().enumerate().map(added).collect();
        if let Some([groups, top]) = groups {
            let total = |group: &[f64]| {
                let two = best(group, 2.min(group.len()));
                ordered(two.into_iter().map(|place| group[place]).sum())
            };
            let kept = best(&scores.chunks(experts / groups).map(total).collect::<Vec<f64>>(), top);
            let others = scores.chunks_mut(experts / groups).enumerate().filter(|(group, _)| !kept.contains(group));
            others.for_each(|(_, scores)| scores.fill(f64::NEG_INFINITY));
        }
        let mut found = best(&scores, top_k);
        found.sort_unstable();
        choice.iter_mut().zip(found).for_each(|(slot, expert)| *slot = expert as i32);
    }
    choice
}

/// Indices of the `count` greatest values, the first ones of equal values.
fn best(values: &[f64], count: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..values.len()).collect();
    places.sort_by(|a, b| values[*b].partial_cmp(&values[*a]).expect("no NaN").then(a.cmp(b)));
    places.truncate(count);
    places
}

/// The tables of [`ExpertChoice::place`](super::ExpertChoice::place).
pub struct Placed {
    pub tokens_of: Vec<i32>,
    pub slots_of: Vec<i32>,
    pub of_tokens: Vec<i32>,
    pub of_slots: Vec<i32>,
}

pub fn place(choice: &[i32], [tokens, top_k, experts]: [usize; 3], starts: &RowStarts) -> Placed {
    let RowStarts { ref rows, shards, capacity, count, .. } = *starts;
    let none = |len: usize| vec![-1; len];
    let (mut tokens_of, mut slots_of) = (none(count), none(count));
    let (mut of_tokens, mut of_slots) = (none(tokens * top_k * shards), none(tokens * experts * shards));
    let mut ranks = vec![0; experts];
    for (token, choice) in choice.chunks(top_k).enumerate() {
        let mut copies = Vec::new();
        for expert in choice.iter().filter(|expert| **expert >= 0).map(|expert| *expert as usize) {
            let (rank, slot) = (ranks[expert], token * experts + expert);
            ranks[expert] += 1;
            if capacity.is_some_and(|capacity| rank >= capacity) {
                continue;
            }
            for shard in 0..shards {
                let Some(start) = rows[shard * experts + expert] else { continue };
                let row = start + rank;
                assert!(row < count, "row {row} of {count}");
                (tokens_of[row], slots_of[row]) = (token as i32, slot as i32);
                of_slots[slot * shards + shard] = row as i32;
                copies.push(row as i32);
            }
        }
        copies.sort_unstable();
        of_tokens[token * top_k * shards..][..copies.len()].copy_from_slice(&copies);
    }
    Placed { tokens_of, slots_of, of_tokens, of_slots }
}
