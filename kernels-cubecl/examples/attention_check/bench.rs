//! How fast the kernels are on a training shape.
use crate::case::Case;
use crate::check::{poisoned, upload};
use crate::reference::normal;
use cubecl::prelude::*;
use kernels_cubecl::attention::forward::ForwardPlan;
use kernels_cubecl::attention::key_gradient::{Gradient, KeyGradientPlan};
use kernels_cubecl::attention::query_gradient::QueryGradientPlan;
use kernels_cubecl::attention::{self, Extras, Variant};
use std::time::Instant;

/// Seconds a call takes, the median of `rounds` batches of `calls`.
fn time(client: &Client, rounds: usize, calls: usize, mut call: impl FnMut()) -> f64 {
    let sync = || cubecl::future::block_on(client.sync()).expect("the kernels ran");
    call();
    sync();
    let mut seconds: Vec<f64> = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            (0..calls).for_each(|_| call());
            sync();
            start.elapsed().as_secs_f64() / calls as f64
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    seconds[rounds / 2]
}

/// Random numbers that tensors repeat: a host draws slowly. A prime, so that no two rows are alike.
const BLOCK: usize = 1_000_003;

/// TFLOP/s of the forward and of the backward pass. With `sweep`, also prints those of other choices of tiles.
pub fn bench(client: &Client, case: &Case, sweep: bool) -> [f64; 2] {
    let (shape, element) = (case.shape, case.element);
    let starts = case.upload_starts(client);
    let extras = case.extras(&starts);
    let tensor = |shape: [usize; 4], seed| {
        let block = normal(BLOCK, seed, element);
        let values: Vec<f32> = block.into_iter().cycle().take(shape.iter().product()).collect();
        upload(client, &values, shape, element)
    };
    let (q, k, v) = (tensor(shape.query_shape(), 1), tensor(shape.key_shape(), 2), tensor(shape.value_shape(), 3));
    let (out, lse) = (tensor(shape.out_shape(), 4), poisoned(client, 4 * shape.statistics_len()));
    let scale = 1.0 / (shape.head_dim as f32).sqrt();
    let flops = case.flops();
    let forward = time(client, 5, 10, || {
        attention::forward(client, &shape, scale, &extras, (&q, &k, &v), &out, &lse).expect("a legal call")
    });
    let out_gradient = tensor(shape.out_shape(), 5);
    let (dq, dk, dv) = (tensor(shape.query_shape(), 6), tensor(shape.key_shape(), 7), tensor(shape.value_shape(), 8));
    let saved = attention::Saved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
    let gradients = attention::Gradients { q: &dq, k: &dk, v: &dv };
    let backward = time(client, 5, 10, || {
        attention::backward(client, &shape, scale, &extras, saved, &out_gradient, gradients).expect("a legal call")
    });
    if sweep {
        let line = |what: String, seconds: f64, flops: f64| {
            println!("{:<16} | {what:<44} {:7.3} ms {:6.1} TFLOP/s", case.name, seconds * 1e3, flops / seconds / 1e12);
        };
        let variant = Variant::of(&shape, &extras);
        let same = Extras { deterministic: true, ..extras };
        let seconds = time(client, 5, 10, || {
            attention::backward(client, &shape, scale, &same, saved, &out_gradient, gradients).expect("a legal call")
        });
        line("backward, deterministic".into(), seconds, 2.5 * flops);
        for plan in forward_plans(variant) {
            let seconds = time(client, 5, 10, || {
                let tensors = (&q, &k, &v);
                attention::forward_planned(client, &shape, scale, &extras, tensors, &out, &lse, plan).expect("legal")
            });
            let ForwardPlan { block, stages, overlap, turns, .. } = plan;
            line(format!("forward {block} × {stages} overlap {overlap} turns {turns}"), seconds, flops);
        }
        let sums = attention::row_sums(client, &shape, &extras, &out, &out_gradient, &lse).expect("legal");
        for plan in query_plans(variant) {
            let seconds = time(client, 5, 10, || {
                attention::query_gradients(client, &shape, scale, &extras, saved, &out_gradient, &sums, &dq, plan)
                    .expect("legal")
            });
            line(format!("query gradient {} × {}", plan.block, plan.stages), seconds, 1.5 * flops);
        }
        for plans in key_plans(variant) {
            let kv = (&dk, &dv);
            let seconds = time(client, 5, 10, || {
                attention::key_gradients(client, &shape, scale, &extras, saved, &out_gradient, &sums, kv, &plans)
                    .expect("legal")
            });
            let choices: Vec<_> = plans.iter().map(|p| (p.gradient, p.block, p.stages, p.early)).collect();
            line(format!("key gradient {choices:?}"), seconds, 2.0 * flops);
        }
    }
    [flops / forward / 1e12, 2.5 * flops / backward / 1e12]
}

/// Bytes of shared memory that a cube has for tiles.
const SHARED: usize = 226 * 1024;

fn forward_plans(variant: Variant) -> Vec<ForwardPlan> {
    let width = variant.key_width() + variant.value_width();
    let fits = |plan: &ForwardPlan| 256 * variant.key_width() + 2 * plan.stages * plan.block * width <= SHARED;
    let registers = |plan: &ForwardPlan| plan.block * 3 / 4 + variant.value_dim / 2 <= 200;
    let blocks = [64, 80, 96, 112, 128, 144, 160, 176];
    let choices = blocks.into_iter().flat_map(|block| [(block, false), (block, true)]);
    choices
        .map(|(block, turns)| ForwardPlan { variant, block, stages: 2, overlap: turns, turns })
        .filter(|plan| fits(plan) && registers(plan))
        .collect()
}

fn query_plans(variant: Variant) -> Vec<QueryGradientPlan> {
    let width = variant.key_width() + variant.value_width();
    let fits = |plan: &QueryGradientPlan| (256 + 2 * plan.stages * plan.block) * width <= SHARED;
    let registers = |plan: &QueryGradientPlan| plan.block * 5 / 4 + variant.head_dim / 2 <= 210;
    [(32, 2), (48, 2), (64, 2), (80, 2), (96, 2), (112, 2), (128, 2)]
        .map(|(block, stages)| QueryGradientPlan { variant, block, stages })
        .into_iter()
        .filter(|plan| fits(plan) && registers(plan))
        .collect()
}

fn key_plans(variant: Variant) -> Vec<Vec<KeyGradientPlan>> {
    let plan = |gradient, block, early| KeyGradientPlan { variant, gradient, block, stages: 2, early };
    let mut all = vec![KeyGradientPlan::fastest(variant)];
    match variant.head_dim {
        64 => all.push(vec![plan(Gradient::Both, 64, true)]),
        96 => all.push(vec![plan(Gradient::Both, 64, true)]),
        128 => all.push(vec![plan(Gradient::Values, 128, false), plan(Gradient::Keys, 64, true)]),
        192 => {
            all.push(vec![plan(Gradient::Both, 32, false)]);
            all.push(vec![plan(Gradient::Values, 64, false), plan(Gradient::Keys, 64, true)]);
        }
        _ => all.push(vec![plan(Gradient::Values, 32, false), plan(Gradient::Keys, 32, false)]),
    }
    all
}
