//! The kernels against the reference.
use crate::case::Case;
use crate::reference::{Gradients, Problem, Rounding};
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};
use kernels_cubecl::attention::dqdkdv::DqDkDvPlan;
use kernels_cubecl::attention::merge::merge;
use kernels_cubecl::attention::{self, AttentionShape, CallOptions, Half, Tensor4, Variant};

pub fn upload(client: &Client, values: &[f32], shape: [usize; 4], element: Half) -> Tensor4 {
    let bits: Vec<u8> = match element {
        Half::Bf16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        Half::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
    };
    Tensor4::contiguous(client.create_from_slice(&bits), shape)
}

fn download(client: &Client, tensor: &Tensor4, element: Half) -> Vec<f64> {
    let bytes = client.read_one_unchecked(tensor.handle.clone());
    let number = |b: &[u8]| match element {
        Half::Bf16 => bf16::from_le_bytes([b[0], b[1]]).to_f64(),
        Half::F16 => f16::from_le_bytes([b[0], b[1]]).to_f64(),
    };
    bytes.chunks_exact(2).map(number).collect()
}

fn download_f32(client: &Client, handle: &Handle) -> Vec<f64> {
    let bytes = client.read_one_unchecked(handle.clone());
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]) as f64).collect()
}

/// A buffer full of NaN: numbers that a kernel does not write are noticed.
pub fn poisoned(client: &Client, bytes: usize) -> Handle {
    client.create_from_slice(&vec![0xff; bytes])
}

fn empty(client: &Client, shape: [usize; 4]) -> Tensor4 {
    Tensor4::contiguous(poisoned(client, 2 * shape.iter().product::<usize>()), shape)
}

fn distance(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let sum = |f: &dyn Fn(usize) -> f64| (0..expected.len()).map(f).sum::<f64>();
    (sum(&|i| (found[i] - expected[i]).powi(2)) / sum(&|i| expected[i].powi(2))).sqrt()
}

/// Results of the checks of one case.
pub struct Verdict {
    /// Errors of `out`, `dq`, `dk` and `dv` over those of the computation in 16 bits.
    pub ratios: [f64; 4],
    pub failures: usize,
}

struct Report {
    label: String,
    ratios: Vec<f64>,
    failures: usize,
}

impl Report {
    fn new(case: &Case) -> Self {
        let s = case.shape;
        let position = case.first_query.map_or(String::new(), |first| format!(" from {first}"));
        Self { label: format!("{} ({} x {}{position})", case.name, s.queries, s.keys), ratios: vec![], failures: 0 }
    }

    fn hold(&mut self, what: &str, good: bool) {
        self.failures += !good as usize;
        println!("{:<34} | {what} {}", self.label, if good { "ok" } else { "BAD" });
    }

    fn compare(&mut self, name: &str, found: &[f64], exact: &[f64], rounded: &[f64]) {
        let (ours, theirs) = (distance(found, exact), distance(rounded, exact));
        self.ratios.push(ours / theirs);
        let what = format!("{name:>4} {ours:.3e} 16 bits {theirs:.3e} ratio {:.2}", ours / theirs);
        self.hold(&what, ours <= 1.2 * theirs);
    }

    fn logarithms(&mut self, found: &[f64], exact: &[f64], shape: &AttentionShape) {
        let rows = (0..shape.batch * shape.heads).flat_map(|i| &found[i * shape.padded_queries()..][..shape.queries]);
        let far = |(a, b): (&f64, &f64)| if a == b { 0.0 } else { (a - b).abs() };
        // A NaN is no maximum.
        let far = rows.zip(exact).map(far).fold(0.0, |a: f64, b| if b.is_nan() { f64::INFINITY } else { a.max(b) });
        self.hold(&format!(" lse greatest difference {far:.1e}"), far < 1e-4);
    }

    fn verdict(self) -> Verdict {
        let ratios = self.ratios.try_into().expect("four comparisons");
        Verdict { ratios, failures: self.failures }
    }
}

/// Forward and backward pass of one case.
pub fn check(client: &Client, case: &Case) -> Verdict {
    let (shape, element) = (case.shape, case.element);
    let starts = case.upload_starts(client);
    let options = case.options(&starts);
    let problem = Problem::random(case, 7);
    let (exact, exact_lse) = problem.forward(Rounding::Fp64);
    let (rounded, _) = problem.forward(Rounding::To(element));
    let tensor = |values: &[f32], shape| upload(client, values, shape, element);
    let q = tensor(&problem.q, shape.query_shape());
    let (k, v) = (tensor(&problem.k, shape.key_shape()), tensor(&problem.v, shape.value_shape()));
    let (out, lse) = (empty(client, shape.out_shape()), poisoned(client, 4 * shape.statistics_len()));
    let scale = problem.scale() as f32;
    attention::forward(client, &shape, scale, &options, (&q, &k, &v), &out, &lse).expect("a legal call");
    let mut report = Report::new(case);
    let stored = download(client, &out, element);
    report.compare("out", &stored, &exact, &rounded);
    report.logarithms(&download_f32(client, &lse), &exact_lse, &shape);

    let exact = problem.backward(&exact, Rounding::Fp64);
    let rounded = problem.backward(&stored, Rounding::To(element));
    let (dq, dk) = (empty(client, shape.query_shape()), empty(client, shape.key_shape()));
    let dv = empty(client, shape.value_shape());
    let dout = tensor(&problem.dout, shape.out_shape());
    let saved = attention::Saved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
    let gradients = attention::Gradients { dq: &dq, dk: &dk, dv: &dv };
    let back = |deterministic| {
        let options = CallOptions { deterministic, ..options };
        attention::backward(client, &shape, scale, &options, saved, &dout, gradients).expect("a legal call");
        [&dq, &dk, &dv].map(|t| download(client, t, element))
    };
    let first = back(true);
    report.hold("second backward pass gives the same bits", back(true) == first);
    compare_gradients(&mut report, &first, &exact, &rounded);
    let mut verdict = report.verdict();
    if DqDkDvPlan::fastest(Variant::of(&shape, &options)).is_some() {
        let mut fused = Report::new(case);
        fused.label += " fused";
        compare_gradients(&mut fused, &back(false), &exact, &rounded);
        verdict.ratios[1..].copy_from_slice(&fused.ratios);
        verdict.failures += fused.failures;
    }
    verdict
}

