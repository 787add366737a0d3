//! Checks the FP8 kernels bit by bit against the host's arithmetic, and times them next to the GPU's copy bandwidth.
//!
//! `cargo run --release --example fp8_check --features cuda`
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl_runtime::runtime::Runtime;
use half::bf16;
use kernels_cubecl::fp8::cast::{Conversion, cast};
use kernels_cubecl::fp8::codec::{decode_host, encode_host};
use kernels_cubecl::fp8::groups::{self, GroupConversion};
use kernels_cubecl::fp8::{Codec, Format, amax, transpose};
use std::time::Instant;

const FORMATS: [Format; 2] = [Format::E4m3, Format::E5m2];

/// Every bf16 number in turn, NaN and infinity among them, then numbers around 0.
fn numbers(len: usize) -> Vec<bf16> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = |i: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        match i < 1 << 16 {
            true => bf16::from_bits(i as u16),
            false => bf16::from_f64((state >> 11) as f64 / (1u64 << 52) as f64 - 1.0),
        }
    };
    (0..len).map(&mut next).collect()
}

fn upload(client: &Client, values: &[bf16]) -> Handle {
    client.create_from_slice(&values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
}

fn read(client: &Client, handle: &Handle) -> Vec<u8> {
    client.read_one_unchecked(handle.clone()).to_vec()
}

fn read_f32(client: &Client, handle: &Handle) -> f32 {
    let bytes = read(client, handle);
    f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

fn report(name: String, wrong: usize) -> usize {
    println!("{name:<60} {}", if wrong == 0 { "ok".into() } else { format!("BAD: {wrong} differ") });
    usize::from(wrong > 0)
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

fn check_amax(client: &Client, len: usize) -> usize {
    let x: Vec<bf16> = numbers(len + (1 << 16)).split_off(1 << 16);
    let expected = x.iter().map(|x| x.to_f32().abs()).fold(0.0, f32::max);
    let (x, found) = (upload(client, &x), client.empty(4));
    let scales = [client.empty(4), client.empty(4)];
    amax::amax::<bf16>(client, &x, &found, len).expect("legal");
    amax::scale(client, &found, [&scales[0], &scales[1]], 1, Format::E4m3, 1).expect("legal");
    let scale = 448.0 / expected * 0.5;
    let found = [&found, &scales[0], &scales[1]].map(|handle| read_f32(client, handle));
    let wrong = found.iter().zip([expected, scale, 1.0 / scale]).filter(|(a, b)| **a != *b).count();
    report(format!("amax and scale of {len}: {found:?}"), wrong)
}

/// Scales of an amax that has none.
fn check_edges(client: &Client) -> usize {
    let found = [0.0, f32::INFINITY, f32::NAN, 1e-45].map(|amax: f32| {
        let amax = client.create_from_slice(&amax.to_le_bytes());
        let [scale, inverse] = [client.empty(4), client.empty(4)];
        amax::scale(client, &amax, [&scale, &inverse], 1, Format::E5m2, 0).expect("legal");
        read_f32(client, &scale)
    });
    report(format!("scales of 0, infinity, NaN, 1e-45: {found:?}"), usize::from(found != [1.0, 1.0, 1.0, f32::MAX]))
}

fn check_casts(client: &Client, rows: usize, columns: usize, scale: f32) -> usize {
    let x = numbers(rows * columns);
    let handle = upload(client, &x);
    let factor = client.create_from_slice(&scale.to_le_bytes());
    let mut failures = 0;
    for format in FORMATS {
        let by_rows: Vec<u8> = x.iter().map(|x| encode_host(x.to_f32() * scale, format)).collect();
        let by_columns = turned(&by_rows, rows, columns);
        for codec in [Codec::Instruction, Codec::Arithmetic] {
            for (lines, turns) in [(true, false), (false, true), (true, true)] {
                let out = [lines, turns].map(|wanted| wanted.then(|| client.empty(rows * columns)));
                let conversion = Conversion { format, codec, rows, columns };
                cast::<bf16>(client, &handle, &factor, out[0].as_ref(), out[1].as_ref(), conversion).expect("legal");
                let pairs = out.iter().zip([&by_rows, &by_columns]);
                let wrong = pairs.filter_map(|(found, expected)| {
                    found.as_ref().map(|found| different(&read(client, found), expected, format))
                });
                let what = format!("{format:?} {rows} × {columns} {codec:?} rows {lines} columns {turns}");
                failures += report(what, wrong.sum());
            }
        }
        let (bytes, out) = (client.create_from_slice(&by_rows), client.empty(rows * columns));
        transpose::transpose(client, &bytes, &out, rows, columns).expect("legal");
        failures +=
            report(format!("transpose {rows} × {columns}"), different(&read(client, &out), &by_columns, format));
    }
    failures
}

/// Amax and casts of groups of rows with a scale each.
fn check_groups(client: &Client, counts: &[usize], columns: usize) -> usize {
    let rows: usize = counts.iter().sum();
    let x: Vec<bf16> = numbers(rows * columns + (1 << 16)).split_off(1 << 16);
    let parts = || {
        let mut rest = &x[..];
        counts.iter().map(move |count| rest.split_off(..count * columns).expect("the groups make up the rows"))
    };
    let (handle, amax) = (upload(client, &x), client.empty(4 * counts.len()));
    groups::amax::<bf16>(client, &handle, &amax, counts, columns).expect("legal");
    let expected: Vec<f32> = parts().map(|part| part.iter().map(|x| x.to_f32().abs()).fold(0.0, f32::max)).collect();
    let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
    let wrong = usize::from(read(client, &amax) != bytes(&expected));
    let mut failures = report(format!("amax of groups {counts:?} × {columns}"), wrong);
    let scales: Vec<f32> = (0..counts.len()).map(|group| 20.0 + 7.5 * group as f32).collect();
    let factors = client.create_from_slice(&bytes(&scales));
    for format in FORMATS {
        let of_group = |(part, scale): (&[bf16], &f32)| -> Vec<u8> {
            part.iter().map(|x| encode_host(x.to_f32() * scale, format)).collect()
        };
        let by_rows: Vec<Vec<u8>> = parts().zip(&scales).map(of_group).collect();
        let by_columns = by_rows.iter().zip(counts).map(|(part, rows)| turned(part, *rows, columns));
        let (by_columns, by_rows) = (by_columns.collect::<Vec<_>>().concat(), by_rows.concat());
        for (lines, turns) in [(true, false), (false, true), (true, true)] {
            let out = [lines, turns].map(|wanted| wanted.then(|| client.empty(rows * columns)));
            let conversion = GroupConversion { format, codec: Codec::Instruction, counts, columns };
            groups::cast::<bf16>(client, &handle, &factors, out[0].as_ref(), out[1].as_ref(), conversion)
                .expect("legal");
            let pairs = out.iter().zip([&by_rows, &by_columns]);
            let wrong = pairs.filter_map(|(found, expected)| {
                found.as_ref().map(|found| different(&read(client, found), expected, format))
            });
            let what = format!("{format:?} groups {counts:?} × {columns} rows {lines} columns {turns}");
            failures += report(what, wrong.sum());
        }
    }
    failures
}

/// Medians of five batches of 20 calls.
fn time(client: &Client, name: &str, bytes: usize, mut call: impl FnMut()) {
    let sync = || cubecl::future::block_on(client.sync()).expect("the kernels ran");
    call();
    sync();
    let mut seconds: Vec<f64> = (0..5)
        .map(|_| {
            let start = Instant::now();
            (0..20).for_each(|_| call());
            sync();
            start.elapsed().as_secs_f64() / 20.0
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    println!("{name:<44} {:7.3} ms {:5.2} TB/s", seconds[2] * 1e3, bytes as f64 / seconds[2] / 1e12);
}

fn main() {
    let client = &cubecl::cuda::CudaRuntime::client(&Default::default());
    let failures = check_amax(client, 8)
        + check_amax(client, 1 << 22)
        + check_amax(client, 5_000_008)
        + check_edges(client)
        + check_casts(client, 256, 512, 1.0)
        + check_casts(client, 272, 1040, 37.5)
        + check_casts(client, 16, 16, 1e30)
        + check_groups(client, &[128, 0, 384, 256], 1024)
        + check_groups(client, &[16, 272, 0, 144, 48], 176)
        + check_groups(client, &[0, 0, 16], 16);

    let (rows, columns) = (16384, 14336);
    let len = rows * columns;
    let pattern = numbers(1 << 20);
    let x = upload(client, &pattern.iter().copied().cycle().take(len).collect::<Vec<_>>());
    let (found, factor) = (client.empty(4), client.create_from_slice(&1f32.to_le_bytes()));
    let (lines, turns) = (client.empty(len), client.empty(len));
    time(client, "amax", 2 * len, || amax::amax::<bf16>(client, &x, &found, len).expect("legal"));
    let conversion = Conversion { format: Format::E4m3, codec: Codec::Instruction, rows, columns };
    let casts = |name: &str, bytes: usize, by_rows: Option<&Handle>, by_columns: Option<&Handle>| {
        time(client, name, bytes * len, || {
            cast::<bf16>(client, &x, &factor, by_rows, by_columns, conversion).expect("legal")
        })
    };
    casts("cast", 3, Some(&lines), None);
    casts("cast and transpose", 4, Some(&lines), Some(&turns));
    casts("cast to the transpose", 3, None, Some(&turns));
    time(client, "transpose of bytes", 2 * len, || {
        transpose::transpose(client, &lines, &turns, rows, columns).expect("legal")
    });
    let counts = [3072, 1024, 0, 4096, 2048, 2048, 3968, 128];
    assert_eq!(counts.iter().sum::<usize>(), rows);
    let (found, factors) =
        (client.empty(4 * counts.len()), client.create_from_slice(&[0x3f80_0000u32; 8].map(u32::to_le_bytes).concat()));
    time(client, "amax of 8 groups", 2 * len, || {
        groups::amax::<bf16>(client, &x, &found, &counts, columns).expect("legal")
    });
    let conversion = GroupConversion { format: Format::E4m3, codec: Codec::Instruction, counts: &counts, columns };
    let casts = |name: &str, bytes: usize, by_rows: Option<&Handle>, by_columns: Option<&Handle>| {
        time(client, name, bytes * len, || {
            groups::cast::<bf16>(client, &x, &factors, by_rows, by_columns, conversion).expect("legal")
        })
    };
    casts("cast of 8 groups", 3, Some(&lines), None);
    casts("cast and transpose of 8 groups", 4, Some(&lines), Some(&turns));
    casts("cast to the transpose of 8 groups", 3, None, Some(&turns));
    assert_eq!(failures, 0, "some kernels are wrong");
}
