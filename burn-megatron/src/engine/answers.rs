//! Which tokens of a micro-batch belong to which answer of preference tuning. Pure.

use std::ops::Range;

use super::TokenBatch;
use crate::preference::{Answer, PreferenceConfig};

/// The documents of a micro-batch as answers, and this rank's tokens of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Answers {
    /// Of every token of this rank, by sequence: the answer that it is part of.
    of_token: Vec<usize>,
    /// All answers of the micro-batch, without what the policy says of them.
    answers: Vec<Answer>,
    /// Answers of each sequence.
    counts: Vec<usize>,
}

impl Answers {
    /// Those of a batch, of which this rank has `positions` of every sequence; `None` where it has none.
    pub fn of(batch: &TokenBatch, positions: &[Range<usize>]) -> Option<Self> {
        let (references, documents) = (batch.references.as_ref()?, batch.documents.as_ref()?);
        let counts = |place: usize| batch.mask.as_ref().is_none_or(|mask| mask[place]);
        let mut all = Self::default();
        for (sequence, (starts, references)) in documents.iter().zip(references).enumerate() {
            let before = all.answers.len();
            let ends = starts[1..].iter().copied().chain([batch.seq]);
            for ((start, end), reference) in starts.iter().zip(ends).zip(references) {
                let tokens = (*start..end).filter(|at| counts(sequence * batch.seq + at)).count();
                all.answers.push(Answer { policy: 0.0, reference: *reference, tokens });
            }
            all.counts.push(all.answers.len() - before);
            let document = |position: usize| before + starts.partition_point(|start| *start <= position) - 1;
            all.of_token.extend(positions.iter().cloned().flatten().map(document));
        }
        Some(all)
    }

    /// Of every answer the sum of the log-probabilities of this rank's tokens, from their losses.
    pub fn sums(&self, tokens: &TokenBatch, losses: &[f64]) -> Vec<f64> {
        let mut sums = vec![0.0; self.answers.len()];
        for (at, (answer, loss)) in self.of_token.iter().zip(losses).enumerate() {
            if tokens.mask.as_ref().is_none_or(|mask| mask[at]) {
                sums[*answer] -= loss;
            }
        }
        sums
    }

    /// The answers of each pair, and their place among all. A pair whose tokens do not count is none.
    pub fn pairs<'a>(
        &'a self,
        config: &PreferenceConfig,
        policy: &'a [f64],
    ) -> impl Iterator<Item = (usize, &'a [Answer], &'a [f64])> {
        let size = config.loss.answers();
        let pairs = self.answers.chunks_exact(size).zip(policy.chunks_exact(size)).enumerate();
        pairs
            .filter(|(_, (answers, _))| answers[0].tokens > 0)
            .map(move |(at, (answers, policy))| (at * size, answers, policy))
    }

    /// Number of pairs.
    pub fn count(&self, config: &PreferenceConfig) -> usize {
        self.answers.chunks_exact(config.loss.answers()).filter(|answers| answers[0].tokens > 0).count()
    }

    /// The factor of the gradient of each of this rank's tokens, from the derivatives by the answers' log-probabilities.
    pub fn factors(&self, derivatives: &[f64]) -> Vec<f64> {
        self.of_token.iter().map(|answer| -derivatives[*answer]).collect()
    }

    /// What belongs to each sequence of a value for every answer.
    pub fn by_sequence(&self, values: &[f64]) -> Vec<Vec<f64>> {
        let mut rest = values;
        let split = |count: &usize| {
            let (own, tail) = rest.split_at(*count);
            rest = tail;
            own.to_vec()
        };
        self.counts.iter().map(split).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preference::PreferenceLoss;

    #[test]
    fn tokens_find_their_answers_wherever_they_are() {
        let mut batch = TokenBatch::from_sequences(&[0; 14], 6);
        batch.documents = Some(vec![vec![0, 2], vec![0, 3]]);
        batch.references = Some(vec![vec![-1.0, -2.0], vec![-3.0, -4.0]]);
        batch.mask = Some(vec![false, true, true, true, true, false, true, true, true, false, true, true]);
        // The second of two ranks that share the sequences in a zigzag would have other places than the whole.
        let whole = Answers::of(&batch, &[0..6]).unwrap();
        assert_eq!(whole.answers.iter().map(|answer| answer.tokens).collect::<Vec<_>>(), [1, 3, 3, 2]);
        let losses: Vec<f64> = (1..=12).map(f64::from).collect();
        let all = whole.sums(&batch, &losses);
        assert_eq!(all, [-2.0, -12.0, -24.0, -23.0]);
        let [left, right] = [vec![0..1, 4..6], vec![1..4]].map(|positions| {
            let part = batch.at_positions(&positions);
            let own: Vec<f64> = positions.iter().cloned().flatten().map(|at| at as f64 + 1.0).collect();
            let losses = [own.clone(), own.iter().map(|loss| loss + 6.0).collect()].concat();
            Answers::of(&batch, &positions).unwrap().sums(&part, &losses)
        });
        assert_eq!(left.iter().zip(&right).map(|(a, b)| a + b).collect::<Vec<_>>(), all);
        assert_eq!(whole.factors(&[1.0, 2.0, 3.0, 4.0])[..4], [-1.0, -1.0, -2.0, -2.0]);
        assert_eq!(whole.by_sequence(&all), [[-2.0, -12.0], [-24.0, -23.0]]);
        let pairs = PreferenceConfig::default();
        assert_eq!(whole.count(&pairs), 2);
        batch.count_first(1);
        assert_eq!(Answers::of(&batch, &[0..6]).unwrap().count(&pairs), 1, "a sequence that does not count");
        batch.references = None;
        assert_eq!(Answers::of(&batch, &[0..6]), None);
        assert_eq!(PreferenceLoss::Kto.answers(), 3);
    }
}
