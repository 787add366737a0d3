//! Attention in f64, one probability at a time; also as a textbook program in 16 bits computes it.

use kernels_cubecl::attention::{AttentionShape, Dropout};

use super::draws::{mix, splitmix};

/// A problem, its sequences as `(queries, keys)` ranges.
#[derive(Clone)]
pub struct Problem {
    pub shape: AttentionShape,
    pub scale: f64,
    pub dropout: Option<Dropout>,
    /// Start offsets of packed sequences: of the queries and of the keys.
    pub starts: Option<[Vec<i32>; 2]>,
    pub first_query: Option<i64>,
}

/// Results of a problem, each `[seq, batch, heads, length]`; the log-sum-exp `[batch, heads, padded queries]`.
pub struct Answer {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    pub gradients: [Vec<f64>; 3],
}

impl Problem {
    /// Whether key `j` is visible to query `i`.
    fn is_visible(&self, i: usize, j: usize) -> bool {
        let AttentionShape { queries, keys, causal, window, .. } = self.shape;
        let sequence_of = |starts: &[i32], row: usize| starts.iter().rposition(|start| *start as usize <= row).unwrap();
        let (i, j, offset) = match &self.starts {
            None => (i, j, self.first_query.unwrap_or(keys as i64 - queries as i64)),
            Some([of_queries, of_keys]) => {
                let sequence = sequence_of(&of_queries[..of_queries.len() - 1], i);
                if sequence != sequence_of(&of_keys[..of_keys.len() - 1], j) {
                    return false;
                }
                let length = |starts: &[i32]| i64::from(starts[sequence + 1] - starts[sequence]);
                let start = |starts: &[i32]| starts[sequence] as usize;
                (i - start(of_queries), j - start(of_keys), length(of_keys) - length(of_queries))
            }
        };
        let ahead = j as i64 - (i as i64 + offset);
        !(causal && ahead > 0) && window.is_none_or(|window| ahead.unsigned_abs() < window as u64)
    }

    /// The factor of dropout.
    fn keep(&self, [b, h, i, j]: [usize; 4]) -> f64 {
        let Some(Dropout { p, seed, first, heads, queries }) = self.dropout else { return 1.0 };
        let row = ((first[0] + b) * heads + first[1] + h) * queries + first[2] + i;
        let key = splitmix(seed ^ splitmix(row as u64));
        let column = ((first[3] + j) as u32).wrapping_mul(0x9e37_79b9).wrapping_add((key >> 32) as u32);
        let dropped = f64::from(mix(mix(column) ^ key as u32)) < f64::from(p) * 4_294_967_296.0;
        // The kernels have the factor in fp32.
        if dropped { 0.0 } else { f64::from((1.0 / (1.0 - f64::from(p))) as f32) }
    }

    pub fn solve(&self, inputs: [&[f64]; 4]) -> Answer {
        self.solve_rounded(inputs, |x| x, None)
    }

    /// As a program whose GEMMs and softmax each round their result, from exact sums. The backward pass has the output
    /// `stored`, or else the one computed here.
    pub fn solve_rounded(
        &self,
        [q, k, v, dout]: [&[f64]; 4],
        round: impl Fn(f64) -> f64,
        stored: Option<&[f64]>,
    ) -> Answer {
        let AttentionShape { batch, heads, kv_heads, queries, keys, head_dim, value_dim, .. } = self.shape;
        let row = |seq: usize, b: usize, h: usize, all: usize, length: usize| {
            let at = ((seq * batch + b) * all + h) * length;
            at..at + length
        };
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let mut answer = Answer {
            out: vec![0.0; queries * batch * heads * value_dim],
            lse: vec![f64::NEG_INFINITY; self.shape.statistics_len()],
            gradients: [vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]],
        };
        for (b, h, i) in (0..batch * heads * queries).map(|n| (n / queries / heads, n / queries % heads, n % queries)) {
            let kv = h / (heads / kv_heads);
            let (at, to) = (row(i, b, h, heads, head_dim), row(i, b, h, heads, value_dim));
            let visible: Vec<usize> = (0..keys).filter(|j| self.is_visible(i, *j)).collect();
            if visible.is_empty() {
                continue;
            }
            let key = |j: usize| row(j, b, kv, kv_heads, head_dim);
            let value = |j: usize| row(j, b, kv, kv_heads, value_dim);
            let score = |j: &usize| round(round(dot(&q[at.clone()], &k[key(*j)])) * self.scale);
            let scores: Vec<f64> = visible.iter().map(score).collect();
            let row_max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let row_sum: f64 = scores.iter().map(|score| (score - row_max).exp()).sum();
            answer.lse[(b * heads + h) * self.shape.padded_queries() + i] = row_max + row_sum.ln();
            let probabilities: Vec<f64> = scores.iter().map(|score| round((score - row_max).exp() / row_sum)).collect();
            let keeps: Vec<f64> = visible.iter().map(|j| self.keep([b, h, i, *j])).collect();
            for ((j, p), keep) in visible.iter().zip(&probabilities).zip(&keeps) {
                let p = round(p * keep);
                for (out, v) in answer.out[to.clone()].iter_mut().zip(&v[value(*j)]) {
                    *out += p * v;
                }
            }
            answer.out[to.clone()].iter_mut().for_each(|x| *x = round(*x));
            let delta = dot(&dout[to.clone()], &stored.unwrap_or(&answer.out)[to.clone()]);
            let [dq, dk, dv] = &mut answer.gradients;
            for ((j, p), keep) in visible.iter().zip(&probabilities).zip(&keeps) {
                let dp = keep * round(dot(&dout[to.clone()], &v[value(*j)]));
                let (ds, p) = (round(p * (dp - delta)) * self.scale, round(p * keep));
                for (e, column) in at.clone().zip(key(*j)) {
                    dq[e] += ds * k[column];
                    dk[column] += ds * q[e];
                }
                for (dv, dout) in dv[value(*j)].iter_mut().zip(&dout[to.clone()]) {
                    *dv += p * dout;
                }
            }
        }
        answer.gradients.iter_mut().flatten().for_each(|x| *x = round(*x));
        answer
    }
}
