//! The kernels of MoE layers besides the grouped GEMMs, at the sizes of Mixtral 8x7B, Qwen3-30B-A3B and gpt-oss-20b with
//! 8192 tokens, each routed to `top_k` experts. Bytes as in `timings`.
use super::bandwidths::Bandwidths;
use half::bf16;
use kernels_cubecl::pointwise::column_sum::{GroupRows, group_sums};
use kernels_cubecl::pointwise::gated::{Clamp, Gating};
use kernels_cubecl::pointwise::moe::biases::{self, GroupBias};
use kernels_cubecl::pointwise::moe::count::{self, CountShape};
use kernels_cubecl::pointwise::moe::permute::{self, PermuteShape, PermuteTables};
use kernels_cubecl::pointwise::moe::topk::{self, Selection};
use kernels_cubecl::pointwise::moe::{self, SumRowsShape, weighted};

const TOKENS: usize = 8192;

struct MoeModel {
    name: &'static str,
    experts: usize,
    top_k: usize,
    hidden: usize,
    ffn: usize,
}

pub fn all(clock: &Bandwidths) {
    for moe in [
        MoeModel { name: "Mixtral", experts: 8, top_k: 2, hidden: 4096, ffn: 14_336 },
        MoeModel { name: "Qwen3", experts: 128, top_k: 8, hidden: 2048, ffn: 768 },
    ] {
        rows(clock, &moe);
        tables(clock, &moe);
    }
    biases(clock, &MoeModel { name: "gpt-oss", experts: 32, top_k: 4, hidden: 2880, ffn: 2880 });
}

/// Experts with biases, as many tokens each.
fn biases(clock: &Bandwidths, moe: &MoeModel) {
    let MoeModel { name, experts, top_k, hidden, ffn } = *moe;
    let rows = TOKENS * top_k;
    let half = |len| clock.half(len);
    let (x, y, dy, dx) = (half(2 * rows * ffn), half(rows * ffn), half(rows * ffn), half(2 * rows * ffn));
    let (first, second) = (half(2 * experts * ffn), half(experts * hidden));
    let (factors, slopes) = (clock.wide(rows), clock.wide(rows));
    let each = rows / experts;
    let of_rows = clock.integers((0..rows).map(|row| row / each));
    let starts = clock.integers((0..=experts).map(|group| group * each));
    let group_rows = || GroupRows { starts: starts.at(0), groups: experts, rows };
    let gating = Gating::Clamped(Clamp::new(1.702, 7.0));
    let bias = |values| GroupBias { values, groups: experts, of_blocks: of_rows.at(0), block: 1 };
    let len = rows * ffn;
    clock.time(&format!("clamped swiglu, {name}"), 6 * len + 8 * rows, |client, i| {
        let tensors = [x.at(i), factors.at(0), y.at(i)];
        weighted::forward::<bf16>(client, tensors, Some(bias(first.at(0))), rows, ffn, gating).expect("legal")
    });
    clock.time(&format!("clamped swiglu gradient, {name}"), 10 * len + 12 * rows, |client, i| {
        let (from, to) = ([x.at(i), factors.at(0), dy.at(i)], [dx.at(i), slopes.at(0)]);
        weighted::backward::<bf16>(client, from, to, Some(bias(first.at(0))), rows, ffn, gating).expect("legal")
    });
    let sums = clock.empty(8 * experts * ffn);
    clock.time(&format!("gradient of the first bias, {name}"), 4 * len, |client, i| {
        group_sums::<bf16>(client, dx.at(i), None, sums.at(0), group_rows(), 2 * ffn).expect("legal")
    });
    let len = rows * hidden;
    clock.time(&format!("second bias, {name}"), 4 * len + 8 * rows, |client, i| {
        biases::add::<bf16>(client, y.at(i), factors.at(0), bias(second.at(0)), rows, hidden).expect("legal")
    });
    clock.time(&format!("gradient of the second bias, {name}"), 2 * len + 4 * rows, |client, i| {
        group_sums::<bf16>(client, dy.at(i), Some(factors.at(0)), sums.at(0), group_rows(), hidden).expect("legal")
    });
    clock.time(&format!("gradient of its factors, {name}"), 2 * len + 8 * rows, |client, i| {
        biases::add_products::<bf16>(client, dy.at(i), slopes.at(0), bias(second.at(0)), rows, hidden).expect("legal")
    });
}

/// The experts of each token, ascending.
fn choice(MoeModel { experts, top_k, .. }: &MoeModel) -> Vec<Vec<usize>> {
    let of_token = |token: usize| {
        let first = token.wrapping_mul(2_654_435_761) >> 16;
        let mut chosen: Vec<usize> = (0..*top_k).map(|nth| (first + nth * experts / top_k) % experts).collect();
        chosen.sort_unstable();
        chosen
    };
    (0..TOKENS).map(of_token).collect()
}

