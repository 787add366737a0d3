//! The metrics themselves: one shape ([`StepMetric`]), one small [`Reading`] each.

use std::marker::PhantomData;
use std::sync::Arc;

use burn::tensor::TensorReadError;
use burn::train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry, SerializedEntry,
};

use super::running::Running;
use super::stats::{StepStats, TokenLoss};
use crate::console::format::quantity;

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

/// Mean loss per token, in nats. Named as burn-train's own loss, so that early stopping on it works unchanged.
#[derive(Clone)]
pub struct LossReading;
/// [`LossReading`] as a metric.
pub type Loss = StepMetric<LossReading>;

impl Reading for LossReading {
    type Input = TokenLoss;
    const NAME: &'static str = "Loss";

    fn read(input: &TokenLoss) -> (f64, u64) {
        (input.loss, input.tokens)
    }
}

/// Exponential of the mean loss per token.
#[derive(Clone)]
pub struct PerplexityReading;
/// [`PerplexityReading`] as a metric.
pub type Perplexity = StepMetric<PerplexityReading>;

impl Reading for PerplexityReading {
    type Input = TokenLoss;
    const NAME: &'static str = "Perplexity";

    fn read(input: &TokenLoss) -> (f64, u64) {
        (input.loss, input.tokens)
    }

    fn view(mean: f64) -> f64 {
        mean.exp()
    }
}

/// Tokens per second of the whole world.
#[derive(Clone)]
pub struct ThroughputReading;
/// [`ThroughputReading`] as a metric.
pub type Throughput = StepMetric<ThroughputReading>;

impl Reading for ThroughputReading {
    type Input = StepStats;
    // burn-train names files after metrics, so no slash.
    const NAME: &'static str = "Tokens per second";
    const HIGHER_IS_BETTER: bool = true;

    fn read(input: &StepStats) -> (f64, u64) {
        (input.tokens_per_second(), 1)
    }
}

/// L2 norm of the gradient before clipping.
#[derive(Clone)]
pub struct GradNormReading;
/// [`GradNormReading`] as a metric.
pub type GradNorm = StepMetric<GradNormReading>;

impl Reading for GradNormReading {
    type Input = StepStats;
    const NAME: &'static str = "Grad norm";

    fn read(input: &StepStats) -> (f64, u64) {
        (input.grad_norm, 1)
    }
}

/// Learning rate of the step.
#[derive(Clone)]
pub struct LearningRateReading;
/// [`LearningRateReading`] as a metric.
pub type LearningRate = StepMetric<LearningRateReading>;

impl Reading for LearningRateReading {
    type Input = StepStats;
    const NAME: &'static str = "Learning rate";

    fn read(input: &StepStats) -> (f64, u64) {
        (input.lr, 1)
    }
}

/// Teraflops per second of one rank, attention counted as Megatron-LM does; NaN where the model's cost is not known.
#[derive(Clone)]
pub struct TeraflopsReading;
/// [`TeraflopsReading`] as a metric.
pub type Teraflops = StepMetric<TeraflopsReading>;

impl Reading for TeraflopsReading {
    type Input = StepStats;
    const NAME: &'static str = "Teraflops";
    const HIGHER_IS_BETTER: bool = true;

    fn read(input: &StepStats) -> (f64, u64) {
        (input.teraflops().unwrap_or(f64::NAN), 1)
    }
}

/// Model FLOPs utilisation in percent; NaN where the peak of the device is not known.
#[derive(Clone)]
pub struct UtilisationReading;
/// [`UtilisationReading`] as a metric.
pub type Utilisation = StepMetric<UtilisationReading>;

impl Reading for UtilisationReading {
    type Input = StepStats;
    const NAME: &'static str = "MFU";
    const UNIT: Option<&'static str> = Some("%");
    const HIGHER_IS_BETTER: bool = true;

    fn read(input: &StepStats) -> (f64, u64) {
        (input.mfu().unwrap_or(f64::NAN) * 100.0, 1)
    }
}

/// The same with attention counted in full, as torchtitan does.
#[derive(Clone)]
pub struct FullUtilisationReading;
/// [`FullUtilisationReading`] as a metric.
pub type FullUtilisation = StepMetric<FullUtilisationReading>;

impl Reading for FullUtilisationReading {
    type Input = StepStats;
    const NAME: &'static str = "MFU full attention";
    const UNIT: Option<&'static str> = Some("%");
    const HIGHER_IS_BETTER: bool = true;

    fn read(input: &StepStats) -> (f64, u64) {
        (input.mfu_full_attention().unwrap_or(f64::NAN) * 100.0, 1)
    }
}

/// Percent of the step in which the GPUs waited for the host; NaN on CPU ranks.
#[derive(Clone)]
pub struct GpuIdleReading;
/// [`GpuIdleReading`] as a metric.
pub type GpuIdle = StepMetric<GpuIdleReading>;

impl Reading for GpuIdleReading {
    type Input = StepStats;
    const NAME: &'static str = "GPU idle";
    const UNIT: Option<&'static str> = Some("%");

    fn read(input: &StepStats) -> (f64, u64) {
        (input.gpu_idle().unwrap_or(f64::NAN) * 100.0, 1)
    }
}

/// Memory of the fullest rank, or of the process; see [`StepStats::memory`].
#[derive(Clone)]
pub struct MemoryReading;
/// [`MemoryReading`] as a metric.
pub type Memory = StepMetric<MemoryReading>;

impl Reading for MemoryReading {
    type Input = StepStats;
    const NAME: &'static str = "Memory";
    const UNIT: Option<&'static str> = Some("MiB");

    fn read(input: &StepStats) -> (f64, u64) {
        (input.memory as f64 / (1024.0 * 1024.0), 1)
    }
}

/// The fullest expert's tokens over the mean, in the worst layer; NaN in models without experts.
#[derive(Clone)]
pub struct ExpertBalanceReading;
/// [`ExpertBalanceReading`] as a metric.
pub type ExpertBalance = StepMetric<ExpertBalanceReading>;

impl Reading for ExpertBalanceReading {
    type Input = StepStats;
    const NAME: &'static str = "Expert max over mean";

    fn read(input: &StepStats) -> (f64, u64) {
        (input.expert_summary().map_or(f64::NAN, |summary| summary.balance), 1)
    }
}

/// Percent of the copies of tokens that no expert had room for; NaN in models without experts.
#[derive(Clone)]
pub struct DroppedTokensReading;
/// [`DroppedTokensReading`] as a metric.
pub type DroppedTokens = StepMetric<DroppedTokensReading>;

impl Reading for DroppedTokensReading {
    type Input = StepStats;
    const NAME: &'static str = "Dropped tokens";
    const UNIT: Option<&'static str> = Some("%");

    fn read(input: &StepStats) -> (f64, u64) {
        (input.expert_summary().map_or(f64::NAN, |summary| summary.dropped * 100.0), 1)
    }
}
