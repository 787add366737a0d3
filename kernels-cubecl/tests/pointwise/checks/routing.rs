//! Routing of tokens to experts: the tables of the kernels against those of plain loops.
use super::{poisoned, random, upload};
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels_cubecl::pointwise::experts::choose::{self, Selection};
use kernels_cubecl::pointwise::experts::count::{self, CountShape};
use kernels_cubecl::pointwise::experts::order::{self, OrderShape};
use kernels_cubecl::pointwise::experts::place::{self, PlaceShape, Places};

fn upload_i32(client: &Client, values: &[i32]) -> Handle {
    client.create_from_slice(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
}

fn download_i32(client: &Client, handle: &Handle) -> Vec<i32> {
    let read = |bytes: &[u8]| i32::from_le_bytes(bytes.try_into().expect("four bytes"));
    client.read_one_unchecked(handle.clone()).chunks_exact(4).map(read).collect()
}

/// 1 if the tables differ.
fn compare(what: &str, found: &[i32], expected: &[i32]) -> usize {
    let wrong = found.iter().zip(expected).filter(|(a, b)| a != b).count();
    let good = wrong == 0 && found.len() == expected.len();
    println!("{what:<64} {wrong} of {} differ {}", expected.len(), if good { "ok" } else { "BAD" });
    !good as usize
}

/// Places of the greatest values, the first ones of equal values.
fn best(values: &[f64], count: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..values.len()).collect();
    places.sort_by(|a, b| values[*b].partial_cmp(&values[*a]).expect("a number").then(a.cmp(b)));
    places.truncate(count);
    places
}

fn expected_choice(scores: &[f64], bias: &[f64], [tokens, valid]: [usize; 2], how: Selection) -> Vec<i32> {
    let (experts, top_k, size) = (how.experts as usize, how.top_k as usize, (how.experts / how.groups) as usize);
    let mut choice = vec![-1; tokens * top_k];
    for token in 0..valid {
        let clean = |value: f64| if value.is_nan() { f64::NEG_INFINITY } else { value };
        let added = |expert: usize| scores[token * experts + expert] + if how.biased { bias[expert] } else { 0.0 };
        let mut row: Vec<f64> = (0..experts).map(|expert| clean(added(expert))).collect();
        let total = |group: &[f64]| best(group, 2).into_iter().map(|place| group[place]).sum::<f64>();
        let totals: Vec<f64> = row.chunks(size).map(|group| clean(total(group))).collect();
        let kept = best(&totals, how.top_groups as usize);
        (0..experts)
            .filter(|expert| !kept.contains(&(expert / size)))
            .for_each(|expert| row[expert] = f64::NEG_INFINITY);
        let mut found = best(&row, top_k);
        found.sort_unstable();
        choice[token * top_k..][..top_k].iter_mut().zip(found).for_each(|(slot, expert)| *slot = expert as i32);
    }
    choice
}

/// Scores with many equal ones, a NaN, and tokens that do not count.
pub fn choice(client: &Client, [tokens, valid]: [usize; 2], how: Selection) -> usize {
    let experts = how.experts as usize;
    let coarse = |value: f64| (value * 4.0).round() / 4.0;
    let mut scores: Vec<f64> = random(tokens * experts, 5).into_iter().map(coarse).collect();
    scores[experts / 2] = f64::NAN;
    let bias: Vec<f64> = random(experts, 6).into_iter().map(coarse).collect();
    let expected = expected_choice(&scores, &bias, [tokens, valid], how);
    let (scores, bias) = (upload::<f32>(client, &scores), upload::<f32>(client, &bias));
    let choice = upload_i32(client, &vec![77; tokens * how.top_k as usize]);
    choose::choose(client, [&scores, &bias], &choice, [tokens, valid], how).expect("legal");
    let mask = upload_i32(client, &vec![77; tokens * experts]);
    choose::spread(client, &choice, &mask, tokens, [experts, how.top_k as usize]).expect("legal");
    let mut expected_mask = vec![0; tokens * experts];
    for (at, expert) in expected.iter().enumerate().filter(|(_, expert)| **expert >= 0) {
        expected_mask[at / how.top_k as usize * experts + *expert as usize] = 1;
    }
    compare(&format!("{how:?}"), &download_i32(client, &choice), &expected)
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
    for chunk in choice.chunks(place::CHUNK as usize * samples * top_k) {
        before.extend_from_slice(&totals);
        for (at, expert) in chunk.iter().enumerate().filter(|(_, expert)| **expert >= 0) {
            totals[at / top_k % samples * experts + *expert as usize] += 1;
        }
    }
    let choice = upload_i32(client, &choice);
    let (found, sums) = (poisoned::<f32>(client, before.len()), poisoned::<f32>(client, totals.len()));
    count::count(client, &choice, &found, &sums, shape).expect("legal");
    compare(&format!("{shape:?}"), &download_i32(client, &sums), &totals)
        + compare("counts in front of chunks", &download_i32(client, &found), &before)
}

