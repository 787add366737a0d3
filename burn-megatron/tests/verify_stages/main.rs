//! `verify_module` and `verify_stages` of modules as Burn users build them, in double precision.

#[macro_use]
#[path = "../support/says.rs"]
mod says;

mod bert;
mod encoder;
mod images;
mod layers;
mod llama;
mod modules;
mod routed;
mod siglip;
mod t5;
mod unet;
mod wrong;

use std::ops::Range;

use burn::module::{Module, ModuleDisplay, ParamGroup};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, ModuleOptimizer, MuonConfig, SgdConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_megatron::prelude::*;
use models::hf::HfModule;
use models::lora::{LoraConfig, with_adapters};

fn layouts(list: &str) -> Vec<ParallelLayout> {
    list.split(", ").map(|layout| layout.parse().unwrap()).collect()
}

fn adamw() -> ModuleOptimizer {
    AdamWConfig::new().with_weight_decay(0.1).init()
}

fn sgd() -> ModuleOptimizer {
    let momentum = MomentumConfig { momentum: 0.9, dampening: 0.1, nesterov: true };
    SgdConfig::new().with_momentum(Some(momentum)).init()
}

/// Muon of matrices and AdamW of the rest.
fn muon() -> ModuleOptimizer {
    let muon = MuonConfig::new().with_weight_decay(None).build();
    adamw().with_group(ParamGroup::from_predicate("weight"), muon, None)
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

/// Every operation has a rule: none gathers its operands for want of one.
fn no_fallback<M: Module + ModuleDisplay + 'static>(
    make_model: fn(&Device) -> M,
    plan: Plan,
    loss: fn(&M, Range<usize>, &Device) -> Tensor<1>,
    layouts: &[&str],
) {
    let mut cpu = Device::flex();
    // The floats of this process are those of the proofs, whichever test makes the first tensor.
    let _ = cpu.configure(FloatDType::F64);
    for layout in layouts {
        let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
        let reports = launch(&mesh, &[cpu.clone()], |rank| {
            let device = rank.logical_device(&[Axis::Tp]).autodiff();
            let model = parallelize(make_model(&device), &rank, &plan)?;
            let gradients = loss(&model, 0..4, &device).backward();
            let report = explain(&device);
            drop(gradients);
            Ok(report)
        });
        for report in reports.unwrap() {
            assert!(report.fallbacks.is_empty(), "{layout}: {report}");
        }
    }
}
