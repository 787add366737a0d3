//! The next tokens and their log-probabilities, from the logits of a step.

use std::sync::Arc;

use backend_dist::ops::decode::likeliest;
use burn::tensor::Tensor;
use rayon::prelude::*;

use super::error::NoChoice;
use super::{Sampling, TextRules};

/// A token and its log-probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Likely {
    /// The token.
    pub token: i64,
    /// Its log-probability.
    pub logprob: f64,
}

/// The log-probability of a token after those before it, `log softmax` of the model's logits, before penalty,
/// temperature and top-k.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Of the token itself.
    pub logprob: f64,
    /// The likeliest tokens at its place, likeliest first.
    pub top: Vec<Likely>,
}

/// What is wanted of one line of logits.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Choice {
    /// Nothing: more of the prompt follows.
    None,
    /// The next token, as new token number `index`, and log-probabilities if there is a number of likeliest tokens.
    Next {
        /// How it is chosen.
        sampling: Sampling,
        /// What else changes its logits, with the tokens before it.
        rules: Option<Arc<TextRules>>,
        /// Which draw this is.
        index: u64,
        /// Log-probabilities of it and so many of the likeliest.
        logprobs: Option<usize>,
    },
    /// The log-probabilities of a token that is known, and of so many of the likeliest.
    Known {
        /// The token.
        token: i64,
        /// Number of the likeliest.
        top: usize,
    },
}

/// A token and, if asked for, its log-probabilities.
pub(crate) type Chosen = (i64, Option<TokenLogprobs>);

impl Choice {
    /// New token number `index` of a text.
    pub fn next(sampling: Sampling, rules: &Option<Arc<TextRules>>, index: usize, logprobs: Option<usize>) -> Self {
        Self::Next { sampling, rules: rules.clone(), index: index as u64, logprobs }
    }

    /// The likeliest token is all that is wanted, or nothing.
    fn is_argmax(&self) -> bool {
        matches!(self, Self::Next { sampling, rules: None, logprobs: None, .. } if sampling.is_argmax())
            || *self == Self::None
    }

    fn of(&self, logits: &[f64]) -> Result<Chosen, NoChoice> {
        if let Some(&value) = logits.iter().find(|logit| !logit.is_finite()) {
            return Err(NoChoice::NotFinite(value));
        }
        Ok(match self {
            Self::None => (0, None),
            Self::Known { token, top } => (*token, Some(logprobs(logits, *token, *top))),
            Self::Next { sampling, rules, index, logprobs: top } => {
                let token = match rules {
                    None => sampling.choose(logits, &[], *index),
                    Some(rules) => rules.choose(logits, sampling, *index)?,
                } as i64;
                (token, top.map(|top| logprobs(logits, token, top)))
            }
        })
    }
}

/// One choice for each line of `logits [lines, vocab]`.
pub(crate) fn choose(logits: Tensor<2>, choices: &[Choice]) -> Vec<Result<Chosen, NoChoice>> {
    if choices.iter().all(Choice::is_argmax)
        && let Some(tokens) = likeliest(&logits)
    {
        // Only one number of each line comes to the host.
        let tokens: Vec<i64> = tokens.into_data().iter::<i64>().collect();
        if tokens.iter().all(|token| *token >= 0) {
            return tokens.into_iter().map(|token| Ok((token, None))).collect();
        }
    }
    let [_, vocabulary] = logits.dims();
    let logits: Vec<f64> = logits.into_data().iter::<f64>().collect();
    let lines = logits.par_chunks_exact(vocabulary).zip(choices.par_iter());
    lines.map(|(logits, choice)| choice.of(logits)).collect()
}

