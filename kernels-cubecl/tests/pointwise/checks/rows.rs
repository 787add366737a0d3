//! Column sums, row normalisation, accumulation, flat runs and squares.
use super::{Element, download, poisoned, random, report, upload, upload_u32};
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};
use kernels_cubecl::pointwise::flat::{self, CHUNK, Chunks, Copies, FloatType, Run};
use kernels_cubecl::pointwise::normalize::{self, NormalizeShape};
use kernels_cubecl::pointwise::small_matrix::{SmallMatrix, multiply};
use kernels_cubecl::pointwise::strided_rows::{StridedRows, pack};
use kernels_cubecl::pointwise::{accumulate::accumulate as add_up, column_sum, reduce_slices, split_bf16::split};

pub fn column_sum<E: Element>(client: &Client, rows: usize, columns: usize) -> usize {
    let x = random(rows * columns, 1);
    let expected: Vec<f64> = (0..columns).map(|c| (0..rows).map(|row| x[row * columns + c]).sum()).collect();
    let (x, total) = (upload::<E>(client, &x), poisoned::<f32>(client, columns));
    column_sum::column_sum::<E>(client, &x, &total, rows, columns).expect("legal");
    report(&format!("column sum {}, {rows} × {columns}", E::NAME), &download::<f32>(client, &total), &expected, 1e-5)
}

/// Rows times a matrix of two or four columns and rows, at any strides.
pub fn small_matrix<E: Element, O: Element>(client: &Client, rows: usize, of: SmallMatrix) -> usize {
    let span = (of.rows - 1) * of.strides[0] + (of.columns - 1) * of.strides[1] + 1;
    let (x, matrix) = (random(rows * of.rows, 1), random(span, 2));
    let mut expected = vec![];
    for row in x.chunks_exact(of.rows) {
        for column in 0..of.columns {
            let factor = |k: usize| matrix[k * of.strides[0] + column * of.strides[1]];
            expected.push(row.iter().enumerate().map(|(k, x)| x * factor(k)).sum());
        }
    }
    let (x, matrix) = (upload::<E>(client, &x), upload::<E>(client, &matrix));
    let out = poisoned::<O>(client, expected.len());
    multiply::<E, O>(client, &x, &matrix, &out, rows, of).expect("legal");
    report(
        &format!("{} rows of {} by {of:?} in {}", rows, E::NAME, O::NAME),
        &download::<O>(client, &out),
        &expected,
        O::LIMIT,
    )
}

/// Positive numbers over their sum, and softmax with one number far below the others.
pub fn normalize_rows(client: &Client, shape: NormalizeShape) -> usize {
    let NormalizeShape { rows, columns, softmax } = shape;
    let (mut x, dy, least) = (random(rows * columns, 1), random(rows * columns, 2), 0.25);
    match softmax {
        true => x[columns / 2] = -1e30,
        false => x.iter_mut().for_each(|x| *x = x.abs()),
    }
    let (mut y, mut totals, mut gradient) = (vec![], vec![], vec![]);
    for (x, dy) in x.chunks_exact(columns).zip(dy.chunks_exact(columns)) {
        let top = x.iter().copied().fold(f64::MIN, f64::max);
        let parts: Vec<f64> = x.iter().map(|x| if softmax { (x - top).exp() } else { *x }).collect();
        let total = parts.iter().sum::<f64>() + least;
        let along: f64 = parts.iter().zip(dy).map(|(part, dy)| part / total * dy).sum();
        for (part, dy) in parts.iter().zip(dy) {
            y.push(part / total);
            gradient.push((dy - along) / total * if softmax { *part } else { 1.0 });
        }
        totals.push(total);
    }
    let (x, dy) = (upload::<f32>(client, &x), upload::<f32>(client, &dy));
    let [found, sums, dx] = [y.len(), rows, y.len()].map(|len| poisoned::<f32>(client, len));
    normalize::forward(client, &x, [&found, &sums], least as f32, shape).expect("legal");
    normalize::backward(client, [&found, &sums], &dy, &dx, shape).expect("legal");
    report(&format!("normalize, {rows} × {columns}, softmax {softmax}"), &download::<f32>(client, &found), &y, 1e-6)
        + report("totals", &download::<f32>(client, &sums), &totals, 1e-6)
        + report("gradient", &download::<f32>(client, &dx), &gradient, 1e-5)
}

