//! Experts in FP8, emulated: training does not depend on where they are, and resumes bit for bit.

use backend_dist::ops::fp8::{AmaxAlgorithm, Fp8Format, Fp8Scaling};
use models::layers::Dispatcher;
use models::{Fp8Config, Mixtral, MixtralConfig};

use super::fp8::numbers;
use super::*;

/// All parts of four ranks are multiples of 16, as are the 16 tokens of a micro-batch.
fn config(dispatcher: Dispatcher) -> MixtralConfig {
    models::sized! { MixtralConfig::tiny();
        vocab_size: 33, hidden_size: 64, intermediate_size: 64, num_attention_heads: 8, num_key_value_heads: 4,
        head_dim: 8, num_experts: 4, moe_dispatcher: dispatcher
    }
}

fn scaled(recipe: Fp8Scaling) -> Fp8Config {
    Fp8Config {
        format: Some(Fp8Format::Hybrid),
        recipe,
        amax_history_len: 3,
        amax_compute_algo: AmaxAlgorithm::Max,
        ..Fp8Config::default()
    }
}

/// Twelve steps.
fn run_in(
    layout: &str,
    dtype: FloatDType,
    fp8: &Fp8Config,
    dispatcher: Dispatcher,
    folder: &Path,
) -> Pretraining<Mixtral> {
    let (mesh, config, fp8) = (Mesh::new(layout.parse().unwrap()).unwrap(), config(dispatcher), fp8.clone());
    let layers = config.num_hidden_layers;
    Pretraining::new(mesh, engine(), 12, (data(900, 1), data(200, 2)), config.dims(), move |rank, part| {
        let params = ParamBuilder::new(rank, dtype, 7).with_part(part).with_fp8(&fp8, layers);
        Ok(Mixtral::build(&config, params)?)
    })
    .evaluate(5, 2)
    .directory(folder.join("run"))
    .checkpoints(saving(folder, Some(5), true))
}

fn steps(layout: &str, fp8: &Fp8Config, dispatcher: Dispatcher) -> Vec<f64> {
    let folder = tempfile::tempdir().unwrap();
    succeeds(&run_in(layout, FloatDType::F64, fp8, dispatcher, folder.path()), "experts in FP8");
    numbers(folder.path(), 0)
}

fn assert_layouts(recipe: Fp8Scaling, dispatcher: Dispatcher, layouts: &[&str]) {
    let fp8 = scaled(recipe);
    let expected = steps("TP1", &fp8, dispatcher);
    assert_ne!(expected, steps("TP1", &Fp8Config::default(), dispatcher));
    for layout in layouts {
        let found = steps(layout, &fp8, dispatcher);
        let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(found.len() == expected.len() && worst < 1e-9, "{layout} {recipe:?}: off by {worst}");
    }
}

/// Data-parallel ranks' tokens meet at an expert, experts are sharded, and a tensor parallel group's tokens go to two ranks that hold
/// the same experts.
#[test]
fn experts_in_fp8_compute_the_same_wherever_they_are() {
    let layouts = ["DP2 EP2", "TP2 SP DP2 EP2 ETP2", "TP2 DP2 EP4 ETP1", "TP4 SP EP2 ETP1", "DP4 EP2 ETP2 ZeRO3"];
    assert_layouts(Fp8Scaling::Tensorwise, Dispatcher::AllToAll, &layouts);
}

#[test]
fn gathered_tokens_have_the_scales_of_their_micro_batches() {
    assert_layouts(Fp8Scaling::Tensorwise, Dispatcher::AllGather, &["DP2 EP2"]);
}

#[test]
fn histories_of_experts_do_not_depend_on_the_layout() {
    assert_layouts(Fp8Scaling::Delayed, Dispatcher::AllToAll, &["DP2 EP2 ZeRO1", "TP2 SP EP2 ETP1 PP2"]);
}

#[test]
fn experts_in_fp8_resume_bit_for_bit() {
    let fp8 = scaled(Fp8Scaling::Delayed);
    let run = |folder: &Path| run_in("DP2 EP2", FloatDType::F32, &fp8, Dispatcher::AllToAll, folder);
    let [whole, folder] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    succeeds(&run(whole.path()), "experts in FP8");
    let from = saved_at(whole.path(), 5);
    succeeds(&run(folder.path()).resume(Resume::From(from)), "experts in FP8");
    let found = numbers(folder.path(), 0);
    assert!(found.len() == 14 && found == numbers(whole.path(), 5));
}
