//! The checked cases: every mask, layout, type and head dimension of the kernels, alone and combined.
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels_cubecl::attention::{AttentionShape, CallOptions, Dropout, Half, Packed};

/// One kind of attention.
#[derive(Clone)]
pub struct Case {
    pub name: &'static str,
    pub shape: AttentionShape,
    pub element: Half,
    /// Queries and keys of packed sequences.
    pub lengths: Option<Vec<(usize, usize)>>,
    pub dropout: Option<Dropout>,
    pub first_query: Option<i64>,
}

/// Start offsets of packed sequences on the device.
pub struct Starts {
    queries: Handle,
    keys: Handle,
}

impl Case {
    fn new(name: &'static str, shape: AttentionShape) -> Self {
        Self { name, shape, element: Half::Bf16, lengths: None, dropout: None, first_query: None }
    }

    fn half(self) -> Self {
        Self { element: Half::F16, ..self }
    }

    fn window(mut self, window: usize) -> Self {
        self.shape.window = Some(window);
        self
    }

    fn full(mut self) -> Self {
        self.shape.causal = false;
        self
    }

    fn from(self, first_query: i64) -> Self {
        Self { first_query: Some(first_query), ..self }
    }

    fn packed(mut self, lengths: &[(usize, usize)]) -> Self {
        let (queries, keys): (Vec<usize>, Vec<usize>) = lengths.iter().copied().unzip();
        self.shape = AttentionShape { batch: 1, queries: queries.iter().sum(), keys: keys.iter().sum(), ..self.shape };
        self.lengths = Some(lengths.to_vec());
        self
    }

    /// The call is a part of a larger tensor: batches 3.., heads 2.., queries 5.., keys 7...
    fn dropout(mut self, p: f32) -> Self {
        let whole = Dropout::whole(p, 0x1234_5678_9abc, &self.shape);
        self.dropout = Some(Dropout { first: [3, 2, 5, 7], heads: 11, queries: 5000, ..whole });
        self
    }

    /// First rows of every sequence in queries and keys, and the end of the last.
    pub fn starts(&self) -> Vec<(usize, usize)> {
        let lengths = self.lengths.clone().unwrap_or_else(|| vec![(self.shape.queries, self.shape.keys)]);
        let mut at = (0, 0);
        let mut all = vec![at];
        for (queries, keys) in lengths {
            at = (at.0 + queries, at.1 + keys);
            all.push(at);
        }
        all
    }

    /// Floating-point operations of the forward pass.
    pub fn flops(&self) -> f64 {
        let lengths = self.lengths.clone().unwrap_or_else(|| vec![(self.shape.queries, self.shape.keys)]);
        lengths.iter().map(|&(queries, keys)| AttentionShape { queries, keys, ..self.shape }.forward_flops()).sum()
    }

    pub fn upload_starts(&self, client: &Client) -> Starts {
        let upload = |starts: Vec<usize>| {
            let bytes: Vec<u8> = starts.iter().flat_map(|start| (*start as i32).to_le_bytes()).collect();
            client.create_from_slice(&bytes)
        };
        let (queries, keys) = self.starts().into_iter().unzip();
        Starts { queries: upload(queries), keys: upload(keys) }
    }

    pub fn options<'a>(&self, starts: &'a Starts) -> CallOptions<'a> {
        let packed = self.lengths.as_ref().map(|lengths| Packed {
            query_starts: &starts.queries,
            key_starts: &starts.keys,
            sequences: lengths.len(),
            longest_query: lengths.iter().map(|l| l.0).max().expect("a sequence"),
            longest_key: lengths.iter().map(|l| l.1).max().expect("a sequence"),
        });
        CallOptions {
            element: self.element,
            packed,
            dropout: self.dropout,
            first_query: self.first_query,
            deterministic: false,
        }
    }
}

/// `queries` and `keys` of two batches, four query and two key heads.
fn shape(head_dim: usize, value_dim: usize, queries: usize, keys: usize) -> AttentionShape {
    let (batch, heads, kv_heads) = (2, 4, 2);
    AttentionShape { batch, heads, kv_heads, queries, keys, head_dim, value_dim, causal: true, window: None }
}

/// Sequences whose lengths are whole blocks and not, an empty one, and one with keys only.
const LENGTHS: [(usize, usize); 7] = [(1, 1), (128, 128), (77, 77), (0, 0), (200, 200), (0, 5), (65, 90)];

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

/// The timed cases, with 8192 queries and keys; names as in [`cases`].
pub fn timed() -> Vec<Case> {
    let train = |name, d, v, heads, kv_heads| {
        Case::new(name, AttentionShape { batch: 1, heads, kv_heads, ..shape(d, v, 8192, 8192) })
    };
    vec![
        train("128 causal", 128, 128, 32, 8),
        train("128 full", 128, 128, 32, 8).full(),
        train("64 causal", 64, 64, 32, 8),
        train("96 causal", 96, 96, 32, 8),
        train("192/128 causal", 192, 128, 32, 32),
        train("256 causal", 256, 256, 16, 8),
        train("128 window", 128, 128, 32, 8).window(1024),
        train("128 fp16", 128, 128, 32, 8).half(),
        train("128 packed", 128, 128, 32, 8).packed(&[(2048, 2048); 4]),
        train("128 dropout", 128, 128, 32, 8).dropout(0.1),
    ]
}
