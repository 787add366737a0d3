//! The portable attention kernels on CubeCL's cpu runtime, against f64.
#![cfg(feature = "cpu")]

mod reference;

use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};
use kernels_cubecl::attention::portable::{self, Element};
use kernels_cubecl::attention::{AttentionShape, Dropout, Extras, Gradients, Packed, Saved, Tensor4};
use reference::Problem;

fn client() -> Client {
    cubecl::Device::Cpu(Default::default()).client()
}

/// Numbers in `-1..1` that look random.
fn numbers(len: usize, seed: usize) -> Vec<f64> {
    (0..len).map(|i| (((i + 1) as f64 * 12.9898 + seed as f64 * 78.233).sin() * 43_758.545_3).fract()).collect()
}

fn bytes(values: &[f64], element: Element) -> Vec<u8> {
    let one = |x: &f64| match element {
        Element::F64 => x.to_le_bytes().to_vec(),
        Element::F32 => (*x as f32).to_le_bytes().to_vec(),
        Element::Bf16 => bf16::from_f64(*x).to_le_bytes().to_vec(),
        Element::F16 => f16::from_f64(*x).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(one).collect()
}

fn numbers_of(bytes: &[u8], element: Element) -> Vec<f64> {
    match element {
        Element::F64 => bytes.chunks(8).map(|x| f64::from_le_bytes(x.try_into().unwrap())).collect(),
        Element::F32 => bytes.chunks(4).map(|x| f64::from(f32::from_le_bytes(x.try_into().unwrap()))).collect(),
        Element::Bf16 => bytes.chunks(2).map(|x| bf16::from_le_bytes(x.try_into().unwrap()).to_f64()).collect(),
        Element::F16 => bytes.chunks(2).map(|x| f16::from_le_bytes(x.try_into().unwrap()).to_f64()).collect(),
    }
}

/// Relative error that rounding explains.
fn allowed(element: Element) -> f64 {
    match element {
        Element::F64 => 1e-13,
        Element::F32 => 3e-6,
        Element::F16 => 3e-3,
        Element::Bf16 => 2e-2,
    }
}

fn compare(what: &str, found: &[f64], expected: &[f64], allowed: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0f64, |max, x| max.max(x.abs()));
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= allowed * largest.max(1e-3), "{what}[{i}]: {a}, expected {b}");
    }
}

/// A tensor whose rows have gaps, filled with NaN, and its numbers rounded to the type.
fn spread(client: &Client, shape: [usize; 4], element: Element, seed: usize) -> (Tensor4, Vec<f64>) {
    let [s, b, h, d] = shape;
    let values = numbers_of(&bytes(&numbers(s * b * h * d, seed), element), element);
    let mut padded = Vec::new();
    for head in values.chunks(d) {
        padded.extend_from_slice(head);
        padded.push(f64::NAN);
    }
    let handle = client.create_from_slice(&bytes(&padded, element));
    (Tensor4 { handle, shape, strides: [b * h * (d + 1), h * (d + 1), d + 1] }, values)
}

fn empty(client: &Client, shape: [usize; 4], element: Element) -> Tensor4 {
    let handle = client.create_from_slice(&vec![0xff; shape.iter().product::<usize>() * element.size()]);
    Tensor4::contiguous(handle, shape)
}

fn read(client: &Client, handle: &Handle, element: Element) -> Vec<f64> {
    numbers_of(&client.read_one_unchecked(handle.clone()), element)
}

fn check(what: &str, problem: &Problem, element: Element) {
    let client = client();
    let shape = &problem.shape;
    let (q, q_values) = spread(&client, shape.query_shape(), element, 1);
    let (k, k_values) = spread(&client, shape.key_shape(), element, 2);
    let (v, v_values) = spread(&client, shape.value_shape(), element, 3);
    let (slope, slopes) = spread(&client, shape.out_shape(), element, 4);
    let expected = problem.solve(&q_values, &k_values, &v_values, &slopes);
    let starts =
        problem.starts.as_ref().map(|starts| starts.each_ref().map(|s| client.create_from_slice(i32::as_bytes(s))));
    let packed = starts.as_ref().map(|[query_starts, key_starts]| Packed {
        query_starts,
        key_starts,
        sequences: problem.starts.as_ref().unwrap()[0].len() - 1,
        longest_query: shape.queries,
        longest_key: shape.keys,
    });
    let extras = Extras { packed, dropout: problem.dropout, first_query: problem.first_query, ..Default::default() };
    let statistic = if element == Element::F64 { Element::F64 } else { Element::F32 };
    let out = empty(&client, shape.out_shape(), element);
    let lse = client.create_from_slice(&vec![0xff; shape.statistics_len() * statistic.size()]);
    let scale = problem.scale;
    portable::forward(&client, element, shape, scale, &extras, (&q, &k, &v), &out, &lse).unwrap();
    let what = |part: &str| format!("{part} of {what} in {element:?}");
    let bound = allowed(element);
    compare(&what("output"), &read(&client, &out.handle, element), &expected.out, bound);
    let found = read(&client, &lse, statistic);
    for (row, expected) in found.chunks(shape.padded_queries()).zip(expected.lse.chunks(shape.padded_queries())) {
        for (a, b) in row.iter().zip(expected).take(shape.queries) {
            assert!(a == b || (a - b).abs() <= allowed(statistic) * b.abs().max(1.0), "{}: {a}, {b}", what("lse"));
        }
    }
    let gradients = [shape.query_shape(), shape.key_shape(), shape.value_shape()].map(|s| empty(&client, s, element));
    let [dq, dk, dv] = &gradients;
    let saved = Saved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
    let into = Gradients { q: dq, k: dk, v: dv };
    portable::backward(&client, element, shape, scale, &extras, saved, &slope, into).unwrap();
    for (name, (found, expected)) in ["dq", "dk", "dv"].iter().zip(gradients.iter().zip(&expected.gradients)) {
        compare(&what(name), &read(&client, &found.handle, element), expected, 2.0 * bound);
    }
}

