//! The next tokens and their log-probabilities, from the logits of a step.

use backend_dist::ops::decode::likeliest;
use burn::tensor::Tensor;
use rayon::prelude::*;

use super::Sampling;

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
pub enum Choice {
    /// Nothing: more of the prompt follows.
    None,
    /// The next token, as new token number `index`, and log-probabilities if there is a number of likeliest tokens.
    Next {
        /// How it is chosen.
        sampling: Sampling,
        /// The tokens before it, if the choice depends on them.
        tokens: Vec<i64>,
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
    /// The token after these of prompt and text, as new token number `index`.
    pub(crate) fn next(sampling: Sampling, tokens: &[i64], index: usize, logprobs: Option<usize>) -> Self {
        let tokens = if sampling.penalises() { tokens.to_vec() } else { Vec::new() };
        Self::Next { sampling, tokens, index: index as u64, logprobs }
    }

    /// The likeliest token is all that is wanted, or nothing.
    fn is_argmax(&self) -> bool {
        matches!(self, Self::Next { sampling, logprobs: None, .. } if sampling.is_argmax()) || *self == Self::None
    }

    fn of(&self, logits: &[f64]) -> Result<Chosen, f64> {
        if let Some(&value) = logits.iter().find(|logit| !logit.is_finite()) {
            return Err(value);
        }
        Ok(match self {
            Self::None => (0, None),
            Self::Known { token, top } => (*token, Some(logprobs(logits, *token, *top))),
            Self::Next { sampling, tokens, index, logprobs: top } => {
                let token = sampling.choose(logits, tokens, *index) as i64;
                (token, top.map(|top| logprobs(logits, token, top)))
            }
        })
    }
}

/// One choice for each line of `logits [lines, vocab]`; the error is a logit that is not a number.
pub(crate) fn choose(logits: Tensor<2>, choices: &[Choice]) -> Vec<Result<Chosen, f64>> {
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

    fn lines(values: &[[f64; 4]]) -> Tensor<2> {
        let data = TensorData::new(values.concat(), [values.len(), 4]);
        Tensor::from_data(data, (&Device::flex(), DType::F64))
    }

    fn greedy(logprobs: Option<usize>) -> Choice {
        Choice::next(Sampling::greedy(), &[], 0, logprobs)
    }

    #[test]
    fn the_first_of_equally_likely_tokens_is_chosen_and_broken_logits_are_named() {
        let values = [[0.5, 2.0, 2.0, -1.0], [3.0, f64::NAN, 0.0, 0.0], [0.0, 1.0, f64::INFINITY, 0.0], [0.0; 4]];
        let chosen = choose(lines(&values), &[greedy(None), greedy(None), greedy(Some(1)), Choice::None]);
        assert_eq!(chosen[0], Ok((1, None)));
        assert!(chosen[1].as_ref().is_err_and(|value| value.is_nan()) && chosen[2] == Err(f64::INFINITY));
        assert_eq!(chosen[3], Ok((0, None)), "nothing is wanted");
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
