//! Pairs of answers as sequences for preference tuning.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::dataset::ChatReport;
use super::encode::ChatTokenizer;
use super::error::ChatError;
use super::learned::{ChatLoss, Tokens, TooLong, learned};
use super::lines::{Row, rows};
use super::pack::pack;
use super::pair_row::pair;
use super::row::Conversation;
use crate::data::numpy::RandomState;
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

/// Sequences of pairs. Each answer, with its prompt, is a document; chosen and rejected answers follow each other.
#[derive(Clone, Debug)]
pub struct PairDataset {
    seq_length: usize,
    /// Answers of a pair: two, or three.
    pairs: Vec<Vec<Tokens>>,
    /// Pairs of each sequence.
    sequences: Vec<Vec<usize>>,
    /// Which sequence is read at each index.
    order: Vec<u32>,
    content: String,
    /// Log-probabilities of the answers of each sequence under the reference model.
    references: Arc<OnceLock<Vec<Vec<f64>>>>,
}

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
    ///
    /// # Errors
    /// See [`ChatError`].
    pub fn open(tokenizer: &ChatTokenizer, set: &PairSet, seq_length: usize) -> Result<(Self, ChatReport), ChatError> {
        let (mut all, mut report) = (Vec::new(), ChatReport::default());
        for file in &set.files {
            let some: Vec<Row> = rows(file)?.collect::<Result<_, _>>()?;
            let found: Vec<_> = some.par_iter().map(|row| encoded(tokenizer, row)).collect();
            for (row, found) in some.iter().zip(found) {
                match found {
                    Ok(found) => all.push((row.clone(), found)),
                    Err(what) if set.skip_bad_rows => {
                        report.skipped.rows += 1;
                        report.skipped.first.get_or_insert_with(|| row.refused(what).to_string());
                    }
                    Err(what) => {
                        return Err(row.refused(format!("{what} (preference.skip-bad-rows: leave such rows out)")));
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
            let files: Vec<String> = set.files.iter().map(|file| file.display().to_string()).collect();
            let why = report.skipped.first.as_ref().map_or(String::new(), |first| format!("; the first: {first}"));
            return Err(ChatError::Nothing {
                what: format!(
                    "no pair of {} can be used: {} rows are bad, {} pairs too long{why}",
                    files.join(", "),
                    report.skipped.rows,
                    report.dropped
                ),
            });
        }
        report.samples = pairs.len();
        report.learned =
            pairs.iter().flatten().map(|answer| answer.learned[1..].iter().filter(|counts| **counts).count()).sum();
        Ok((Self::new(pairs, seq_length, set.packing), report))
    }

    fn new(pairs: Vec<Vec<Tokens>>, seq_length: usize, packing: bool) -> Self {
        let mut hash = Sha256::new();
        for Tokens { ids, learned } in pairs.iter().flatten() {
            hash.update((ids.len() as u64).to_le_bytes());
            ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
            hash.update(Vec::from_iter(learned.iter().map(|counts| u8::from(*counts))));
        }
        let content = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        let lengths: Vec<usize> = pairs.iter().map(|pair| pair.iter().map(Tokens::len).sum()).collect();
        let sequences = if packing { pack(&lengths, seq_length) } else { (0..pairs.len()).map(|i| vec![i]).collect() };
        let order = (0..sequences.len() as u32).collect();
        Self { seq_length, pairs, sequences, order, content, references: Arc::default() }
    }

    /// `samples` sequences: epochs, each in an order of its own that follows from the seed.
    pub fn shuffled(mut self, samples: usize, seed: u32) -> Self {
        let mut random = RandomState::new(seed);
        let mut order = Vec::with_capacity(samples);
        while order.len() < samples {
            let mut epoch: Vec<u32> = (0..self.sequences.len() as u32).collect();
            random.shuffle(&mut epoch);
            order.extend(epoch);
        }
        order.truncate(samples);
        self.order = order;
        self
    }

    /// At most the first `samples` sequences.
    pub fn first(mut self, samples: usize) -> Self {
        self.order.truncate(samples);
        self
    }

    /// The others, and the last `share` (0 to 1) of the sequences in an order that follows from the seed.
    ///
    /// # Errors
    /// If there is only one sequence.
    pub fn split(self, share: f64, seed: u32) -> Result<[Self; 2], ChatError> {
        let count = self.sequences.len();
        if count < 2 {
            let what = format!(
                "{count} sequence of pairs cannot be divided into training and validation; name preference.validation, or set \
                 evaluation.batches = 0"
            );
            return Err(ChatError::Nothing { what });
        }
        let mut all = self.sequences.clone();
        RandomState::new(seed).shuffle(&mut all);
        let held = ((count as f64 * share).round() as usize).clamp(1, count - 1);
        let rest = all.split_off(count - held);
        let part = |sequences: Vec<Vec<usize>>| {
            let order = (0..sequences.len() as u32).collect();
            Self { sequences, order, references: Arc::default(), ..self.clone() }
        };
        Ok([part(all), part(rest)])
    }

    /// Sequences of an epoch.
    pub fn sequences(&self) -> usize {
        self.sequences.len()
    }

    /// The share of positions that hold no answer.
    pub fn padding(&self) -> f64 {
        let length = |pair: &usize| self.pairs[*pair].iter().map(Tokens::len).sum::<usize>();
        let filled: usize = self.sequences.iter().flatten().map(length).sum();
        1.0 - filled as f64 / (self.sequences.len() * self.seq_length) as f64
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

    /// Its answers one after the other, each a document, then padding that does not count.
    fn sample(&self, index: usize) -> Sample {
        let (length, sequence) = (self.seq_length, self.order[index] as usize);
        let (mut tokens, mut labels) = (Vec::with_capacity(length), Vec::with_capacity(length));
        let (mut mask, mut documents) = (Vec::with_capacity(length), Vec::new());
        for Tokens { ids, learned } in self.sequences[sequence].iter().flat_map(|pair| &self.pairs[*pair]) {
            documents.push(tokens.len());
            tokens.extend(ids[..ids.len() - 1].iter().map(|id| i64::from(*id)));
            labels.extend(ids[1..].iter().map(|id| i64::from(*id)));
            mask.extend(&learned[1..]);
        }
        tokens.resize(length, 0);
        labels.resize(length, 0);
        mask.resize(length, false);
        let known = self.references.get().map(|references| references[sequence].clone());
        let references = known.filter(|known| !known.is_empty()).unwrap_or_else(|| vec![0.0; documents.len()]);
        Sample { tokens, labels, loss_mask: Some(mask), documents: Some(documents), references: Some(references) }
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
        self.references.set(all).ok();
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
