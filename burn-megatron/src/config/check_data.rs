//! Whether the data of a run, its weights and its tasks fit together.

use models::ModelConfig;

use super::check::demand;
use super::run::RunConfig;
use crate::data::preprocess::{LARGEST_BPE, SMALLEST_BPE};

impl RunConfig {
    pub(super) fn check_data(&self, note: &mut impl FnMut(Result<(), String>)) {
        let data = &self.data;
        let sources = [
            ("data.prefixes", &data.prefixes),
            ("data.text", &data.text),
            ("chat.train", &self.chat.train),
            ("preference.train", &self.preference.train),
            ("grpo.train", &self.grpo.train),
        ];
        let named: Vec<&str> = sources.iter().filter(|(_, files)| !files.is_empty()).map(|(key, _)| *key).collect();
        note(demand(!named.is_empty(), || {
            "data.prefixes or data.text is needed, or chat.train, preference.train or grpo.train: the run has no training data"
                .into()
        }));
        note(demand(named.len() < 2, || format!("{}: only one can be the data", named.join(" and "))));
        self.check_chat(note);
        self.check_preference(note);
        self.check_grpo(note);
        note(demand(!self.grpo.is_used() || self.training.rampup_batch_size.is_none(), || {
            "training.rampup-batch-size: with grpo.train every step has as many completions; nearest legal: none".into()
        }));
        self.check_distill(note);
        self.check_tasks(note);
        self.check_weights(note);
        let shares = data.split.ranges(1);
        let apart = data.files_of_their_own();
        if let Some((key, _)) = apart.first() {
            note(demand(!data.prefixes.is_empty() || !data.text.is_empty(), || {
                format!(
                    "{key} is for data.prefixes and data.text, which are not given; chat and preference have a key validation of \
                     their own"
                )
            }));
            note(demand(data.split.shares()[0] == 1.0, || {
                format!(
                    "data.split = {} divides the files of training, and {key} names others for what it would divide: give only one of \
                     the two; nearest legal: 1,0,0",
                    data.split
                )
            }));
        }
        note(demand(shares[0].is_some(), || format!("data.split = {} leaves nothing to train on", data.split)));
        let named = [&data.validation, &self.chat.validation, &self.preference.validation];
        let held_out = shares[1].is_some() || named.iter().any(|files| !files.is_empty());
        note(demand(held_out || self.evaluation.batches == 0, || {
            let (split, batches) = (&data.split, self.evaluation.batches);
            match apart.is_empty() {
                true => format!(
                    "data.split = {split} leaves no validation data for evaluation.batches = {batches}; give it a share (\"90,10\"), or \
                     evaluation.batches = 0"
                ),
                false => format!(
                    "data.test leaves no validation data for evaluation.batches = {batches}; give data.validation, or \
                     evaluation.batches = 0"
                ),
            }
        }));
        if !data.text.is_empty() {
            let needs = data.tokenizer.is_some();
            note(demand(needs, || "data.text needs data.tokenizer: a tokenizer.json, char, byte or bpe".into()));
            let size = data.bpe_size;
            let is_made = data.tokenizer.as_deref() == Some("bpe");
            note(demand(!is_made || size >= SMALLEST_BPE, || {
                format!(
                    "data.bpe-size = {size} is not at least {SMALLEST_BPE}, the bytes and the end of document; nearest legal: {SMALLEST_BPE}"
                )
            }));
            note(demand(!is_made || size <= LARGEST_BPE, || {
                format!("data.bpe-size = {size} is too large; nearest legal: {LARGEST_BPE}")
            }));
        } else if self.has_conversations() {
        } else if let Some(made @ ("char" | "byte" | "bpe")) = data.tokenizer.as_deref() {
            note(Err(format!("data.tokenizer = {made} is trained on data.text, which is not given")));
        }
        let vocabulary = self.model.config.vocab_size();
        let outside = data.eod_id.filter(|id| *id >= vocabulary as i64);
        note(outside.map_or(Ok(()), |id| {
            Err(format!(
                "data.eod-id = {id} is no token of model.vocab-size = {vocabulary}; nearest legal: {}",
                vocabulary - 1
            ))
        }));
        let knows_end = data.eod_id.is_some() || data.tokenizer.is_some();
        for key in data.needs_end_of_document().into_iter().filter(|_| !knows_end) {
            note(Err(format!("{key} needs data.eod-id, or a data.tokenizer that has such a token")));
        }
    }

    fn check_weights(&self, note: &mut impl FnMut(Result<(), String>)) {
        let data = &self.data;
        for (key, weights, of, prefixes) in [
            ("data.weights", &data.weights, "data.prefixes", &data.prefixes),
            ("data.validation-weights", &data.validation_weights, "data.validation", &data.validation),
            ("data.test-weights", &data.test_weights, "data.test", &data.test),
            ("chat.weights", &self.chat.weights, "chat.train", &self.chat.train),
        ] {
            let Some(weights) = weights else { continue };
            let (numbers, files) = (weights.len(), prefixes.len());
            note(demand(numbers == files, || format!("{key} has {numbers} numbers, {of} {files}")));
            note(demand(data.text.is_empty(), || {
                format!("{key} is for prefixes, and data.text is one data set; nearest legal: none")
            }));
            if let Some(weight) = weights.iter().find(|weight| **weight <= 0.0) {
                note(Err(format!("{key} must all be above 0, and one is {weight}; nearest legal: leave its file out")));
            }
            let sum: f64 = weights.iter().sum();
            note(demand(sum.is_finite(), || format!("{key} are too large to be added; only their shares matter")));
        }
    }

    fn check_tasks(&self, note: &mut impl FnMut(Result<(), String>)) {
        let is_file = self.data.tokenizer.as_deref().is_some_and(|name| !["char", "byte", "bpe"].contains(&name));
        note(demand(is_file || self.evaluation.tasks.is_empty(), || {
            let there = self.data.tokenizer.as_deref().unwrap_or("none");
            format!("evaluation.tasks needs the model's tokenizer.json, but data.tokenizer = {there}")
        }));
    }
}
