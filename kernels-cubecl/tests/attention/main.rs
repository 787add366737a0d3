//! The portable attention kernels on CubeCL's cpu runtime, against f64.

mod checks;
#[path = "../draws/mod.rs"]
mod draws;
#[path = "../libcalls/mod.rs"]
mod libcalls;
mod reference;

use checks::{Kernels, empty};
use cubecl::prelude::*;
use kernels_cubecl::attention::portable::{self, Element};
use kernels_cubecl::attention::{AttentionShape, CallOptions, Dropout};
use reference::Problem;

fn client() -> Client {
    cubecl::Device::Cpu(Default::default()).client()
}

fn check(what: &str, problem: &Problem, element: Element) {
    for found in checks::check(&client(), Kernels::Plain(element), problem) {
        assert!(found.error <= found.bound, "{what} in {element:?}: {found}");
    }
}

fn shape() -> AttentionShape {
    let ([batch, heads, kv_heads], [queries, keys], [head_dim, value_dim]) = ([2, 4, 2], [11, 11], [6, 6]);
    let (causal, window) = (true, None);
    AttentionShape { batch, heads, kv_heads, queries, keys, head_dim, value_dim, causal, window }
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
        check("queries at other positions", &Problem { first_query: Some(first), ..plain(window) }, Element::F64);
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
    let said = |shape: AttentionShape, options: CallOptions| {
        let done = portable::forward(&client, element, &shape, 1.0, &options, (&q, &k, &v), &out, &lse);
        done.unwrap_err().to_string()
    };
    assert!(said(shape, CallOptions::default()).contains("the buffer of lse has 4 bytes"));
    assert!(said(AttentionShape { kv_heads: 3, ..shape }, CallOptions::default()).contains("do not divide among 3"));
    assert!(said(AttentionShape { window: Some(0), ..shape }, CallOptions::default()).contains("window is zero"));
    assert!(said(AttentionShape { keys: 10, ..shape }, CallOptions::default()).contains("k has shape"));
    let dropout = Some(Dropout { p: 1.0, ..Dropout::whole(0.0, 1, &shape) });
    assert!(said(shape, CallOptions { dropout, ..Default::default() }).contains("dropout probability is 1"));
}
