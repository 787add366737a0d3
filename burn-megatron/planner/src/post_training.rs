//! What post-training has besides a model of which every weight is trained by the cross-entropy of its tokens.

use layouts::pattern::fits;
use layouts::recompute::{Granularity, Recompute};

use super::Job;
use super::decoder::Decoder;

/// Of a run that is none of post-training nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PostTraining {
    /// Patterns of the names of parameters that are not trained.
    pub frozen: Vec<String>,
    /// What the loss is.
    pub loss: LossOf,
    /// What GRPO draws.
    pub completions: Option<Completions>,
}

/// What the loss of a token is computed from.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum LossOf {
    /// Its label, by a kernel.
    #[default]
    Label,
    /// Its label and logits divided by a temperature (GRPO).
    TemperedLogits,
    /// All logits, and those of a teacher.
    Teacher(Box<Decoder>),
    /// All logits, and the likeliest tokens in a file.
    TopK,
}

/// What GRPO draws before a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completions {
    /// Most tokens of a completion.
    pub longest: usize,
    /// A frozen copy of the model is kept for the KL divergence.
    pub reference: bool,
    /// Completions are scored by a reference model, a copy or the model without its adapters.
    pub scored: bool,
    /// Steps that learn from the same completions.
    pub iterations: usize,
}

impl Job {
    /// Whether a parameter is not trained, by its global name. Parameters of one operation count
    /// as frozen if the first weight among them is.
    pub(super) fn is_frozen(&self, name: &str) -> bool {
        self.adapters.is_some() || self.post_training.frozen.iter().any(|pattern| fits(pattern, name))
    }

    /// Whether the stage of the head trains the embedding's table too, or a copy of it.
    pub(super) fn shares_table(&self) -> bool {
        self.decoder.shares_table() && !self.is_frozen(TABLE)
    }

    /// The same job for a model that is not trained: of a layer nothing is kept.
    fn without_gradients(&self, decoder: &Decoder) -> Self {
        Self {
            decoder: decoder.clone(),
            adapters: None,
            post_training: PostTraining::default(),
            fp8: 0..0,
            recompute: Recompute { granularity: Granularity::Full, ..Recompute::default() },
            ..self.clone()
        }
    }

    /// The teacher, if the run has one.
    pub(super) fn teacher(&self) -> Option<Self> {
        match &self.post_training.loss {
            LossOf::Teacher(decoder) => Some(self.without_gradients(decoder)),
            _ => None,
        }
    }

    /// The job in which all prompts of a rank are read at once, as the first step of generation does.
    pub(super) fn reading_prompts(&self, completions: &Completions) -> Self {
        let mut job = self.without_gradients(&self.decoder);
        (job.micro_batch, job.layout.cp, job.layout.sp) = (self.drawn_sequences(), 1, false);
        job.seq = (self.seq + 1).saturating_sub(completions.longest).max(1);
        job
    }

    /// Sequences that a rank draws at once.
    pub(super) fn drawn_sequences(&self) -> usize {
        self.global_batch().div_ceil(self.layout.dp * self.layout.cp)
    }
}

/// The global name of the embedding's weight.
pub(super) const TABLE: &str = "embed_tokens.weight";
