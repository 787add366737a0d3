//! Clipping by norm in every layout does what it does on one device.

use burn::grad_clipping::GradientClippingConfig;
use burn::train::TrainingStrategy;
use burn_megatron::prelude::*;

use crate::classifier::{Classifier, Trap};
use crate::setup::{Setup, difference, interleaved};
use crate::training::one_device;

const LAYOUTS: &str = "\
    TP2, DP2, DP2 ZeRO1, DP2 ZeRO2, DP4 ZeRO3, TP2 SP DP2 ZeRO1, TP2 DP2 ZeRO3, PP2 DP2 ZeRO1, PP2 DP2 ZeRO2, \
    TP2 PP2 DP2 ZeRO3, TP2 PP2";

/// Most of the gradients are clipped to this.
const NORM: f64 = 0.05;

fn strategy(layout: &str, change: impl Fn(MeshStrategy) -> MeshStrategy) -> TrainingStrategy<Classifier> {
    let mesh = change(MegatronStrategy::mesh(layout.parse().unwrap()).units(Units::auto().keep_below(2)));
    if layout.contains("PP") { mesh.stages().into() } else { mesh.into() }
}

/// The trained numbers of one device with the batch of `layout`.
fn alone(layout: &str, setup: Setup) -> Vec<f64> {
    let ranks = layout.parse::<ParallelLayout>().unwrap().dp;
    Setup { items: interleaved(16, ranks, 4 / ranks), ..setup }.numbers(one_device())
}

fn over_ranks(layout: &str, setup: Setup, change: impl Fn(MeshStrategy) -> MeshStrategy) -> Vec<f64> {
    let batch = 4 / layout.parse::<ParallelLayout>().unwrap().dp;
    Setup { items: (0..16).collect(), batch, ..setup }.numbers(strategy(layout, change))
}

#[test]
fn gradients_are_clipped_by_the_norm_of_all_ranks_together() {
    for layout in LAYOUTS.split(", ") {
        let trap = Trap { max_grad_norm: Some(NORM), ..Trap::default() };
        let single = alone(layout, Setup { trap, ..Setup::default() });
        assert!(difference(&single, &alone(layout, Setup::default())) > 1e-6, "nothing was clipped");
        let found = over_ranks(layout, Setup::default(), |mesh| mesh.max_grad_norm(NORM));
        let gap = difference(&found, &single);
        assert!(gap < 1e-10, "{layout}: {gap}");
    }
}

/// The share of a rank is that of every part.
#[test]
fn gradients_in_parts_are_clipped_by_the_same_norm() {
    let plan = Plan::auto().columns_in_parts("query", 2).columns_in("linear_inner", &[16, 8, 8]);
    for layout in ["TP2", "TP2 DP2 ZeRO1", "TP2 DP2 ZeRO3", "TP2 PP2 DP2 ZeRO3"] {
        let trap = Trap { max_grad_norm: Some(NORM), ..Trap::default() };
        let single = alone(layout, Setup { trap, ..Setup::default() });
        let found = over_ranks(layout, Setup::default(), |mesh| mesh.max_grad_norm(NORM).plan(plan.clone()));
        let gap = difference(&found, &single);
        assert!(gap < 1e-10, "{layout}: {gap}");
    }
}

#[test]
fn burns_clipping_of_each_parameter_sees_whole_parameters() {
    let setup = || Setup { clipping: Some(GradientClippingConfig::Norm(NORM as f32 / 8.0)), ..Setup::default() };
    for layout in LAYOUTS.split(", ") {
        let single = alone(layout, setup());
        assert!(difference(&single, &alone(layout, Setup::default())) > 1e-6, "nothing was clipped");
        let gap = difference(&over_ranks(layout, setup(), |mesh| mesh), &single);
        assert!(gap < 1e-10, "{layout}: {gap}");
    }
}