/// The sum of a slice and of others that begin `start` elements into their buffer.
pub fn slices<E: Element>(client: &Client, len: usize, count: usize, start: usize) -> usize {
    let (own, others) = (random(len, 1), random(start + count * len, 2));
    let of_others = |i: usize| (0..count).map(|slice| others[start + slice * len + i]).sum::<f64>();
    let expected: Vec<f64> = own.iter().enumerate().map(|(i, own)| own + of_others(i)).collect();
    let (own, others, out) = (upload::<E>(client, &own), upload::<E>(client, &others), poisoned::<E>(client, len));
    let others = others.offset_start((start * size_of::<E>()) as u64);
    reduce_slices::sum::<E, f32>(client, [&own, &others, &out], count, len).expect("legal");
    let name = format!("sum of {count} slices {}, {len} from {start}", E::NAME);
    report(&name, &download::<E>(client, &out), &expected, E::LIMIT)
}

/// Three bf16 numbers that add up to the fp32 one; each is rounded from the remainder of those before.
pub fn split_bf16(client: &Client, rows: usize, columns: usize) -> usize {
    let len = rows * columns;
    let x: Vec<f64> = random(len, 1).iter().zip(random(len, 2)).map(|(a, b)| f64::from((a * b / 3.0) as f32)).collect();
    let (on, found) = (upload::<f32>(client, &x), poisoned::<bf16>(client, 3 * len));
    split(client, &on, &found, rows, columns).expect("legal");
    let found = download::<bf16>(client, &found);
    let third = |part: usize, i: usize| found[(i / columns * 3 + part) * columns + i % columns];
    let all = |of: &dyn Fn(usize) -> f64| (0..len).map(of).collect::<Vec<f64>>();
    let rounded = |value: f64| bf16::from_f64(value).to_f64();
    let middle = all(&|i| rounded(x[i] - rounded(x[i])));
    report(&format!("bf16x3, {rows} × {columns}"), &all(&|i| (0..3).map(|part| third(part, i)).sum()), &x, 0.0)
        + report("high", &all(&|i| third(0, i)), &all(&|i| rounded(x[i])), 0.0)
        + report("middle", &all(&|i| third(1, i)), &middle, 0.0)
}

/// From element `start` on: at whole vectors or not.
pub fn accumulate<E: Element>(client: &Client, len: usize, start: usize) -> usize {
    let (x, y) = (random(start + len, 1), random(len, 2));
    let expected: Vec<f64> = x[start..].iter().zip(&y).map(|(x, y)| x + y).collect();
    let value = upload::<E>(client, &x).offset_start((start * size_of::<E>()) as u64);
    let (sum, copy) = (upload::<f32>(client, &y), poisoned::<f32>(client, len));
    add_up::<E>(client, &value, &sum, len, true).expect("legal");
    add_up::<E>(client, &value, &copy, len, false).expect("legal");
    report(&format!("accumulate {}, {len} from {start}", E::NAME), &download::<f32>(client, &sum), &expected, 1e-6)
        + report("its first", &download::<f32>(client, &copy), &x[start..], 0.0)
}

/// Runs that begin and end inside vectors of four, between all types.
pub fn runs(client: &Client) -> usize {
    fn run(handle: &Handle, float: FloatType, start: usize, len: usize) -> Run<'_> {
        Run { handle, float, start, len }
    }
    let mut failures = 0;
    let floats = [FloatType::F32, FloatType::Bf16, FloatType::F16];
    for (from, to) in floats.into_iter().flat_map(|from| floats.map(|to| (from, to))) {
        let (x, y) = (random(400, 1), random(400, 2));
        let upload = |float, values: &[f64]| match float {
            FloatType::F32 => upload::<f32>(client, values),
            FloatType::Bf16 => upload::<bf16>(client, values),
            FloatType::F16 => upload::<f16>(client, values),
        };
        let (source, target) = (upload(from, &x), upload(to, &y));
        flat::write(client, run(&source, from, 0, 100), run(&target, to, 0, 100), true).expect("legal");
        flat::write(client, run(&source, from, 301, 77), run(&target, to, 202, 77), false).expect("legal");
        let mut expected = y;
        (0..100).for_each(|i| expected[i] += x[i]);
        expected[202..279].copy_from_slice(&x[301..378]);
        let (found, limit) = match to {
            FloatType::F32 => (download::<f32>(client, &target), 1e-6),
            FloatType::Bf16 => (download::<bf16>(client, &target), bf16::LIMIT),
            FloatType::F16 => (download::<f16>(client, &target), f16::LIMIT),
        };
        failures += report(&format!("runs from {from:?} to {to:?}"), &found, &expected, limit);
    }
    failures
}

