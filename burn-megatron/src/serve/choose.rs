//! The next tokens and their log-probabilities, from the logits of a step.

use burn::tensor::{DType, Tensor};
use rayon::prelude::*;

use super::request::{Likely, TokenLogprobs};
use crate::generate::Sampling;

/// What is wanted of one line of logits.
#[derive(Clone, Debug, PartialEq)]
pub enum Choice {
    /// Nothing: more of the prompt follows.
    None,
    /// The next token, as new token number `index`, and log-probabilities if there is a number of likeliest tokens.
    Next {
        /// How it is chosen.
        sampling: Sampling,
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
pub(super) type Chosen = (i64, Option<TokenLogprobs>);

impl Choice {
    /// The likeliest token is all that is wanted.
    fn is_argmax(&self) -> bool {
        matches!(self, Self::Next { sampling, logprobs: None, .. } if sampling.temperature == 0.0)
            || *self == Self::None
    }

    fn of(&self, logits: &[f64]) -> Result<Chosen, f64> {
        if let Some(&value) = logits.iter().find(|logit| !logit.is_finite()) {
            return Err(value);
        }
        Ok(match self {
            Self::None => (0, None),
            Self::Known { token, top } => (*token, Some(logprobs(logits, *token, *top))),
            Self::Next { sampling, index, logprobs: top } => {
                let token = sampling.choose(logits, *index) as i64;
                (token, top.map(|top| logprobs(logits, token, top)))
            }
        })
    }
}

/// One choice for each line of `logits [lines, vocab]`; the error is a logit that is not a number.
pub(super) fn choose(logits: Tensor<2>, choices: &[Choice]) -> Vec<Result<Chosen, f64>> {
    if choices.iter().all(Choice::is_argmax) {
        return likeliest(logits);
    }
    let [_, vocabulary] = logits.dims();
    let logits: Vec<f64> = logits.into_data().iter::<f64>().collect();
    let lines = logits.par_chunks_exact(vocabulary).zip(choices.par_iter());
    lines.map(|(logits, choice)| choice.of(logits)).collect()
}

/// On the device: only one number of each line comes to the host.
fn likeliest(logits: Tensor<2>) -> Vec<Result<Chosen, f64>> {
    // 0 if all are finite, else no number.
    let finite = logits.clone().cast(DType::F32).mul_scalar(0.0).sum_dim(1).into_data();
    let tokens = logits.argmax(1).into_data();
    let all = tokens.iter::<i64>().zip(finite.iter::<f64>().collect::<Vec<_>>());
    all.map(|(token, finite)| if finite == 0.0 { Ok((token, None)) } else { Err(finite) }).collect()
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
    use burn::tensor::{Device, TensorData};

    use super::*;

    fn lines(values: &[[f64; 4]]) -> Tensor<2> {
        let data = TensorData::new(values.concat(), [values.len(), 4]);
        Tensor::from_data(data, (&Device::flex(), DType::F64))
    }

    fn greedy(logprobs: Option<usize>) -> Choice {
        Choice::Next { sampling: Sampling::greedy(), index: 0, logprobs }
    }

    #[test]
    fn the_device_and_the_host_choose_the_same() {
        let values = [[0.5, 2.0, 2.0, -1.0], [3.0, f64::NAN, 0.0, 0.0], [0.0, 1.0, f64::INFINITY, 0.0], [0.0; 4]];
        let device = choose(lines(&values), &[greedy(None), greedy(None), greedy(None), Choice::None]);
        let host = choose(lines(&values), &[greedy(Some(0)), greedy(None), greedy(None), Choice::None]);
        assert_eq!(device[0], Ok((1, None)), "the first of equally likely tokens");
        assert_eq!(device[0].as_ref().unwrap().0, host[0].as_ref().unwrap().0);
        for line in [1, 2] {
            assert!(device[line].is_err() && host[line].is_err(), "{device:?} {host:?}");
        }
        assert!(device[3].is_ok() && host[3].is_ok());
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
