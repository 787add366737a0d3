//! What one step of the whole world reports.

use burn::tensor::ExecutionError;
use burn::train::metric::{Adaptor, ItemLazy};
use serde::{Deserialize, Serialize};

/// A mean loss and the number of tokens it is the mean of.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLoss {
    /// Mean negative log-likelihood per token, in nats.
    pub loss: f64,
    /// Tokens that count in the loss.
    pub tokens: u64,
}

/// One optimizer step of the whole world.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepStats {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean negative log-likelihood per token over the global batch, in nats.
    pub loss: f64,
    /// Tokens of the global batch that count in the loss.
    pub tokens: u64,
    /// L2 norm of the gradient of all parameters before clipping.
    pub grad_norm: f64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Wall-clock seconds of this step.
    pub seconds: f64,
    /// Resident memory of the process in bytes, 0 where the system does not tell.
    pub memory: u64,
}

impl StepStats {
    /// Tokens per second of the whole world.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }
}

/// One validation batch of the whole world.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalStats {
    /// Mean negative log-likelihood per token, in nats.
    pub loss: f64,
    /// Tokens that count in the loss.
    pub tokens: u64,
}

impl ItemLazy for StepStats {
    fn sync(self) -> Result<Self, ExecutionError> {
        Ok(self)
    }
}

impl ItemLazy for EvalStats {
    fn sync(self) -> Result<Self, ExecutionError> {
        Ok(self)
    }
}

impl Adaptor<StepStats> for StepStats {
    fn adapt(&self) -> StepStats {
        *self
    }
}

impl Adaptor<TokenLoss> for StepStats {
    fn adapt(&self) -> TokenLoss {
        TokenLoss { loss: self.loss, tokens: self.tokens }
    }
}

impl Adaptor<TokenLoss> for EvalStats {
    fn adapt(&self) -> TokenLoss {
        TokenLoss { loss: self.loss, tokens: self.tokens }
    }
}
