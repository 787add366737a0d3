//! The FP8 kernels against the host's arithmetic, bit by bit, and their bandwidths next to the GPU's copy bandwidth.

use crate::choice::Choice;
use crate::clock;
use crate::kernel_tests::client;
use crate::kernel_tests::pointwise::download;
use crate::numbers::uniform;
use crate::report::Report;
use backend_dist::launch::BoxError;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::bf16;
use kernels_cubecl::fp8::cast::{Conversion, cast};
use kernels_cubecl::fp8::codec::{decode_host, encode_host};
use kernels_cubecl::fp8::groups::{self, GroupConversion};
use kernels_cubecl::fp8::{BLOCK, Codec, Format, Granularity, amax, blocks, transpose};

const FORMATS: [Format; 2] = [Format::E4m3, Format::E5m2];

/// Every bf16 number in turn, NaN and infinity among them, then numbers around 0.
fn numbers(len: usize) -> Vec<bf16> {
    let mut next = uniform(1);
    let number = |i: usize| if i < 1 << 16 { bf16::from_bits(i as u16) } else { bf16::from_f64(2.0 * next() - 1.0) };
    (0..len).map(number).collect()
}

/// Numbers around 0.
fn small(len: usize) -> Vec<bf16> {
    numbers(len + (1 << 16)).split_off(1 << 16)
}

