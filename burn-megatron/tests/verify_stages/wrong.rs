//! Models, layouts and schedules that do not fit are refused before a rank starts, and a stage that fails ends all.

use std::time::{Duration, Instant};

use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::train::{RegressionOutput, TrainOutput, TrainStep};
use burn_megatron::prelude::*;

use crate::encoder::{Classifier, batch};
use crate::layouts;

/// Why a classifier of `blocks` layers does not train in `layout`.
fn refused(blocks: usize, layout: &str, proof: &Proof) -> String {
    let make_model = |device: &Device| Classifier::new(device, blocks);
    let batch = |items: std::ops::Range<usize>, device: &Device| {
        // One device has all items.
        assert!(items.len() >= 8, "a rank has started");
        batch(items, device)
    };
    verify_stages_as(make_model, batch, &layouts(layout), proof).unwrap_err().to_string()
}

#[test]
fn more_stages_than_blocks() {
    let proof = Proof::default();
    let text = refused(3, "PP4", &proof);
    let expected = "pipeline-parallel 4 with virtual-pipeline 1 makes 4 stages of a model with 3 blocks; nearest legal: \
                    pipeline-parallel 3";
    says!(text, expected);
    says!(refused(5, "PP3 VPP2", &proof), "6 stages of a model with 5 blocks; nearest legal: pipeline-parallel 2");
}

#[test]
fn schedules_and_micro_batches_that_do_not_fit() {
    let text = refused(4, "PP2 VPP2", &Proof::default().micro_batches(3));
    says!(text, "with 3 micro-batches", "nearest legal: microbatch-group-size");
    let text = refused(4, "PP2", &Proof::default().schedule(ScheduleKind::ZbH1));
    says!(text, "schedule zb-h1 computes gradients of inputs", "nearest legal: 1f1b");
    let text = refused(4, "PP2", &Proof::default().schedule(ScheduleKind::ZbV));
    says!(text, "schedule zb-v", "nearest legal: interleaved");
    let text = refused(4, "PP2", &Proof::default().schedule(ScheduleKind::NoPipeline));
    says!(text, "pipeline-parallel 2 does not fit schedule none; nearest legal: 1");
    let text = refused(4, "PP2 VPP2", &Proof::default().schedule(ScheduleKind::GPipe));
    says!(text, "virtual-pipeline 2 does not fit schedule gpipe; nearest legal: 1");
    let selective = Recompute::selective(&[models::recompute::Module::Norms]);
    let text = refused(4, "PP2", &Proof::default().recompute(selective));
    says!(text, "recompute-granularity selective", "Recompute::full()");
}

#[test]
fn layouts_that_are_not_for_a_model_of_stages() {
    for (layout, nearest) in [("PP2 ZeRO3", "PP2"), ("CP2 PP2", "PP2"), ("EP2 PP2 DP2 ZeRO3", "PP2 DP2 ZeRO3")] {
        let text = refused(4, layout, &Proof::default());
        assert!(text.starts_with(&format!("layout {layout}: a model of stages can have")), "{text}");
        says!(text, &format!("nearest legal: {nearest}. "));
    }
    let make_model = |device: &Device| LinearConfig::new(1, 1).init(device);
    let loss = |model: &Linear, items: std::ops::Range<usize>, device: &Device| {
        model.forward(Tensor::<2>::ones([items.len(), 1], device)).mean()
    };
    let text = verify_module(make_model, loss, &layouts("PP2")).unwrap_err().to_string();
    says!(text, "one that implements `Stages` pipelines; nearest legal: TP1. ");
    let proof = Proof::default().micro_batches(2);
    says!(verify_module_as(make_model, loss, &layouts("TP1"), &proof).unwrap_err(), "verify_stages_as");
}

/// How a chain of three linear layers goes wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Flaw {
    None,
    /// The last part uses the parameter of the first.
    UsesFirst,
    /// A block panics in its second micro-batch.
    Panics,
}

/// With the owner of the block's parameters.
#[derive(Module, Debug)]
struct Chain<const OWNER: usize> {
    first: Linear,
    middle: Vec<Linear>,
    last: Linear,
    /// Nothing uses it.
    norm: Option<BatchNorm>,
    #[module(skip)]
    flaw: Flaw,
    #[module(skip)]
    runs: std::sync::Arc<std::sync::atomic::AtomicUsize>,
}

#[derive(Module, Debug)]
struct Points {
    x: Tensor<2>,
}

impl<const OWNER: usize> Chain<OWNER> {
    fn new(device: &Device, flaw: Flaw) -> Self {
        let linear = || LinearConfig::new(3, 3).with_bias(false).init(device);
        Self {
            first: linear(),
            middle: vec![linear(), linear()],
            last: linear(),
            norm: None,
            flaw,
            runs: Default::default(),
        }
    }
}

impl<const OWNER: usize> Stages for Chain<OWNER> {
    type Activation = Tensor<2>;

