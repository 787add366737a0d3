//! Training in FP8, emulated: it learns what training without it learns, resumes bit for bit, and does not depend on
//! the layout.

use backend_dist::ops::fp8::{AmaxAlgorithm, Fp8Format, Fp8Scaling};
use models::Fp8Config;
use models::recompute::{Granularity, Module, Recompute};

use super::*;

/// All parts of two ranks are multiples of 16, as are the 16 tokens of a micro-batch.
fn config() -> LlamaConfig {
    models::sized! { LlamaConfig::tiny();
        vocab_size: 33, hidden_size: 64, intermediate_size: 128, num_attention_heads: 8, num_key_value_heads: 4,
        head_dim: 8
    }
}

fn tensorwise() -> Fp8Config {
    Fp8Config { format: Some(Fp8Format::Hybrid), ..Fp8Config::default() }
}

fn delayed() -> Fp8Config {
    Fp8Config {
        recipe: Fp8Scaling::Delayed,
        amax_history_len: 3,
        amax_compute_algo: AmaxAlgorithm::Max,
        ..tensorwise()
    }
}

fn run_in(layout: &str, dtype: FloatDType, fp8: Fp8Config, folder: &Path, every: Option<u64>) -> Pretraining<Llama> {
    let (mesh, config) = (Mesh::new(layout.parse().unwrap()).unwrap(), config());
    let layers = config.num_hidden_layers;
    Pretraining::new(mesh, engine(), 12, (data(900, 1), data(200, 2)), config.dims(), move |rank, part| {
        let params = ParamBuilder::new(rank, dtype, 7).with_part(part).with_fp8(&fp8, layers);
        Ok(Llama::build(&config, params)?)
    })
    .evaluate(5, 2)
    .directory(folder.join("run"))
    .checkpoints(saving(folder, every, true))
}

/// Loss and norm of every step after `step`.
pub(super) fn numbers(folder: &Path, step: u64) -> Vec<f64> {
    let steps = trained_after(folder, step);
    steps.iter().flat_map(|line| ["loss", "grad_norm"].map(|key| line[key].as_f64().unwrap())).collect()
}

#[test]
fn runs_in_fp8_resume_bit_for_bit() {
    for (layout, dtype) in [("TP2 SP DP2", FloatDType::F32), ("PP2 DP2 ZeRO3", FloatDType::BF16)] {
        for fp8 in [tensorwise(), delayed()] {
            let whole = tempfile::tempdir().unwrap();
            succeeds(&run_in(layout, dtype, fp8.clone(), whole.path(), Some(1)), layout);
            for step in [1, 5] {
                let folder = tempfile::tempdir().unwrap();
                let from = saved_at(whole.path(), step);
                succeeds(&run_in(layout, dtype, fp8.clone(), folder.path(), None).resume(Resume::From(from)), layout);
                let found = numbers(folder.path(), 0);
                assert!(
                    found.len() == 2 * (12 - step as usize) && found == numbers(whole.path(), step),
                    "{layout} {fp8:?}"
                );
            }
        }
    }
}

#[test]
fn layouts_in_fp8_log_the_same_steps() {
    for fp8 in [tensorwise(), delayed()] {
        let steps = |layout: &str| {
            let folder = tempfile::tempdir().unwrap();
            succeeds(&run_in(layout, FloatDType::F64, fp8.clone(), folder.path(), None), layout);
            numbers(folder.path(), 0)
        };
        let expected = steps("TP1");
        for layout in ["TP2 SP DP2", "PP2 DP2 ZeRO1", "DP2 ZeRO3"] {
            let found = steps(layout);
            let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(found.len() == expected.len() && worst < 1e-9, "{layout} {:?}: off by {worst}", fp8.recipe);
        }
    }
}

/// Every other token follows from the one before, the rest are drawn: no model can have a loss below half of ln 32.
fn half_random(length: usize, seed: u64) -> Arc<dyn TokenDataset> {
    let mut state = seed;
    let mut tokens = vec![0i64];
    for index in 1..length {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        tokens.push(if index % 2 == 0 { (state >> 59) as i64 } else { (tokens[index - 1] * 5 + 3) % 32 });
    }
    Arc::new(TokensInMemory::new(tokens, SEQ))
}

