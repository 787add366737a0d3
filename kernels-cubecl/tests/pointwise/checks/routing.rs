//! Routing of tokens to experts: the kernels' tables against those of plain loops.
use super::{download_i32, poisoned, random, upload, upload_i32};
use cubecl::prelude::*;
use kernels_cubecl::pointwise::moe::count::{self, CountShape};
use kernels_cubecl::pointwise::moe::offsets::{self, OffsetsShape};
use kernels_cubecl::pointwise::moe::permute::{self, PermuteShape, PermuteTables};
use kernels_cubecl::pointwise::moe::topk::{self, Selection};

/// 1 if the tables differ.
fn compare(what: &str, found: &[i32], expected: &[i32]) -> usize {
    let wrong = found.iter().zip(expected).filter(|(a, b)| a != b).count();
    let good = wrong == 0 && found.len() == expected.len();
    println!("{what:<64} {wrong} of {} differ {}", expected.len(), if good { "ok" } else { "BAD" });
    !good as usize
}

/// Indices of the greatest values, the first ones of equal values.
fn best(values: &[f64], count: usize) -> Vec<usize> {
    let mut indices: Vec<usize> = (0..values.len()).collect();
    indices.sort_by(|a, b| values[*b].partial_cmp(&values[*a]).expect("a number").then(a.cmp(b)));
    indices.truncate(count);
    indices
}

fn expected_choice(scores: &[f64], bias: &[f64], [tokens, valid]: [usize; 2], selection: Selection) -> Vec<i32> {
    let (experts, top_k, size) =
        (selection.experts as usize, selection.top_k as usize, (selection.experts / selection.groups) as usize);
    let mut choice = vec![-1; tokens * top_k];
    for token in 0..valid {
        let clean = |value: f64| if value.is_nan() { f64::NEG_INFINITY } else { value };
        let added =
            |expert: usize| scores[token * experts + expert] + if selection.biased { bias[expert] } else { 0.0 };
        let mut row: Vec<f64> = (0..experts).map(|expert| clean(added(expert))).collect();
        let total = |group: &[f64]| best(group, 2).into_iter().map(|place| group[place]).sum::<f64>();
        let totals: Vec<f64> = row.chunks(size).map(|group| clean(total(group))).collect();
        let kept = best(&totals, selection.top_groups as usize);
        (0..experts)
            .filter(|expert| !kept.contains(&(expert / size)))
            .for_each(|expert| row[expert] = f64::NEG_INFINITY);
        let mut found = best(&row, top_k);
        found.sort_unstable();
        choice[token * top_k..][..top_k].iter_mut().zip(found).for_each(|(slot, expert)| *slot = expert as i32);
    }
    choice
}

/// Scores with many equal ones, a NaN, and tokens that are not valid.
pub fn choice(client: &Client, [tokens, valid]: [usize; 2], selection: Selection) -> usize {
    let experts = selection.experts as usize;
    let coarse = |value: f64| (value * 4.0).round() / 4.0;
    let mut scores: Vec<f64> = random(tokens * experts, 5).into_iter().map(coarse).collect();
    scores[experts / 2] = f64::NAN;
    let bias: Vec<f64> = random(experts, 6).into_iter().map(coarse).collect();
    let expected = expected_choice(&scores, &bias, [tokens, valid], selection);
    let (scores, bias) = (upload::<f32>(client, &scores), upload::<f32>(client, &bias));
    let choice = upload_i32(client, &vec![77; tokens * selection.top_k as usize]);
    topk::select_experts(client, [&scores, &bias], &choice, [tokens, valid], selection).expect("legal");
    let mask = upload_i32(client, &vec![77; tokens * experts]);
    topk::mask(client, &choice, &mask, tokens, [experts, selection.top_k as usize]).expect("legal");
    let mut expected_mask = vec![0; tokens * experts];
    for (at, expert) in expected.iter().enumerate().filter(|(_, expert)| **expert >= 0) {
        expected_mask[at / selection.top_k as usize * experts + *expert as usize] = 1;
    }
    compare(&format!("{selection:?}"), &download_i32(client, &choice), &expected)
        + compare("its mask", &download_i32(client, &mask), &expected_mask)
}

/// A choice in which some experts are never used, one is used often, and some tokens use fewer experts.
fn uneven(tokens: usize, experts: usize, top_k: usize) -> Vec<i32> {
    let noise = random(tokens * top_k, 9);
    let mut choice = vec![-1; tokens * top_k];
    for (token, slots) in choice.chunks_mut(top_k).enumerate().filter(|(token, _)| token % 7 != 3) {
        let at = |k: usize| ((noise[token * top_k + k].abs() * 1000.0) as usize * 2) % experts;
        let mut found: Vec<i32> = (0..top_k).map(|k| if k == 0 { 1 } else { at(k) as i32 }).collect();
        found.sort_unstable();
        found.dedup();
        slots.iter_mut().zip(found).for_each(|(slot, expert)| *slot = expert);
    }
    choice
}

