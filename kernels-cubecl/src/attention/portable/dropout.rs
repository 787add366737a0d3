//! Dropout of attention probabilities. Which ones are dropped is a function of a seed and of the position in the whole
//! `[sample, head, query, key]` alone, so every kernel and every rank computes the same mask without storing it.
use crate::{attention::Dropout, attention::dropout::splitmix, pointwise::dropout::mix};
use cubecl::prelude::*;

/// [`Dropout`] as a kernel argument.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct DropoutParams {
    pub seed: u64,
    /// Elements whose hash is below this are dropped.
    pub drop_threshold: u32,
    /// Factor of the elements that are kept.
    pub keep_scale: f32,
    /// Position of the call's first element in the whole tensor.
    pub first_batch: u32,
    pub first_head: u32,
    pub first_query: u32,
    pub first_key: u32,
    /// Heads and queries of the whole tensor.
    pub heads: u32,
    pub queries: u32,
}

impl DropoutParamsLaunch {
    /// The arguments for `dropout`; `None` drops nothing.
    pub fn of(dropout: Option<Dropout>) -> Self {
        let Some(dropout) = dropout else { return Self::new(0, 0, 1.0, 0, 0, 0, 0, 1, 1) };
        let [batch, head, query, key] = dropout.first.map(|first| first as u32);
        let scale = (1.0 / (1.0 - f64::from(dropout.p))) as f32;
        let (heads, queries) = (dropout.heads as u32, dropout.queries as u32);
        Self::new(dropout.seed, dropout.threshold(), scale, batch, head, query, key, heads, queries)
    }
}

/// The two dropout keys of a row of scores.
#[derive(CubeType, Clone, Copy)]
pub struct RowKeys {
    a: u32,
    b: u32,
}

/// The keys of the row of `query`, in head `head` of sample `batch` of the call.
#[cube]
pub fn row_keys(dropout: &DropoutParams, batch: u32, head: u32, query: u32) -> RowKeys {
    let head = (dropout.first_batch + batch) as u64 * dropout.heads as u64 + (dropout.first_head + head) as u64;
    let row = head * dropout.queries as u64 + (dropout.first_query + query) as u64;
    let key = splitmix(dropout.seed ^ splitmix(row));
    RowKeys { a: (key >> 32) as u32, b: key as u32 }
}

/// The factor of the probability of `key`, for the row with these keys: zero where it is dropped.
#[cube]
pub fn keep_factor(dropout: &DropoutParams, row_keys: &RowKeys, key: u32) -> f32 {
    let hash = mix(mix((dropout.first_key + key) * 0x9e37_79b9u32 + row_keys.a) ^ row_keys.b);
    select(hash >= dropout.drop_threshold, dropout.keep_scale, 0.0)
}
