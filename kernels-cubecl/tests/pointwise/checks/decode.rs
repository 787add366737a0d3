//! The attention of a decode step over pages.
use super::{Element, download, download_i32, poisoned, random, report, round, upload, upload_i32};
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels_cubecl::decode::copies::{self, CopyTables};
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