fn upload(client: &Client, values: &[bf16]) -> Handle {
    client.create_from_slice(&values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
}

fn read(client: &Client, handle: &Handle) -> Vec<u8> {
    client.read_one_unchecked(handle.clone()).to_vec()
}

/// Bytes that differ; all NaNs are one number.
fn different(found: &[u8], expected: &[u8], format: Format) -> usize {
    let nan = |byte: u8| decode_host(byte, format).is_nan();
    found.iter().zip(expected).filter(|(a, b)| a != b && !(nan(**a) && nan(**b))).count()
        + found.len().abs_diff(expected.len())
}

fn turned(bytes: &[u8], rows: usize, columns: usize) -> Vec<u8> {
    (0..columns).flat_map(|column| (0..rows).map(move |row| bytes[row * columns + column])).collect()
}

fn largest(x: &[bf16]) -> f32 {
    x.iter().map(|x| x.to_f32().abs()).fold(0.0, f32::max)
}

fn check_amax(client: &Client, report: &mut Report, len: usize) {
    let x = small(len);
    let expected = largest(&x);
    let (x, found) = (upload(client, &x), client.empty(4));
    let scales = [client.empty(4), client.empty(4)];
    amax::amax::<bf16>(client, &x, &found, len).expect("legal");
    amax::scale(client, &found, [&scales[0], &scales[1]], 1, Format::E4m3, 1).expect("legal");
    let scale = 448.0 / expected * 0.5;
    let found = [&found, &scales[0], &scales[1]].map(|handle| download::<f32>(client, handle)[0]);
    let is_right = found == [expected, scale, 1.0 / scale].map(f64::from);
    report.holds(format!("amax and scale of {len}: {found:?}"), is_right);
}

/// Scales of an amax that has none.
fn check_edges(client: &Client, report: &mut Report) {
    let found = [0.0, f32::INFINITY, f32::NAN, 1e-45].map(|amax: f32| {
        let amax = client.create_from_slice(&amax.to_le_bytes());
        let [scale, inverse] = [client.empty(4), client.empty(4)];
        amax::scale(client, &amax, [&scale, &inverse], 1, Format::E5m2, 0).expect("legal");
        download::<f32>(client, &scale)[0]
    });
    let is_right = found == [1.0, 1.0, 1.0, f64::from(f32::MAX)];
    report.holds(format!("scales of 0, infinity, NaN, 1e-45: {found:?}"), is_right);
}

/// What a cast writes: by rows, by columns, and both at once; each call of `cast` is for one of them.
fn check_targets(
    client: &Client,
    report: &mut Report,
    what: &str,
    expected: [&Vec<u8>; 2],
    format: Format,
    cast: impl Fn([Option<&Handle>; 2]),
) {
    for (lines, turns) in [(true, false), (false, true), (true, true)] {
        let out = [lines, turns].map(|wanted| wanted.then(|| client.empty(expected[0].len())));
        cast([out[0].as_ref(), out[1].as_ref()]);
        let found = out.iter().zip(expected).filter_map(|(out, expected)| Some((out.as_ref()?, expected)));
        let wrong: usize = found.map(|(out, expected)| different(&read(client, out), expected, format)).sum();
        report.error(format!("{format:?} {what} rows {lines} columns {turns}, differences"), wrong as f64, 0.0);
    }
}

fn check_casts(client: &Client, report: &mut Report, rows: usize, columns: usize, scale: f32) {
    let x = numbers(rows * columns);
    let handle = upload(client, &x);
    let factor = client.create_from_slice(&scale.to_le_bytes());
    for format in FORMATS {
        let by_rows: Vec<u8> = x.iter().map(|x| encode_host(x.to_f32() * scale, format)).collect();
        let by_columns = turned(&by_rows, rows, columns);
        for codec in [Codec::Instruction, Codec::Arithmetic] {
            let conversion = Conversion { format, codec, rows, columns };
            let what = format!("{rows} × {columns} {codec:?}");
            check_targets(client, report, &what, [&by_rows, &by_columns], format, |[by_rows, by_columns]| {
                cast::<bf16>(client, &handle, &factor, by_rows, by_columns, conversion).expect("legal");
            });
        }
        let (bytes, out) = (client.create_from_slice(&by_rows), client.empty(rows * columns));
        transpose::transpose(client, &bytes, &out, rows, columns).expect("legal");
        let wrong = different(&read(client, &out), &by_columns, format);
        report.error(format!("transpose {rows} × {columns}, differences"), wrong as f64, 0.0);
    }
}

/// Amax and casts of groups of rows with a scale each.
fn check_groups(client: &Client, report: &mut Report, counts: &[usize], columns: usize) {
    let rows: usize = counts.iter().sum();
    let x = small(rows * columns);
    let parts = || {
        let mut rest = &x[..];
        counts.iter().map(move |count| rest.split_off(..count * columns).expect("the groups make up the rows"))
    };
    let (handle, amax) = (upload(client, &x), client.empty(4 * counts.len()));
    groups::amax::<bf16>(client, &handle, &amax, counts, columns).expect("legal");
    let expected: Vec<f64> = parts().map(|part| f64::from(largest(part))).collect();
    let is_right = download::<f32>(client, &amax) == expected;
    report.holds(format!("amax of groups {counts:?} × {columns}"), is_right);
    let scales: Vec<f32> = (0..counts.len()).map(|group| 20.0 + 7.5 * group as f32).collect();
    let factors = client.create_from_slice(&scales.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
    for format in FORMATS {
        let of_group = |(part, scale): (&[bf16], &f32)| -> Vec<u8> {
            part.iter().map(|x| encode_host(x.to_f32() * scale, format)).collect()
        };
        let by_rows: Vec<Vec<u8>> = parts().zip(&scales).map(of_group).collect();
        let by_columns = by_rows.iter().zip(counts).map(|(part, rows)| turned(part, *rows, columns));
        let (by_columns, by_rows) = (by_columns.collect::<Vec<_>>().concat(), by_rows.concat());
        let conversion = GroupConversion { format, codec: Codec::Instruction, counts, columns, together: false };
        let what = format!("groups {counts:?} × {columns}");
        check_targets(client, report, &what, [&by_rows, &by_columns], format, |[by_rows, by_columns]| {
            groups::cast::<bf16>(client, &handle, &factors, by_rows, by_columns, conversion).expect("legal");
        });
    }
}

/// The largest power of two that takes the amax of these numbers into the format.
fn power(x: &[f32], format: Format) -> f32 {
    let amax = x.iter().fold(0.0, |top: f32, x| top.max(x.abs()));
    let power = f32::from_bits((format.max() / amax).to_bits() & 0xff80_0000);
    if amax > 0.0 && amax.is_finite() { power.min(2f32.powi(126)) } else { 1.0 }
}

/// `x [rows, columns]` with a scale for each block of `height` rows: the bytes, and the reciprocals, a line of blocks after the
/// other.
fn in_blocks(x: &[f32], [rows, columns]: [usize; 2], height: usize, format: Format) -> (Vec<u8>, Vec<f32>) {
    let (mut bytes, mut inverse) = (vec![0; rows * columns], Vec::new());
    for (first_row, first) in
        (0..rows).step_by(height).flat_map(|row| (0..columns).step_by(BLOCK).map(move |at| (row, at)))
    {
        let places =
            || (first_row..first_row + height).flat_map(|row| (first..first + BLOCK).map(move |at| row * columns + at));
        let scale = power(&places().map(|at| x[at]).collect::<Vec<_>>(), format);
        inverse.push(1.0 / scale);
        places().for_each(|at| bytes[at] = encode_host(x[at] * scale, format));
    }
    (bytes, inverse)
}

/// Casts with a scale for each block, and their scales in cuBLASLt's order.
fn check_blocks(client: &Client, report: &mut Report, [rows, columns]: [usize; 2]) {
    // Blocks without an amax and with an infinite one among them, and rows of very different sizes.
    let mut x = numbers(rows * columns);
    x.iter_mut()
        .enumerate()
        .skip(1 << 16)
        .for_each(|(i, x)| *x = bf16::from_f32(x.to_f32() * 2f32.powi((i / columns % 60) as i32 - 30)));
    let handle = upload(client, &x);
    let by_rows: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
    let by_columns: Vec<f32> = (0..rows * columns).map(|i| by_rows[i % rows * columns + i / rows]).collect();
    for (granularity, height) in [(Granularity::Vector, 1), (Granularity::Block, BLOCK)] {
        for (format, [lines, turns]) in FORMATS
            .into_iter()
            .flat_map(|format| [[true, false], [false, true], [true, true]].map(|sides| (format, sides)))
        {
            let sides = [(lines, &by_rows, [rows, columns]), (turns, &by_columns, [columns, rows])];
            let out = sides.map(|(wanted, _, [rows, inner])| {
                let [lines, line] = granularity.scales(rows, inner);
                wanted.then(|| [client.empty(rows * inner), client.empty(4 * lines * line)])
            });
            let written =
                [&out[0], &out[1]].map(|out| out.as_ref().map(|[bytes, inverse]| blocks::Written { bytes, inverse }));
            blocks::cast::<bf16>(
                client,
                &handle,
                written,
                (granularity, format, Codec::Instruction),
                [1, rows, columns],
            )
            .expect("legal");
            let (mut wrong, mut other) = (0, 0);
            for (out, (_, x, sizes)) in out.iter().zip(sides) {
                let Some([bytes, inverse]) = out else { continue };
                let (expected, scales) = in_blocks(x, sizes, height, format);
                wrong += different(&read(client, bytes), &expected, format);
                let (found, [_, line]) = (download::<f32>(client, inverse), granularity.scales(sizes[0], sizes[1]));
                let across = sizes[1] / BLOCK;
                let place = |i: usize| match granularity {
                    Granularity::Vector => i % across * line + i / across,
                    _ => i / across * line + i % across,
                };
                other += scales.iter().enumerate().filter(|(i, scale)| found[place(*i)] != f64::from(**scale)).count();
            }
            let what = format!("{format:?} {rows} × {columns} by {granularity:?} rows {lines} columns {turns}");
            report.error(format!("{what}, differences"), wrong as f64, 0.0);
            report.error(format!("{what}, other scales"), other as f64, 0.0);
        }
    }
}

pub fn run(choice: &Choice, report: &mut Report) -> Result<(), BoxError> {
    let client = &client();
    if choice.does("check") {
        for len in [8, 1 << 22, 5_000_008] {
            check_amax(client, report, len);
        }
        check_edges(client, report);
        for (rows, columns, scale) in [(256, 512, 1.0), (272, 1040, 37.5), (16, 16, 1e30)] {
            check_casts(client, report, rows, columns, scale);
        }
        check_blocks(client, report, [256, 512]);
        check_blocks(client, report, [384, 640]);
        check_groups(client, report, &[128, 0, 384, 256], 1024);
        check_groups(client, report, &[16, 272, 0, 144, 48], 176);
        check_groups(client, report, &[0, 0, 16], 16);
    }
    if choice.does("time") {
        time(client);
    }
    Ok(())
}

fn time(client: &Client) {
    let (rows, columns) = (16384, 14336);
    let len = rows * columns;
    let pattern = numbers(1 << 20);
    let x = upload(client, &pattern.iter().copied().cycle().take(len).collect::<Vec<_>>());
    let (found, factor) = (client.empty(4), client.create_from_slice(&1f32.to_le_bytes()));
    let (lines, turns) = (client.empty(len), client.empty(len));
    let time = |name: &str, bytes: usize, call: &dyn Fn()| {
        let (seconds, bytes) = (clock::kernel(client, |_| call()), (bytes * len) as f64);
        println!("{name:<44} {:7.3} ms {:5.2} TB/s", seconds * 1e3, bytes / seconds / 1e12);
    };
    let targets = [
        ("cast", 3, Some(&lines), None),
        ("cast and transpose", 4, Some(&lines), Some(&turns)),
        ("cast to the transpose", 3, None, Some(&turns)),
    ];
    time("amax", 2, &|| amax::amax::<bf16>(client, &x, &found, len).expect("legal"));
    let conversion = Conversion { format: Format::E4m3, codec: Codec::Instruction, rows, columns };
    for (name, bytes, by_rows, by_columns) in targets {
        time(name, bytes, &|| cast::<bf16>(client, &x, &factor, by_rows, by_columns, conversion).expect("legal"));
    }
    let inverses = [(); 2].map(|()| client.empty(len / BLOCK * 4));
    for (granularity, name, bytes, sides) in [
        (Granularity::Vector, "cast by vectors", 3, [true, false]),
        (Granularity::Vector, "cast by vectors, and transpose", 4, [true, true]),
        (Granularity::Vector, "cast by vectors to the transpose", 3, [false, true]),
        (Granularity::Block, "cast by blocks, and transpose", 4, [true, true]),
    ] {
        let written = [(&lines, &inverses[0], sides[0]), (&turns, &inverses[1], sides[1])]
            .map(|(bytes, inverse, wanted)| wanted.then_some(blocks::Written { bytes, inverse }));
        let how = (granularity, Format::E4m3, Codec::Instruction);
        time(name, bytes, &|| blocks::cast::<bf16>(client, &x, written, how, [1, rows, columns]).expect("legal"));
    }
    time("transpose of bytes", 2, &|| transpose::transpose(client, &lines, &turns, rows, columns).expect("legal"));
    let counts = [3072, 1024, 0, 4096, 2048, 2048, 3968, 128];
    assert_eq!(counts.iter().sum::<usize>(), rows);
    let factors = client.create_from_slice(&1f32.to_le_bytes().repeat(counts.len()));
    let found = client.empty(4 * counts.len());
    time("amax of 8 groups", 2, &|| groups::amax::<bf16>(client, &x, &found, &counts, columns).expect("legal"));
    let conversion =
        GroupConversion { format: Format::E4m3, codec: Codec::Instruction, counts: &counts, columns, together: false };
    for (name, bytes, by_rows, by_columns) in targets {
        time(&format!("{name} of 8 groups"), bytes, &|| {
            groups::cast::<bf16>(client, &x, &factors, by_rows, by_columns, conversion).expect("legal")
        });
    }
}
