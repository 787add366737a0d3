//! The rules of one text.

use std::sync::Arc;

use super::Sampling;
use super::error::NoChoice;
use crate::logits::{Changes, Guide, LogitsProcessors, Seen};

/// What changes the logits of a text, with the text as far as it is written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TextRules {
    processors: Arc<LogitsProcessors>,
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
        // A guide that reads each token of this text once.
        let own = |guide: &Arc<Guide>| {
            let guide = Some(Arc::new(guide.another()));
            Arc::new(LogitsProcessors { guide, ..LogitsProcessors::clone(processors) })
        };
        let processors = || processors.guide.as_ref().map_or_else(|| Arc::clone(processors), own);
        changes.then(|| Arc::new(Self { processors: processors(), seen: seen() }))
    }

    /// Another token of the text. It is not copied where no choice has it any more.
    pub fn push(rules: &mut Option<Arc<Self>>, token: i64) {
        if let Some(rules) = rules {
            Arc::make_mut(rules).seen.push(token);
        }
    }

    /// What they and a repetition penalty do to the logits of a vocabulary.
    pub fn changes(&self, sampling: &Sampling, vocabulary: usize) -> Changes {
        self.processors.changes(&self.seen, sampling.repetition_penalty, vocabulary)
    }

    /// The token chosen as new token number `index`. Fails if the rules leave none.
    pub fn choose(&self, logits: &[f64], sampling: &Sampling, index: u64) -> Result<usize, NoChoice> {
        let mut left = logits.to_vec();
        self.changes(sampling, logits.len()).apply(&mut left);
        let forbidding = || self.processors.forbidding(&self.seen, logits.len()).join(", ");
        sampling.pick(&left, index).ok_or_else(|| NoChoice::Forbidden(forbidding()))
    }
}
