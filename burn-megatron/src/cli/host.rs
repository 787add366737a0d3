//! What a run on CPU ranks asks of this host: memory, and time.

use std::time::Instant;

use anyhow::{Result, bail};
use burn::tensor::{DType, Device, Tensor};
use models::ModelConfig;

use crate::config::{Precision, RunConfig};
use crate::console::format::duration;
use crate::doctor::available_memory;
use crate::flops::AttentionCount;
use crate::plan::{bytes, total_memory};

/// Bytes of a sample's place in the order of all samples: its document, its offset, its place in the shuffled order.
const ORDER: u64 = 12;

/// Refuses a run whose CPU ranks, `share` of all ranks, need more memory than this host has available. The error has
/// the bytes that are needed, those that are available, and what to change.
pub(super) fn check_memory(config: &RunConfig, share: f64) -> Result<()> {
    let needed = match config.lora.rank {
        None => total_memory(&config.job()?),
        // Much less than the plan says, which trains everything: the frozen weights at least, on every data-parallel rank.
        Some(_) => {
            let parameters = config.model.config.parameter_count() as u64;
            let copies = (config.parallel.dp * config.parallel.cp) as u64;
            let bytes = match config.lora.base {
                None => parameters.saturating_mul(config.training.dtype.bytes()),
                Some(_) => parameters / 2,
            };
            Some(bytes.saturating_mul(copies))
        }
    };
    let (Some(needed), Some(available)) = (needed, available_memory()) else { return Ok(()) };
    let needed = (needed as f64 * share) as u64;
    if needed <= available {
        return Ok(());
    }
    bail!(
        "{} on CPU ranks need {} of memory, and this host has {} available: train on GPUs (--device cuda), or take a \
         smaller model, training.micro-batch or training.seq-length",
        config.parallel,
        bytes(needed),
        bytes(available)
    )
}

/// Refuses an order of samples that this host cannot hold. Process 0 holds it on GPUs, too. The error has the bytes
/// that are needed, those that are available, and the nearest legal number.
pub(super) fn check_samples(config: &RunConfig) -> Result<()> {
    let (samples, Some(available)) = (config.data.samples as u64, available_memory()) else { return Ok(()) };
    let (needed, most) = (samples.saturating_mul(ORDER), available / ORDER);
    if needed <= available {
        return Ok(());
    }
    bail!(
        "data.samples = {samples}: their order needs {} of memory, and this host has {} available; nearest legal: \
         {most}, or fewer training.steps",
        bytes(needed),
        bytes(available)
    )
}

/// How long a run takes on the CPU at least after `done` steps: the FLOPs of the model at the measured rate of GEMMs.
pub(super) fn estimate(config: &RunConfig, done: u64) -> String {
    let shape = config.flop_shape(config.training.seq_length);
    let tokens = config.tokens().saturating_sub(config.batch_sizes().samples(done) * config.training.seq_length as u64);
    let flops = shape.per_token(AttentionCount::Causal) * tokens as f64;
    // CPU ranks widen narrow operands.
    let dtype = if config.training.dtype == Precision::F64 { DType::F64 } else { DType::F32 };
    let rate = gemm_rate(dtype);
    let seconds = flops / rate;
    let hint = match seconds > LONG {
        true if cfg!(feature = "cuda") => "; --device cuda trains on GPUs",
        true => "; a build with --features cuda trains on GPUs",
        false => "",
    };
    format!(
        "at least {} on this CPU: {flops:.1e} FLOPs at {:.0} GFLOP/s, measured with one GEMM{hint}",
        duration(seconds),
        rate / 1e9
    )
}

/// Seconds from which on a run had better use GPUs.
const LONG: f64 = 600.0;

/// FLOP/s of a GEMM on the CPU, all cores together.
fn gemm_rate(dtype: DType) -> f64 {
    const SIZE: usize = 512;
    let device = Device::flex();
    let x = Tensor::<2>::ones([SIZE, SIZE], (&device, dtype));
    let seconds = || {
        let start = Instant::now();
        drop(x.clone().matmul(x.clone()).into_data());
        start.elapsed().as_secs_f64()
    };
    // The first ones start threads.
    let fastest = (0..5).map(|_| seconds()).fold(f64::INFINITY, f64::min);
    2.0 * (SIZE as f64).powi(3) / fastest.max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(overrides: &[(&str, &str)]) -> RunConfig {
        let overrides: Vec<_> = overrides.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
        RunConfig::parse("run.toml", "[data]\ntext = [\"a\"]\n", &overrides).unwrap()
    }

    #[test]
    fn a_model_that_does_not_fit_into_memory_is_refused() {
        assert!(check_memory(&config(&[]), 1.0).is_ok());
        // 671 billion parameters in fp32.
        let large = config(&[("model.preset", "deepseek-v3"), ("training.seq-length", "8")]);
        says!(check_memory(&large, 1.0).unwrap_err(), "--device cuda", "available");
        assert!(check_memory(&large, 1e-9).is_ok(), "one process of many");
    }

    #[test]
    fn an_order_of_too_many_samples_is_refused() {
        assert!(check_samples(&config(&[])).is_ok());
        let said = check_samples(&config(&[("data.samples", "1000000000000000")])).unwrap_err().to_string();
        says!(said, "data.samples = 1000000000000000", "nearest legal");
    }

    #[test]
    fn the_time_of_a_run_follows_from_its_flops() {
        let (short, long) = (estimate(&config(&[]), 999), estimate(&config(&[("model.preset", "llama3-1b")]), 0));
        assert!(short.starts_with("at least ") && !short.contains("trains on GPUs"), "{short}");
        assert!(long.contains(" h ") || long.contains(" d "), "{long}");
        says!(long, "trains on GPUs", "FLOPs at");
    }
}
