//! The loss over a whole data set.

use std::sync::Arc;

use models::CausalLm;

use super::batches::GlobalBatch;
use crate::data::TokenDataset;
use crate::engine::{EngineError, RankEngine};
use crate::metrics::TokenLoss;

/// Mean loss per token over `data`, every sequence of it once in every layout: those that pad the last batch do not
/// count. All ranks call it together and get the same number.
///
/// # Errors
/// As [`RankEngine::eval_step`].
pub fn loss_over<M: CausalLm>(
    engine: &mut RankEngine<M>,
    data: &Arc<dyn TokenDataset>,
) -> Result<TokenLoss, EngineError> {
    let plan = engine.plan();
    let sequences = plan.micro * plan.data_parallel;
    let mut sum = TokenLoss { loss: 0.0, tokens: 0 };
    for first in (0..data.len()).step_by(sequences) {
        let mut batch = GlobalBatch::new(data.clone(), first, sequences).read(0..sequences);
        batch.count_first(data.len() - first);
        let report = engine.eval_step(&batch)?;
        sum = TokenLoss { loss: sum.loss + report.loss * report.tokens as f64, tokens: sum.tokens + report.tokens };
    }
    Ok(TokenLoss { loss: sum.loss / sum.tokens.max(1) as f64, ..sum })
}
