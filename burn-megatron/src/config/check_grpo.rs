//! Whether the values of `[grpo]` fit the rest of a configuration.

use super::check::{demand, in_range};
use super::run::RunConfig;
use crate::engine::LossMean;
use crate::grpo::ExactAnswer;
use models::ModelConfig;

impl RunConfig {
    /// Notes what is wrong with `[grpo]`.
    pub(super) fn check_grpo(&self, note: &mut impl FnMut(Result<(), String>)) {
        let Some(grpo) = self.grpo.config() else { return };
        let pattern = ExactAnswer::new(self.grpo.answer_pattern.as_deref()).map(drop);
        note(pattern.map_err(|error| format!("grpo.answer-pattern is no regular expression: {error}")));
        let (group, global) = (grpo.num_generations, self.training.global_batch);
        note(demand(group > 1, || format!("grpo.num-generations = {group}: a group has at least 2 completions")));
        note(demand(global.is_multiple_of(group.max(1)), || {
            let below = global / group.max(1) * group;
            let nearest = if below == 0 { group.to_string() } else { format!("{below} or {}", below + group) };
            format!(
                "training.global-batch = {global} counts completions, and is not a multiple of grpo.num-generations = {group}; nearest \
                 legal: {nearest}"
            )
        }));
        let (longest, seq_length) = (grpo.max_completion_length, self.training.seq_length);
        note(demand(longest <= seq_length, || {
            format!(
                "grpo.max-completion-length = {longest} leaves no room for a prompt in training.seq-length = {seq_length}; nearest \
                 legal: {seq_length}"
            )
        }));
        let (temperature, beta, low) = (grpo.temperature, grpo.beta, grpo.epsilon);
        let high = grpo.epsilon_high.unwrap_or(low);
        in_range(
            note,
            &[
                ("grpo.temperature", temperature, temperature > 0.0 && temperature.is_finite(), "above 0"),
                ("grpo.beta", beta, beta >= 0.0 && beta.is_finite(), "at least 0"),
                ("grpo.epsilon", low, low > 0.0 && low < 1.0, "above 0 and below 1"),
                ("grpo.epsilon-high", high, high > 0.0 && high.is_finite(), "above 0"),
            ],
        );
        note(demand(self.training.loss == LossMean::PerToken, || {
            "training.loss = per-micro-batch has no meaning with grpo.train, whose mean grpo.loss-type says; nearest legal: \
             per-token"
                .into()
        }));
        let evaluation = &self.evaluation;
        for (key, batches) in [("batches", evaluation.batches), ("final-batches", evaluation.final_batches)] {
            note(demand(batches == 0, || {
                format!(
                    "evaluation.{key} = {batches}: with grpo.train there is no loss on held-out data, rewards are in the log of every \
                     step; nearest legal: 0, with evaluation.tasks"
                )
            }));
        }
        note(demand(!self.context.dynamic, || {
            "context.dynamic = true has no meaning with grpo.train, whose sequences are one completion each; nearest legal: false"
                .into()
        }));
        note(demand(self.distill.config().is_none(), || {
            let key = if self.distill.teacher.is_some() { "distill.teacher" } else { "distill.logits" };
            format!("{key} and grpo.train: only one can be what the run learns from")
        }));
        self.no_multi_token_prediction("grpo.train", note);
        let (seq, cached) = (self.training.seq_length, self.model.config.cached_positions());
        note(demand(cached.is_none_or(|most| seq <= most), || {
            let most = cached.unwrap_or_default();
            format!(
                "training.seq-length = {seq}: LongRoPE turns sequences of more than {most} tokens by other angles than those with \
                 which completions of grpo.train are drawn; nearest legal: {most}"
            )
        }));
    }
}