fn shape() -> AttentionShape {
    AttentionShape {
        batch: 2,
        heads: 4,
        kv_heads: 2,
        queries: 11,
        keys: 11,
        head_dim: 6,
        value_dim: 6,
        causal: true,
        window: None,
    }
}

fn plain(shape: AttentionShape) -> Problem {
    Problem { shape, scale: 0.8, dropout: None, starts: None, first_query: None }
}

const ALL: [Element; 4] = [Element::F64, Element::F32, Element::Bf16, Element::F16];

#[test]
fn every_type() {
    for element in ALL {
        check("a causal call", &plain(shape()), element);
    }
}

#[test]
fn masks_and_sizes() {
    for (causal, window) in [(true, None), (false, None), (true, Some(3)), (false, Some(2)), (false, Some(1))] {
        for (queries, keys) in [(11, 11), (3, 70), (1, 5)] {
            let shape = AttentionShape { causal, window, queries, keys, ..shape() };
            check(&format!("{shape:?}"), &plain(shape), Element::F32);
        }
    }
    let mla = AttentionShape { head_dim: 5, value_dim: 3, kv_heads: 1, ..shape() };
    check("values of another length", &plain(mla), Element::F64);
}

/// A query that sees no key: zeros, a log-sum-exp of -∞, no gradient.
#[test]
fn queries_without_keys() {
    check("more queries than keys", &plain(AttentionShape { keys: 4, ..shape() }), Element::F64);
    let window = AttentionShape { window: Some(3), causal: false, ..shape() };
    for first in [-20, -5, 4, 30] {
        check("queries elsewhere", &Problem { first_query: Some(first), ..plain(window) }, Element::F64);
    }
}

#[test]
fn packed_sequences() {
    let packed = AttentionShape { batch: 1, queries: 12, keys: 14, ..shape() };
    let starts = [vec![0, 5, 5, 6, 12], vec![0, 5, 6, 8, 14]];
    for (causal, window) in [(true, None), (false, None), (true, Some(2)), (false, Some(2))] {
        let shape = AttentionShape { causal, window, ..packed };
        check("packed sequences", &Problem { starts: Some(starts.clone()), ..plain(shape) }, Element::F64);
    }
}

#[test]
fn dropout() {
    let dropout = Dropout { p: 0.4, seed: 77, first: [3, 2, 1, 5], heads: 9, queries: 40 };
    let window = AttentionShape { window: Some(6), ..shape() };
    for element in [Element::F64, Element::Bf16] {
        check("dropout", &Problem { dropout: Some(dropout), ..plain(window) }, element);
    }
    let packed = AttentionShape { batch: 1, ..shape() };
    let starts = [vec![0, 4, 11], vec![0, 4, 11]];
    check("dropout", &Problem { dropout: Some(dropout), starts: Some(starts), ..plain(packed) }, Element::F32);
}

#[test]
fn what_does_not_fit_is_refused() {
    let client = client();
    let element = Element::F32;
    let shape = shape();
    let [q, k, v] = [shape.query_shape(), shape.key_shape(), shape.value_shape()].map(|s| empty(&client, s, element));
    let (out, lse) = (empty(&client, shape.out_shape(), element), client.empty(4));
    let said = |shape: AttentionShape, extras: Extras| {
        let done = portable::forward(&client, element, &shape, 1.0, &extras, (&q, &k, &v), &out, &lse);
        done.unwrap_err().to_string()
    };
    assert!(said(shape, Extras::default()).contains("the buffer of lse has 4 bytes"));
    assert!(said(AttentionShape { kv_heads: 3, ..shape }, Extras::default()).contains("do not divide among 3"));
    assert!(said(AttentionShape { window: Some(0), ..shape }, Extras::default()).contains("window is zero"));
    assert!(said(AttentionShape { keys: 10, ..shape }, Extras::default()).contains("k has shape"));
    let dropout = Some(Dropout { p: 1.0, ..Dropout::whole(0.0, 1, &shape) });
    assert!(said(shape, Extras { dropout, ..Default::default() }).contains("dropout probability is 1"));
}
