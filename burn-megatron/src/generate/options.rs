//! What is asked of a text, and whether a model can write it.

use std::sync::Arc;

use models::ModelConfig;

use super::{GenerateError, Sampling};
use crate::logits::LogitsProcessors;

/// How much is written, and how.
///
/// ```
/// use burn_megatron::prelude::*;
///
/// // At most 100 tokens, fewer if token 0 comes earlier.
/// let options = GenerateOptions { stop_tokens: vec![0], ..GenerateOptions::new(100, Sampling::default()) };
/// options.check(&LlamaConfig::tiny(), &[1, 2, 3])?;
/// // Learned positions have an end. With a window the text may outgrow them.
/// let gpt = GptConfig { max_position_embeddings: 64, ..GptConfig::tiny() };
/// assert!(options.check(&gpt, &[1, 2, 3]).is_err());
/// GenerateOptions { window: Some(64), ..options }.check(&gpt, &[1, 2, 3])?;
/// # Ok::<(), BoxError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Most tokens to write.
    pub max_new_tokens: usize,
    /// Tokens that end the text; the one that does is its last.
    pub stop_tokens: Vec<i64>,
    /// How each token is chosen.
    pub sampling: Sampling,
    /// What changes the logits before.
    pub processors: Arc<LogitsProcessors>,
    /// Most tokens that the model sees at once. A text that gets longer resumes from its last half window, which is
    /// read anew. `None`: the model sees everything, and one with learned positions must have enough of them.
    pub window: Option<usize>,
    /// Prompts that begin with the same tokens are read once, and have the same blocks of the cache for them. Left out where
    /// a model cannot do it ([`CausalLm::shares_prefixes`](models::CausalLm::shares_prefixes)), and where a window moves on.
    pub enable_prefix_caching: bool,
    /// GPUs: no CUDA graphs. Recording one needs a process in which nobody else calls the driver: no training, no other
    /// ranks. Where a process has several, and in pipelines, none is recorded in any case.
    pub enforce_eager: bool,
}

impl GenerateOptions {
    /// So many tokens, without a stop and without a window.
    pub fn new(max_new_tokens: usize, sampling: Sampling) -> Self {
        Self {
            max_new_tokens,
            stop_tokens: Vec::new(),
            sampling,
            processors: Arc::default(),
            window: None,
            enable_prefix_caching: true,
            enforce_eager: false,
        }
    }

    /// Whether a model of this configuration can continue this prompt.
    ///
    /// # Errors
    /// Names what it cannot do, and the limit.
    pub fn check(&self, config: &impl ModelConfig, prompt: &[i64]) -> Result<(), GenerateError> {
        self.check_choices()?;
        let vocab_size = config.vocab_size();
        if prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        if let Some(&token) = prompt.iter().find(|token| !(0..vocab_size as i64).contains(token)) {
            return Err(GenerateError::UnknownToken { token, vocab_size });
        }
        let positions = config.cached_positions().unwrap_or(usize::MAX);
        match self.window {
            Some(window) if window < 2 || window > positions => {
                Err(GenerateError::Window { window, nearest: window.clamp(2, positions.max(2)) })
            }
            None if self.positions(prompt.len()) > positions => {
                Err(GenerateError::TooLong { prompt: prompt.len(), new: self.max_new_tokens, positions })
            }
            _ => Ok(()),
        }
    }

    /// Whether tokens can be chosen so.
    pub(super) fn check_choices(&self) -> Result<(), GenerateError> {
        self.sampling.check()?;
        self.processors.check().map_err(GenerateError::Processors)
    }

    /// Whether the keys and values of all positions fit into `available` bytes, of which a position takes `each`.
    ///
    /// # Errors
    /// Names the bytes, and the most tokens that would do.
    pub fn check_memory(&self, prompt: usize, each: u64, available: u64) -> Result<(), GenerateError> {
        let positions = self.positions(prompt);
        let bytes = each.saturating_mul(positions as u64);
        if bytes <= available {
            return Ok(());
        }
        let fitting = (available / each.max(1)) as usize;
        Err(GenerateError::Memory { new: self.max_new_tokens, positions, bytes, available, fitting, prompt })
    }

    /// The same, without shared prefixes if the model cannot share them.
    pub(crate) fn sharing_if(&self, possible: bool) -> Self {
        Self { enable_prefix_caching: self.enable_prefix_caching && possible, ..self.clone() }
    }

    /// Positions that the model reads at once at most: the last token is not read.
    pub(super) fn positions(&self, prompt: usize) -> usize {
        let all = prompt.saturating_add(self.max_new_tokens).saturating_sub(1).max(prompt);
        self.window.map_or(all, |window| window.min(all))
    }
}