/// Rounding leads elsewhere, to lower losses as often as to higher ones. Over seven seeds the mean loss of the first
/// 100 steps differed with a standard deviation of 0.08 %, that of the next 100 with 0.3 % (current scaling) and 0.6 %
/// (delayed), and the means over the seeds by no more than 0.035 %. Later, when nothing more is learned, single seeds
/// are up to 1.5 % apart.
#[test]
fn fp8_learns_what_f32_learns() {
    const STEPS: usize = 200;
    let losses = |fp8: Fp8Config, seed: u64| {
        let folder = tempfile::tempdir().unwrap();
        let (mesh, config) = (Mesh::new(ParallelLayout::default()).unwrap(), config());
        let layers = config.num_hidden_layers;
        let engine = EngineConfig { lr: LrConfig { max: 3e-3, form: LrDecay::Constant, ..engine().lr }, ..engine() };
        let data = (half_random(8 * SEQ * STEPS + 1, seed), half_random(200, 100));
        let run = Pretraining::new(mesh, engine, STEPS, data, config.dims(), move |rank, part| {
            let params = ParamBuilder::new(rank, FloatDType::F32, seed).with_part(part).with_fp8(&fp8, layers);
            Ok(Llama::build(&config, params)?)
        });
        succeeds(&run.evaluate(STEPS, 1).directory(folder.path().join("run")), "a run in FP8");
        let losses: Vec<f64> = numbers(folder.path(), 0).into_iter().step_by(2).collect();
        losses
    };
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    let halves = |losses: &[f64]| [mean(&losses[..STEPS / 2]), mean(&losses[STEPS / 2..])];
    let seeds = 1..=4;
    let exact: Vec<Vec<f64>> = seeds.clone().map(|seed| losses(Fp8Config::default(), seed)).collect();
    for losses in &exact {
        assert!(halves(losses)[1] < 0.7 * losses[0], "{} after {}: nothing was learned", halves(losses)[1], losses[0]);
    }
    for fp8 in [tensorwise(), delayed()] {
        let mut late = Vec::new();
        for (seed, exact) in seeds.clone().zip(&exact) {
            let found = losses(fp8.clone(), seed);
            assert!(&found != exact);
            let [[early, later], [exact_early, exact_later]] = [halves(&found), halves(exact)];
            let off = early / exact_early - 1.0;
            assert!(off.abs() < 3e-3, "{:?}, seed {seed}: {off:e}", fp8.recipe);
            late.push(later / exact_later - 1.0);
        }
        assert!(mean(&late).abs() < 1e-2, "{:?}: {late:?}", fp8.recipe);
    }
}

/// NVIDIA/TransformerEngine issues 1190 and 539: with layers recomputed, and several micro-batches in a pipeline,
/// magnitudes of gradients were lost, or a pass was done again with other scales.
#[test]
fn transformer_engine_1190_539_recomputed_layers_use_the_same_scales() {
    let steps = |layout: &str, fp8: &Fp8Config, recompute: Recompute| {
        let folder = tempfile::tempdir().unwrap();
        let (mesh, config) = (Mesh::new(layout.parse().unwrap()).unwrap(), config());
        let engine = EngineConfig { recompute: recompute.clone(), ..engine() };
        let (dims, layers, fp8) = (config.dims(), config.num_hidden_layers, fp8.clone());
        let run = Pretraining::new(mesh, engine, 6, (data(900, 1), data(200, 2)), dims, move |rank, part| {
            let params = ParamBuilder::new(rank, FloatDType::F32, 7).with_part(part).with_fp8(&fp8, layers);
            Ok(Llama::build(&config, params.with_recompute(&recompute))?)
        });
        succeeds(&run.evaluate(3, 1).directory(folder.path().join("run")), "a run in FP8");
        numbers(folder.path(), 0)
    };
    let full = Recompute { granularity: Granularity::Full, num_layers: 1, ..Recompute::default() };
    let modules = Recompute::selective(&[Module::MlpActivation, Module::Norms]);
    for fp8 in [tensorwise(), delayed()] {
        for layout in ["TP1", "PP2"] {
            let kept = steps(layout, &fp8, Recompute::default());
            assert_eq!(kept.len(), 12);
            for recompute in [&full, &modules] {
                assert_eq!(steps(layout, &fp8, recompute.clone()), kept, "{layout} {:?} {recompute:?}", fp8.recipe);
            }
        }
    }
}