/// Rows by part, expert and token, with gaps between experts; expert 2 has none.
pub fn places(client: &Client, tokens: usize, experts: usize, top_k: usize, parts: usize, room: usize) -> usize {
    let choice = uneven(tokens, experts, top_k);
    let each = experts / 2;
    let mut counts = vec![0; experts];
    choice.iter().filter(|expert| **expert >= 0).for_each(|expert| counts[*expert as usize] += 1);
    let mut starts = vec![-1; parts * experts];
    let mut rows = 0;
    for (member, part) in (0..2).flat_map(|member| (0..parts).map(move |part| (member, part))) {
        for expert in (member * each..(member + 1) * each).filter(|expert| *expert != 2) {
            starts[part * experts + expert] = rows;
            rows += (counts[expert] as usize).min(room) as i32 + 3;
        }
    }
    let rows = rows as usize;
    let none = |len: usize| vec![-1; len];
    let (mut tokens_of, mut slots_of) = (none(rows), none(rows));
    let (mut of_tokens, mut of_slots) = (none(tokens * top_k * parts), none(tokens * experts * parts));
    let mut ranks = vec![0; experts];
    for (token, slots) in choice.chunks(top_k).enumerate() {
        for expert in slots.iter().filter(|expert| **expert >= 0).map(|expert| *expert as usize) {
            ranks[expert] += 1;
            for part in (0..parts).filter(|part| ranks[expert] <= room && starts[part * experts + expert] >= 0) {
                let row = starts[part * experts + expert] as usize + ranks[expert] - 1;
                (tokens_of[row], slots_of[row]) = (token as i32, (token * experts + expert) as i32);
                of_slots[(token * experts + expert) * parts + part] = row as i32;
            }
        }
        // The rows of a token ascend, and those that there are not are anywhere between them.
        let mut found: Vec<i32> =
            (0..rows).filter(|row| tokens_of[*row] == token as i32).map(|row| row as i32).collect();
        found.resize(top_k * parts, -1);
        of_tokens[token * top_k * parts..][..top_k * parts].copy_from_slice(&found);
    }
    let shape = CountShape { tokens, samples: 1, experts, top_k };
    let choice = upload_i32(client, &choice);
    let before = poisoned::<f32>(client, shape.chunks() * experts);
    count::count(client, &choice, &before, &poisoned::<f32>(client, experts), shape).expect("legal");
    // Bytes of 255 are -1.
    let tables = [rows, rows, tokens * top_k * parts, tokens * experts * parts].map(|len| poisoned::<f32>(client, len));
    let [a, b, c, d] = &tables;
    let places = Places { tokens_of: a, slots_of: b, of_tokens: c, of_slots: d };
    let sizes = PlaceShape { tokens, experts, top_k, parts, each, room, rows };
    place::place(client, [&choice, &before, &upload_i32(client, &starts)], places, sizes).expect("legal");
    let [a, b, c, d] = tables.map(|table| download_i32(client, &table));
    let together: Vec<i32> = c
        .chunks(top_k * parts)
        .flat_map(|rows| {
            let mut there: Vec<i32> = rows.iter().filter(|row| **row >= 0).copied().collect();
            there.resize(top_k * parts, -1);
            there
        })
        .collect();
    compare(&format!("{sizes:?}"), &a, &tokens_of)
        + compare("slots of rows", &b, &slots_of)
        + compare("rows of tokens", &together, &of_tokens)
        + compare("rows of slots", &d, &of_slots)
}

pub fn runs(client: &Client, rows: usize) -> usize {
    let runs = [[0, 40, 1], [3, 7, 5], [8, 0, 2], [11, 99, rows as i32]];
    let table: Vec<i32> = (0..3).flat_map(|part| runs.iter().map(move |run| run[part])).collect();
    let number = |row: i32| {
        let inside = |run: &&[i32; 3]| (run[0]..run[0] + run[2]).contains(&row);
        runs.iter().find(inside).map_or(-1, |run| run[1] + row - run[0])
    };
    let expected: Vec<i32> = (0..rows as i32).map(number).collect();
    let out = upload_i32(client, &vec![77; rows]);
    place::runs(client, &upload_i32(client, &table), &out, [runs.len(), rows]).expect("legal");
    compare("runs", &download_i32(client, &out), &expected)
}

/// Experts of two members and more one behind the other; every third has no tokens.
pub fn order(client: &Client, shape: OrderShape) -> usize {
    let OrderShape { experts, each, parts, pieces } = shape;
    let totals: Vec<i32> = (0..experts as i32).map(|expert| expert * 7 % 5 * (expert % 3)).collect();
    let mut expected = vec![0; parts * experts];
    let mut rows = 0;
    for (piece, member) in (0..pieces).flat_map(|piece| (0..experts / each).map(move |member| (piece, member))) {
        let bound = |piece| member * each + each * piece / pieces;
        for (part, expert) in (0..parts).flat_map(|part| (bound(piece)..bound(piece + 1)).map(move |e| (part, e))) {
            expected[part * experts + expert] = rows;
            rows += totals[expert];
        }
    }
    let starts = upload_i32(client, &vec![77; parts * experts]);
    order::starts(client, &upload_i32(client, &totals), &starts, shape).expect("legal");
    compare(&format!("{shape:?}"), &download_i32(client, &starts), &expected)
}

/// All of the above, at sizes that need chunks, several rounds and many units.
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
    let orders = [
        OrderShape { experts: 8, each: 4, parts: 1, pieces: 1 },
        OrderShape { experts: 30, each: 10, parts: 2, pieces: 3 },
        OrderShape { experts: 300, each: 150, parts: 1, pieces: 2 },
        OrderShape { experts: 6, each: 3, parts: 1, pieces: 3 },
    ];
    choices.into_iter().map(|(tokens, how)| choice(client, tokens, how)).sum::<usize>()
        + counted.into_iter().map(|shape| counts(client, shape)).sum::<usize>()
        + places(client, 131, 8, 3, 1, usize::MAX)
        + places(client, 150, 12, 4, 3, 20)
        + places(client, 64 * 3, 300, 8, 1, 50)
        + runs(client, 700)
        + orders.into_iter().map(|shape| order(client, shape)).sum::<usize>()
}
