//! The attention of a decode step over pages.
use super::{Element, download, download_i32, poisoned, random, report, round, upload, upload_i32};
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels_cubecl::decode::copies::{self, CopyTables};
use kernels_cubecl::decode::draw::{self, Draw};
use kernels_cubecl::decode::{self, DecodeShape, FewRows, NewAngles, Rows, few_rows};
use kernels_cubecl::pointwise::gated::{self, Gating};

/// Sequences of these lengths, whose pages lie in a shuffled order. The newest keys and values come from the projection;
/// so many features of queries and keys are rotated.
pub fn step<E: Element>(
    client: &Client,
    shape: DecodeShape,
    lengths: &[i32],
    window: Option<usize>,
    rotated: usize,
) -> usize {
    let DecodeShape { sequences, heads, kv_heads, head_dim, block_size, pages, max_blocks } = shape;
    assert_eq!(lengths.len(), sequences);
    let packed = heads + 2 * kv_heads;
    let mut qkv = random(sequences * packed * head_dim, 1);
    // No angles have these cosines and sines, but the sums are the same.
    let [cos, sin] = [5, 6].map(|seed| random(sequences * rotated / 2, seed));
    let [mut keys, mut values] = [2, 3].map(|seed| random(pages * block_size * kv_heads * head_dim, seed));
    // 7 has no common divisor with the numbers of pages here, so no page is used twice.
    let table: Vec<i32> = (0..sequences * max_blocks).map(|nth| ((nth * 7 + 3) % pages) as i32).collect();
    let row = |sequence: usize, position: usize| {
        table[sequence * max_blocks + position / block_size] as usize * block_size + position % block_size
    };
    let [keys_on, values_on] = [&keys, &values].map(|x| upload::<E>(client, x));
    let (qkv_on, out) = (upload::<E>(client, &qkv), poisoned::<E>(client, sequences * heads * head_dim));
    let (table_on, lengths_on) = (upload_i32(client, &table), upload_i32(client, lengths));
    let (cache, at) = ([&keys_on, &values_on], [&table_on, &lengths_on]);
    let [cos_on, sin_on] = [&cos, &sin].map(|x| upload::<E>(client, x));
    let angles = (rotated > 0).then_some(NewAngles { cos: &cos_on, sin: &sin_on, rotated });
    decode::append::<E>(client, shape, &qkv_on, angles, cache, at).expect("legal");
    let scale = 0.7 / (head_dim as f64).sqrt();
    decode::attention::<E>(client, shape, (scale, window), &qkv_on, cache, at, &out).expect("legal");

    for sequence in 0..sequences {
        for (head, i) in (0..heads + kv_heads).flat_map(|head| (0..rotated / 2).map(move |i| (head, i))) {
            let low = (sequence * packed + head) * head_dim + i;
            let (high, angle) = (low + rotated / 2, sequence * rotated / 2 + i);
            let (a, b, c, s) = (qkv[low], qkv[high], cos[angle], sin[angle]);
            // The attention reads them as they are stored.
            [qkv[low], qkv[high]] = [a * c - b * s, b * c + a * s].map(round::<E>);
        }
    }
    let mut expected = vec![0.0; sequences * heads * head_dim];
    for sequence in (0..sequences).filter(|sequence| lengths[*sequence] > 0) {
        let length = lengths[sequence] as usize;
        for (nth, x) in [&mut keys, &mut values].into_iter().enumerate() {
            let from = (sequence * packed + heads + nth * kv_heads) * head_dim;
            let to = row(sequence, length - 1) * kv_heads * head_dim;
            x[to..][..kv_heads * head_dim].copy_from_slice(&qkv[from..][..kv_heads * head_dim]);
        }
        for head in 0..heads {
            let q = &qkv[(sequence * packed + head) * head_dim..][..head_dim];
            let at = |position| (row(sequence, position) * kv_heads + head / (heads / kv_heads)) * head_dim;
            let seen = length - window.unwrap_or(length).min(length)..length;
            let dot = |position: usize| q.iter().zip(&keys[at(position)..]).map(|(q, k)| q * k).sum::<f64>() * scale;
            let weights: Vec<f64> = seen.clone().map(|position| dot(position).exp()).collect();
            let total: f64 = weights.iter().sum();
            let out = &mut expected[(sequence * heads + head) * head_dim..][..head_dim];
            for (weight, position) in weights.iter().zip(seen) {
                out.iter_mut().zip(&values[at(position)..]).for_each(|(out, v)| *out += weight / total * v);
            }
        }
    }
    let what = format!("{} sequences of {} and {} heads of {head_dim}", E::NAME, heads, kv_heads);
    let [keys, values] = [&keys, &values].map(|x| download::<E>(client, &upload::<E>(client, x)));
    let of_keys = if rotated > 0 { E::LIMIT } else { 0.0 };
    report(&format!("keys after a step, {what}"), &download::<E>(client, &keys_on), &keys, of_keys)
        + report("values", &download::<E>(client, &values_on), &values, 0.0)
        + report(&format!("attention, window {window:?}"), &download::<E>(client, &out), &expected, E::LIMIT)
}