/// Squares of chunks: whole ones, single elements, and the ends of tensors.
pub fn squares(client: &Client) -> usize {
    let len = CHUNK + 4000;
    let x = random(len, 1);
    let runs = [(3u32, CHUNK as u32), (CHUNK as u32 + 3, 1), (CHUNK as u32 + 10, 3990)];
    let (starts, lens): (Vec<u32>, Vec<u32>) = runs.into_iter().unzip();
    let (starts, lens) = (upload_u32(client, &starts), upload_u32(client, &lens));
    let (values, sums) = (upload::<f32>(client, &x), upload::<f32>(client, &[7.0; 5]));
    let chunks = Chunks { starts: &starts, lens: &lens, count: 3, end: len };
    flat::squares(client, (&values, FloatType::F32), chunks, &sums, 1).expect("legal");
    let (narrow, narrow_sums) = (upload::<bf16>(client, &x), upload::<f32>(client, &[7.0; 5]));
    flat::squares(client, (&narrow, FloatType::Bf16), chunks, &narrow_sums, 1).expect("legal");
    let square = |(start, len): (u32, u32)| x[start as usize..(start + len) as usize].iter().map(|v| v * v).sum();
    let expected = [vec![7.0], runs.map(square).to_vec(), vec![7.0]].concat();
    // The numbers are bf16 numbers, and the sums in fp32.
    let [sums, narrow_sums] = [&sums, &narrow_sums].map(|sums| download::<f32>(client, sums));
    report("squares", &sums, &expected, 1e-5) + report("squares of bf16", &narrow_sums, &sums, 0.0)
}

/// Chunks copied out of an array and into another one; one of them consists of whole vectors.
pub fn copies(client: &Client) -> usize {
    let x = random(3000, 1);
    let chunks = [(1200u32, 0u32, 404u32), (7, 404, 1000), (2000, 1404, 1), (2500, 1405, 500)];
    let column = |pick: fn(&(u32, u32, u32)) -> u32| upload_u32(client, &chunks.iter().map(pick).collect::<Vec<_>>());
    let (apart, close, lens) = (column(|c| c.0), column(|c| c.1), column(|c| c.2));
    let (source, packed, target) =
        (upload::<f32>(client, &x), poisoned::<f32>(client, 1905), upload::<f32>(client, &[0.0; 3000]));
    let out = Copies { from: &apart, to: &close, lens: &lens, count: 4, ends: [3000, 1905] };
    let back = Copies { from: &close, to: &apart, lens: &lens, count: 4, ends: [1905, 3000] };
    flat::copy(client, &source, &packed, out).expect("legal");
    flat::copy(client, &packed, &target, back).expect("legal");
    let (mut together, mut again) = (vec![0.0; 1905], vec![0.0; 3000]);
    for (from, to, len) in chunks.map(|(from, to, len)| (from as usize, to as usize, len as usize)) {
        together[to..to + len].copy_from_slice(&x[from..from + len]);
        again[from..from + len].copy_from_slice(&x[from..from + len]);
    }
    report("chunks out of an array", &download::<f32>(client, &packed), &together, 0.0)
        + report("chunks back into an array", &download::<f32>(client, &target), &again, 0.0)
}

/// Heads of `[samples, positions, heads · columns]` by sample and head, and back, `start` elements into their buffer.
pub fn heads<E: Element>(client: &Client, [samples, positions, heads, columns]: [usize; 4], start: usize) -> usize {
    let len = samples * positions * heads * columns;
    let x = random(start + len, 1);
    let source = upload::<E>(client, &x).offset_start((start * size_of::<E>()) as u64);
    let (apart, back) = (poisoned::<E>(client, len), poisoned::<E>(client, len));
    let size = size_of::<E>();
    let (width, head) = (heads * columns, positions * columns);
    let by_head = [positions * width, columns, width, 1];
    let rows = StridedRows::of(&[samples, heads, positions, columns], &by_head, size).expect("whole accesses");
    pack(client, &source, rows, &apart).expect("legal");
    let by_position = [heads * head, columns, head, 1];
    let rows = StridedRows::of(&[samples, positions, heads, columns], &by_position, size).expect("whole accesses");
    pack(client, &apart, rows, &back).expect("legal");
    let place = |i: usize| {
        let (column, position, line) = (i % columns, i / columns % positions, i / head);
        start + ((line / heads * positions + position) * heads + line % heads) * columns + column
    };
    let expected: Vec<f64> = (0..len).map(|i| x[place(i)]).collect();
    let name = format!("heads {}, {samples} × {positions} × {heads} × {columns}", E::NAME);
    report(&name, &download::<E>(client, &apart), &expected, 0.0)
        + report("and back", &download::<E>(client, &back), &x[start..], 0.0)
}
