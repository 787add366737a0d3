//! The checked cases: every mask, layout, type and head dimension of the kernels, alone and combined.

use crate::kernel_tests::reference::Problem;
use kernels_cubecl::attention::{AttentionShape, Dropout, Half};
use std::collections::BTreeSet;

/// One kind of attention.
#[derive(Clone)]
pub struct Case {
    pub name: &'static str,
    pub element: Half,
    pub problem: Problem,
}

impl Case {
    fn new(name: &'static str, shape: AttentionShape) -> Self {
        let scale = 1.0 / (shape.head_dim as f64).sqrt();
        let problem = Problem { shape, scale, dropout: None, starts: None, first_query: None };
        Self { name, element: Half::Bf16, problem }
    }

    fn half(self) -> Self {
        Self { element: Half::F16, ..self }
    }

    fn window(mut self, window: usize) -> Self {
        self.problem.shape.window = Some(window);
        self
    }

    fn full(mut self) -> Self {
        self.problem.shape.causal = false;
        self
    }

    fn from(mut self, first_query: i64) -> Self {
        self.problem.first_query = Some(first_query);
        self
    }

    /// Sequences of so many queries and keys.
    fn packed(mut self, lengths: &[(usize, usize)]) -> Self {
        let (mut starts, mut end) = ([vec![0], vec![0]], [0, 0]);
        for (queries, keys) in lengths {
            end = [end[0] + queries, end[1] + keys];
            starts.iter_mut().zip(end).for_each(|(starts, end)| starts.push(end as i32));
        }
        self.problem.shape = AttentionShape { batch: 1, queries: end[0], keys: end[1], ..self.problem.shape };
        self.problem.starts = Some(starts);
        self
    }

    /// The call is a part of a larger tensor: batches 3.., heads 2.., queries 5.., keys 7...
    fn dropout(mut self, p: f32) -> Self {
        let whole = Dropout::whole(p, 0x1234_5678_9abc, &self.problem.shape);
        self.problem.dropout = Some(Dropout { first: [3, 2, 5, 7], heads: 11, queries: 5000, ..whole });
        self
    }

    /// Floating-point operations of the forward pass.
    pub fn flops(&self) -> f64 {
        let Problem { shape, starts, .. } = &self.problem;
        let Some([queries, keys]) = starts else { return shape.forward_flops() };
        let length = |ends: &[i32]| (ends[1] - ends[0]) as usize;
        let sequences = queries.windows(2).map(length).zip(keys.windows(2).map(length));
        sequences.map(|(queries, keys)| AttentionShape { queries, keys, ..*shape }.forward_flops()).sum()
    }
}

/// `queries` and `keys` of two batches, four query and two key heads.
fn shape(head_dim: usize, value_dim: usize, queries: usize, keys: usize) -> AttentionShape {
    let (batch, heads, kv_heads) = (2, 4, 2);
    AttentionShape { batch, heads, kv_heads, queries, keys, head_dim, value_dim, causal: true, window: None }
}

/// Sequences whose lengths are whole blocks and not, an empty one, and one with keys only.
const LENGTHS: [(usize, usize); 7] = [(1, 1), (128, 128), (77, 77), (0, 0), (200, 200), (0, 5), (65, 90)];
/// The same, of more than 128 queries on average.
const LONGER: [(usize, usize); 7] = [(300, 300), (128, 128), (77, 77), (0, 0), (200, 200), (0, 5), (265, 290)];

/// What is checked against the reference.
pub fn cases() -> Vec<Case> {
    let at = |name, d, v| Case::new(name, shape(d, v, 300, 300));
    let sized = |name, d, queries, keys| Case::new(name, shape(d, d, queries, keys));
    vec![
        sized("128 causal", 128, 384, 384),
        at("128 causal", 128, 128),
        sized("128 causal", 128, 200, 333),
        sized("128 causal", 128, 333, 200),
        sized("128 causal", 128, 128, 128),
        sized("128 full", 128, 129, 333).full(),
        sized("128 full", 128, 384, 384).full(),
        at("64 causal", 64, 64),
        sized("64 causal", 64, 300, 333),
        sized("64 causal", 64, 333, 200),
        sized("64 causal", 64, 128, 128),
        sized("64 causal", 64, 512, 512),
        sized("64 full", 64, 129, 333).full(),
        sized("64 window", 64, 700, 700).window(128),
        at("64 window", 64, 64).window(100).from(250),
        at("64 full window", 64, 64).full().window(60).from(-100),
        at("64 fp16", 64, 64).half(),
        at("64 packed", 64, 64).packed(&LONGER),
        at("64 packed window", 64, 64).packed(&LONGER).window(50),
        at("64 full packed", 64, 64).full().packed(&LONGER),
        at("96 causal", 96, 96),
        at("192/128 causal", 192, 128),
        at("256 causal", 256, 256),
        at("128 window", 128, 128).window(100),
        sized("128 window", 128, 700, 700).window(200),
        at("128 window", 128, 128).window(100).from(250),
        at("128 full window", 128, 128).full().window(60),
        at("128 full window", 128, 128).full().window(60).from(-100),
        at("128 fp16", 128, 128).half(),
        at("128 packed", 128, 128).packed(&LENGTHS),
        at("128 full packed", 128, 128).full().packed(&LENGTHS),
        at("128 dropout", 128, 128).dropout(0.1),
        at("64 all", 64, 64).packed(&LENGTHS).window(50).dropout(0.2).half(),
        at("96 full all", 96, 96).full().packed(&LENGTHS).window(50).dropout(0.2).half(),
        at("192/128 all", 192, 128).packed(&LENGTHS).window(50).dropout(0.2),
        at("256 full all", 256, 256).full().packed(&LENGTHS).window(50).dropout(0.2),
    ]
}

/// Rings of two steps: each takes half of the keys.
pub fn rings() -> Vec<Case> {
    let sized = |name, queries, keys| Case::new(name, shape(128, 128, queries, keys));
    vec![
        sized("128 ring", 256, 512),
        sized("128 ring window", 256, 512).window(100),
        sized("128 ring full", 200, 512).full(),
    ]
}

/// Names of all cases.
pub fn names() -> Vec<String> {
    let all = [cases(), rings(), timed()].concat();
    let names: BTreeSet<&str> = all.iter().map(|case| case.name).collect();
    names.into_iter().map(str::to_owned).collect()
}

/// The timed cases, with 8192 queries and keys; names as in [`cases`].
pub fn timed() -> Vec<Case> {
    let train = |name, d, v, heads, kv_heads| {
        Case::new(name, AttentionShape { batch: 1, heads, kv_heads, ..shape(d, v, 8192, 8192) })
    };
    vec![
        train("128 causal", 128, 128, 32, 8),
        train("128 full", 128, 128, 32, 8).full(),
        train("64 causal", 64, 64, 32, 8),
        train("64 window", 64, 64, 32, 4).window(128),
        train("64 packed", 64, 64, 32, 8).packed(&[(2048, 2048); 4]),
        train("96 causal", 96, 96, 32, 8),
        train("192/128 causal", 192, 128, 32, 32),
        train("256 causal", 256, 256, 16, 8),
        train("128 window", 128, 128, 32, 8).window(1024),
        train("128 fp16", 128, 128, 32, 8).half(),
        train("128 packed", 128, 128, 32, 8).packed(&[(2048, 2048); 4]),
        train("128 dropout", 128, 128, 32, 8).dropout(0.1),
    ]
}
