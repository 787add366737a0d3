//! The metrics themselves: one shape ([`StepMetric`]), one line of a table each.

use std::marker::PhantomData;
use std::sync::Arc;

use burn::tensor::TensorReadError;
use burn::train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry, SerializedEntry,
};

use super::running::Running;
use super::stats::{EvalStats, StepStats, TokenLoss};
use crate::console::format::quantity;
use crate::preference::PreferenceMeans;

/// What a metric reads from a step and how it is shown.
pub trait Reading: Clone + Send + Sync + 'static {
    /// The part of the step that is read.
    type Input;
    /// Name in the dashboard and in the log files.
    const NAME: &'static str;
    /// Unit, if the value has one.
    const UNIT: Option<&'static str> = None;
    /// Whether larger values are better.
    const HIGHER_IS_BETTER: bool = false;

    /// The value of one step and its weight in the mean of an epoch.
    fn read(input: &Self::Input) -> (f64, u64);

    /// How the mean is shown: means are taken before this, so that a perplexity is the exponential of a mean loss.
    fn view(mean: f64) -> f64 {
        mean
    }
}

/// A burn-train metric over a [`Reading`].
#[derive(Clone)]
pub struct StepMetric<R: Reading> {
    name: MetricName,
    running: Running,
    reading: PhantomData<R>,
}

impl<R: Reading> StepMetric<R> {
    /// A metric without values yet.
    pub fn new() -> Self {
        Self { name: Arc::new(R::NAME.to_string()), running: Running::default(), reading: PhantomData }
    }

    fn formatted(&self) -> String {
        let show = |value: f64| quantity(value, R::UNIT);
        format!("epoch {} - batch {}", show(R::view(self.running.mean())), show(R::view(self.running.last())))
    }
}

impl<R: Reading> Default for StepMetric<R> {
    fn default() -> Self {
        Self::new()
    }
}

impl<R: Reading> Metric for StepMetric<R> {
    type Input = R::Input;

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn attributes(&self) -> MetricAttributes {
        NumericAttributes { unit: R::UNIT.map(str::to_string), higher_is_better: R::HIGHER_IS_BETTER }.into()
    }

    fn update(&mut self, input: &R::Input, _: &MetricMetadata) -> Result<SerializedEntry, TensorReadError> {
        let (value, weight) = R::read(input);
        self.running.push(value, weight);
        Ok(SerializedEntry::new(self.formatted(), self.running.last_entry(R::view).serialize()))
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(SerializedEntry::new(self.formatted(), self.final_value().serialize()))
    }

    fn clear(&mut self) {
        self.running.clear();
    }
}

impl<R: Reading> Numeric for StepMetric<R> {
    fn value(&self) -> Option<NumericEntry> {
        Some(self.running.last_entry(R::view))
    }

    fn running_value(&self) -> Option<NumericEntry> {
        Some(self.running.mean_entry(R::view))
    }

    fn final_value(&self) -> NumericEntry {
        NumericEntry::Final(R::view(self.running.mean()))
    }
}