pub fn counts(client: &Client, shape: CountShape) -> usize {
    let CountShape { tokens, samples, experts, top_k } = shape;
    let choice = uneven(tokens, experts, top_k);
    let (mut before, mut totals) = (Vec::new(), vec![0; shape.width()]);
    for chunk in choice.chunks(count::CHUNK as usize * samples * top_k) {
        before.extend_from_slice(&totals);
        for (at, expert) in chunk.iter().enumerate().filter(|(_, expert)| **expert >= 0) {
            totals[at / top_k % samples * experts + *expert as usize] += 1;
        }
    }
    let choice = upload_i32(client, &choice);
    let (found, sums) = (poisoned::<f32>(client, before.len()), poisoned::<f32>(client, totals.len()));
    count::count(client, &choice, &found, &sums, shape).expect("legal");
    compare(&format!("{shape:?}"), &download_i32(client, &sums), &totals)
        + compare("counts before chunks", &download_i32(client, &found), &before)
}

/// Rows by shard, expert and token, with gaps between experts; expert 2 has none.
pub fn permutation(
    client: &Client,
    tokens: usize,
    experts: usize,
    top_k: usize,
    shards: usize,
    capacity: usize,
) -> usize {
    let choice = uneven(tokens, experts, top_k);
    let experts_per_rank = experts / 2;
    let mut counts = vec![0; experts];
    choice.iter().filter(|expert| **expert >= 0).for_each(|expert| counts[*expert as usize] += 1);
    let mut starts = vec![-1; shards * experts];
    let mut rows = 0;
    for (rank_index, shard) in (0..2).flat_map(|rank_index| (0..shards).map(move |shard| (rank_index, shard))) {
        for expert in (rank_index * experts_per_rank..(rank_index + 1) * experts_per_rank).filter(|expert| *expert != 2)
        {
            starts[shard * experts + expert] = rows;
            rows += (counts[expert] as usize).min(capacity) as i32 + 3;
        }
    }
    let rows = rows as usize;
    let none = |len: usize| vec![-1; len];
    let (mut token_of_row, mut slot_of_row) = (none(rows), none(rows));
    let (mut rows_of_token, mut rows_of_slot) = (none(tokens * top_k * shards), none(tokens * experts * shards));
    let mut ranks = vec![0; experts];
    for (token, slots) in choice.chunks(top_k).enumerate() {
        for expert in slots.iter().filter(|expert| **expert >= 0).map(|expert| *expert as usize) {
            ranks[expert] += 1;
            for shard in (0..shards).filter(|shard| ranks[expert] <= capacity && starts[shard * experts + expert] >= 0)
            {
                let row = starts[shard * experts + expert] as usize + ranks[expert] - 1;
                (token_of_row[row], slot_of_row[row]) = (token as i32, (token * experts + expert) as i32);
                rows_of_slot[(token * experts + expert) * shards + shard] = row as i32;
            }
        }
        // The rows of a token ascend; missing ones may be anywhere between them.
        let mut found: Vec<i32> =
            (0..rows).filter(|row| token_of_row[*row] == token as i32).map(|row| row as i32).collect();
        found.resize(top_k * shards, -1);
        rows_of_token[token * top_k * shards..][..top_k * shards].copy_from_slice(&found);
    }
    let shape = CountShape { tokens, samples: 1, experts, top_k };
    let choice = upload_i32(client, &choice);
    let before = poisoned::<f32>(client, shape.chunks() * experts);
    count::count(client, &choice, &before, &poisoned::<f32>(client, experts), shape).expect("legal");
    // Bytes of 255 are -1.
    let tables =
        [rows, rows, tokens * top_k * shards, tokens * experts * shards].map(|len| poisoned::<f32>(client, len));
    let [a, b, c, d] = &tables;
    let tables_out = PermuteTables { token_of_row: a, slot_of_row: b, rows_of_token: c, rows_of_slot: d };
    let sizes = PermuteShape { tokens, experts, top_k, shards, experts_per_rank, capacity, rows };
    permute::permute(client, [&choice, &before, &upload_i32(client, &starts)], tables_out, sizes).expect("legal");
    let [a, b, c, d] = tables.map(|table| download_i32(client, &table));
    let together: Vec<i32> = c
        .chunks(top_k * shards)
        .flat_map(|rows| {
            let mut there: Vec<i32> = rows.iter().filter(|row| **row >= 0).copied().collect();
            there.resize(top_k * shards, -1);
            there
        })
        .collect();
    compare(&format!("{sizes:?}"), &a, &token_of_row)
        + compare("slots of rows", &b, &slot_of_row)
        + compare("rows of tokens", &together, &rows_of_token)
        + compare("rows of slots", &d, &rows_of_slot)
}

