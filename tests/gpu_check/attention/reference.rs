//! Attention on the CPU: exact (fp64), and as a textbook program in 16 bits computes it.
use crate::case::Case;
use crate::draws::{mix, splitmix};
use half::{bf16, f16};
use kernels_cubecl::attention::{AttentionShape, Dropout, Half};
use std::ops::Range;

/// Where the computation rounds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// Nowhere but in fp64.
    Fp64,
    /// Every GEMM and every softmax rounds its result to 16 bits, from exact sums.
    To(Half),
}

impl Rounding {
    fn round(self, x: f64) -> f64 {
        match self {
            Rounding::Fp64 => x,
            Rounding::To(Half::Bf16) => bf16::from_f64(x).to_f64(),
            Rounding::To(Half::F16) => f16::from_f64(x).to_f64(),
        }
    }
}

/// Normal numbers, rounded to 16 bits.
pub fn normal(len: usize, seed: u64, element: Half) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    (0..len)
        .map(|_| {
            let (a, b) = (uniform(), uniform());
            Rounding::To(element).round((-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()) as f32
        })
        .collect()
}

/// Inputs of a small problem.
pub struct Problem {
    case: Case,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub dout: Vec<f32>,
}

/// Gradients of the three inputs.
#[derive(Default)]
pub struct Gradients {
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
}

/// A row of scores: its visible keys, and for each its probability and the factor of dropout.
struct Row {
    keys: Range<usize>,
    p: Vec<f64>,
    kept: Vec<f64>,
    lse: f64,
}

impl Problem {
    pub fn random(case: &Case, seed: u64) -> Self {
        let random = |s: [usize; 4], seed| normal(s.iter().product(), seed, case.element);
        let shape = case.shape;
        Self {
            case: case.clone(),
            q: random(shape.query_shape(), seed),
            k: random(shape.key_shape(), seed + 1),
            v: random(shape.value_shape(), seed + 2),
            dout: random(shape.out_shape(), seed + 3),
        }
    }

    pub fn scale(&self) -> f64 {
        1.0 / (self.case.shape.head_dim as f64).sqrt()
    }

    /// The keys that a query sees.
    fn visible_keys(&self, query: usize) -> Range<usize> {
        let (s, starts) = (&self.case.shape, self.case.starts());
        let sequence =
            starts.windows(2).find(|w| (w[0].0..w[1].0).contains(&query)).expect("every query has a sequence");
        let (first, keys) = (sequence[0].1 as i64, (sequence[1].1 - sequence[0].1) as i64);
        let queries = (sequence[1].0 - sequence[0].0) as i64;
        let position = (query - sequence[0].0) as i64 + self.case.first_query.unwrap_or(keys - queries);
        let max_distance = s.window.map_or(i64::MAX / 4, |window| window as i64);
        let end = if s.causal { position + 1 } else { position + max_distance }.clamp(0, keys);
        let begin = (position + 1 - max_distance).clamp(0, end);
        (first + begin) as usize..(first + end) as usize
    }

    fn row(&self, query: usize, batch: usize, head: usize, rounding: Rounding) -> Row {
        let s = &self.case.shape;
        let q = line(&self.q, s.query_shape(), query, batch, head);
        let keys = self.visible_keys(query);
        let scores: Vec<f64> = keys
            .clone()
            .map(|key| rounding.round(dot(q, line(&self.k, s.key_shape(), key, batch, head / (s.heads / s.kv_heads)))))
            .map(|score| rounding.round(score * self.scale()))
            .collect();
        let row_max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let row_sum: f64 = scores.iter().map(|score| (score - row_max).exp()).sum();
        let p = scores.iter().map(|score| rounding.round((score - row_max).exp() / row_sum)).collect();
        let factor = |key| self.case.dropout.map_or(1.0, |dropout| kept(&dropout, batch, head, query, key));
        let lse = if keys.is_empty() { f64::NEG_INFINITY } else { row_max + row_sum.ln() };
        Row { p, kept: keys.clone().map(factor).collect(), keys, lse }
    }

