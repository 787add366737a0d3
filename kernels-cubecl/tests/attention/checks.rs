//! A call of a kernel against f64: the same on a GPU and on CubeCL's cpu runtime.

use super::reference::Problem;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};
use kernels_cubecl::attention::portable::{self, Element, mma};
use kernels_cubecl::attention::{CallOptions, Gradients, Half, Packed, Saved, Tensor4};
use std::fmt;

/// Which kernels.
#[derive(Clone, Copy, Debug)]
pub enum Kernels {
    /// Without matrix units.
    Plain(Element),
    /// Matrix units.
    #[allow(dead_code, reason = "the cpu runtime has none")]
    Mma(Half),
}

impl Kernels {
    pub fn element(self) -> Element {
        match self {
            Self::Plain(element) => element,
            Self::Mma(Half::Bf16) => Element::Bf16,
            Self::Mma(Half::F16) => Element::F16,
        }
    }

    /// Elements between the heads of a tensor that has gaps.
    fn gap(self) -> usize {
        match self {
            Self::Plain(_) => 1,
            Self::Mma(_) => 8,
        }
    }

    fn half(self) -> Half {
        match self {
            Self::Plain(_) => Half::default(),
            Self::Mma(half) => half,
        }
    }
}

/// Error of one result, relative to its largest number, and its bound.
pub struct Comparison {
    pub name: &'static str,
    pub error: f64,
    pub bound: f64,
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is off by {:.1e}, allowed is {:.1e}", self.name, self.error, self.bound)
    }
}

/// Numbers in `-1..1` that look random.
pub fn numbers(len: usize, seed: usize) -> Vec<f64> {
    (0..len).map(|i| (((i + 1) as f64 * 12.9898 + seed as f64 * 78.233).sin() * 43_758.545_3).fract()).collect()
}

/// What a buffer with these numbers holds.
pub fn bytes(values: &[f64], element: Element) -> Vec<u8> {
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
        Element::F32 => 1e-5,
        Element::F16 => 3e-3,
        Element::Bf16 => 2e-2,
    }
}

/// The largest difference, relative to the largest expected number; infinite where one of them is no number.
fn distance(found: &[f64], expected: &[f64]) -> f64 {
    let largest = expected.iter().fold(1e-3f64, |max, x| max.max(x.abs()));
    let one = |(a, b): (&f64, &f64)| if (a - b).is_finite() { (a - b).abs() / largest } else { f64::INFINITY };
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(one).fold(0.0, f64::max)
}

/// A tensor with NaN in gaps between its heads, and its numbers rounded to the type.
fn spread(client: &Client, shape: [usize; 4], kernels: Kernels, seed: usize) -> (Tensor4, Vec<f64>) {
    let ([s, b, h, d], element, gap) = (shape, kernels.element(), kernels.gap());
    let values = numbers_of(&bytes(&numbers(s * b * h * d, seed), element), element);
    let mut padded = Vec::new();
    for head in values.chunks(d) {
        padded.extend_from_slice(head);
        padded.extend(std::iter::repeat_n(f64::NAN, gap));
    }
    let handle = client.create_from_slice(&bytes(&padded, element));
    let by_head = d + gap;
    (Tensor4 { handle, shape, strides: [b * h * by_head, h * by_head, by_head] }, values)
}

pub fn empty(client: &Client, shape: [usize; 4], element: Element) -> Tensor4 {
    let handle = client.create_from_slice(&vec![0xff; shape.iter().product::<usize>() * element.size()]);
    Tensor4::contiguous(handle, shape)
}

pub fn read(client: &Client, handle: &Handle, element: Element) -> Vec<f64> {
    numbers_of(&client.read_one_unchecked(handle.clone()), element)
}