fn compare_gradients(report: &mut Report, found: &[Vec<f64>; 3], exact: &Gradients, rounded: &Gradients) {
    report.compare("dq", &found[0], &exact.q, &rounded.q);
    report.compare("dk", &found[1], &exact.k, &rounded.k);
    report.compare("dv", &found[2], &exact.v, &rounded.v);
}

/// Two steps of a ring: forward over the keys in two halves, merged; backward of both with the merged result.
pub fn check_ring(client: &Client, case: &Case) -> Verdict {
    let (shape, element) = (case.shape, case.element);
    let problem = Problem::random(case, 7);
    let (exact, exact_lse) = problem.forward(Rounding::Fp64);
    let (rounded, _) = problem.forward(Rounding::To(element));
    let tensor = |values: &[f32], shape| upload(client, values, shape, element);
    let q = tensor(&problem.q, shape.query_shape());
    let (k, v) = (tensor(&problem.k, shape.key_shape()), tensor(&problem.v, shape.value_shape()));
    let scale = problem.scale() as f32;
    let half = AttentionShape { keys: shape.keys / 2, ..shape };
    let first = |step: usize| (shape.keys - shape.queries) as i64 - (step * half.keys) as i64;
    let options = |step| CallOptions { element, first_query: Some(first(step)), ..Default::default() };

    let sum = client.create_from_slice(&vec![0; 4 * rounded.len()]);
    let none: Vec<u8> = (0..shape.statistics_len()).flat_map(|_| f32::NEG_INFINITY.to_le_bytes()).collect();
    let lse = client.create_from_slice(&none);
    for step in 0..2 {
        let (part, part_lse) = (empty(client, shape.out_shape()), poisoned(client, 4 * shape.statistics_len()));
        let keys = (&q, &rows(&k, step, half.keys), &rows(&v, step, half.keys));
        attention::forward(client, &half, scale, &options(step), keys, &part, &part_lse).expect("a legal call");
        merge(client, &shape, element, (&sum, &lse), (&part, &part_lse)).expect("a legal call");
    }
    let merged = download_f32(client, &sum);
    let mut report = Report::new(case);
    report.compare("out", &merged, &exact, &rounded);
    report.logarithms(&download_f32(client, &lse), &exact_lse, &shape);

    let narrow: Vec<f32> = merged.iter().map(|x| *x as f32).collect();
    let out = tensor(&narrow, shape.out_shape());
    let stored = download(client, &out, element);
    let exact = problem.backward(&exact, Rounding::Fp64);
    let rounded = problem.backward(&stored, Rounding::To(element));
    let dout = tensor(&problem.dout, shape.out_shape());
    let (dk, dv) = (empty(client, shape.key_shape()), empty(client, shape.value_shape()));
    let mut found = vec![0.0; problem.q.len()];
    for step in 0..2 {
        let dq = empty(client, shape.query_shape());
        let (k, v) = (rows(&k, step, half.keys), rows(&v, step, half.keys));
        let saved = attention::Saved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
        let (half_k, half_v) = (rows(&dk, step, half.keys), rows(&dv, step, half.keys));
        let gradients = attention::Gradients { dq: &dq, dk: &half_k, dv: &half_v };
        attention::backward(client, &half, scale, &options(step), saved, &dout, gradients).expect("a legal call");
        found.iter_mut().zip(download(client, &dq, element)).for_each(|(sum, x)| *sum += x);
    }
    let gradients = [found, download(client, &dk, element), download(client, &dv, element)];
    compare_gradients(&mut report, &gradients, &exact, &rounded);
    report.verdict()
}

/// Rows `step len..` of a tensor, `len` of them.
fn rows(tensor: &Tensor4, step: usize, len: usize) -> Tensor4 {
    let [_, batch, heads, dim] = tensor.shape;
    let skipped = 2 * step * len * tensor.strides[0];
    Tensor4 {
        handle: tensor.handle.clone().offset_start(skipped as u64),
        shape: [len, batch, heads, dim],
        strides: tensor.strides,
    }
}
