//! The metrics of a run on burn-train's screen and in its log files.

use burn::train::SupervisedTraining;

use super::placeholder::Megatron;
use crate::console::dashboard_possible;
use crate::engine::EngineConfig;
use crate::metrics::{
    self, CompletionLength, DroppedTokens, ExpertBalance, FlopsPerToken, FullUtilisation, GpuIdle, GradNorm, HeldOutKl,
    Kl, LearningRate, Loss, MeanReward, Memory, Perplexity, RewardAccuracy, RewardChosen, RewardMargin, RewardRejected,
    Teraflops, Throughput, TokenAccuracy, Utilisation,
};

/// Adds the metrics of every run, those that need the cost of a token, and those of runs with a teacher, of models with experts and of GPUs.
pub(super) fn with_metrics(
    training: SupervisedTraining<Megatron>,
    flops: Option<FlopsPerToken>,
    engine: &EngineConfig,
    teacher: bool,
    experts: bool,
    gpus: bool,
) -> SupervisedTraining<Megatron> {
    let mut training = training
        .metrics((Loss::new(),))
        .metric_train_numeric(GradNorm::new())
        .metric_train_numeric(LearningRate::new())
        .metric_train_numeric(Throughput::new())
        .metric_train_numeric(Memory::new());
    training = match (engine.preference, engine.grpo) {
        (Some(_), _) => {
            training.metrics((RewardChosen::new(), RewardRejected::new(), RewardMargin::new(), RewardAccuracy::new()))
        }
        (_, Some(_)) => training
            .metric_train_numeric(MeanReward::new())
            .metric_train_numeric(Kl::new())
            .metric_train_numeric(CompletionLength::new()),
        // The loss of a step is none of tokens alone.
        _ if engine.distill.is_some() => {
            training.metric_train_numeric(Kl::new()).metric_valid_numeric(Perplexity::new())
        }
        _ => training.metrics((Perplexity::new(),)),
    };
    if teacher {
        training = training.metric_valid_numeric(HeldOutKl::new());
    }
    if engine.accuracy {
        training = training.metric_valid_numeric(TokenAccuracy::new());
    }
    if let Some(flops) = flops {
        training = training.metric_train_numeric(Teraflops::new());
        if flops.peak.is_some() {
            training = training.metric_train_numeric(Utilisation::new()).metric_train_numeric(FullUtilisation::new());
        }
    }
    if experts {
        training = training.metric_train_numeric(ExpertBalance::new()).metric_train_numeric(DroppedTokens::new());
    }
    if gpus {
        training = training.metric_train_numeric(GpuIdle::new());
        // It changes with every step, which a log would print as news.
        if dashboard_possible() {
            training = training.metric_train(metrics::gpus());
        }
    }
    training
}
