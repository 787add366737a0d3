//! The next tokens and their log-probabilities, from the logits of a step.

use std::ops::Range;
use std::sync::Arc;

use backend_dist::ops::decode::{Draw, Penalty, draw, is_drawn_on_device, likeliest};
use burn::tensor::{DType, Element, Int, Tensor, TensorData};
use half::{bf16, f16};
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

    /// The draw of a token, if that is all that is wanted, or nothing, and what is done to logits of row `row` before.
    fn draw(&self, row: usize, vocabulary: usize) -> Option<(Draw, Vec<Penalty>)> {
        match self {
            Self::None => Some((Sampling::greedy().draw(0)?, Vec::new())),
            Self::Next { sampling, rules, index, logprobs: None } => {
                let penalties = match rules {
                    None => Vec::new(),
                    Some(rules) => rules.penalties(sampling, vocabulary)?,
                };
                let penalty = |(token, times, less)| Penalty { row, token, times, less };
                Some((sampling.draw(*index)?, penalties.into_iter().map(penalty).collect()))
            }
            Self::Next { .. } | Self::Known { .. } => None,
        }
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
    let drawn = on_device(&logits, choices);
    // The other lines come to the host whole.
    let others: Vec<usize> = drawn.iter().enumerate().filter(|(_, drawn)| drawn.is_none()).map(|(i, _)| i).collect();
    let wanted = match others.len() {
        0 => Vec::new(),
        all if all == choices.len() => on_host(logits, choices.iter().collect()),
        count => {
            let lines: Vec<i64> = others.iter().map(|line| *line as i64).collect();
            let lines = Tensor::<1, Int>::from_data(TensorData::new(lines, [count]), &logits.device());
            on_host(logits.select(0, lines), others.iter().map(|line| &choices[*line]).collect())
        }
    };
    let mut wanted = wanted.into_iter();
    let of_line = |drawn: Option<i64>| match drawn {
        Some(token) => Ok((token, None)),
        None => wanted.next().expect("a choice for each of the other lines"),
    };
    drawn.into_iter().map(of_line).collect()
}

/// The tokens that are drawn where the logits are, so that one number of a line comes to the host.
fn on_device(logits: &Tensor<2>, choices: &[Choice]) -> Vec<Option<i64>> {
    if !is_drawn_on_device(logits) {
        return vec![None; choices.len()];
    }
    let mut penalties = Vec::new();
    let draw_of = |(row, choice): (usize, &Choice)| {
        let (draw, own) = choice.draw(row, logits.dims()[1])?;
        penalties.extend(own);
        Some(draw)
    };
    let draws: Vec<Option<Draw>> = choices.iter().enumerate().map(draw_of).collect();
    let is_greedy = |draw: &Option<Draw>| draw.is_some_and(|draw| draw.temperature == 0.0);
    let tokens = if penalties.is_empty() && draws.iter().all(is_greedy) {
        likeliest(logits)
    } else if draws.iter().any(Option::is_some) {
        let greedy = Draw { temperature: 0.0, top_k: None, top_p: None, min_p: None, at: 0.0 };
        draw(logits, &draws.iter().map(|draw| draw.unwrap_or(greedy)).collect::<Vec<_>>(), &penalties)
    } else {
        None
    };
    let Some(tokens) = tokens else { return vec![None; choices.len()] };
    // −1 where a logit is not finite.
    let of_line = |(token, draw): (i64, &Option<Draw>)| (token >= 0 && draw.is_some()).then_some(token);
    tokens.into_data().iter::<i64>().zip(&draws).map(of_line).collect()
}

fn on_host(logits: Tensor<2>, choices: Vec<&Choice>) -> Vec<Result<Chosen, NoChoice>> {
    let (data, [_, vocabulary]) = (logits.to_data(), logits.dims());
    let of_line =
        |(line, choice): (usize, &Choice)| choice.of(&line_of(&data, line * vocabulary..(line + 1) * vocabulary));
    choices.into_par_iter().enumerate().map(of_line).collect()
}

/// Numbers of a tensor of floats.
fn line_of(data: &TensorData, range: Range<usize>) -> Vec<f64> {
    fn of<E: Element>(data: &TensorData, range: Range<usize>) -> Vec<f64> {
        let all = data.as_slice::<E>().expect("the data is of this type");
        all[range].iter().map(|number| number.elem()).collect()
    }
    match data.dtype() {
        DType::F64 => of::<f64>(data, range),
        DType::F32 | DType::Flex32 => of::<f32>(data, range),
        DType::F16 => of::<f16>(data, range),
        DType::BF16 => of::<bf16>(data, range),
        dtype => panic!("logits of {dtype:?}"),
    }
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
    use burn::tensor::Device;

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
