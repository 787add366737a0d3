//! `MegatronStrategy::mesh` under autocast: near the training of one device in f32, with records in f32.

#[expect(dead_code, reason = "the tests in double precision use more of it")]
#[path = "mesh_strategy/classifier.rs"]
mod classifier;
#[path = "mesh_strategy/clip_grad_norm.rs"]
mod clip_grad_norm;
#[path = "mesh_strategy/passes.rs"]
mod passes;
#[expect(dead_code, reason = "the tests in double precision use more of it")]
#[path = "mesh_strategy/setup.rs"]
mod setup;
#[path = "support/values.rs"]
mod values;

use burn::tensor::{Device, FloatDType};
use burn::train::ExecutionStrategy;
use burn_megatron::prelude::*;

use setup::{Setup, difference};

/// AdamW moves a parameter by the learning rate however small its gradient is, so a rounded sign moves it the other way.
const NEAR: f64 = 0.08;

fn cpu() -> Device {
    Device::flex()
}

#[test]
fn layouts_under_autocast_train_nearly_as_one_device_in_f32() {
    let single = Setup::default().numbers(ExecutionStrategy::single(cpu()).into());
    for layout in ["TP1", "TP2", "TP2 SP"] {
        let strategy = MegatronStrategy::mesh(layout.parse().unwrap()).autocast(FloatDType::BF16);
        let gap = difference(&Setup::default().numbers(strategy.into()), &single);
        assert!(gap > 1e-6, "{layout}: nothing was rounded");
        assert!(gap < NEAR, "{layout}: {gap}");
    }
    let ranks = |layout: &str, autocast: bool| {
        let strategy = MegatronStrategy::mesh(layout.parse().unwrap());
        let strategy = if autocast { strategy.autocast(FloatDType::BF16) } else { strategy };
        Setup::default().numbers(strategy.into())
    };
    let alone = ranks("DP2", false);
    for layout in ["DP2", "DP2 ZeRO1", "TP2 DP2 ZeRO3"] {
        let gap = difference(&ranks(layout, true), &alone);
        assert!((1e-6..NEAR).contains(&gap), "{layout}: {gap}");
    }
}

#[test]
fn pipelines_under_autocast_train_nearly_as_one_device_in_f32() {
    let single = Setup::default().numbers(ExecutionStrategy::single(cpu()).into());
    for layout in ["TP1", "PP2", "TP2 SP PP2"] {
        for recompute in [Recompute::default(), Recompute::full()] {
            let mesh = MegatronStrategy::mesh(layout.parse().unwrap()).autocast(FloatDType::BF16).recompute(recompute);
            let gap = difference(&Setup::default().numbers(mesh.stages().into()), &single);
            assert!((1e-6..NEAR).contains(&gap), "{layout}: {gap}");
        }
    }
}

#[test]
fn fp8_of_what_is_multiplied_in_f32_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let strategy = MegatronStrategy::mesh("TP2".parse().unwrap()).fp8();
    let error = Setup::default().run(directory.path(), strategy.into()).error.unwrap().to_string();
    assert!(error.contains("of f32: FP8 layers lie between others in half precision"), "{error}");
    assert!(error.contains("nearest legal: .autocast(FloatDType::BF16).fp8()"), "{error}");
}

#[test]
fn a_type_that_is_no_half_precision_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let strategy = MegatronStrategy::mesh("TP2".parse().unwrap()).autocast(FloatDType::F64);
    let error = Setup::default().run(directory.path(), strategy.into()).error.unwrap().to_string();
    assert!(error.contains("autocast(F64): no half precision type; nearest legal: BF16, F16"), "{error}");
}
