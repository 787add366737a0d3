//! The kernels against the reference.

use super::case::Case;
use crate::kernel_tests::attention::{Kernels, bytes, empty, options, read, upload_starts};
use crate::kernel_tests::pointwise::{download, poisoned};
use crate::kernel_tests::reference::{Answer, Problem};
use crate::numbers::{most, normal, relative};
use crate::report::Report;
use cubecl::prelude::*;
use half::{bf16, f16};
use kernels_cubecl::attention::dqdkdv::DqDkDvPlan;
use kernels_cubecl::attention::merge::merge;
use kernels_cubecl::attention::{self, AttentionShape, CallOptions, Gradients, Half, Saved, Tensor4, Variant};

/// A case on the host and on the GPU.
struct Setup {
    label: String,
    element: Half,
    problem: Problem,
    /// Queries, keys, values and the gradient of the output.
    values: [Vec<f64>; 4],
    tensors: [Tensor4; 4],
    /// Results in fp64.
    exact: Answer,
}

impl Setup {
    fn new(client: &Client, case: &Case) -> Self {
        let (element, problem) = (case.element, case.problem.clone());
        let shape = problem.shape;
        let position = problem.first_query.map_or(String::new(), |first| format!(" from {first}"));
        let label = format!("{} ({} x {}{position})", case.name, shape.queries, shape.keys);
        let shapes = [shape.query_shape(), shape.key_shape(), shape.value_shape(), shape.out_shape()];
        let values: [Vec<f64>; 4] = std::array::from_fn(|i| {
            let numbers = normal(shapes[i].iter().product(), 7 + i as u64);
            numbers.map(|x| round(element)(x)).collect()
        });
        let tensors = std::array::from_fn(|i| upload(client, &values[i], shapes[i], element));
        let exact = problem.solve(values.each_ref().map(Vec::as_slice));
        Self { label, element, problem, values, tensors, exact }
    }

    /// Results of the textbook computation in 16 bits; the gradients follow from the output that the kernel stored.
    fn rounded(&self, stored: &[f64]) -> Answer {
        self.problem.solve_rounded(self.values.each_ref().map(Vec::as_slice), round(self.element), Some(stored))
    }

    fn scale(&self) -> f32 {
        self.problem.scale as f32
    }

    fn poisoned(&self, client: &Client, shape: [usize; 4]) -> Tensor4 {
        empty(client, shape, Kernels::Mma(self.element).element())
    }

    fn read(&self, client: &Client, tensor: &Tensor4) -> Vec<f64> {
        read(client, &tensor.handle, Kernels::Mma(self.element).element())
    }

    /// The error over that of the computation in 16 bits.
    fn compare(&self, report: &mut Report, name: &str, [found, exact, rounded]: [&[f64]; 3]) -> f64 {
        let (ours, theirs) = (relative(found, exact), relative(rounded, exact));
        let what = format!("{} | {name:>4} {ours:.3e} 16 bits {theirs:.3e} ratio", self.label);
        report.error(what, ours / theirs, 1.2);
        ours / theirs
    }

    fn compare_gradients(&self, report: &mut Report, how: &str, found: &[Vec<f64>; 3], rounded: &Answer) -> [f64; 3] {
        std::array::from_fn(|i| {
            let name = format!("{}{how}", ["dq", "dk", "dv"][i]);
            self.compare(report, &name, [&found[i], &self.exact.gradients[i], &rounded.gradients[i]])
        })
    }

    fn compare_logarithms(&self, report: &mut Report, found: &[f64]) {
        let AttentionShape { queries, .. } = self.problem.shape;
        let rows = found.iter().zip(&self.exact.lse).enumerate();
        let rows = rows.filter(|(i, _)| i % self.problem.shape.padded_queries() < queries);
        let far = most(rows.map(|(_, (a, b))| if a == b { 0.0 } else { (a - b).abs() }));
        report.error(format!("{} |  lse greatest difference", self.label), far, 1e-4);
    }
}

/// A number that 16 bits hold.
fn round(element: Half) -> fn(f64) -> f64 {
    match element {
        Half::Bf16 => |x| bf16::from_f64(x).to_f64(),
        Half::F16 => |x| f16::from_f64(x).to_f64(),
    }
}

fn upload(client: &Client, values: &[f64], shape: [usize; 4], element: Half) -> Tensor4 {
    let bytes = bytes(values, Kernels::Mma(element).element());
    Tensor4::contiguous(client.create_from_slice(&bytes), shape)
}

