//! What a run reads, so that nothing is written over it.

use std::path::PathBuf;

use super::run::RunConfig;
use crate::data::indexed::paths;

impl RunConfig {
    /// The files and folders that the keys name for reading.
    pub fn inputs(&self) -> Vec<PathBuf> {
        let Self { data, chat, preference, grpo, distill, .. } = self;
        let lists = [
            &data.text,
            &data.validation,
            &data.test,
            &chat.train,
            &chat.validation,
            &preference.train,
            &preference.validation,
            &grpo.train,
            &self.evaluation.tasks,
        ];
        let ones = [
            &self.model.hf,
            &self.lora.adapter,
            &distill.teacher,
            &distill.logits,
            &chat.template,
            &preference.template,
            &grpo.template,
        ];
        let prefixes = [&data.prefixes, &data.validation, &data.test].into_iter().flatten();
        let indexed = prefixes.flat_map(|prefix| <[PathBuf; 2]>::from(paths(prefix)));
        let named = lists.into_iter().flatten().chain(ones.into_iter().flatten()).cloned();
        named.chain(data.tokenizer.iter().map(PathBuf::from)).chain(indexed).collect()
    }
}
