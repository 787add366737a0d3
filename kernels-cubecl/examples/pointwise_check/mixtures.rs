//! What mixtures of experts move, weight and count besides their products, at the sizes of Mixtral 8x7B and
//! Qwen3-30B-A3B with 8192 tokens of which each goes to `top_k` experts. Bytes as in `timings`.
use crate::checks::tokens::upload_i32;
use crate::clock::Clock;
use half::bf16;
use kernels_cubecl::pointwise::experts::choose::{self, Selection};
use kernels_cubecl::pointwise::experts::count::{self, CountShape};
use kernels_cubecl::pointwise::experts::place::{self, PlaceShape, Places};
use kernels_cubecl::pointwise::experts::{self, RowSums};
use kernels_cubecl::pointwise::flat::FloatType;

const TOKENS: usize = 8192;

struct Mixture {
    name: &'static str,
    experts: usize,
    top_k: usize,
    hidden: usize,
    ffn: usize,
}

pub fn all(clock: &mut Clock) {
    for mixture in [
        Mixture { name: "Mixtral", experts: 8, top_k: 2, hidden: 4096, ffn: 14_336 },
        Mixture { name: "Qwen3", experts: 128, top_k: 8, hidden: 2048, ffn: 768 },
    ] {
        rows(clock, &mixture);
        tables(clock, &mixture);
    }
}

/// The rows of every token by expert, as tokens that go to the next `top_k` experts from any one on have them: the
/// token of each row, and the rows of each token.
fn order(Mixture { experts, top_k, .. }: &Mixture) -> (Vec<i32>, Vec<i32>) {
    let chosen = |token: usize| (0..*top_k).map(move |nth| ((token * 7919 + nth) % experts, token));
    let mut copies: Vec<(usize, usize)> = (0..TOKENS).flat_map(chosen).collect();
    copies.sort_unstable();
    let mut of_tokens = vec![vec![]; TOKENS];
    copies.iter().enumerate().for_each(|(row, (_, token))| of_tokens[*token].push(row as i32));
    (copies.into_iter().map(|(_, token)| token as i32).collect(), of_tokens.concat())
}

fn rows(clock: &mut Clock, mixture: &Mixture) {
    let Mixture { name, top_k, hidden, ffn, .. } = *mixture;
    let names = ["rows to experts", "rows to tokens", "weighted swiglu", "weighted swiglu gradient"];
    let names = names.map(|what| format!("{what}, {name}"));
    if !clock.wants(&names.each_ref().map(String::as_str)) {
        return;
    }
    let (client, copies) = (clock.client, TOKENS * top_k);
    let half = |len| clock.tensor(FloatType::Bf16, len);
    let (tokens, sorted) = (half(TOKENS * hidden), half(copies * hidden));
    let (tokens_of, of_tokens) = order(mixture);
    let (tokens_of, of_tokens) = (upload_i32(client, &tokens_of), upload_i32(client, &of_tokens));
    let bytes = 2 * (TOKENS + copies) * hidden + 4 * copies;
    clock.time(&names[0], bytes, |i| {
        let shape = RowSums { rows: TOKENS, columns: hidden, out: copies, terms: 1 };
        experts::sum_rows::<bf16>(client, tokens.at(i), &tokens_of, sorted.at(i), shape).expect("legal")
    });
    clock.time(&names[1], bytes, |i| {
        let shape = RowSums { rows: copies, columns: hidden, out: TOKENS, terms: top_k };
        experts::sum_rows::<bf16>(client, sorted.at(i), &of_tokens, tokens.at(i), shape).expect("legal")
    });
    drop((tokens, sorted));
    let len = copies * ffn;
    let half = |len| clock.tensor(FloatType::Bf16, len);
    let (x, y, dy, dx) = (half(2 * len), half(len), half(len), half(2 * len));
    let (factors, slopes) = (clock.tensor(FloatType::F32, copies), client.empty(4 * copies));
    clock.time(&names[2], 6 * len + 4 * copies, |i| {
        experts::swiglu::<bf16>(client, x.at(i), factors.at(0), y.at(i), copies, ffn).expect("legal")
    });
    clock.time(&names[3], 10 * len + 8 * copies, |i| {
        let from = [x.at(i), factors.at(0), dy.at(i)];
        experts::swiglu_gradients::<bf16>(client, from, [dx.at(i), &slopes], copies, ffn).expect("legal")
    });
}

fn tables(clock: &mut Clock, mixture: &Mixture) {
    let Mixture { name, experts, top_k, .. } = *mixture;
    let names = ["choice of experts", "counts of experts", "places of rows", "mask of experts"];
    let names = names.map(|what| format!("{what}, {name}"));
    if !clock.wants(&names.each_ref().map(String::as_str)) {
        return;
    }
    let (client, copies) = (clock.client, TOKENS * top_k);
    let scores = clock.tensor(FloatType::F32, TOKENS * experts);
    let ints = |len: usize| client.empty(4 * len);
    let (choice, mask, totals) = (ints(copies), ints(TOKENS * experts), ints(experts));
    let how = Selection { experts: experts as u32, top_k: top_k as u32, groups: 1, top_groups: 1, biased: false };
    let choose = |i| {
        choose::choose(client, [scores.at(i); 2], &choice, [TOKENS, TOKENS], how).expect("legal");
    };
    choose(0);
    clock.time_behind_a_copy(&names[0], 4 * (TOKENS * experts + copies), choose);
    let shape = CountShape { tokens: TOKENS, samples: 1, experts, top_k };
    let before = ints(shape.chunks() * experts);
    let count = |_| count::count(client, &choice, &before, &totals, shape).expect("legal");
    count(0);
    clock.time_behind_a_copy(&names[1], 4 * (copies + shape.chunks() * experts), count);
    let starts: Vec<i32> = (0..experts).map(|expert| (expert * copies / experts) as i32).collect();
    let starts = upload_i32(client, &starts);
    let tables = [ints(copies), ints(copies), ints(copies), ints(TOKENS * experts)];
    let [tokens_of, slots_of, of_tokens, of_slots] = &tables;
    clock.time_behind_a_copy(&names[2], 4 * 5 * copies, |_| {
        let places = Places { tokens_of, slots_of, of_tokens, of_slots };
        let shape = PlaceShape { tokens: TOKENS, experts, top_k, parts: 1, each: 1, room: TOKENS, rows: copies };
        place::place(client, [&choice, &before, &starts], places, shape).expect("legal")
    });
    clock.time_behind_a_copy(&names[3], 4 * (copies + TOKENS * experts), |_| {
        choose::spread(client, &choice, &mask, TOKENS, [experts, top_k]).expect("legal")
    });
}
