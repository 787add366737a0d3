//! Speed of the kernels on a training shape.
use crate::case::Case;
use crate::check::{poisoned, upload};
use crate::reference::normal;
use cubecl::prelude::*;
use kernels_cubecl::attention::dkdv::{DkDvOutputs, DkDvPlan};
use kernels_cubecl::attention::{self, CallOptions, Variant, dq::DqPlan, forward::ForwardPlan};
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

/// Length of the random pattern that tensors repeat, as a host generates numbers slowly. A prime, so that no two rows
/// are equal.
const BLOCK: usize = 1_000_003;

/// TFLOP/s of the forward and of the backward pass. With `sweep`, also prints those of other plans.
pub fn bench(client: &Client, case: &Case, sweep: bool) -> [f64; 2] {
    let (shape, element) = (case.shape, case.element);
    let starts = case.upload_starts(client);
    let options = case.options(&starts);
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
        attention::forward(client, &shape, scale, &options, (&q, &k, &v), &out, &lse).expect("a legal call")
    });
    let dout = tensor(shape.out_shape(), 5);
    let (dq, dk, dv) = (tensor(shape.query_shape(), 6), tensor(shape.key_shape(), 7), tensor(shape.value_shape(), 8));
    let saved = attention::Saved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
    let gradients = attention::Gradients { dq: &dq, dk: &dk, dv: &dv };
    let backward = time(client, 5, 10, || {
        attention::backward(client, &shape, scale, &options, saved, &dout, gradients).expect("a legal call")
    });
    if sweep {
        let line = |what: String, seconds: f64, flops: f64| {
            println!("{:<16} | {what:<44} {:7.3} ms {:6.1} TFLOP/s", case.name, seconds * 1e3, flops / seconds / 1e12);
        };
        let variant = Variant::of(&shape, &options);
        let same = CallOptions { deterministic: true, ..options };
        let seconds = time(client, 5, 10, || {
            attention::backward(client, &shape, scale, &same, saved, &dout, gradients).expect("a legal call")
        });
        line("backward, deterministic".into(), seconds, 2.5 * flops);
        for plan in forward_plans(variant) {
            let seconds = time(client, 5, 10, || {
                let tensors = (&q, &k, &v);
                attention::forward_planned(client, &shape, scale, &options, tensors, &out, &lse, plan).expect("legal")
            });
            let ForwardPlan { block, stages, intra_wg_overlap, ping_pong, .. } = plan;
            line(
                format!("forward {block} × {stages} overlap {intra_wg_overlap} ping-pong {ping_pong}"),
                seconds,
                flops,
            );
        }
        let stats = attention::preprocess(client, &shape, &options, &out, &dout, &lse).expect("legal");
        for plan in dq_plans(variant) {
            let seconds = time(client, 5, 10, || {
                attention::launch_dq(client, &shape, scale, &options, saved, &dout, &stats, &dq, plan).expect("legal")
            });
            line(format!("dQ {} × {}", plan.block, plan.stages), seconds, 1.5 * flops);
        }
        for plans in dkdv_plans(variant) {
            let dkdv = (&dk, &dv);
            let seconds = time(client, 5, 10, || {
                attention::launch_dkdv(client, &shape, scale, &options, saved, &dout, &stats, dkdv, &plans)
                    .expect("legal")
            });
            let choices: Vec<_> = plans.iter().map(|p| (p.outputs, p.block, p.stages, p.early_dp)).collect();
            line(format!("dK, dV {choices:?}"), seconds, 2.0 * flops);
        }
    }
    [flops / forward / 1e12, 2.5 * flops / backward / 1e12]
}

/// Shared memory of a cube for tiles, in bytes.
const SHARED: usize = 226 * 1024;

fn forward_plans(variant: Variant) -> Vec<ForwardPlan> {
    let width = variant.key_width() + variant.value_width();
    let fits = |plan: &ForwardPlan| 256 * variant.key_width() + 2 * plan.stages * plan.block * width <= SHARED;
    let registers = |plan: &ForwardPlan| plan.block * 3 / 4 + variant.value_dim / 2 <= 200;
    let blocks = [64, 80, 96, 112, 128, 144, 160, 176];
    let choices = blocks.into_iter().flat_map(|block| [(block, false), (block, true)]);
    choices
        .map(|(block, ping_pong)| ForwardPlan { variant, block, stages: 2, intra_wg_overlap: ping_pong, ping_pong })
        .filter(|plan| fits(plan) && registers(plan))
        .collect()
}

fn dq_plans(variant: Variant) -> Vec<DqPlan> {
    let width = variant.key_width() + variant.value_width();
    let fits = |plan: &DqPlan| (256 + 2 * plan.stages * plan.block) * width <= SHARED;
    let registers = |plan: &DqPlan| plan.block * 5 / 4 + variant.head_dim / 2 <= 210;
    [(32, 2), (48, 2), (64, 2), (80, 2), (96, 2), (112, 2), (128, 2)]
        .map(|(block, stages)| DqPlan { variant, block, stages })
        .into_iter()
        .filter(|plan| fits(plan) && registers(plan))
        .collect()
}

fn dkdv_plans(variant: Variant) -> Vec<Vec<DkDvPlan>> {
    let plan = |outputs, block, early_dp| DkDvPlan { variant, outputs, block, stages: 2, early_dp };
    let mut all = vec![DkDvPlan::fastest(variant)];
    match variant.head_dim {
        64 => all.push(vec![plan(DkDvOutputs::Both, 64, true)]),
        96 => all.push(vec![plan(DkDvOutputs::Both, 64, true)]),
        128 => all.push(vec![plan(DkDvOutputs::Dv, 128, false), plan(DkDvOutputs::Dk, 64, true)]),
        192 => {
            all.push(vec![plan(DkDvOutputs::Both, 32, false)]);
            all.push(vec![plan(DkDvOutputs::Dv, 64, false), plan(DkDvOutputs::Dk, 64, true)]);
        }
        _ => all.push(vec![plan(DkDvOutputs::Dv, 32, false), plan(DkDvOutputs::Dk, 32, false)]),
    }
    all
}
