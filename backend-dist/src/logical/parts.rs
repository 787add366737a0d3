//! Parts of a dimension: the queries, keys and values that one matrix computes, each of which every rank has its share of.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The most parts of different sizes.
const MOST: usize = 8;

/// The sizes of several parts of a dimension, in proportion, so that they are those of a rank's share too. Zeros follow the
/// last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Parts([u32; MOST]);

impl Parts {
    /// Of these sizes, none of which is zero; `None` if they are more than eight.
    pub(super) fn new(sizes: &[usize]) -> Option<Self> {
        let divisor = sizes.iter().copied().fold(0, gcd);
        let mut parts = [0; MOST];
        for (at, size) in sizes.iter().enumerate() {
            *parts.get_mut(at)? = u32::try_from(size / divisor).ok()?;
        }
        Some(Self(parts))
    }

    fn proportions(&self) -> impl Iterator<Item = usize> {
        self.0.iter().map(|&part| part as usize).filter(|&part| part > 0)
    }

    /// The sizes in a dimension of `size` elements, if they divide it so.
    pub(super) fn sizes(&self, size: usize) -> Option<Vec<usize>> {
        let sum: usize = self.proportions().sum();
        size.is_multiple_of(sum).then(|| self.proportions().map(|part| part * (size / sum)).collect())
    }
}

impl fmt::Display for Parts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self.proportions().map(|part| part.to_string()).collect();
        f.write_str(&parts.join(":"))
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
