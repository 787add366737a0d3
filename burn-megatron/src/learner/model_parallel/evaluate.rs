//! The loss over a whole data set.

use std::sync::Arc;

use models::CausalLm;

use super::batches::GlobalBatch;
use crate::data::TokenDataset;
use crate::engine::{EngineError, RankEngine};
use crate::metrics::TokenLoss;

/// Mean loss per token over `data`, in as many whole batches of one micro-batch per data-parallel rank as it fills, at
/// least one. All ranks call it together and get the same number.
///
/// # Errors
/// As [`RankEngine::eval_step`].
///
/// # Panics
/// If the data set is empty.
pub fn loss_over<M: CausalLm>(
    engine: &mut RankEngine<M>,
    data: &Arc<dyn TokenDataset>,
) -> Result<TokenLoss, EngineError> {
    let plan = engine.plan();
    let rows = plan.micro * plan.data_parallel;
    let mut sum = TokenLoss { loss: 0.0, tokens: 0 };
    for index in 0..(data.len() / rows).max(1) {
        let batch = GlobalBatch::new(data.clone(), index * rows, rows);
        let report = engine.eval_step(&batch.read(0..rows))?;
        sum = TokenLoss { loss: sum.loss + report.loss * report.tokens as f64, tokens: sum.tokens + report.tokens };
    }
    Ok(TokenLoss { loss: sum.loss / sum.tokens.max(1) as f64, ..sum })
}
