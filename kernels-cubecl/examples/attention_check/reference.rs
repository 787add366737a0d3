//! Attention on the CPU: exactly (fp64), and as a textbook program in bf16 would compute it.
use half::bf16;
use kernels_cubecl::attention::AttentionShape;

/// Where the computation rounds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// Nowhere but in fp64.
    Fp64,
    /// Every matrix product and every softmax gives bf16, from exact sums.
    Bf16,
}

impl Rounding {
    fn round(self, x: f64) -> f64 {
        match self {
            Rounding::Fp64 => x,
            Rounding::Bf16 => bf16::from_f64(x).to_f64(),
        }
    }
}

/// Normal numbers, rounded to bf16.
pub fn normal(len: usize, seed: u64) -> Vec<f32> {
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
            bf16::from_f64((-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()).to_f32()
        })
        .collect()
}

/// Inputs of a small problem.
pub struct Problem {
    shape: AttentionShape,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub out_gradient: Vec<f32>,
}

/// Gradients of the three inputs.
#[derive(Default)]
pub struct Gradients {
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
}

impl Problem {
    pub fn random(shape: AttentionShape, seed: u64) -> Self {
        let len = |s: [usize; 4]| s.iter().product::<usize>();
        Self {
            shape,
            q: normal(len(shape.query_shape()), seed),
            k: normal(len(shape.key_shape()), seed + 1),
            v: normal(len(shape.key_shape()), seed + 2),
            out_gradient: normal(len(shape.query_shape()), seed + 3),
        }
    }

    pub fn scale(&self) -> f64 {
        1.0 / (self.shape.head_dim as f64).sqrt()
    }

    fn row<'a>(&self, data: &'a [f32], heads: usize, position: usize, batch: usize, head: usize) -> &'a [f32] {
        let d = self.shape.head_dim;
        &data[((position * self.shape.batch + batch) * heads + head) * d..][..d]
    }

    fn seen(&self, query: usize) -> usize {
        let s = &self.shape;
        if s.causal { query + 1 + s.keys - s.queries } else { s.keys }
    }

    /// Probabilities of one query and its log-sum-exp.
    fn probabilities(&self, query: usize, batch: usize, head: usize, rounding: Rounding) -> (Vec<f64>, f64) {
        let s = &self.shape;
        let q = self.row(&self.q, s.heads, query, batch, head);
        let scores: Vec<f64> = (0..self.seen(query))
            .map(|key| {
                let k = self.row(&self.k, s.kv_heads, key, batch, head / (s.heads / s.kv_heads));
                rounding.round(dot(q, k)) * self.scale()
            })
            .map(|score| rounding.round(score))
            .collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|score| (score - top).exp()).sum();
        (scores.iter().map(|score| rounding.round((score - top).exp() / total)).collect(), top + total.ln())
    }

    /// The output `[seq, batch, heads, head_dim]` and the log-sum-exp `[batch, heads, seq]`.
    pub fn forward(&self, rounding: Rounding) -> (Vec<f64>, Vec<f64>) {
        let s = self.shape;
        let mut out = vec![0.0; s.query_shape().iter().product()];
        let mut lse = Vec::new();
        for (batch, head, query) in positions(&s) {
            let (p, l) = self.probabilities(query, batch, head, rounding);
            lse.push(l);
            let at = ((query * s.batch + batch) * s.heads + head) * s.head_dim;
            let row = &mut out[at..][..s.head_dim];
            for (key, p) in p.iter().enumerate() {
                axpy(row, *p, self.row(&self.v, s.kv_heads, key, batch, head / (s.heads / s.kv_heads)));
            }
            row.iter_mut().for_each(|x| *x = rounding.round(*x));
        }
        (out, lse)
    }

    /// The gradients of `sum(out · out_gradient)`, given the output that the forward pass stored.
    pub fn backward(&self, out: &[f64], rounding: Rounding) -> Gradients {
        let s = self.shape;
        let group = s.heads / s.kv_heads;
        let kv_len = s.key_shape().iter().product();
        let mut g = Gradients { q: vec![0.0; out.len()], k: vec![0.0; kv_len], v: vec![0.0; kv_len] };
        for (batch, head, query) in positions(&s) {
            let (p, _) = self.probabilities(query, batch, head, rounding);
            let at = ((query * s.batch + batch) * s.heads + head) * s.head_dim;
            let out_gradient = self.row(&self.out_gradient, s.heads, query, batch, head);
            let delta: f64 = out_gradient.iter().zip(&out[at..]).map(|(a, b)| *a as f64 * b).sum();
            let q = self.row(&self.q, s.heads, query, batch, head);
            for (key, p) in p.iter().enumerate() {
                let (k, v) = (
                    self.row(&self.k, s.kv_heads, key, batch, head / group),
                    self.row(&self.v, s.kv_heads, key, batch, head / group),
                );
                let dp = rounding.round(dot(out_gradient, v));
                let ds = rounding.round(p * (dp - delta)) * self.scale();
                let kv_at = ((key * s.batch + batch) * s.kv_heads + head / group) * s.head_dim;
                axpy(&mut g.q[at..][..s.head_dim], ds, k);
                axpy(&mut g.k[kv_at..][..s.head_dim], ds, q);
                axpy(&mut g.v[kv_at..][..s.head_dim], *p, out_gradient);
            }
        }
        for values in [&mut g.q, &mut g.k, &mut g.v] {
            values.iter_mut().for_each(|x| *x = rounding.round(*x));
        }
        g
    }
}

fn positions(s: &AttentionShape) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
    let (batch, heads, queries) = (s.batch, s.heads, s.queries);
    (0..batch).flat_map(move |b| (0..heads).flat_map(move |h| (0..queries).map(move |q| (b, h, q))))
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| *a as f64 * *b as f64).sum()
}

fn axpy(row: &mut [f64], factor: f64, x: &[f32]) {
    row.iter_mut().zip(x).for_each(|(r, x)| *r += factor * *x as f64);
}
