//! Training, validation and test splits of a dataset.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::error::DataError;
use super::numpy;

/// A split of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// To learn from.
    Train = 0,
    /// To watch while learning.
    Valid = 1,
    /// To judge at the end.
    Test = 2,
}

impl Split {
    /// The three splits in order.
    pub const ALL: [Split; 3] = [Split::Train, Split::Valid, Split::Test];

    /// `train`, `valid` or `test`.
    pub fn name(self) -> &'static str {
        ["train", "valid", "test"][self as usize]
    }
}

/// Shares of training, validation and test, of any scale: `969,30,1`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SplitRatios([f64; 3]);

impl SplitRatios {
    /// Everything for training.
    pub const TRAIN_ONLY: SplitRatios = SplitRatios([1.0, 0.0, 0.0]);

    /// Everything for one split.
    pub fn only(split: Split) -> Self {
        Self(Split::ALL.map(|other| if other == split { 1.0 } else { 0.0 }))
    }

    /// The share of each split; their sum is 1.
    pub fn shares(&self) -> [f64; 3] {
        let shares = numpy::normalize(&self.0);
        [0, 1, 2].map(|split| shares[split])
    }

    /// The sequences of each split of `sequences`, `None` for a share of 0. As in Megatron, boundaries are rounded to
    /// the nearest sequence, halves to the even one.
    pub fn ranges(&self, sequences: usize) -> [Option<Range<usize>>; 3] {
        let shares = numpy::normalize(&self.0);
        let mut from = 0.0;
        [0, 1, 2].map(|split| {
            let (start, end) = (from, from + shares[split]);
            from = end;
            let boundary = |share: f64| ((share * sequences as f64).round_ties_even() as usize).min(sequences);
            (end > start).then(|| boundary(start)..boundary(end))
        })
    }
}

impl FromStr for SplitRatios {
    type Err = DataError;

    fn from_str(split: &str) -> Result<Self, DataError> {
        let refuse = |what: String| DataError::Split { split: split.into(), what };
        let mut shares = [0.0f64; 3];
        let words: Vec<&str> = split.split(',').map(str::trim).collect();
        if words.len() > 3 {
            return Err(refuse(format!("{} shares; at most train,valid,test", words.len())));
        }
        for (share, word) in shares.iter_mut().zip(words) {
            *share = word.parse().map_err(|_| refuse(format!("'{word}' is not a number")))?;
            if !share.is_finite() || *share < 0.0 {
                return Err(refuse(format!("'{word}' is not a share of 0 or more")));
            }
        }
        if shares.iter().sum::<f64>() == 0.0 {
            return Err(refuse("all shares are 0".into()));
        }
        Ok(Self(shares))
    }
}

impl TryFrom<String> for SplitRatios {
    type Error = DataError;

    fn try_from(split: String) -> Result<Self, DataError> {
        split.parse()
    }
}

impl From<SplitRatios> for String {
    fn from(split: SplitRatios) -> String {
        split.to_string()
    }
}

impl fmt::Display for SplitRatios {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [train, valid, test] = self.0;
        write!(f, "{train},{valid},{test}")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn boundaries_are_rounded_as_python_rounds() {
        let split: SplitRatios = "50,50".parse().unwrap();
        assert_eq!(split.ranges(5), [Some(0..2), Some(2..5), None]); // 2.5 rounds to 2
        assert_eq!(split.ranges(7), [Some(0..4), Some(4..7), None]); // 3.5 rounds to 4
        let split: SplitRatios = "90, 5, 5".parse().unwrap();
        assert_eq!(split.ranges(200), [Some(0..180), Some(180..190), Some(190..200)]);
        assert_eq!(split.to_string(), "90,5,5");
    }

    #[test]
    fn nonsense_is_refused() {
        for wrong in ["", "a", "1,-1", "0,0,0", "1,2,3,4", "inf"] {
            assert!(wrong.parse::<SplitRatios>().is_err(), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn splits_are_disjoint_and_in_order(shares in [0.0f64..1.0, 0.0f64..1.0, 0.0f64..1.0], sequences in 0usize..10_000) {
            prop_assume!(shares.iter().sum::<f64>() > 0.0);
            let mut next = 0;
            for range in SplitRatios(shares).ranges(sequences).into_iter().flatten() {
                prop_assert_eq!(range.start, next);
                next = range.end;
            }
            prop_assert_eq!(next, sequences);
        }
    }
}
