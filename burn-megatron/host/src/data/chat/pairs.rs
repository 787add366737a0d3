//! Pairs of answers as sequences for preference tuning.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use rayon::prelude::*;

use super::dataset::ChatReport;
use super::encode::ChatTokenizer;
use super::error::Result;
use super::learned::{ChatLoss, Tokens, TooLong, learned};
use super::lines::{Row, rows};
use super::packed::Packed;
use super::pair_row::pair;
use super::row::Conversation;
use crate::data::{Sample, SampleError, TokenDataset};

/// How files of pairs become sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PairSet {
    /// Files of rows, in order.
    pub files: Vec<PathBuf>,
    /// Whether several pairs share a sequence.
    pub packing: bool,
    /// What happens to pairs that are longer than a sequence.
    pub too_long: TooLong,
    /// Whether rows that cannot be used are left out and counted.
    pub skip_bad_rows: bool,
    /// Whether each pair has a third answer, the chosen one to the prompt of the pair before it: what KTO estimates its
    /// KL divergence from.
    pub mismatched: bool,
}

/// Sequences of pairs. Each answer, with its prompt, is a document; chosen and rejected answers follow each other. A group is
/// the answers of a pair: two, or three.
pub type PairDataset = Packed<References>;

/// Log-probabilities of the answers of each sequence under the reference model.
pub type References = Arc<OnceLock<Vec<Vec<f64>>>>;

fn encode(tokenizer: &ChatTokenizer, conversation: &Conversation) -> Result<Tokens, String> {
    Ok(learned(tokenizer.encode(conversation)?, ChatLoss::Assistant))
}

/// A row's prompt and its answers as tokens.
struct Encoded {
    prompt: Conversation,
    chosen: Conversation,
    answers: [Tokens; 2],
}

fn encoded(tokenizer: &ChatTokenizer, row: &Row) -> Result<Encoded, String> {
    let [chosen, rejected] = pair(&row.value()?)?;
    let answers = [encode(tokenizer, &chosen)?, encode(tokenizer, &rejected)?];
    if answers[0].ids == answers[1].ids {
        return Err("chosen and rejected are the same: there is nothing to prefer; remove the row".into());
    }
    Ok(Encoded { prompt: chosen.clone(), chosen, answers })
}

impl PairDataset {
    /// Reads, encodes and packs all rows into sequences of `seq_length` predictions, in the order of the packing.
    pub fn open(tokenizer: &ChatTokenizer, set: &PairSet, seq_length: usize) -> Result<(Self, ChatReport)> {
        let (mut all, mut report) = (Vec::new(), ChatReport::default());
        for file in &set.files {
            let some: Vec<Row> = rows(file)?.collect::<Result<_, _>>()?;
            let found: Vec<_> = some.par_iter().map(|row| encoded(tokenizer, row)).collect();
            for (row, found) in some.iter().zip(found) {
                match found {
                    Ok(found) => all.push((row.clone(), found)),
                    Err(what) => {
                        report.skipped.leave_out(row, what, (set.skip_bad_rows, "preference.skip-bad-rows"))?;
                    }
                }
            }
        }
        if set.mismatched && all.len() == 1 {
            return Err(all[0]
                .0
                .refused("preference.loss = kto needs the answer to another prompt: two rows at least".into()));
        }
        let mut pairs = Vec::new();
        for at in 0..all.len() {
            let (row, Encoded { prompt, answers, .. }) = &all[at];
            let mut pair = answers.to_vec();
            if set.mismatched {
                let other = &all[(at + all.len() - 1) % all.len()].1.chosen;
                pair.push(encode(tokenizer, &prompt.with_answer_of(other)).map_err(|what| row.refused(what))?);
            }
            let length: usize = pair.iter().map(Tokens::len).sum();
            let most = seq_length / pair.len();
            match (length <= seq_length, set.too_long) {
                (true, _) => {}
                (false, TooLong::Refuse) => {
                    return Err(row.refused(format!(
                        "the answers with their prompts have {length} predictions together, but training.seq-length = {seq_length}; \
                         nearest legal: training.seq-length = {length}, or preference.too-long = truncate or drop"
                    )));
                }
                (false, TooLong::Drop) => {
                    report.dropped += 1;
                    continue;
                }
                (false, TooLong::Truncate) => {
                    pair.iter_mut().for_each(|answer| answer.truncate(most));
                    report.truncated += 1;
                }
            }
            // A truncated prompt leaves no answer.
            if pair.iter().any(|answer| answer.learned[1..].iter().all(|counts| !counts)) {
                match set.too_long {
                    TooLong::Refuse => return Err(row.refused("an answer has no token to predict".into())),
                    _ => {
                        report.dropped += 1;
                        continue;
                    }
                }
            }
            pairs.push(pair);
        }
        if pairs.is_empty() {
            return Err(report.nothing("pair", &set.files));
        }
        let data = Self::new(pairs, seq_length, set.packing);
        (report.samples, report.learned) = (data.groups.len(), data.learned());
        Ok((data, report))
    }

