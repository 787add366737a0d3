//! Lengths of training, as they are written.

use super::LrError;
use crate::batch::BatchSizes;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A length of training, in optimizer steps or in samples (sequences): `100 steps`, `6400 samples`, or a number of steps.
///
/// ```
/// use host::lr::Span;
///
/// assert_eq!("100 steps".parse::<Span>()?, Span::Steps(100));
/// assert_eq!("6400 samples".parse::<Span>()?, Span::Samples(6400));
/// assert_eq!(Span::Steps(100).samples(64), Span::Samples(6400).samples(64), "the same with 64 sequences per step");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "WrittenSpan", into = "String")]
pub enum Span {
    /// Optimizer steps of the run's global batch.
    Steps(u64),
    /// Rows of the data set.
    Samples(u64),
}

impl Span {
    /// The length in samples, where the steps have batches of these sizes: a number, or a ramp.
    pub fn samples(self, batch: impl Into<BatchSizes>) -> u64 {
        match self {
            Span::Steps(steps) => batch.into().samples(steps),
            Span::Samples(samples) => samples,
        }
    }

    /// The longest length in the unit of this one, which is too long, that has fewer than `limit` samples.
    pub(super) fn longest_below(self, limit: u64, batch: BatchSizes) -> Self {
        let Span::Steps(too_many) = self else { return Span::Samples(limit.saturating_sub(1)) };
        let (mut fits, mut not) = (0, too_many);
        while not - fits > 1 {
            let middle = fits + (not - fits) / 2;
            if batch.samples(middle) < limit { fits = middle } else { not = middle }
        }
        Span::Steps(fits)
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum WrittenSpan {
    Steps(u64),
    Text(String),
}

impl TryFrom<WrittenSpan> for Span {
    type Error = LrError;

    fn try_from(written: WrittenSpan) -> Result<Self, LrError> {
        match written {
            WrittenSpan::Steps(steps) => Ok(Self::Steps(steps)),
            WrittenSpan::Text(text) => text.parse(),
        }
    }
}

impl FromStr for Span {
    type Err = LrError;

    fn from_str(text: &str) -> Result<Self, LrError> {
        let wrong = || LrError::Span { text: text.into() };
        let (number, unit) = text.trim().split_once(' ').unwrap_or((text.trim(), "steps"));
        let number = number.parse().map_err(|_| wrong())?;
        match unit.trim() {
            "step" | "steps" => Ok(Self::Steps(number)),
            "sample" | "samples" => Ok(Self::Samples(number)),
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Steps(steps) => write!(f, "{steps} steps"),
            Self::Samples(samples) => write!(f, "{samples} samples"),
        }
    }
}

impl From<Span> for String {
    fn from(span: Span) -> Self {
        span.to_string()
    }
}
