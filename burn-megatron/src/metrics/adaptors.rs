//! What the metrics read of a step and of an evaluation.

use burn::tensor::ExecutionError;
use burn::train::metric::{Adaptor, ItemLazy};

use super::stats::{EvalStats, SaveStats, StepStats, TokenLoss};
use crate::preference::PreferenceMeans;

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
        self.clone()
    }
}

impl Adaptor<Option<SaveStats>> for StepStats {
    fn adapt(&self) -> Option<SaveStats> {
        self.saved
    }
}

impl Adaptor<TokenLoss> for StepStats {
    fn adapt(&self) -> TokenLoss {
        let pairs = self.preference.map(|means| means.pairs);
        TokenLoss { loss: self.loss, tokens: pairs.unwrap_or(self.tokens) }
    }
}

impl Adaptor<EvalStats> for EvalStats {
    fn adapt(&self) -> EvalStats {
        *self
    }
}

impl Adaptor<PreferenceMeans> for StepStats {
    fn adapt(&self) -> PreferenceMeans {
        self.preference.unwrap_or_default()
    }
}

impl Adaptor<PreferenceMeans> for EvalStats {
    fn adapt(&self) -> PreferenceMeans {
        self.preference.unwrap_or_default()
    }
}

impl Adaptor<TokenLoss> for EvalStats {
    fn adapt(&self) -> TokenLoss {
        TokenLoss { loss: self.loss, tokens: self.tokens }
    }
}
