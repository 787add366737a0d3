//! Programs that cannot run end with an error that says why.

use crate::harness::cpu;
use backend_dist::launch::launch;
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::mesh_backend::LogicalDevice;
use backend_dist::parallelize::{Plan, parallelize};
use burn::nn::transformer::TransformerEncoderConfig;
use std::time::{Duration, Instant};

fn error(plan: &Plan, heads: usize) -> String {
    let mesh = Mesh::new("TP2".parse().unwrap()).unwrap();
    let begun = Instant::now();
    let run = launch(&mesh, &[cpu()], |rank| {
        let device = rank.logical_device(&[Axis::Tp]).autodiff();
        let model = TransformerEncoderConfig::new(12, 24, heads, 1).init(&device);
        parallelize(model, &rank, plan)?;
        Ok(())
    });
    assert!(begun.elapsed() < Duration::from_secs(1));
    run.unwrap_err().to_string()
}

#[test]
fn an_unknown_name_in_a_plan() {
    let text = error(&Plan::auto().columns("mlp.gate"), 4);
    assert!(text.contains("pattern `mlp.gate` matches no parameter; the nearest is `layers.0."), "{text}");
}

#[test]
fn three_heads_over_two_ranks() {
    let text = error(&Plan::auto(), 3);
    assert!(text.contains("`layers.0.mha` has 3 heads (`n_heads`), which 2 ranks of axis tp do not divide"), "{text}");
    assert!(text.contains("3 heads can be on 1 ranks"), "{text}");
}
