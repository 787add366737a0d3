//! The next token of each sequence, drawn from its logits: temperature, top-k, top-p, min-p, in this order.
//!
//! A cube has a row, which it reads some 20 times, from the L2 cache but for the first: the least logit that top-k and top-p
//! leave is searched for by its bits, with two sums over the row for each third of what is left of them. Nothing is sorted,
//! and all sums have one order.

#[cfg(feature = "cuda")]
pub mod changes;
#[cfg(feature = "cuda")]
pub mod kernel;
#[cfg(feature = "cuda")]
mod launch;
#[cfg(feature = "cuda")]
pub mod likelihoods;
#[cfg(feature = "cuda")]
mod search;

use std::f64::consts::LOG2_E;

use super::LONGEST;
#[cfg(feature = "cuda")]
pub use changes::changed;
#[cfg(feature = "cuda")]
pub use launch::draw;
#[cfg(feature = "cuda")]
pub use likelihoods::likelihoods;

/// Numbers that say what is drawn of a row.
pub const NUMBERS: usize = 5;
/// Numbers of a change.
const CHANGE: usize = 4;
/// The logit of a token that does not come. A row whose greatest is not far above has no draw.
#[cfg(feature = "cuda")]
const NEVER: f64 = -1e38;
/// Numbers that say how likely a row's token is.
pub const OWN: usize = 3;

/// What is drawn of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// What logits are divided by; 0 takes the first of the greatest.
    pub temperature: f64,
    /// Only of so many greatest logits and those as great as the last of them.
    pub top_k: Option<usize>,
    /// Only of the greatest that together reach this probability, the one that crosses it included; of equal ones the first.
    pub top_p: Option<f64>,
    /// Only of those whose probability is at least this share of the greatest.
    pub min_p: Option<f64>,
    /// The point of `[0, 1)` under which the token lies when each takes a share of the line as long as its probability.
    pub at: f64,
}

/// What is done to a logit before its row is drawn from, in the order of the fields.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitChange {
    /// Of this row.
    pub row: usize,
    /// Of this token.
    pub token: usize,
    /// Added to it.
    pub plus: f64,
    /// Divides a positive one and multiplies a negative one.
    pub times: f64,
    /// Taken from it; ∞ if the token does not come.
    pub less: f64,
    /// So many times its magnitude is added.
    pub grown: f64,
}

impl LogitChange {
    /// As the kernel reads it.
    pub fn numbers(&self) -> [f32; CHANGE] {
        [self.plus, self.times, self.less, self.grown].map(|number| number as f32)
    }
}

/// Words of 32 bits, a bit for each of so many columns, 8 of which are never in two words.
pub fn words(columns: usize) -> usize {
    columns.div_ceil(32)
}

impl Draw {
    /// As the kernel reads it.
    pub fn numbers(&self) -> [f32; NUMBERS] {
        let Self { temperature, top_k, top_p, min_p, at } = *self;
        let scale = if temperature > 0.0 { (LOG2_E / temperature).min(1e30) as f32 } else { 0.0 };
        let at = if temperature > 0.0 { at } else { 0.0 };
        // How far below the greatest logit.
        let floor = (temperature * min_p.unwrap_or(0.0).ln()).max(-1e38) as f32;
        let k = top_k.unwrap_or(0).min(LONGEST) as f32;
        [scale, k, top_p.unwrap_or(1.0) as f32, floor, (at as f32).min(1.0f32.next_down())]
    }
}
