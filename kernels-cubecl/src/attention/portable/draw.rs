//! Which attention weights a dropout drops: a function of a seed and a weight's place in the global
//! `[sample, head, query, key]` alone, so that every kernel and every rank draws the same mask without storing it.
use crate::attention::Dropout;
use crate::attention::draw::splitmix;
use crate::pointwise::dropout::mix;
use cubecl::prelude::*;

/// [`Dropout`] as a kernel takes it.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Draws {
    pub seed: u64,
    /// Draws below this are dropped.
    pub limit: u32,
    /// Factor of the weights that are kept.
    pub scale: f32,
    /// Place of the call's first weight in the whole tensor.
    pub first_batch: u32,
    pub first_head: u32,
    pub first_query: u32,
    pub first_key: u32,
    /// Heads and queries of the whole tensor.
    pub heads: u32,
    pub queries: u32,
}

impl DrawsLaunch {
    /// What to drop; nothing for `None`.
    pub fn of(dropout: Option<Dropout>) -> Self {
        let Some(dropout) = dropout else { return Self::new(0, 0, 1.0, 0, 0, 0, 0, 1, 1) };
        let [batch, head, query, key] = dropout.first.map(|first| first as u32);
        let scale = (1.0 / (1.0 - f64::from(dropout.p))) as f32;
        let (heads, queries) = (dropout.heads as u32, dropout.queries as u32);
        Self::new(dropout.seed, dropout.limit(), scale, batch, head, query, key, heads, queries)
    }
}

/// The two words of a row of attention weights.
#[derive(CubeType, Clone, Copy)]
pub struct RowWords {
    a: u32,
    b: u32,
}

/// The words of the row of `query`, in head `head` of sample `batch` of the call.
#[cube]
pub fn row_words(draws: &Draws, batch: u32, head: u32, query: u32) -> RowWords {
    let head = (draws.first_batch + batch) as u64 * draws.heads as u64 + (draws.first_head + head) as u64;
    let row = head * draws.queries as u64 + (draws.first_query + query) as u64;
    let key = splitmix(draws.seed ^ splitmix(row));
    RowWords { a: (key >> 32) as u32, b: key as u32 }
}

/// What the weight of `key` in a row is multiplied with: zero where it is dropped.
#[cube]
pub fn keep(draws: &Draws, words: &RowWords, key: u32) -> f32 {
    let draw = mix(mix((draws.first_key + key) * 0x9e37_79b9u32 + words.a) ^ words.b);
    select(draw >= draws.limit, draws.scale, 0.0)
}