/// The token of each row, and the rows of each token.
fn order(moe: &MoeModel) -> (Vec<usize>, Vec<usize>) {
    let choice = choice(moe).into_iter().enumerate();
    let mut copies: Vec<(usize, usize)> =
        choice.flat_map(|(token, experts)| experts.into_iter().map(move |expert| (expert, token))).collect();
    copies.sort_unstable();
    let mut rows_of_token = vec![vec![]; TOKENS];
    copies.iter().enumerate().for_each(|(row, (_, token))| rows_of_token[*token].push(row));
    (copies.into_iter().map(|(_, token)| token).collect(), rows_of_token.concat())
}

fn rows(clock: &Bandwidths, moe: &MoeModel) {
    let MoeModel { name, top_k, hidden, ffn, .. } = *moe;
    let copies = TOKENS * top_k;
    let half = |len| clock.half(len);
    let (tokens, sorted) = (half(TOKENS * hidden), half(copies * hidden));
    let (token_of_row, rows_of_token) = order(moe);
    let (token_of_row, rows_of_token) = (clock.integers(token_of_row), clock.integers(rows_of_token));
    let bytes = 2 * (TOKENS + copies) * hidden + 4 * copies;
    clock.time(&format!("tokens to experts, {name}"), bytes, |client, i| {
        let shape = SumRowsShape { rows: TOKENS, columns: hidden, out: copies, terms: 1 };
        moe::sum_rows::<bf16>(client, tokens.at(i), token_of_row.at(0), sorted.at(i), shape).expect("legal")
    });
    clock.time(&format!("tokens from experts, {name}"), bytes, |client, i| {
        let shape = SumRowsShape { rows: copies, columns: hidden, out: TOKENS, terms: top_k };
        moe::sum_rows::<bf16>(client, sorted.at(i), rows_of_token.at(0), tokens.at(i), shape).expect("legal")
    });
    let len = copies * ffn;
    let (x, y, dy, dx) = (half(2 * len), half(len), half(len), half(2 * len));
    let (factors, slopes) = (clock.wide(copies), clock.empty(4 * copies));
    clock.time(&format!("weighted swiglu, {name}"), 6 * len + 4 * copies, |client, i| {
        let tensors = [x.at(i), factors.at(0), y.at(i)];
        weighted::forward::<bf16>(client, tensors, None, copies, ffn, Gating::Silu).expect("legal")
    });
    clock.time(&format!("weighted swiglu gradient, {name}"), 10 * len + 8 * copies, |client, i| {
        let from = [x.at(i), factors.at(0), dy.at(i)];
        weighted::backward::<bf16>(client, from, [dx.at(i), slopes.at(0)], None, copies, ffn, Gating::Silu)
            .expect("legal")
    });
}

fn tables(clock: &Bandwidths, moe: &MoeModel) {
    let MoeModel { name, experts, top_k, .. } = *moe;
    let copies = TOKENS * top_k;
    let scores = clock.wide(TOKENS * experts);
    let integers = |len: usize| clock.empty(4 * len);
    let (chosen, mask, totals) = (integers(copies), integers(TOKENS * experts), integers(experts));
    let selection = Selection { experts: experts as u32, top_k: top_k as u32, groups: 1, top_groups: 1, biased: false };
    clock.time_after_a_copy(&format!("top-k of experts, {name}"), 4 * (TOKENS * experts + copies), |client, i| {
        topk::select_experts(client, [scores.at(i); 2], chosen.at(0), [TOKENS, TOKENS], selection).expect("legal")
    });
    let shape = CountShape { tokens: TOKENS, samples: 1, experts, top_k };
    let (choice, mut counts, mut before) = (choice(moe), vec![0; experts], Vec::new());
    for chunk in choice.chunks(count::CHUNK as usize) {
        before.extend_from_slice(&counts);
        chunk.iter().flatten().for_each(|expert| counts[*expert] += 1);
    }
    let (counted, choice, before) = (integers(before.len()), clock.integers(choice.concat()), clock.integers(before));
    let moved = 4 * (copies + shape.chunks() * experts);
    clock.time_after_a_copy(&format!("counts of experts, {name}"), moved, |client, _| {
        count::count(client, choice.at(0), counted.at(0), totals.at(0), shape).expect("legal")
    });
    let starts = clock.integers((0..experts).map(|expert| expert * copies / experts));
    let tables = [copies, copies, copies, TOKENS * experts].map(integers);
    clock.time_after_a_copy(&format!("permutation of tokens, {name}"), 4 * 5 * copies, |client, _| {
        let [token_of_row, slot_of_row, rows_of_token, rows_of_slot] = tables.each_ref().map(|table| table.at(0));
        let permutation = PermuteTables { token_of_row, slot_of_row, rows_of_token, rows_of_slot };
        let (tokens, rows, capacity) = (TOKENS, copies, TOKENS);
        let shape = PermuteShape { tokens, experts, top_k, shards: 1, experts_per_rank: 1, capacity, rows };
        permute::permute(client, [choice.at(0), before.at(0), starts.at(0)], permutation, shape).expect("legal")
    });
    clock.time_after_a_copy(&format!("mask of experts, {name}"), 4 * (copies + TOKENS * experts), |client, _| {
        topk::mask(client, choice.at(0), mask.at(0), TOKENS, [experts, top_k]).expect("legal")
    });
}
