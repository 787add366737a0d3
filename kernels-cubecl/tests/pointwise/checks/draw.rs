//! The choice of tokens.
use super::{Element, download, download_i32, poisoned, random, report, round, upload, upload_i32};
use cubecl::prelude::*;
use kernels_cubecl::decode;
use kernels_cubecl::decode::draw::{self, Draw};

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

/// Some logits are changed, some rows have some tokens alone, and the others are as they were; of a row without any token
/// none is drawn, and of the others one that may come.
pub fn changes<E: Element>(client: &Client, columns: usize) -> usize {
    const NEVER: f64 = -1e38;
    let rows = 5;
    let mut logits = random(rows * columns, 9);
    logits[2 * columns + 1] = f64::NAN;
    // Every third place, in no order.
    let places: Vec<i32> = (0..rows * columns / 3).map(|nth| (nth * 3 * 7 % (rows * columns / 3 * 3)) as i32).collect();
    let change = |place: &i32| {
        let numbers = [place % 4, place % 5, place % 3, place % 7].map(|n| f64::from(n) / 4.0);
        let less = if place % 11 == 0 { f64::INFINITY } else { numbers[2] };
        [numbers[0], 1.0 + numbers[1], less, numbers[3]]
    };
    let by: Vec<f64> = places.iter().flat_map(change).collect();
    let (on, out) = (upload::<E>(client, &logits), poisoned::<f32>(client, rows * columns));
    // Rows in no order: all but every fifth, no number and a token, none.
    let only = [4, 2, 0];
    let comes_in = |row: usize, at: usize| match row {
        4 => !at.is_multiple_of(5),
        2 => at == 3,
        _ => false,
    };
    let words = draw::words(columns);
    let mut bits = vec![0u32; 3 * words];
    for (nth, row) in only.into_iter().enumerate() {
        (0..columns).filter(|at| comes_in(row, *at)).for_each(|at| bits[nth * words + at / 32] |= 1 << (at % 32));
    }
    let bits: Vec<i32> = bits.into_iter().map(|word| word as i32).collect();
    let (at, how) = (upload_i32(client, &places), upload::<f32>(client, &by));
    let (kept, bits) = (upload_i32(client, &only.map(|row| row as i32)), upload_i32(client, &bits));
    let changes = [(&at, &how, places.len()), (&kept, &bits, only.len())];
    draw::changed::<E>(client, [rows, columns], &on, changes, &out).expect("legal");
    for (place, by) in places.iter().zip(by.chunks_exact(4)) {
        let logit = &mut logits[*place as usize];
        let plus = *logit + by[0];
        let left = if plus < 0.0 { plus * by[1] } else { plus / by[1] } - by[2];
        *logit = if left == f64::NEG_INFINITY { NEVER } else { left + left.abs() * by[3] };
    }
    for row in only {
        let goes = |(at, logit): &(usize, &mut f64)| !comes_in(row, *at) && logit.is_finite();
        logits[row * columns..][..columns].iter_mut().enumerate().filter(goes).for_each(|(_, logit)| *logit = NEVER);
    }
    let found = download::<f32>(client, &out);
    // The comparison knows neither numbers of this size nor none.
    let near =
        |logits: &[f64]| -> Vec<f64> { logits.iter().map(|x| if x.is_nan() { 20.0 } else { x.max(-20.0) }).collect() };
    let wrong = report(&format!("changes, {columns} {}", E::NAME), &near(&found), &near(&logits), 1e-6);
    let plain = Draw { temperature: 1.0, top_k: Some(columns / 2), top_p: Some(0.9), min_p: None, at: 0.4 };
    let draws = [plain, Draw { temperature: 0.0, ..plain }, plain, Draw { min_p: Some(1e-9), ..plain }, plain];
    let numbers: Vec<f64> = draws.iter().flat_map(|draw| draw.numbers().map(f64::from)).collect();
    let (numbers, tokens) = (upload::<f32>(client, &numbers), poisoned::<f32>(client, rows));
    draw::draw::<f32>(client, [rows, columns], [&out, &numbers, &tokens]).expect("legal");
    let tokens = download_i32(client, &tokens);
    let comes =
        |row: usize| usize::try_from(tokens[row]).is_ok_and(|token| logits[row * columns + token] > NEVER / 2.0);
    let right = [tokens[0] == -1, comes(1), tokens[2] == -1, comes(3), comes(4)];
    if right != [true; 5] {
        println!("{} {columns}: {tokens:?} are drawn of changed logits: {right:?}", E::NAME);
    }
    wrong + usize::from(right != [true; 5])
}

/// How likely known and drawn tokens are, and the likeliest, the first of equal ones first.
pub fn likelihoods<E: Element>(client: &Client, columns: usize) -> usize {
    let (rows, most) = (5, 6);
    let mut logits: Vec<f64> = random(rows * columns, 3).iter().map(|x| round::<E>(x * 4.0)).collect();
    logits.iter_mut().step_by(3).for_each(|logit| *logit = logit.round());
    logits[columns + 2] = f64::NAN;
    let drawn = [2, -1, 5, columns as i32 - 1, 0];
    // Of the second nothing was drawn, of the third nothing is asked.
    let asked = [[-1, 6], [-1, 3], [-1, -1], [-1, 0], [columns as i32 / 2, 4]];
    let (on, stride) = (upload::<E>(client, &logits), draw::OWN + 2 * most);
    let (drawn_on, asked_on) = (upload_i32(client, &drawn), upload_i32(client, asked.as_flattened()));
    let out = poisoned::<f32>(client, rows * stride);
    draw::likelihoods::<E>(client, [rows, columns, most], [&on, &drawn_on, &asked_on, &out]).expect("legal");
    let found = download::<f32>(client, &out);
    let (mut numbers, mut expected) = (Vec::new(), Vec::new());
    for (row, [known, count]) in asked.into_iter().enumerate().filter(|(row, _)| ![1, 2].contains(row)) {
        let logits = &logits[row * columns..][..columns];
        let mut order: Vec<usize> = (0..columns).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        let token = if known < 0 { drawn[row] } else { known } as usize;
        let top = logits[order[0]];
        expected.extend([top, logits.iter().map(|logit| (logit - top).exp()).sum(), logits[token]]);
        let (tokens, pairs): (Vec<f64>, Vec<f64>) =
            order[..count as usize].iter().map(|token| (*token as f64, logits[*token])).unzip();
        let of_row = &found[row * stride..][..draw::OWN + 2 * count as usize];
        numbers.extend(&of_row[..draw::OWN]);
        expected.extend(pairs);
        numbers.extend(of_row[draw::OWN..].chunks_exact(2).map(|pair| pair[1]));
        let places: Vec<f64> = of_row[draw::OWN..].chunks_exact(2).map(|pair| pair[0]).collect();
        if places != tokens {
            println!("{} {columns}: likeliest {places:?}, not {tokens:?}", E::NAME);
            return 1;
        }
    }
    report(&format!("likelihoods, {columns} {}", E::NAME), &numbers, &expected, 3e-6)
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