    /// The output `[seq, batch, heads, value_dim]` and the log-sum-exp `[batch, heads, seq]`.
    pub fn forward(&self, rounding: Rounding) -> (Vec<f64>, Vec<f64>) {
        let s = self.case.shape;
        let mut out = vec![0.0; s.out_shape().iter().product()];
        let mut lse = Vec::new();
        for (batch, head, query) in positions(&s) {
            let row = self.row(query, batch, head, rounding);
            lse.push(row.lse);
            let sum = line_mut(&mut out, s.out_shape(), query, batch, head);
            for (key, (p, kept)) in row.keys.zip(row.p.iter().zip(&row.kept)) {
                let v = line(&self.v, s.value_shape(), key, batch, head / (s.heads / s.kv_heads));
                axpy(sum, rounding.round(p * kept), v);
            }
            sum.iter_mut().for_each(|x| *x = rounding.round(*x));
        }
        (out, lse)
    }

    /// The gradients of `sum(out · dout)`, given the output that the forward pass stored.
    pub fn backward(&self, out: &[f64], rounding: Rounding) -> Gradients {
        let s = self.case.shape;
        let group = s.heads / s.kv_heads;
        let zeros = |shape: [usize; 4]| vec![0.0; shape.iter().product()];
        let mut g = Gradients { q: zeros(s.query_shape()), k: zeros(s.key_shape()), v: zeros(s.value_shape()) };
        for (batch, head, query) in positions(&s) {
            let row = self.row(query, batch, head, rounding);
            let dout = line(&self.dout, s.out_shape(), query, batch, head);
            let out = line(out, s.out_shape(), query, batch, head);
            let delta: f64 = dout.iter().zip(out).map(|(a, b)| *a as f64 * b).sum();
            let q = line(&self.q, s.query_shape(), query, batch, head);
            for (key, (p, kept)) in row.keys.zip(row.p.iter().zip(&row.kept)) {
                let v = line(&self.v, s.value_shape(), key, batch, head / group);
                let k = line(&self.k, s.key_shape(), key, batch, head / group);
                let dp = rounding.round(dot(dout, v)) * kept;
                let ds = rounding.round(p * (dp - delta)) * self.scale();
                axpy(line_mut(&mut g.q, s.query_shape(), query, batch, head), ds, k);
                axpy(line_mut(&mut g.k, s.key_shape(), key, batch, head / group), ds, q);
                let p_kept = rounding.round(p * kept);
                axpy(line_mut(&mut g.v, s.value_shape(), key, batch, head / group), p_kept, dout);
            }
        }
        for values in [&mut g.q, &mut g.k, &mut g.v] {
            values.iter_mut().for_each(|x| *x = rounding.round(*x));
        }
        g
    }
}

/// The factor of dropout, from the definition.
fn kept(dropout: &Dropout, batch: usize, head: usize, query: usize, key: usize) -> f64 {
    let [b, h, i, j] = dropout.first;
    let row = ((b + batch) * dropout.heads + h + head) * dropout.queries + i + query;
    let words = splitmix(dropout.seed ^ splitmix(row as u64));
    let position = ((j + key) as u32).wrapping_mul(0x9e37_79b9).wrapping_add((words >> 32) as u32);
    let drawn = f64::from(mix(mix(position) ^ words as u32));
    let p = f64::from(dropout.p);
    if drawn < (p * 4_294_967_296.0).floor() { 0.0 } else { 1.0 / (1.0 - p) }
}

fn positions(s: &AttentionShape) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
    let (batch, heads, queries) = (s.batch, s.heads, s.queries);
    (0..batch).flat_map(move |b| (0..heads).flat_map(move |h| (0..queries).map(move |q| (b, h, q))))
}

/// One head's row of a tensor `[seq, batch, heads, dim]`.
fn line<T>(data: &[T], [_, batches, heads, dim]: [usize; 4], position: usize, batch: usize, head: usize) -> &[T] {
    &data[((position * batches + batch) * heads + head) * dim..][..dim]
}

fn line_mut<T>(
    data: &mut [T],
    [_, batches, heads, dim]: [usize; 4],
    position: usize,
    batch: usize,
    head: usize,
) -> &mut [T] {
    &mut data[((position * batches + batch) * heads + head) * dim..][..dim]
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| *a as f64 * *b as f64).sum()
}

fn axpy(row: &mut [f64], factor: f64, x: &[f32]) {
    row.iter_mut().zip(x).for_each(|(r, x)| *r += factor * *x as f64);
}