/// The first of the greatest numbers of each row, wherever it is; two rows have a number that is not finite.
pub fn likeliest<E: Element>(client: &Client, columns: usize) -> usize {
    let rows = 6;
    let mut logits = random(rows * columns, 4);
    for (row, at) in [columns - 1, columns / 2, 0, 3].into_iter().enumerate() {
        logits[row * columns + at] = 100.0;
        // Later ones are not the first.
        logits[row * columns + at + (columns - 1 - at) / 2] = 100.0;
    }
    logits[4 * columns + 1] = f64::NAN;
    logits[5 * columns + columns / 2] = f64::NEG_INFINITY;
    let (on, out) = (upload::<E>(client, &logits), poisoned::<f32>(client, rows));
    decode::likeliest::<E>(client, [rows, columns], &on, &out).expect("legal");
    let found: Vec<f64> = download_i32(client, &out).into_iter().map(f64::from).collect();
    let expected = [columns - 1, columns / 2, 0, 3].map(|at| at as f64);
    report(&format!("likeliest of {columns} {}", E::NAME), &found, &[&expected[..], &[-1.0; 2]].concat(), 0.0)
}

/// What the kernel draws of each row, and what is drawn by sorting it: the same but where the point is so near to the end of
/// a token's part of the line that fp32 may see the next one.
pub fn draw<E: Element>(client: &Client, columns: usize) -> usize {
    let plain = Draw { temperature: 1.0, top_k: None, top_p: None, min_p: None, at: 0.0 };
    let mut draws = vec![];
    for at in [0.0, 0.03, 0.3, 0.5, 0.77, 0.999, 1.0f64.next_down()] {
        draws.extend([
            Draw { temperature: 0.0, at, ..plain },
            Draw { at, ..plain },
            Draw { temperature: 0.6, at, ..plain },
            Draw { top_k: Some(1), at, ..plain },
            Draw { top_k: Some(5), at, ..plain },
            Draw { temperature: 1.7, top_k: Some(columns + 3), at, ..plain },
            Draw { top_p: Some(0.9), at, ..plain },
            Draw { top_p: Some(1e-9), at, ..plain },
            Draw { temperature: 0.4, top_p: Some(0.999), at, ..plain },
            Draw { min_p: Some(0.2), at, ..plain },
            Draw { temperature: 0.7, top_k: Some(20), top_p: Some(0.8), min_p: Some(0.05), at },
        ]);
    }
    let mut logits: Vec<f64> = random(draws.len() * columns, 6).iter().map(|x| round::<E>(x * 5.0 - 3.0)).collect();
    for (row, logits) in logits.chunks_exact_mut(columns).enumerate() {
        // Many equal ones, and some that are far less likely than fp32 adds to one.
        logits.iter_mut().step_by(3).for_each(|logit| *logit = round::<E>((*logit * 2.0).round() / 2.0));
        logits[row % columns] = -200.0;
    }
    let broken = draws.len() / 2;
    logits[broken * columns + columns / 3] = f64::NAN;
    let how: Vec<f64> = draws.iter().flat_map(|draw| draw.numbers().map(f64::from)).collect();
    let (on, how, out) =
        (upload::<E>(client, &logits), upload::<f32>(client, &how), poisoned::<f32>(client, draws.len()));
    draw::draw::<E>(client, [draws.len(), columns], [&on, &how, &out]).expect("legal");
    let found = download_i32(client, &out);
    let mut wrong = 0;
    for (row, (draw, found)) in draws.iter().zip(found).enumerate() {
        let of_row = &logits[row * columns..][..columns];
        let right = if row == broken { found == -1 } else { is_drawn(of_row, draw, found) };
        if !right {
            println!("{} {columns}, row {row}: {found} is not drawn by {draw:?}", E::NAME);
        }
        wrong += usize::from(!right);
    }
    wrong
}

