//! Which tokens of a sample are learned, and what remains of samples that are longer than a sequence.

use serde::{Deserialize, Serialize};

use super::encode::ChatSample;

/// Which tokens of a conversation are learned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ChatLoss {
    /// Those of all assistant turns.
    #[default]
    Assistant,
    /// Those of the last assistant turn.
    LastTurn,
    /// All.
    All,
}

/// What happens to samples that are longer than a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TooLong {
    /// The run does not start.
    #[default]
    Refuse,
    /// Their end is left out.
    Truncate,
    /// They are left out.
    Drop,
}

/// A sample: tokens, and by token whether it is learned.
#[derive(Clone, Debug)]
pub(super) struct Tokens {
    pub ids: Vec<u32>,
    pub learned: Vec<bool>,
}

impl Tokens {
    /// Predictions: all tokens but the first.
    pub fn len(&self) -> usize {
        self.ids.len() - 1
    }
}

/// What remains of a sample.
pub(super) enum Fit {
    Whole(Tokens),
    Truncated(Tokens),
    Dropped,
    Nothing,
    Refused,
}

impl Tokens {
    /// Leaves at most so many predictions, the first.
    pub fn truncate(&mut self, predictions: usize) {
        self.ids.truncate(predictions + 1);
        self.learned.truncate(predictions + 1);
    }

    /// What remains of the sample in a sequence of so many predictions.
    pub fn fit(mut self, seq_length: usize, too_long: TooLong) -> Fit {
        let teaches = |tokens: &Self| tokens.learned.iter().skip(1).any(|counts| *counts);
        if !teaches(&self) {
            return Fit::Nothing;
        }
        if self.len() <= seq_length {
            return Fit::Whole(self);
        }
        match too_long {
            TooLong::Refuse => Fit::Refused,
            TooLong::Drop => Fit::Dropped,
            TooLong::Truncate => {
                self.truncate(seq_length);
                if teaches(&self) { Fit::Truncated(self) } else { Fit::Dropped }
            }
        }
    }
}

/// A sample with the tokens that are learned of it.
pub(super) fn learned(sample: ChatSample, loss: ChatLoss) -> Tokens {
    let learned = match loss {
        ChatLoss::Assistant => sample.mask,
        ChatLoss::All => vec![true; sample.ids.len()],
        ChatLoss::LastTurn => {
            let last = sample.turns.last().cloned().unwrap_or_default();
            (0..sample.ids.len()).map(|token| last.contains(&token)).collect()
        }
    };
    Tokens { ids: sample.ids, learned }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn sample(ids: std::ops::Range<u32>, turns: &[std::ops::Range<usize>]) -> ChatSample {
        let mask = (0..ids.len()).map(|token| turns.iter().any(|turn| turn.contains(&token))).collect();
        ChatSample { text: String::new(), ids: ids.collect(), mask, turns: turns.to_vec() }
    }

    #[test]
    fn the_last_turn_or_all_tokens_may_be_learned() {
        let counts = |loss| learned(sample(0..6, &[1..2, 3..5]), loss).learned;
        assert_eq!(counts(ChatLoss::LastTurn), [false, false, false, true, true, false]);
        assert_eq!(counts(ChatLoss::All), [true; 6]);
    }

    #[test]
    fn long_samples_are_refused_truncated_or_dropped() {
        let long = |turn: std::ops::Range<usize>| learned(sample(0..10, &[turn]), ChatLoss::Assistant);
        assert!(matches!(long(2..9).fit(9, TooLong::Refuse), Fit::Whole(_)));
        assert!(matches!(long(2..9).fit(8, TooLong::Refuse), Fit::Refused));
        assert!(matches!(long(2..9).fit(4, TooLong::Truncate), Fit::Truncated(tokens) if tokens.len() == 4));
        assert!(matches!(long(6..9).fit(4, TooLong::Truncate), Fit::Dropped), "nothing to learn would remain");
        assert!(matches!(long(2..9).fit(4, TooLong::Drop), Fit::Dropped));
    }
}
