//! What planning needs to know of a run.

use models::FamilyConfig;

use super::problem::{ConfigErrors, Problem};
use super::run::RunConfig;
use crate::plan::{Decoder, Job, Moments};

impl RunConfig {
    /// The run as [`plan`](crate::plan) sees it. Data and files play no part.
    ///
    /// # Errors
    /// A layout or a batch that cannot be, with the nearest legal one.
    pub fn job(&self) -> Result<Job, ConfigErrors> {
        let (training, layout) = (&self.training, &self.parallel);
        ConfigErrors::from_problems(self.layout_problems())?;
        let problem = |what: String| ConfigErrors(vec![Problem::new(what)]);
        let decoder = Decoder::from(&self.model.config);
        let batches = self.engine().plan(layout.dp).map_err(|error| problem(format!("training: {error}")))?;
        let (schedule, stages) = (self.pipeline.resolve(layout, decoder.layers, batches.accumulation))
            .map_err(|error| problem(format!("pipeline: {error}")))?;
        let (matrices, others) = self.optimizer.moments();
        Ok(Job {
            decoder,
            layout: layout.clone(),
            schedule,
            stages,
            micro_batch: training.micro_batch,
            seq: training.seq_length,
            element: training.dtype.bytes(),
            moments: Moments { matrices: matrices as u64, others: others as u64 },
            recompute: self.recompute.clone(),
        })
    }
}

impl From<&FamilyConfig> for Decoder {
    fn from(config: &FamilyConfig) -> Self {
        match config {
            FamilyConfig::Llama(config) => Self {
                vocab: config.vocab_size,
                vocab_multiple: config.make_vocab_size_divisible_by,
                hidden: config.hidden_size,
                intermediate: config.intermediate_size,
                layers: config.num_hidden_layers,
                heads: config.num_attention_heads,
                kv_heads: config.num_key_value_heads,
                head_dim: config.head_dim,
                window: config.sliding_window,
                gated: true,
                head_norms: config.variant == models::LlamaVariant::Qwen3,
                norm_bias: false,
                attention_bias: config.attention_bias,
                mlp_bias: config.mlp_bias,
                positions: None,
                tied: config.tie_word_embeddings,
            },
            FamilyConfig::Gpt(config) => Self {
                vocab: config.vocab_size,
                vocab_multiple: config.make_vocab_size_divisible_by,
                hidden: config.hidden_size,
                intermediate: config.intermediate_size,
                layers: config.num_hidden_layers,
                heads: config.num_attention_heads,
                kv_heads: config.num_attention_heads,
                head_dim: config.head_dim(),
                window: None,
                gated: false,
                head_norms: false,
                norm_bias: true,
                attention_bias: config.bias,
                mlp_bias: config.bias,
                positions: Some(config.max_position_embeddings),
                tied: config.tie_word_embeddings,
            },
        }
    }
}