pub fn runs(client: &Client, rows: usize) -> usize {
    let runs = [[0, 40, 1], [3, 7, 5], [8, 0, 2], [11, 99, rows as i32]];
    let table: Vec<i32> = (0..3).flat_map(|field| runs.iter().map(move |run| run[field])).collect();
    let number = |row: i32| {
        let inside = |run: &&[i32; 3]| (run[0]..run[0] + run[2]).contains(&row);
        runs.iter().find(inside).map_or(-1, |run| run[1] + row - run[0])
    };
    let expected: Vec<i32> = (0..rows as i32).map(number).collect();
    let out = upload_i32(client, &vec![77; rows]);
    permute::runs(client, &upload_i32(client, &table), &out, [runs.len(), rows]).expect("legal");
    compare("runs", &download_i32(client, &out), &expected)
}

/// Experts of two and more ranks one after the other; every third expert has no tokens.
pub fn offsets(client: &Client, shape: OffsetsShape) -> usize {
    let OffsetsShape { experts, experts_per_rank, shards, chunks } = shape;
    let totals: Vec<i32> = (0..experts as i32).map(|expert| expert * 7 % 5 * (expert % 3)).collect();
    let mut expected = vec![0; shards * experts];
    let mut rows = 0;
    for (chunk, rank_index) in
        (0..chunks).flat_map(|chunk| (0..experts / experts_per_rank).map(move |rank_index| (chunk, rank_index)))
    {
        let bound = |chunk| rank_index * experts_per_rank + experts_per_rank * chunk / chunks;
        for (shard, expert) in (0..shards).flat_map(|shard| (bound(chunk)..bound(chunk + 1)).map(move |e| (shard, e))) {
            expected[shard * experts + expert] = rows;
            rows += totals[expert];
        }
    }
    let starts = upload_i32(client, &vec![77; shards * experts]);
    offsets::starts(client, &upload_i32(client, &totals), &starts, shape).expect("legal");
    compare(&format!("{shape:?}"), &download_i32(client, &starts), &expected)
}

/// All of these, at sizes that need chunks, several rounds and many units.
pub fn all(client: &Client) -> usize {
    let plain = |experts, top_k| Selection { experts, top_k, groups: 1, top_groups: 1, biased: false };
    let choices = [
        ([37, 30], plain(8, 2)),
        ([5, 0], plain(3, 3)),
        ([70, 70], Selection { biased: true, ..plain(64, 6) }),
        ([40, 33], Selection { groups: 8, top_groups: 4, biased: true, ..plain(256, 8) }),
        ([9, 9], Selection { groups: 8, top_groups: 3, ..plain(8, 3) }),
        ([33, 33], Selection { groups: 4, top_groups: 2, ..plain(16, 8) }),
    ];
    let counted = [
        CountShape { tokens: 129, samples: 1, experts: 8, top_k: 2 },
        CountShape { tokens: 3 * 70, samples: 3, experts: 5, top_k: 3 },
        CountShape { tokens: 64 * 18, samples: 1, experts: 300, top_k: 4 },
        CountShape { tokens: 1, samples: 1, experts: 2, top_k: 1 },
    ];
    let all_offsets = [
        OffsetsShape { experts: 8, experts_per_rank: 4, shards: 1, chunks: 1 },
        OffsetsShape { experts: 30, experts_per_rank: 10, shards: 2, chunks: 3 },
        OffsetsShape { experts: 300, experts_per_rank: 150, shards: 1, chunks: 2 },
        OffsetsShape { experts: 6, experts_per_rank: 3, shards: 1, chunks: 3 },
    ];
    choices.into_iter().map(|(tokens, selection)| choice(client, tokens, selection)).sum::<usize>()
        + counted.into_iter().map(|shape| counts(client, shape)).sum::<usize>()
        + permutation(client, 131, 8, 3, 1, usize::MAX)
        + permutation(client, 150, 12, 4, 3, 20)
        + permutation(client, 64 * 3, 300, 8, 1, 50)
        + runs(client, 700)
        + all_offsets.into_iter().map(|shape| offsets(client, shape)).sum::<usize>()
}
