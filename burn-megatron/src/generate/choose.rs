//! The next tokens and their log-probabilities, from the logits of a step.

use std::ops::Range;

use burn::tensor::{DType, Element, Int, Tensor, TensorData};
use half::{bf16, f16};
use rayon::prelude::*;

use super::choice::{Choice, Chosen, Likely, TokenLogprobs};
use super::device::on_device;
use super::error::NoChoice;

/// One choice for each line of `logits [lines, vocab]`.
pub(crate) fn choose(logits: Tensor<2>, choices: &[Choice]) -> Vec<Result<Chosen, NoChoice>> {
    let chosen = on_device(&logits, choices);
    // The other lines come to the host whole.
    let others: Vec<usize> = (0..choices.len()).filter(|line| chosen[*line].is_none()).collect();
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
    let of_line = |chosen: Option<Chosen>| match chosen {
        Some(chosen) => Ok(chosen),
        None => wanted.next().expect("a choice for each of the other lines"),
    };
    chosen.into_iter().map(of_line).collect()
}

/// What is wanted of a line on the host.
fn on_line(choice: &Choice, logits: &[f64]) -> Result<Chosen, NoChoice> {
    if let Some(&value) = logits.iter().find(|logit| !logit.is_finite()) {
        return Err(NoChoice::NotFinite(value));
    }
    Ok(match choice {
        Choice::None => (0, None),
        Choice::Known { token, top } => (*token, Some(logprobs(logits, *token, *top))),
        Choice::Next { sampling, rules, index, logprobs: top } => {
            let token = match rules {
                None => sampling.choose(logits, &[], *index),
                Some(rules) => rules.choose(logits, sampling, *index)?,
            } as i64;
            (token, top.map(|top| logprobs(logits, token, top)))
        }
    })
}

fn on_host(logits: Tensor<2>, choices: Vec<&Choice>) -> Vec<Result<Chosen, NoChoice>> {
    let (data, [_, vocabulary]) = (logits.to_data(), logits.dims());
    let of_line =
        |(line, choice): (usize, &Choice)| on_line(choice, &line_of(&data, line * vocabulary..(line + 1) * vocabulary));
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
    use std::sync::Arc;

    use burn::tensor::Device;

    use super::super::{Sampling, TextRules};
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