    fn blocks(&self) -> usize {
        2
    }

    fn owner(&self, path: &str) -> Option<Part> {
        match (OWNER, path.starts_with("middle")) {
            (1, true) => None,
            (2, true) => Some(Part::Block(7)),
            (3, false) | (4, _) => Some(Part::Tied),
            _ => Part::by_path(path, "first", "middle", "last|norm"),
        }
    }

    fn first(&self, batch: &Points) -> Tensor<2> {
        self.first.forward(batch.x.clone())
    }

    fn block(&self, index: usize, x: Tensor<2>, batch: &Points) -> Tensor<2> {
        // One device has all items at once.
        if self.flaw == Flaw::Panics && index == 1 && batch.x.dims()[0] < 8 {
            let runs = self.runs.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            assert!(runs < 1, "the block ran into a wall");
        }
        self.middle[index].forward(x)
    }

    fn last(&self, x: Tensor<2>, _: &Points) -> (Tensor<1>, RegressionOutput) {
        let y = match self.flaw {
            Flaw::UsesFirst => self.first.forward(x),
            _ => self.last.forward(x),
        };
        let loss = y.clone().powi_scalar(2).mean();
        (loss.clone(), RegressionOutput::new(loss, y.clone(), y))
    }
}

impl<const OWNER: usize> TrainStep for Chain<OWNER> {
    type Input = Points;
    type Output = RegressionOutput;

    fn step(&self, batch: Points) -> TrainOutput<RegressionOutput> {
        let (loss, output) = self.run(&batch);
        TrainOutput::new(self, loss.backward(), output)
    }
}

fn points(items: std::ops::Range<usize>, device: &Device) -> Points {
    let x: Vec<f64> = items.clone().flat_map(|item| [0, 1, 2].map(|at| ((item * 3 + at) as f64).sin())).collect();
    Points { x: Tensor::<1>::from_data(x.as_slice(), device).reshape([items.len(), 3]) }
}

fn chain<const OWNER: usize>(flaw: Flaw) -> Result<ModuleReport, ModuleError> {
    verify_stages(|device| Chain::<OWNER>::new(device, flaw), points, &layouts("PP2"))
}

#[test]
fn parameters_without_an_owner_or_with_a_wrong_one() {
    chain::<0>(Flaw::None).unwrap();
    let text = chain::<1>(Flaw::None).unwrap_err().to_string();
    let expected = "parameter `middle.0.weight` has no owner: `Stages::owner` returns None for its path; nearest legal: \
                    Part::First";
    says!(text, expected);
    let text = chain::<2>(Flaw::None).unwrap_err().to_string();
    says!(text, "owned by Part::Block(7) of a model with 2 blocks; nearest legal: Part::Block(1)");
    let text = chain::<0>(Flaw::UsesFirst).unwrap_err().to_string();
    says!(text, "a stage uses parameter `module.first.weight`, which `Stages::owner` gives to Part::First");
    says!(text, "nearest legal: the part that uses it, or Part::Tied");
}

#[test]
fn recomputation_of_running_states() {
    let make_model = |device: &Device| {
        let norm = Some(BatchNormConfig::new(3).init(device));
        Chain::<0> { norm, ..Chain::new(device, Flaw::None) }
    };
    let proof = Proof::default().recompute(Recompute::full());
    let text = verify_stages_as(make_model, points, &layouts("TP1"), &proof).unwrap_err().to_string();
    says!(text, "recompute: `norm.running_mean` is a running state");
}

/// Why a chain whose first and last parts have a field each for one parameter does not train; as the fourth, one between
/// them has it too.
fn twice<const OWNER: usize>() -> String {
    let make_model = |device: &Device| {
        let mut chain = Chain::<OWNER>::new(device, Flaw::None);
        chain.last.weight = chain.first.weight.clone();
        if OWNER == 4 {
            // Fields of one value that is not there yet are frozen together.
            drop(chain.first.weight.val());
            chain.middle[0].weight = chain.first.weight.clone().set_require_grad(false);
        }
        chain
    };
    verify_stages(make_model, points, &layouts("PP2")).unwrap_err().to_string()
}

#[test]
fn one_parameter_in_two_fields() {
    says!(twice::<0>(), "`last.weight` (Part::Last) is `first.weight` (Part::First)");
    says!(twice::<3>(), "`last.weight` (Part::Tied) is `first.weight` (Part::Tied)", "nearest legal: one field");
    // A third one between them, which is not trained.
    says!(twice::<4>(), "`last.weight` (Part::Tied) is `first.weight` (Part::Tied)");
    chain::<3>(Flaw::None).unwrap();
}

#[test]
fn a_stage_that_fails_ends_all() {
    let begun = Instant::now();
    says!(chain::<0>(Flaw::Panics).unwrap_err(), "the block ran into a wall");
    assert!(begun.elapsed() < Duration::from_secs(10));
}