/// A table of metrics: documentation, the metric and its reading; what it reads; name, unit, whether larger values are
/// better; the value of a step and its weight; how the mean is shown.
macro_rules! metrics {
    ($($(#[$doc:meta])* $metric:ident $reading:ident: $input:ty = ($name:literal, $unit:expr, $higher:literal),
        |$step:ident| $read:expr $(, $view:expr)?;)*) => {$(
        $(#[$doc])*
        #[derive(Clone)]
        pub struct $reading;
        #[doc = concat!("[`", stringify!($reading), "`] as a metric.")]
        pub type $metric = StepMetric<$reading>;

        impl Reading for $reading {
            type Input = $input;
            const NAME: &'static str = $name;
            const UNIT: Option<&'static str> = $unit;
            const HIGHER_IS_BETTER: bool = $higher;

            fn read($step: &$input) -> (f64, u64) {
                $read
            }

            $(fn view(mean: f64) -> f64 {
                $view(mean)
            })?
        }
    )*};
}

metrics! {
    /// Mean loss per token, in nats. Named as burn-train's own loss, so that early stopping on it works unchanged.
    Loss LossReading: TokenLoss = ("Loss", None, false), |step| (step.loss, step.tokens);
    /// Exponential of the mean loss per token.
    Perplexity PerplexityReading: TokenLoss = ("Perplexity", None, false), |step| (step.loss, step.tokens), f64::exp;
    /// Tokens per second of the whole world.
    // burn-train names files after metrics, so no slash.
    Throughput ThroughputReading: StepStats = ("Tokens per second", None, true), |step| (step.tokens_per_second(), 1);
    /// L2 norm of the gradient before clipping.
    GradNorm GradNormReading: StepStats = ("Grad norm", None, false), |step| (step.grad_norm, 1);
    /// Learning rate of the step.
    LearningRate LearningRateReading: StepStats = ("Learning rate", None, false), |step| (step.lr, 1);
    /// Teraflops per second of one rank, attention counted as Megatron-LM does; NaN where the model's cost is not known.
    Teraflops TeraflopsReading: StepStats = ("Teraflops", None, true), |step| (step.teraflops().unwrap_or(f64::NAN), 1);
    /// Model FLOPs utilisation in percent; NaN where the peak of the device is not known.
    Utilisation UtilisationReading: StepStats = ("MFU", Some("%"), true), |step| (percent(step.mfu()), 1);
    /// The same with attention counted in full, as torchtitan does.
    FullUtilisation FullUtilisationReading: StepStats = ("MFU full attention", Some("%"), true),
        |step| (percent(step.mfu_full_attention()), 1);
    /// Percent of the step in which the GPUs waited for the host; NaN on CPU ranks.
    GpuIdle GpuIdleReading: StepStats = ("GPU idle", Some("%"), false), |step| (percent(step.gpu_idle()), 1);
    /// Memory of the fullest rank, or of the process; see [`StepStats::memory`].
    Memory MemoryReading: StepStats = ("Memory", Some("MiB"), false), |step| (step.memory as f64 / (1024.0 * 1024.0), 1);
    /// The fullest expert's tokens over the mean, in the worst layer; NaN in models without experts.
    ExpertBalance ExpertBalanceReading: StepStats = ("Expert max over mean", None, false),
        |step| (step.expert_summary().map_or(f64::NAN, |summary| summary.balance), 1);
    /// Percent of the copies of tokens that no expert had room for; NaN in models without experts.
    DroppedTokens DroppedTokensReading: StepStats = ("Dropped tokens", Some("%"), false),
        |step| (percent(step.expert_summary().map(|summary| summary.dropped)), 1);
    /// Share of held-out tokens that are the likeliest, in fine-tuning on conversations.
    TokenAccuracy TokenAccuracyReading: EvalStats = ("Token accuracy", None, true),
        |held_out| (held_out.accuracy.unwrap_or(f64::NAN), held_out.tokens);
    /// Mean reward of chosen answers, in preference tuning.
    RewardChosen RewardChosenReading: PreferenceMeans = ("Reward chosen", None, true),
        |means| (means.rewards_chosen, means.pairs);
    /// Mean reward of rejected answers, in preference tuning.
    RewardRejected RewardRejectedReading: PreferenceMeans = ("Reward rejected", None, false),
        |means| (means.rewards_rejected, means.pairs);
    /// Mean reward of chosen answers less that of rejected ones, in preference tuning.
    RewardMargin RewardMarginReading: PreferenceMeans = ("Reward margin", None, true),
        |means| (means.rewards_margin, means.pairs);
    /// Share of pairs whose chosen answer has the higher reward, in preference tuning.
    RewardAccuracy RewardAccuracyReading: PreferenceMeans = ("Reward accuracy", None, true),
        |means| (means.rewards_accuracy, means.pairs);
    /// Mean reward of the completions, in GRPO.
    MeanReward MeanRewardReading: StepStats = ("Reward", None, true), |step| (step.grpo.unwrap_or_default().reward, 1);
    /// KL divergence from the teacher's distribution, in distillation; in GRPO the estimate of that from the reference model.
    Kl KlReading: StepStats = ("KL", None, false),
        |step| (step.teacher_kl.unwrap_or_else(|| step.grpo.unwrap_or_default().kl), step.tokens);
    /// KL divergence from the teacher's distribution on held-out data, in distillation with a teacher.
    HeldOutKl HeldOutKlReading: EvalStats = ("KL", None, false),
        |held_out| (held_out.teacher_kl.unwrap_or(f64::NAN), held_out.tokens);
    /// Mean tokens of a completion, in GRPO.
    CompletionLength CompletionLengthReading: StepStats = ("Completion length", None, false),
        |step| (step.grpo.unwrap_or_default().completion_length, 1);
}

fn percent(share: Option<f64>) -> f64 {
    share.unwrap_or(f64::NAN) * 100.0
}
