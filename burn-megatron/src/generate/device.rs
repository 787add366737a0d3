//! The choice of tokens where their logits are.

use backend_dist::ops::draw::{self, Draw, LogitChange, OWN, OnlyTokens, is_drawn_on_device};
use burn::tensor::{Int, Tensor};
use rayon::prelude::*;

use super::choice::{Choice, Chosen, Likely, TokenLogprobs};
use crate::logits::{Change, Changes};

/// What the device does for a line.
struct Asked {
    draw: Draw,
    changes: Option<Changes>,
    /// Log-probabilities of this token, or of the drawn one, and of so many of the likeliest.
    logprobs: Option<(Option<usize>, usize)>,
}

/// The first of the greatest.
const GREEDY: Draw = Draw { temperature: 0.0, top_k: None, top_p: None, min_p: None, at: 0.0 };

impl Choice {
    /// What the device does for it, unless the host must.
    fn asked(&self, vocabulary: usize) -> Option<Asked> {
        match self {
            Self::None => Some(Asked { draw: GREEDY, changes: None, logprobs: None }),
            Self::Known { token, top } => {
                let token = usize::try_from(*token).ok().filter(|token| *token < vocabulary)?;
                Some(Asked { draw: GREEDY, changes: None, logprobs: Some((Some(token), (*top).min(vocabulary))) })
            }
            Self::Next { sampling, rules, index, logprobs } => {
                let changes = rules.as_ref().map(|rules| rules.changes(sampling, vocabulary));
                let draw = sampling.draw(*index).filter(|_| changes.as_ref().is_none_or(|of| !of.are_forced()))?;
                Some(Asked { draw, changes, logprobs: logprobs.map(|top| (None, top.min(vocabulary))) })
            }
        }
    }

    fn token(&self, drawn: i64) -> i64 {
        if let Self::Known { token, .. } = self { *token } else { drawn }
    }
}

/// What is chosen where the logits are, so that few numbers of a line come to the host; nothing of a line that it must see.
pub(super) fn on_device(logits: &Tensor<2>, choices: &[Choice]) -> Vec<Option<Chosen>> {
    let vocabulary = logits.dims()[1];
    let asked: Vec<Option<Asked>> = match is_drawn_on_device(logits) {
        true => choices.par_iter().map(|choice| choice.asked(vocabulary)).collect(),
        false => return choices.iter().map(|_| None).collect(),
    };
    if asked.iter().all(Option::is_none) {
        return asked.iter().map(|_| None).collect();
    }
    let tokens = drawn(logits, &asked);
    let logprobs: Vec<_> = asked.iter().map(|asked| asked.as_ref().and_then(|asked| asked.logprobs)).collect();
    let numbers = logprobs.iter().any(Option::is_some).then(|| draw::likelihoods(logits, &tokens, &logprobs));
    let tokens = tokens.into_data();
    let numbers: Vec<f64> = numbers.map(|numbers| numbers.into_data().iter::<f64>().collect()).unwrap_or_default();
    let width = numbers.len() / choices.len().max(1);
    let of_line = |(line, (drawn, choice)): (usize, (i64, &Choice))| {
        // Negative where a logit is not finite, or no token may come.
        asked[line].as_ref().filter(|_| drawn >= 0)?;
        let of_likely = |top| likely(&numbers[line * width..], top);
        Some((choice.token(drawn), logprobs[line].map(|(_, top)| of_likely(top))))
    };
    tokens.iter::<i64>().zip(choices).enumerate().map(of_line).collect()
}

/// A token of each line, where it is asked for.
fn drawn(logits: &Tensor<2>, asked: &[Option<Asked>]) -> Tensor<1, Int> {
    let (mut changes, mut only) = (Vec::new(), Vec::new());
    for (row, of_row) in asked.iter().enumerate() {
        let Some(of_row) = of_row.as_ref().and_then(|asked| asked.changes.as_ref()) else { continue };
        let change =
            |(token, Change { plus, times, less, grown })| LogitChange { row, token, plus, times, less, grown };
        changes.extend(of_row.tokens().into_iter().map(change));
        only.extend(of_row.only().map(|tokens| OnlyTokens { row, bits: tokens.words().to_vec() }));
    }
    let draws: Vec<Draw> = asked.iter().map(|asked| asked.as_ref().map_or(GREEDY, |asked| asked.draw)).collect();
    if !(changes.is_empty() && only.is_empty()) {
        draw::draw(&draw::changed(logits, &changes, &only), &draws)
    } else if draws.iter().all(|draw| draw.temperature == 0.0) {
        draw::likeliest(logits)
    } else {
        draw::draw(logits, &draws)
    }
}

/// From what [`draw::likelihoods`] says of a line.
fn likely(numbers: &[f64], top: usize) -> TokenLogprobs {
    let normaliser = numbers[0] + numbers[1].ln();
    let pairs = numbers[OWN..].chunks_exact(2).take(top);
    let top = pairs.map(|pair| Likely { token: pair[0] as i64, logprob: pair[1] - normaliser }).collect();
    TokenLogprobs { logprob: numbers[2] - normaliser, top }
}