/// Start offsets of packed sequences on the device.
pub fn upload_starts(client: &Client, problem: &Problem) -> Option<[Handle; 2]> {
    let upload = |starts: &Vec<i32>| client.create_from_slice(i32::as_bytes(starts));
    problem.starts.as_ref().map(|starts| starts.each_ref().map(upload))
}

/// Options of a call; `starts` are the problem's on the device.
pub fn options<'a>(problem: &Problem, starts: &'a Option<[Handle; 2]>, element: Half) -> CallOptions<'a> {
    let longest =
        |starts: &[i32]| starts.windows(2).map(|ends| (ends[1] - ends[0]) as usize).max().expect("a sequence");
    let packed = starts.as_ref().zip(problem.starts.as_ref()).map(|(on_device, starts)| Packed {
        query_starts: &on_device[0],
        key_starts: &on_device[1],
        sequences: starts[0].len() - 1,
        longest_query: longest(&starts[0]),
        longest_key: longest(&starts[1]),
    });
    let (dropout, first_query) = (problem.dropout, problem.first_query);
    CallOptions { element, packed, dropout, first_query, ..Default::default() }
}

/// Output, log-sum-exp and gradients of a call.
pub fn check(client: &Client, kernels: Kernels, problem: &Problem) -> Vec<Comparison> {
    let (shape, element) = (&problem.shape, kernels.element());
    let (q, q_values) = spread(client, shape.query_shape(), kernels, 1);
    let (k, k_values) = spread(client, shape.key_shape(), kernels, 2);
    let (v, v_values) = spread(client, shape.value_shape(), kernels, 3);
    let (dout, dout_values) = spread(client, shape.out_shape(), kernels, 4);
    let expected = problem.solve([&q_values, &k_values, &v_values, &dout_values]);
    let starts = upload_starts(client, problem);
    let options = options(problem, &starts, kernels.half());
    let statistic = if element == Element::F64 { Element::F64 } else { Element::F32 };
    let out = empty(client, shape.out_shape(), element);
    let lse = client.create_from_slice(&vec![0xff; shape.statistics_len() * statistic.size()]);
    let (scale, qkv) = (problem.scale, (&q, &k, &v));
    let done = match kernels {
        Kernels::Plain(_) => portable::forward(client, element, shape, scale, &options, qkv, &out, &lse),
        Kernels::Mma(_) => mma::forward(client, shape, scale as f32, &options, qkv, &out, &lse),
    };
    done.expect("a legal call");
    let gradients = [shape.query_shape(), shape.key_shape(), shape.value_shape()].map(|s| empty(client, s, element));
    let [dq, dk, dv] = &gradients;
    let saved = Saved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
    let into = Gradients { dq, dk, dv };
    let done = match kernels {
        Kernels::Plain(_) => portable::backward(client, element, shape, scale, &options, saved, &dout, into),
        Kernels::Mma(_) => mma::backward(client, shape, scale as f32, &options, saved, &dout, into),
    };
    done.expect("a legal call");

    let rows = |all: &[f64]| -> Vec<f64> {
        let finite = |x: &f64| if *x == f64::NEG_INFINITY { -1e3 } else { *x };
        all.chunks(shape.padded_queries()).flat_map(|row| row[..shape.queries].iter().map(finite)).collect()
    };
    let bound = allowed(element);
    let one = |name, handle: &Handle, expected: &[f64], bound| {
        let error = distance(&read(client, handle, element), expected);
        Comparison { name, error, bound }
    };
    let error = distance(&rows(&read(client, &lse, statistic)), &rows(&expected.lse));
    // The product of two rounded numbers is exact in fp32; only their sum is not.
    let mut found = vec![Comparison { name: "lse", error, bound: allowed(statistic) }];
    found.push(one("out", &out.handle, &expected.out, bound));
    for (name, (gradient, expected)) in ["dq", "dk", "dv"].into_iter().zip(gradients.iter().zip(&expected.gradients)) {
        found.push(one(name, &gradient.handle, expected, 2.0 * bound));
    }
    found
}