/// Forward and backward pass of one case.
pub fn check(client: &Client, case: &Case, report: &mut Report) -> [f64; 4] {
    let (shape, setup) = (case.problem.shape, Setup::new(client, case));
    let starts = upload_starts(client, &case.problem);
    let (options, scale) = (options(&case.problem, &starts, case.element), setup.scale());
    let [q, k, v, dout] = &setup.tensors;
    let (out, lse) = (setup.poisoned(client, shape.out_shape()), poisoned::<f32>(client, shape.statistics_len()));
    attention::forward(client, &shape, scale, &options, (q, k, v), &out, &lse).expect("a legal call");
    let stored = setup.read(client, &out);
    let rounded = setup.rounded(&stored);
    let of_out = setup.compare(report, "out", [&stored, &setup.exact.out, &rounded.out]);
    setup.compare_logarithms(report, &download::<f32>(client, &lse));

    let gradients = [shape.query_shape(), shape.key_shape(), shape.value_shape()];
    let [dq, dk, dv] = &gradients.map(|shape| setup.poisoned(client, shape));
    let back = |deterministic| {
        let options = CallOptions { deterministic, ..options };
        let saved = Saved { q, k, v, out: &out, lse: &lse };
        attention::backward(client, &shape, scale, &options, saved, dout, Gradients { dq, dk, dv })
            .expect("a legal call");
        [dq, dk, dv].map(|tensor| setup.read(client, tensor))
    };
    let first = back(true);
    report.holds(format!("{} | a second backward pass gives the same bits", setup.label), back(true) == first);
    let mut of_gradients = setup.compare_gradients(report, "", &first, &rounded);
    if DqDkDvPlan::fastest(Variant::of(&shape, &options)).is_some() {
        of_gradients = setup.compare_gradients(report, " fused", &back(false), &rounded);
    }
    let [dq, dk, dv] = of_gradients;
    [of_out, dq, dk, dv]
}

/// Two steps of a ring: forward over the keys in two halves, merged; backward of both with the merged result.
pub fn ring(client: &Client, case: &Case, report: &mut Report) -> [f64; 4] {
    let (shape, setup) = (case.problem.shape, Setup::new(client, case));
    let (element, scale) = (setup.element, setup.scale());
    let [q, k, v, dout] = &setup.tensors;
    let half = AttentionShape { keys: shape.keys / 2, ..shape };
    let first = |step: usize| (shape.keys - shape.queries) as i64 - (step * half.keys) as i64;
    let options = |step| CallOptions { element, first_query: Some(first(step)), ..Default::default() };

    let sum = client.create_from_slice(&vec![0; 4 * setup.exact.out.len()]);
    let lse = client.create_from_slice(&f32::NEG_INFINITY.to_le_bytes().repeat(shape.statistics_len()));
    for step in 0..2 {
        let part = setup.poisoned(client, shape.out_shape());
        let part_lse = poisoned::<f32>(client, shape.statistics_len());
        let keys = (q, &rows(k, step, half.keys), &rows(v, step, half.keys));
        attention::forward(client, &half, scale, &options(step), keys, &part, &part_lse).expect("a legal call");
        merge(client, &shape, element, (&sum, &lse), (&part, &part_lse)).expect("a legal call");
    }
    let merged = download::<f32>(client, &sum);
    let out = upload(client, &merged, shape.out_shape(), element);
    let rounded = setup.rounded(&setup.read(client, &out));
    let of_out = setup.compare(report, "out", [&merged, &setup.exact.out, &rounded.out]);
    setup.compare_logarithms(report, &download::<f32>(client, &lse));

    let [dk, dv] = [shape.key_shape(), shape.value_shape()].map(|shape| setup.poisoned(client, shape));
    let mut of_queries = vec![0.0; setup.values[0].len()];
    for step in 0..2 {
        let dq = setup.poisoned(client, shape.query_shape());
        let [k, v, half_dk, half_dv] = [k, v, &dk, &dv].map(|tensor| rows(tensor, step, half.keys));
        let saved = Saved { q, k: &k, v: &v, out: &out, lse: &lse };
        let gradients = Gradients { dq: &dq, dk: &half_dk, dv: &half_dv };
        attention::backward(client, &half, scale, &options(step), saved, dout, gradients).expect("a legal call");
        of_queries.iter_mut().zip(setup.read(client, &dq)).for_each(|(sum, x)| *sum += x);
    }
    let found = [of_queries, setup.read(client, &dk), setup.read(client, &dv)];
    let [dq, dk, dv] = setup.compare_gradients(report, "", &found, &rounded);
    [of_out, dq, dk, dv]
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
