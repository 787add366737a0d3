//! Which tokens are masked: `_create_masked_lm_predictions` of Megatron's `masked_dataset.py`, without permutations.

use std::collections::HashSet;

use super::{MaskVocabulary, MaskedError, Result};
use crate::data::numpy::{self, RandomState};

/// How tokens are masked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Masking {
    /// Share of tokens that are masked, above 0 and below 1.
    pub probability: f64,
    /// Most words that are masked together, from 1.
    pub max_ngram: usize,
    /// Whether the pieces of a word are masked together.
    pub whole_words: bool,
    /// Whether longer spans are more frequent than shorter ones; otherwise a span of n words is 1/n as frequent as one word.
    pub favor_long: bool,
    /// Whether the words of a span are drawn from a geometric distribution with p = 0.2 instead (SpanBERT,
    /// arXiv:1907.10529, section 3.1).
    pub geometric: bool,
}

/// A masked sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Masked {
    /// The sequence with its masks.
    pub tokens: Vec<i64>,
    /// Positions that are masked together, in the order of the sequence.
    pub spans: Vec<Vec<usize>>,
}

impl Masking {
    pub(super) fn check(&self) -> Result<()> {
        let refuse = |name, value: String, legal: &str| Err(MaskedError::Option { name, value, legal: legal.into() });
        if !(self.probability > 0.0 && self.probability < 1.0) {
            return refuse("masking.probability", self.probability.to_string(), "above 0 and below 1, such as 0.15");
        }
        if self.max_ngram == 0 {
            return refuse("masking.max_ngram", "0".into(), "1");
        }
        Ok(())
    }

    /// Masks some of `tokens`. `replace` says what stands for a masked token: `None` is the token itself. `target` is the
    /// length that the sequence was truncated to.
    pub(super) fn mask(
        &self,
        tokens: &[i64],
        target: usize,
        vocabulary: &MaskVocabulary,
        random: &mut RandomState,
        replace: impl Fn(&mut RandomState) -> Option<i64>,
    ) -> Masked {
        let words = self.words(tokens, vocabulary);
        let most = self.most(tokens.len(), target);
        let mut order: Vec<usize> = (0..words.len()).collect();
        random.shuffle(&mut order);

        let mut masked = Masked { tokens: tokens.to_vec(), spans: Vec::new() };
        let mut positions = HashSet::new();
        for first in order {
            if positions.len() as f64 >= most {
                break;
            }
            let longest = self.draw_length(random);
            let span = |length: usize| words[first..(first + length).min(words.len())].concat();
            // The longest of at most that many words that leaves the number of masks within its bound.
            let fits = |span: &Vec<usize>| most >= (positions.len() + span.len()) as f64;
            let Some(span) = (1..=longest).rev().map(span).find(fits) else { continue };
            if span.iter().any(|position| positions.contains(position)) {
                continue;
            }
            for &position in &span {
                positions.insert(position);
                if let Some(token) = replace(random) {
                    masked.tokens[position] = token;
                }
            }
            masked.spans.push(span);
        }
        masked.spans.sort_by_key(|span| span[0]);
        masked
    }

    /// Positions of each word, or of each token.
    fn words(&self, tokens: &[i64], vocabulary: &MaskVocabulary) -> Vec<Vec<usize>> {
        let mut words: Vec<Vec<usize>> = Vec::new();
        for (position, &token) in tokens.iter().enumerate() {
            if token == vocabulary.cls || token == vocabulary.sep {
                continue;
            }
            match words.last_mut() {
                Some(word) if self.whole_words && vocabulary.continues[token as usize] => word.push(position),
                _ => words.push(vec![position]),
            }
        }
        words
    }

    /// How many tokens are masked at most. Python rounds halves to even.
    pub(super) fn most(&self, tokens: usize, target: usize) -> f64 {
        let share = (tokens as f64 * self.probability).round_ties_even().max(1.0);
        share.min(self.probability * target as f64)
    }

    /// Words of a span.
    fn draw_length(&self, random: &mut RandomState) -> usize {
        if self.geometric {
            return random.geometric(0.2).min(self.max_ngram as u64) as usize;
        }
        let inverse: Vec<f64> = (1..=self.max_ngram).map(|n| 1.0 / n as f64).collect();
        let mut shares = numpy::normalize(&inverse);
        if self.favor_long {
            shares.reverse();
        }
        1 + random.choice(&numpy::normalize(&shares))
    }
}