/// Some logits are changed, the others are as they were.
pub fn penalties<E: Element>(client: &Client, columns: usize) -> usize {
    let rows = 3;
    let mut logits = random(rows * columns, 9);
    // Every third place, in no order.
    let places: Vec<i32> = (0..rows * columns / 3).map(|nth| (nth * 3 * 7 % (rows * columns / 3 * 3)) as i32).collect();
    let by: Vec<f64> =
        places.iter().flat_map(|place| [1.0 + f64::from(place % 5) / 4.0, f64::from(place % 3) / 2.0]).collect();
    let (on, out) = (upload::<E>(client, &logits), poisoned::<f32>(client, rows * columns));
    let (at, how) = (upload_i32(client, &places), upload::<f32>(client, &by));
    draw::penalized::<E>(client, [rows, columns], &on, (&at, &how, places.len()), &out).expect("legal");
    for (place, by) in places.iter().zip(by.chunks_exact(2)) {
        let logit = &mut logits[*place as usize];
        *logit = if *logit < 0.0 { *logit * by[0] } else { *logit / by[0] } - by[1];
    }
    report(&format!("penalties, {columns} {}", E::NAME), &download::<f32>(client, &out), &logits, 1e-6)
}

/// Whether a token's part of the line has the point, or nearly.
fn is_drawn(logits: &[f64], draw: &Draw, found: i32) -> bool {
    let Ok(found) = usize::try_from(found) else { return false };
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    if draw.temperature == 0.0 {
        return found == order[0];
    }
    let top = logits[order[0]];
    let weight = |token: usize| ((logits[token] - top) / draw.temperature).exp();
    if let Some(last) = draw.top_k.and_then(|k| order.get(k - 1)) {
        let last = logits[*last];
        order.retain(|token| logits[*token] >= last);
    }
    let enough = draw.top_p.unwrap_or(2.0) * order.iter().map(|token| weight(*token)).sum::<f64>();
    let mut before = 0.0;
    // One more or less where fp32 cannot tell.
    let near = 2e-6 * enough;
    let (mut surely, mut perhaps) = (0, 0);
    for token in &order {
        surely += usize::from(before < enough - near);
        perhaps += usize::from(before < enough + near);
        before += weight(*token);
    }
    let least = draw.min_p.unwrap_or(0.0);
    (surely.max(1)..=perhaps.max(1)).any(|count| {
        let mut left: Vec<usize> = order[..count].iter().copied().filter(|token| weight(*token) >= least).collect();
        left.sort_unstable();
        let total: f64 = left.iter().map(|token| weight(*token)).sum();
        let (mut from, point) = (0.0, draw.at * total);
        left.iter().any(|token| {
            let to = from + weight(*token);
            let has_point = point >= from - 4e-6 * total && point <= to + 4e-6 * total;
            from = to;
            *token == found && has_point
        })
    })
}

/// Rows of which `counts` belong to each of the matrices, or all to the only one.
pub fn few_rows<E: Element>(client: &Client, counts: &[usize], features: usize, inner: usize) -> usize {
    let (rows, groups) = (counts.iter().sum(), counts.len());
    let (x, w) = (random(rows * inner, 1), random(groups * features * inner, 2));
    let owners: Vec<usize> = counts.iter().enumerate().flat_map(|(group, count)| vec![group; *count]).collect();
    let on = [&x, &w].map(|x| upload::<E>(client, x));
    // The last row first.
    let slots: Vec<i32> =
        (owners.iter().enumerate()).map(|(i, owner)| ((rows - 1 - i) * groups + owner) as i32).collect();
    let table = upload_i32(client, &slots);
    let run = |of: Rows| {
        let out = poisoned::<E>(client, rows * features);
        let sizes = FewRows { rows, groups, features, inner };
        let slots = (of != Rows::All).then_some((&table, of));
        few_rows::linear::<E>(client, sizes, [&on[0], &on[1], &out], slots).expect("legal");
        let of_row = |(i, owner): (usize, &usize)| {
            let row = if of == Rows::Gathered { rows - 1 - i } else { i };
            let (x, matrix) = (&x[row * inner..][..inner], &w[owner * features * inner..][..features * inner]);
            let dot = |w: &[f64]| w.iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
            matrix.chunks_exact(inner).map(dot).collect::<Vec<_>>()
        };
        let expected: Vec<f64> = owners.iter().enumerate().flat_map(of_row).collect();
        let what = format!("{} rows {counts:?} of [{features}, {inner}], {of:?}", E::NAME);
        report(&what, &download::<E>(client, &out), &expected, E::LIMIT)
    };
    if groups == 1 { run(Rows::All) } else { run(Rows::Grouped) + run(Rows::Gathered) }
}

