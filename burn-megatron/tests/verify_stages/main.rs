//! `verify_stages` of an encoder, a Llama and models of images as Burn users build them, in double precision.

mod bert;
mod encoder;
mod images;
mod llama;
mod t5;
mod wrong;

use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, ModuleOptimizer, SgdConfig};
use burn_megatron::prelude::*;
use models::hf::HfModule;
use models::lora::{LoraConfig, with_adapters};

fn layouts(list: &[&str]) -> Vec<ParallelLayout> {
    list.iter().map(|layout| layout.parse().unwrap()).collect()
}

fn adamw() -> ModuleOptimizer {
    AdamWConfig::new().with_weight_decay(0.1).init()
}

fn sgd() -> ModuleOptimizer {
    let momentum = MomentumConfig { momentum: 0.9, dampening: 0.1, nesterov: true };
    SgdConfig::new().with_momentum(Some(momentum)).init()
}

/// With a DoRA adapter of every linear layer.
fn adapted<M: HfModule>(module: M) -> M {
    let plan = LoraConfig { rank: 3, dora: true, ..LoraConfig::default() }.module_plan(&module).unwrap();
    with_adapters(module, &plan, None).unwrap()
}

/// All layouts ran, and something was compared: sums over micro-batches round differently.
fn proven(report: Result<ModuleReport, ModuleError>, layouts: usize) {
    let report = report.unwrap_or_else(|error| panic!("{error}"));
    println!("{report}");
    assert_eq!(report.worst().count(), layouts);
    assert!(report.worst().any(|(_, worst)| worst.relative > 0.0));
    assert!(report.worst().all(|(_, worst)| worst.relative <= 1e-10));
}
