//! The loss over a whole data set.

use std::sync::Arc;

use backend_dist::launch::BoxError;
use models::CausalLm;

use super::batches::GlobalBatch;
use crate::data::TokenDataset;
use crate::engine::RankEngine;
use crate::metrics::TokenLoss;

/// Mean loss per token over `data`, every sequence of it once in every layout: those that pad the last batch do not
/// count. All ranks call it together and get the same number. It is the loss of the moving average of the weights where
/// [`EngineConfig::evaluate_ema`](crate::engine::EngineConfig::evaluate_ema) says so.
///
/// ```no_run
/// # use std::sync::Arc;
/// # use burn_megatron::data::TokenDataset;
/// # use models::CausalLm;
/// # fn trained<M: CausalLm + 'static>(run: burn_megatron::prelude::Pretraining<M>, held_out: Arc<dyn TokenDataset>) {
/// use burn_megatron::prelude::*;
///
/// let run = run.finish(move |_, engine| Ok(loss_over(engine, &held_out)?.loss));
/// let (training, learner) = run.supervised();
/// training.launch(learner);
/// if let Some(loss) = run.finished() {
///     println!("held-out text: loss {loss:.4}, perplexity {:.1}", loss.exp());
/// }
/// # }
/// ```
///
/// # Errors
/// As [`RankEngine::eval_step`], and if the data cannot be read.
pub fn loss_over<M: CausalLm>(engine: &mut RankEngine<M>, data: &Arc<dyn TokenDataset>) -> Result<TokenLoss, BoxError> {
    let weights = engine.enter_average();
    let loss = loss_of(engine, data);
    engine.leave_average(weights);
    loss
}

fn loss_of<M: CausalLm>(engine: &mut RankEngine<M>, data: &Arc<dyn TokenDataset>) -> Result<TokenLoss, BoxError> {
    let plan = engine.plan();
    // The loss of a pair depends on the others of its batch (KTO).
    let sequences = if engine.learns_pairs() { plan.global() } else { plan.micro * plan.data_parallel };
    let mut sum = TokenLoss { loss: 0.0, tokens: 0 };
    for first in (0..data.len()).step_by(sequences) {
        let mut batch = GlobalBatch::new(data.clone(), first, sequences).read(0..sequences)?;
        batch.count_first(data.len() - first);
        let report = engine.eval_step(&batch)?;
        sum = TokenLoss { loss: sum.loss + report.loss * report.tokens as f64, tokens: sum.tokens + report.tokens };
    }
    Ok(TokenLoss { loss: sum.loss / sum.tokens.max(1) as f64, ..sum })
}

/// The log-probabilities of the answers of every sequence of `data`, in its order. All ranks call it together and get
/// all of them. Fails as [`RankEngine::log_probabilities`], and if the data cannot be read.
pub(super) fn log_probabilities<M: CausalLm>(
    engine: &mut RankEngine<M>,
    data: &Arc<dyn TokenDataset>,
) -> Result<Vec<Vec<f64>>, BoxError> {
    let plan = engine.plan();
    let sequences = plan.micro * plan.data_parallel;
    let mut all = Vec::with_capacity(data.len());
    for first in (0..data.len()).step_by(sequences) {
        let batch = GlobalBatch::new(data.clone(), first, sequences).read(0..sequences)?;
        all.extend(engine.log_probabilities(&batch)?);
    }
    // The last batch begins anew at the first sequence.
    all.truncate(data.len());
    Ok(all)
}