/// The features `[gate | up]` of rows, gated by the kernel that computes them: the bits of one after the other.
pub fn gated_rows<E: Element>(client: &Client, rows: usize, features: usize, inner: usize) -> usize {
    let [x, w] =
        [(rows * inner, 1), (features * inner, 2)].map(|(count, seed)| upload::<E>(client, &random(count, seed)));
    let [apart, product, together] =
        [features, features / 2, features / 2].map(|columns| poisoned::<E>(client, rows * columns));
    let sizes = FewRows { rows, groups: 1, features, inner };
    few_rows::linear::<E>(client, sizes, [&x, &w, &apart], None).expect("legal");
    gated::forward::<E>(client, &apart, &product, rows, features / 2, Gating::Silu).expect("legal");
    few_rows::gated_linear::<E>(client, sizes, [&x, &w, &together]).expect("legal");
    let [found, expected] = [&together, &product].map(|x| download::<E>(client, x));
    report(&format!("{} rows {rows} of [{features}, {inner}], gated", E::NAME), &found, &expected, 0.0)
}

/// Copies of tokens that use `top_k` of the experts: in the order of the experts, and of one expert in that of the tokens.
pub fn copies(client: &Client, [tokens, top_k, experts]: [usize; 3]) -> usize {
    let chosen = |token: usize| {
        let mut of: Vec<usize> = (0..top_k).map(|k| (token * 5 + k * 3) % experts).collect();
        of.sort_unstable();
        of
    };
    let choice: Vec<usize> = (0..tokens).flat_map(chosen).collect();
    let logits = random(tokens * experts, 9);
    let mut order: Vec<usize> = (0..choice.len()).collect();
    order.sort_by_key(|copy| (choice[*copy], *copy));
    let numbers = |of: &dyn Fn(usize) -> usize| order.iter().map(|copy| of(*copy) as f64).collect::<Vec<_>>();
    let on = upload_i32(client, &choice.iter().map(|expert| *expert as i32).collect::<Vec<_>>());
    let weights = upload::<f32>(client, &logits);
    let run = |softmax: bool| {
        let [slots, of_token, rows, p] = [(); 4].map(|()| poisoned::<f32>(client, tokens * top_k));
        let tables = CopyTables { slots: &slots, tokens: &of_token, rows: &rows, probabilities: &p };
        copies::order(client, [tokens, top_k, experts], [&on, &weights], tables, softmax).expect("legal");
        let probability = |copy: usize| {
            let row = &logits[copy / top_k * experts..][..experts];
            let sum: f64 = chosen(copy / top_k).into_iter().map(|expert| row[expert].exp()).sum();
            if softmax { row[choice[copy]].exp() / sum } else { row[choice[copy]] }
        };
        let expected: Vec<f64> = order.iter().map(|copy| probability(*copy)).collect();
        let ints = |x: &Handle| download_i32(client, x).into_iter().map(f64::from).collect::<Vec<_>>();
        let mut back = vec![0.0; order.len()];
        order.iter().enumerate().for_each(|(row, copy)| back[*copy] = row as f64);
        let what = |of: &str| format!("{of} of {tokens} tokens' {top_k} of {experts} experts");
        report(&what("slots"), &ints(&slots), &numbers(&|copy| copy / top_k * experts + choice[copy]), 0.0)
            + report(&what("tokens"), &ints(&of_token), &numbers(&|copy| copy / top_k), 0.0)
            + report(&what("rows"), &ints(&rows), &back, 0.0)
            + report(&what("probabilities"), &download::<f32>(client, &p), &expected, f32::LIMIT)
    };
    run(false) + run(true)
}
