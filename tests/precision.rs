//! Training in 16 bits on CPU ranks: fp32 master weights, dynamic loss scaling, in any layout.

use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::Mesh;
use burn::tensor::{Device, FloatDType};
use burn_megatron::engine::{EngineConfig, RankEngine, StepReport};
use burn_megatron::optim::LossScalerConfig;
use burn_megatron::verify::{Candidate, Settings, curve};
use models::{CausalLm, Gpt, GptConfig, Llama, ModelConfig, ParamBuilder};
use tests::{SETTINGS, gpt, llama, verified};

const STEPS: usize = 12;

/// Twelve steps on the same batch.
fn train(layout: &str, dtype: FloatDType, loss_scale: LossScalerConfig) -> Vec<StepReport> {
    let (config, candidate): (_, Candidate) = (llama(), layout.parse().unwrap());
    let job = SETTINGS.job(config.vocab_size());
    let mut engine = EngineConfig {
        micro_batch: SETTINGS.global_batch / candidate.layout.dp / candidate.accumulation,
        pipeline: candidate.pipeline.clone(),
        loss_scale,
        ..job.engine.clone()
    };
    (engine.lr.init, engine.lr.max, engine.lr.min) = (3e-3, 3e-3, 3e-3);
    let run = |rank: Rank| {
        let build = |part| Ok(Llama::build(&config, ParamBuilder::new(&rank, dtype, SETTINGS.seed).with_part(part))?);
        let mut engine = RankEngine::new(&rank, &config.dims(), build, engine.clone())?;
        (0..STEPS).map(|_| Ok(engine.train_step(&job.batches[0])?)).collect()
    };
    launch(&Mesh::new(candidate.layout.clone()).unwrap(), &[Device::flex()], run).unwrap().remove(0)
}

/// The largest relative difference of the losses of steps that were done.
fn gap(a: &[StepReport], b: &[StepReport]) -> f64 {
    let losses = |reports: &[StepReport]| -> Vec<f64> {
        reports.iter().filter(|report| !report.skipped).map(|report| report.loss).collect()
    };
    losses(a).iter().zip(losses(b)).map(|(a, b)| (a - b).abs() / b).fold(0.0, f64::max)
}

#[test]
fn bf16_with_master_weights_follows_fp32() {
    let reference = train("TP1", FloatDType::F32, LossScalerConfig::default());
    assert!(reference[STEPS - 1].loss < reference[0].loss - 0.5);
    for layout in ["TP1", "TP2 SP", "PP2 x4 zb-h1", "DP2 ZeRO1", "DP2 ZeRO3 x2", "TP2 PP2 DP2 ZeRO2 x2"] {
        let reports = train(layout, FloatDType::BF16, LossScalerConfig::default());
        let gap = gap(&reports, &reference);
        // A bf16 number has eight bits.
        assert!(gap < 1e-2, "{layout}: {gap:e}");
        assert!(reports.iter().all(|report| report.loss_scale.is_none() && !report.skipped));
    }
}

#[test]
fn fp16_finds_its_loss_scale_and_then_follows_fp32() {
    let reference = train("TP1", FloatDType::F32, LossScalerConfig::default());
    // Far too large for the gradients of summed losses: the first steps overflow.
    let scaling = LossScalerConfig { initial_scale: 65536.0, ..LossScalerConfig::default() };
    for layout in ["TP1", "TP2 SP PP2 x4", "DP2 ZeRO1 x2"] {
        let reports = train(layout, FloatDType::F16, scaling);
        let skipped = reports.iter().take_while(|report| report.skipped).count();
        assert!(skipped > 1 && skipped < STEPS - 4, "{layout}: {skipped} steps skipped");
        assert!(reports.iter().filter(|report| !report.skipped).count() >= STEPS / 2, "{layout}");
        // Nothing was updated in between, and the learning rate waited.
        assert!(reports[..=skipped].iter().all(|report| report.loss == reports[0].loss), "{layout}");
        assert!(reports[..=skipped].iter().all(|report| report.lr == reports[0].lr), "{layout}");
        let scales: Vec<f64> = reports.iter().map(|report| report.loss_scale.unwrap()).collect();
        assert!(scales[skipped] < scales[0] && scales.windows(2).all(|pair| pair[1] <= pair[0]));
        let gap = gap(&reports, &reference);
        assert!(gap < 5e-3, "{layout}: {gap:e}");
    }
}

/// Mixes of everything, with several micro-batches where a schedule needs them.
const MIXES: [&str; 7] =
    ["TP1 x2 uniform1", "TP2 SP selective", "TP4", "PP2 x4 zb-h1", "DP2 ZeRO2", "TP2 PP2 DP2 ZeRO1 x2", "DP4 ZeRO3 x2"];

fn differs_by_rounding<M: CausalLm>(config: &M::Config, dtype: FloatDType) {
    let steps = if dtype == FloatDType::BF16 { 1 } else { 3 };
    let settings = Settings { steps, dtype, ..SETTINGS };
    let layouts = MIXES.map(|layout| layout.parse().unwrap());
    for line in verified::<M>(config, &settings, &layouts) {
        assert!(line.outcome.iter().all(|found| found.gradients.relative > 1e-9), "nothing was rounded: {line}");
    }
}

#[test]
fn fp32_and_bf16_differ_from_fp64_by_rounding() {
    for dtype in [FloatDType::F32, FloatDType::BF16] {
        differs_by_rounding::<Llama>(&llama(), dtype);
        differs_by_rounding::<Gpt>(&GptConfig { num_hidden_layers: 4, ..gpt() }, dtype);
    }
}

/// The loss falls, and over all ranks as on one.
#[test]
fn fp32_losses_stay_together_for_fifty_steps() {
    let settings = Settings { steps: 50, dtype: FloatDType::F32, ..SETTINGS };
    for layout in ["TP2 SP", "TP2 PP2 DP2 ZeRO1 x2"] {
        let found = curve::<Llama>(&llama(), &settings, &[Device::flex()].into(), &layout.parse().unwrap()).unwrap();
        assert!(found.losses[49] < found.losses[0] - 0.5 && found.passes(), "{layout}: {found}");
        assert!(found.losses != found.expected, "{layout}: {found}");
    }
}
