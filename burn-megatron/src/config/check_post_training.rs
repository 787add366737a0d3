//! Whether the values of `[chat]`, `[preference]` and `[distill]` fit the rest of a configuration.

use super::check::{demand, in_range};
use super::decoder::decoder_of;
use super::run::RunConfig;
use crate::engine::LossMean;

impl RunConfig {
    pub(super) fn check_chat(&self, note: &mut impl FnMut(Result<(), String>)) {
        let (chat, data) = (&self.chat, &self.data);
        if !self.has_conversations() {
            return;
        }
        let (key, template) = match (chat.is_used(), self.preference.is_used()) {
            (true, _) => ("chat", " with its chat template"),
            (_, true) => ("preference", " with its chat template"),
            _ => ("grpo", ""),
        };
        let is_file = data.tokenizer.as_deref().is_some_and(|name| !["char", "byte", "bpe"].contains(&name));
        note(demand(is_file, || {
            let there = data.tokenizer.as_deref().unwrap_or("none");
            format!("{key}.train needs a tokenizer.json{template}, but data.tokenizer = {there}")
        }));
        let split = &data.split;
        let [train, valid, test] = split.shares();
        let validation = if chat.is_used() { &chat.validation } else { &self.preference.validation };
        if self.grpo.is_used() || !validation.is_empty() {
            let of = if self.grpo.is_used() {
                "grpo.train, which no part is kept from".into()
            } else {
                format!("{key}.validation")
            };
            let usual = ["95,5,0", "1,0,0"].contains(&split.to_string().as_str());
            note(demand(usual, || {
                format!("data.split = {split} has no meaning with {of}; nearest legal: leave it out")
            }));
        } else {
            note(demand(test == 0.0, || {
                let [train, valid] = [train + test, valid].map(|share| (100.0 * share).round());
                format!(
                    "data.split = {split}: {key}.train has no test data, whose share would be trained on; nearest legal: {train},{valid},0"
                )
            }));
        }
        for masked in data.needs_end_of_document().into_iter().filter(|key| *key == "data.eod-mask-loss") {
            note(Err(format!("{masked} has no meaning with {key}.train: only what assistants write is learned")));
        }
    }

    pub(super) fn check_preference(&self, note: &mut impl FnMut(Result<(), String>)) {
        let Some(preference) = self.preference.config() else { return };
        let positive = [
            ("beta", preference.beta),
            ("desirable-weight", preference.desirable_weight),
            ("undesirable-weight", preference.undesirable_weight),
        ];
        for (key, value) in positive {
            note(demand(value > 0.0 && value.is_finite(), || format!("preference.{key} = {value} is not above 0")));
        }
        let smoothing = preference.label_smoothing;
        let holds = (0.0..0.5).contains(&smoothing);
        in_range(note, &[("preference.label-smoothing", smoothing, holds, "at least 0 and below 0.5")]);
        note(demand(self.training.loss == LossMean::PerToken, || {
            "training.loss = per-micro-batch has no meaning with preference.train, whose loss is the mean over pairs; nearest \
             legal: per-token"
                .into()
        }));
        note(demand(!self.context.dynamic, || {
            "context.dynamic = true assigns documents to ranks one by one, but the answers of a pair stay together; nearest legal: \
             false, with parallel.context-parallel"
                .into()
        }));
        self.no_multi_token_prediction("preference.train", note);
    }

    pub(super) fn check_distill(&self, note: &mut impl FnMut(Result<(), String>)) {
        let Some(distill) = self.distill.config() else { return };
        let both = self.distill.teacher.is_some() && self.distill.logits.is_some();
        note(demand(!both, || {
            "distill.teacher and distill.logits: a file takes the place of a teacher; give one".into()
        }));
        note(demand(self.distill.logits.is_none() || !self.anomaly.rolls_back(), || {
            "anomaly: roll-back continues with further sequences, of which distill.logits knows nothing; nearest legal: skip".into()
        }));
        note(demand(self.distill.logits.is_none() || !self.context.dynamic, || {
            "context.dynamic = true packs documents anew in every step, but distill.logits knows whole sequences; nearest legal: \
             false, with parallel.context-parallel"
                .into()
        }));
        let (temperature, weight) = (distill.temperature, distill.weight);
        let of_temperature =
            ("distill.temperature", temperature, temperature > 0.0 && temperature.is_finite(), "above 0");
        let of_weight = ("distill.weight", weight, weight > 0.0 && weight <= 1.0, "above 0 and at most 1");
        in_range(note, &[of_temperature, of_weight]);
        let key = if self.distill.teacher.is_some() { "distill.teacher" } else { "distill.logits" };
        note(demand(!self.preference.is_used(), || {
            format!("{key} and preference.train: a loss of tokens and a loss of pairs; only one can be the run's")
        }));
        self.no_multi_token_prediction(key, note);
    }

    pub(super) fn no_multi_token_prediction(&self, key: &str, note: &mut impl FnMut(Result<(), String>)) {
        let mtp = decoder_of(&self.model.config).mtp;
        note(demand(mtp == 0, || {
            format!(
                "model.num-nextn-predict-layers = {mtp}: the losses of modules of multi-token prediction have no meaning with {key}; \
                 nearest legal: 0"
            )
        }));
    }
}
