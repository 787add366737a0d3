//! What one step of the whole world reports.

use std::fmt;

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
    /// The checkpoint that became complete since the step before, if one did.
    #[serde(skip)]
    pub saved: Option<SaveStats>,
}

/// A checkpoint that was written.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SaveStats {
    /// The step it holds.
    pub step: u64,
    /// Bytes of its tensors.
    pub bytes: u64,
    /// Seconds that training stood still for it: the copy of the state, and the wait for the save before.
    pub stall: f64,
    /// Seconds from the start of the write until the checkpoint was complete.
    pub seconds: f64,
}

/// A checkpoint that was loaded.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadStats {
    /// The step it holds.
    pub step: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// Seconds from the first look at its files, whose hashes are checked, until all ranks had their slices.
    pub seconds: f64,
}

impl fmt::Display for LoadStats {
    /// `step 200, 1.21 GB in 0.9 s`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}, {:.3} GB in {:.2} s", self.step, self.bytes as f64 / 1e9, self.seconds)
    }
}

impl fmt::Display for SaveStats {
    /// `step 200: stall 12 ms, 1.21 GB in 0.9 s (1.34 GB/s)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (gigabytes, milliseconds) = (self.bytes as f64 / 1e9, self.stall * 1e3);
        let rate = gigabytes / self.seconds;
        let Self { step, seconds, .. } = self;
        write!(f, "step {step}: stall {milliseconds:.1} ms, {gigabytes:.3} GB in {seconds:.2} s ({rate:.2} GB/s)")
    }
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

impl Adaptor<Option<SaveStats>> for StepStats {
    fn adapt(&self) -> Option<SaveStats> {
        self.saved
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
