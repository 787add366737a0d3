//! The kernels of MoE layers besides the grouped GEMMs, at the sizes of Mixtral 8x7B, Qwen3-30B-A3B and gpt-oss-20b with
//! 8192 tokens, each routed to `top_k` experts. Bytes as in `timings`.
use crate::checks::upload_i32;
use crate::clock::Clock;
use half::bf16;
use kernels_cubecl::pointwise::column_sum::{GroupRows, group_sums};
use kernels_cubecl::pointwise::flat::FloatType;
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

pub fn all(clock: &mut Clock) {
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
fn biases(clock: &mut Clock, moe: &MoeModel) {
    let MoeModel { name, experts, top_k, hidden, ffn } = *moe;
    let names = [
        "clamped swiglu",
        "clamped swiglu gradient",
        "gradient of the first bias",
        "second bias",
        "gradient of the second bias",
        "gradient of its factors",
    ];
    let names = names.map(|what| format!("{what}, {name}"));
    if !clock.wants(&names.each_ref().map(String::as_str)) {
        return;
    }
    let (client, rows) = (clock.client, TOKENS * top_k);
    let half = |len| clock.tensor(FloatType::Bf16, len);
    let (x, y, dy, dx) = (half(2 * rows * ffn), half(rows * ffn), half(rows * ffn), half(2 * rows * ffn));
    let (first, second) = (half(2 * experts * ffn), half(experts * hidden));
    let (factors, slopes) = (clock.tensor(FloatType::F32, rows), clock.tensor(FloatType::F32, rows));
    let each = rows / experts;
    let of_rows = upload_i32(client, &(0..rows).map(|row| (row / each) as i32).collect::<Vec<_>>());
    let starts = upload_i32(client, &(0..=experts).map(|group| (group * each) as i32).collect::<Vec<_>>());
    let group_rows = GroupRows { starts: &starts, groups: experts, rows };
    let gating = Gating::Clamped(Clamp::new(1.702, 7.0));
    let bias = |values| GroupBias { values, groups: experts, of_rows: &of_rows };
    let len = rows * ffn;
    clock.time(&names[0], 6 * len + 8 * rows, |i| {
        let tensors = [x.at(i), factors.at(0), y.at(i)];
        weighted::forward::<bf16>(client, tensors, Some(bias(first.at(0))), rows, ffn, gating).expect("legal")
    });
    clock.time(&names[1], 10 * len + 12 * rows, |i| {
        let (from, to) = ([x.at(i), factors.at(0), dy.at(i)], [dx.at(i), slopes.at(0)]);
        weighted::backward::<bf16>(client, from, to, Some(bias(first.at(0))), rows, ffn, gating).expect("legal")
    });
    let sums = client.empty(8 * experts * ffn);
    clock.time(&names[2], 4 * len, |i| {
        group_sums::<bf16>(client, dx.at(i), None, &sums, group_rows, 2 * ffn).expect("legal")
    });
    let len = rows * hidden;
    clock.time(&names[3], 4 * len + 8 * rows, |i| {
        biases::add::<bf16>(client, y.at(i), factors.at(0), bias(second.at(0)), rows, hidden).expect("legal")
    });
    clock.time(&names[4], 2 * len + 4 * rows, |i| {
        group_sums::<bf16>(client, dy.at(i), Some(factors.at(0)), &sums, group_rows, hidden).expect("legal")
    });
    clock.time(&names[5], 2 * len + 8 * rows, |i| {
        biases::add_products::<bf16>(client, dy.at(i), slopes.at(0), bias(second.at(0)), rows, hidden).expect("legal")
    });
}

/// A permutation of tokens that each use `top_k` consecutive experts: the token of each row, and the rows of each token.
fn order(MoeModel { experts, top_k, .. }: &MoeModel) -> (Vec<i32>, Vec<i32>) {
    let chosen = |token: usize| (0..*top_k).map(move |nth| ((token * 7919 + nth) % experts, token));
    let mut copies: Vec<(usize, usize)> = (0..TOKENS).flat_map(chosen).collect();
    copies.sort_unstable();
    let mut rows_of_token = vec![vec![]; TOKENS];
    copies.iter().enumerate().for_each(|(row, (_, token))| rows_of_token[*token].push(row as i32));
    (copies.into_iter().map(|(_, token)| token as i32).collect(), rows_of_token.concat())
}

fn rows(clock: &mut Clock, moe: &MoeModel) {
    let MoeModel { name, top_k, hidden, ffn, .. } = *moe;
    let names = ["tokens to experts", "tokens from experts", "weighted swiglu", "weighted swiglu gradient"];
    let names = names.map(|what| format!("{what}, {name}"));
    if !clock.wants(&names.each_ref().map(String::as_str)) {
        return;
    }
    let (client, copies) = (clock.client, TOKENS * top_k);
    let half = |len| clock.tensor(FloatType::Bf16, len);
    let (tokens, sorted) = (half(TOKENS * hidden), half(copies * hidden));
    let (token_of_row, rows_of_token) = order(moe);
    let (token_of_row, rows_of_token) = (upload_i32(client, &token_of_row), upload_i32(client, &rows_of_token));
    let bytes = 2 * (TOKENS + copies) * hidden + 4 * copies;
    clock.time(&names[0], bytes, |i| {
        let shape = SumRowsShape { rows: TOKENS, columns: hidden, out: copies, terms: 1 };
        moe::sum_rows::<bf16>(client, tokens.at(i), &token_of_row, sorted.at(i), shape).expect("legal")
    });
    clock.time(&names[1], bytes, |i| {
        let shape = SumRowsShape { rows: copies, columns: hidden, out: TOKENS, terms: top_k };
        moe::sum_rows::<bf16>(client, sorted.at(i), &rows_of_token, tokens.at(i), shape).expect("legal")
    });
    drop((tokens, sorted));
    let len = copies * ffn;
    let half = |len| clock.tensor(FloatType::Bf16, len);
    let (x, y, dy, dx) = (half(2 * len), half(len), half(len), half(2 * len));
    let (factors, slopes) = (clock.tensor(FloatType::F32, copies), client.empty(4 * copies));
    clock.time(&names[2], 6 * len + 4 * copies, |i| {
        let tensors = [x.at(i), factors.at(0), y.at(i)];
        weighted::forward::<bf16>(client, tensors, None, copies, ffn, Gating::Silu).expect("legal")
    });
    clock.time(&names[3], 10 * len + 8 * copies, |i| {
        let from = [x.at(i), factors.at(0), dy.at(i)];
        weighted::backward::<bf16>(client, from, [dx.at(i), &slopes], None, copies, ffn, Gating::Silu).expect("legal")
    });
}

fn tables(clock: &mut Clock, moe: &MoeModel) {
    let MoeModel { name, experts, top_k, .. } = *moe;
    let names = ["top-k of experts", "counts of experts", "permutation of tokens", "mask of experts"];
    let names = names.map(|what| format!("{what}, {name}"));
    if !clock.wants(&names.each_ref().map(String::as_str)) {
        return;
    }
    let (client, copies) = (clock.client, TOKENS * top_k);
    let scores = clock.tensor(FloatType::F32, TOKENS * experts);
    let ints = |len: usize| client.empty(4 * len);
    let (choice, mask, totals) = (ints(copies), ints(TOKENS * experts), ints(experts));
    let selection = Selection { experts: experts as u32, top_k: top_k as u32, groups: 1, top_groups: 1, biased: false };
    let choose = |i| {
        topk::select_experts(client, [scores.at(i); 2], &choice, [TOKENS, TOKENS], selection).expect("legal");
    };
    choose(0);
    clock.time_after_a_copy(&names[0], 4 * (TOKENS * experts + copies), choose);
    let shape = CountShape { tokens: TOKENS, samples: 1, experts, top_k };
    let before = ints(shape.chunks() * experts);
    let count = |_| count::count(client, &choice, &before, &totals, shape).expect("legal");
    count(0);
    clock.time_after_a_copy(&names[1], 4 * (copies + shape.chunks() * experts), count);
    let starts: Vec<i32> = (0..experts).map(|expert| (expert * copies / experts) as i32).collect();
    let starts = upload_i32(client, &starts);
    let tables = [ints(copies), ints(copies), ints(copies), ints(TOKENS * experts)];
    let [token_of_row, slot_of_row, rows_of_token, rows_of_slot] = &tables;
    clock.time_after_a_copy(&names[2], 4 * 5 * copies, |_| {
        let permutation = PermuteTables { token_of_row, slot_of_row, rows_of_token, rows_of_slot };
        let shape = PermuteShape {
            tokens: TOKENS,
            experts,
            top_k,
            shards: 1,
            experts_per_rank: 1,
            capacity: TOKENS,
            rows: copies,
        };
        permute::permute(client, [&choice, &before, &starts], permutation, shape).expect("legal")
    });
    clock.time_after_a_copy(&names[3], 4 * (copies + TOKENS * experts), |_| {
        topk::mask(client, &choice, &mask, TOKENS, [experts, top_k]).expect("legal")
    });
}
