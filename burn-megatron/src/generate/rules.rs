//! The rules of one text.

use std::sync::Arc;

use super::Sampling;
use super::error::NoChoice;
use crate::logits::{Guide, LogitsProcessors, Seen};

/// What changes the logits of a text, with the text as far as it is written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TextRules {
    processors: Arc<LogitsProcessors>,
    /// Whether they only penalise tokens that are there.
    penalise: bool,
    seen: Seen,
}

impl TextRules {
    /// Those of a text that begins with `seen`, or none if they change nothing.
    pub fn new(
        processors: &Arc<LogitsProcessors>,
        sampling: &Sampling,
        seen: impl FnOnce() -> Seen,
    ) -> Option<Arc<Self>> {
        let changes = sampling.penalises() || **processors != LogitsProcessors::default();
        let others =
            LogitsProcessors { presence_penalty: 0.0, frequency_penalty: 0.0, ..LogitsProcessors::clone(processors) };
        let penalise = others == LogitsProcessors::default();
        // A guide that reads each token of this text once.
        let own = |guide: &Arc<Guide>| {
            let guide = Some(Arc::new(guide.another()));
            Arc::new(LogitsProcessors { guide, ..LogitsProcessors::clone(processors) })
        };
        let processors = || processors.guide.as_ref().map_or_else(|| Arc::clone(processors), own);
        changes.then(|| Arc::new(Self { processors: processors(), penalise, seen: seen() }))
    }

    /// Another token of the text. It is not copied where no choice has it any more.
    pub fn push(rules: &mut Option<Arc<Self>>, token: i64) {
        if let Some(rules) = rules {
            Arc::make_mut(rules).seen.push(token);
        }
    }

    /// What it changes if it only penalises tokens that are there: of each such token of a vocabulary how much its logit is
    /// divided by, if it is positive, or multiplied with, and what is then taken from it.
    pub fn penalties(&self, sampling: &Sampling, vocabulary: usize) -> Option<Vec<(usize, f64, f64)>> {
        let LogitsProcessors { presence_penalty, frequency_penalty, .. } = *self.processors;
        self.penalise.then(|| {
            let of = |(token, new): (i64, usize)| {
                let token = usize::try_from(token).ok().filter(|token| *token < vocabulary)?;
                let there = if new > 0 { presence_penalty } else { 0.0 };
                Some((token, sampling.repetition_penalty, frequency_penalty * new as f64 + there))
            };
            self.seen.counts().filter_map(of).collect()
        })
    }

    /// The token chosen as new token number `index`. Fails if the rules leave none.
    pub fn choose(&self, logits: &[f64], sampling: &Sampling, index: u64) -> Result<usize, NoChoice> {
        let Self { processors, seen, .. } = self;
        let mut left = logits.to_vec();
        processors.bias(&mut left, seen);
        if sampling.penalises() {
            sampling.penalise(&mut left, seen.distinct());
        }
        processors.restrict(&mut left, seen);
        sampling.pick(&left, index).ok_or_else(|| NoChoice::Forbidden(processors.forbidding(logits, seen).join(", ")))
    }
}