    /// The sequences that are read, in order of their first use.
    fn used(&self) -> Vec<u32> {
        let mut seen = vec![false; self.sequences.len()];
        let new = |sequence: &u32| !std::mem::replace(&mut seen[*sequence as usize], true);
        self.order.iter().copied().filter(new).collect()
    }
}

impl TokenDataset for PairDataset {
    fn len(&self) -> usize {
        self.order.len()
    }

    fn seq_length(&self) -> usize {
        self.seq_length
    }

    fn sample(&self, index: usize) -> Sample {
        let mut sample = self.texts(index);
        let sequence = self.order[index] as usize;
        let known = self.known.get().map(|references| references[sequence].clone());
        let answers = sample.documents.as_ref().map_or(0, Vec::len);
        sample.references = Some(known.filter(|known| !known.is_empty()).unwrap_or_else(|| vec![0.0; answers]));
        sample
    }

    fn content(&self) -> Result<Option<String>, SampleError> {
        Ok(Some(self.content.clone()))
    }

    fn distinct(&self) -> Option<Arc<dyn TokenDataset>> {
        Some(Arc::new(Self { order: self.used(), ..self.clone() }))
    }

    fn set_references(&self, found: Vec<Vec<f64>>) {
        let mut all = vec![Vec::new(); self.sequences.len()];
        self.used().into_iter().zip(found).for_each(|(sequence, values)| all[sequence as usize] = values);
        self.known.set(all).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(from: u32, prompt: usize, tokens: usize) -> Tokens {
        Tokens { ids: (from..from + tokens as u32).collect(), learned: (0..tokens).map(|at| at >= prompt).collect() }
    }

    #[test]
    fn answers_are_documents_and_references_find_their_sequence() {
        let pairs = vec![vec![answer(10, 1, 3), answer(20, 1, 4)], vec![answer(30, 2, 5), answer(40, 1, 2)]];
        let data = PairDataset::new(pairs, 6, true);
        assert_eq!(data.sequences(), 2);
        let first = data.sample(0);
        assert_eq!(first.tokens, [10, 11, 20, 21, 22, 0].map(i64::from).to_vec());
        assert_eq!(first.labels[..5], [11, 12, 21, 22, 23]);
        assert_eq!(first.loss_mask.unwrap(), [true, true, true, true, true, false]);
        assert_eq!((first.documents.unwrap(), first.references.unwrap()), (vec![0, 2], vec![0.0, 0.0]));
        let longer = data.clone().shuffled(5, 1);
        let distinct = longer.distinct().unwrap();
        assert_eq!(distinct.len(), 2);
        longer.set_references((0..2).map(|at| vec![distinct.sample(at).tokens[0] as f64; 2]).collect());
        for at in 0..5 {
            let sample = longer.sample(at);
            assert_eq!(sample.references.unwrap()[0], sample.tokens[0] as f64);
        }
    }
}