fn logprobs(logits: &[f64], token: i64, top: usize) -> TokenLogprobs {
    let highest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let normaliser = highest + logits.iter().map(|logit| (logit - highest).exp()).sum::<f64>().ln();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    let top = top.min(order.len());
    // The first of equally likely ones comes first, as in greedy decoding.
    let by_logit = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    if top > 0 && top < order.len() {
        order.select_nth_unstable_by(top - 1, by_logit);
    }
    order.truncate(top);
    order.sort_unstable_by(by_logit);
    let of = |token: usize| logits[token] - normaliser;
    let top = order.into_iter().map(|token| Likely { token: token as i64, logprob: of(token) }).collect();
    TokenLogprobs { logprob: of(token as usize), top }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, TensorData};

    use super::*;
    use crate::logits::{LogitsProcessors, Seen};

    fn lines(values: &[[f64; 4]]) -> Tensor<2> {
        let data = TensorData::new(values.concat(), [values.len(), 4]);
        Tensor::from_data(data, (&Device::flex(), DType::F64))
    }

    fn greedy(logprobs: Option<usize>) -> Choice {
        Choice::next(Sampling::greedy(), &None, 0, logprobs)
    }

    #[test]
    fn the_first_of_equally_likely_tokens_is_chosen_and_broken_logits_are_named() {
        let values = [[0.5, 2.0, 2.0, -1.0], [3.0, f64::NAN, 0.0, 0.0], [0.0, 1.0, f64::INFINITY, 0.0], [0.0; 4]];
        let chosen = choose(lines(&values), &[greedy(None), greedy(None), greedy(Some(1)), Choice::None]);
        assert_eq!(chosen[0], Ok((1, None)));
        assert!(matches!(chosen[1], Err(NoChoice::NotFinite(value)) if value.is_nan()));
        assert_eq!(chosen[2], Err(NoChoice::NotFinite(f64::INFINITY)));
        assert_eq!(chosen[3], Ok((0, None)), "nothing is wanted");
    }

    /// A token that no rule leaves is not chosen, and the rules are named; each text has its own.
    #[test]
    fn rules_that_leave_no_token_are_named() {
        let processors = Arc::new(LogitsProcessors {
            allowed_token_ids: vec![1, 2],
            no_repeat_ngram_size: 1,
            ..LogitsProcessors::default()
        });
        for sampling in [Sampling::greedy(), Sampling::default()] {
            let mut rules = TextRules::new(&processors, &sampling, || Seen::new(&[0], &[0], &[], 9));
            let mut next = || -> Result<i64, NoChoice> {
                let choice = Choice::next(sampling, &rules, 0, None);
                let chosen = choose(lines(&[[5.0, 1.0, -2.0, 0.0]]), &[choice]).remove(0)?;
                TextRules::push(&mut rules, chosen.0);
                Ok(chosen.0)
            };
            let mut both = [next().unwrap(), next().unwrap()];
            both.sort_unstable();
            assert_eq!(both, [1, 2]);
            let none = next();
            assert_eq!(none, Err(NoChoice::Forbidden("no_repeat_ngram_size, allowed_token_ids".into())));
            let error = none.unwrap_err().after(3).to_string();
            assert_eq!(error, "after 3 tokens no token may come: no_repeat_ngram_size, allowed_token_ids forbid all");
        }
        let neutral = Arc::new(LogitsProcessors::default());
        assert_eq!(TextRules::new(&neutral, &Sampling::greedy(), || panic!("nothing is counted")), None);
    }

    #[test]
    fn log_probabilities_are_those_of_the_softmax() {
        let logits = [1.0f64, 3.0, 2.0, 3.0];
        let total: f64 = logits.iter().map(|logit| logit.exp()).sum();
        let found = choose(lines(&[logits]), &[Choice::Known { token: 2, top: 3 }]).remove(0).unwrap().1.unwrap();
        assert!((found.logprob - (2f64.exp() / total).ln()).abs() < 1e-14);
        assert_eq!(found.top.iter().map(|likely| likely.token).collect::<Vec<_>>(), [1, 3, 2]);
        assert!((found.top[2].logprob - found.logprob).abs() < 1e-14);
    }
}
