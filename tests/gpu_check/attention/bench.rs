//! Speed of the kernels on a training shape.
use super::case::Case;
use crate::clock::{self, speed};
use crate::kernel_tests::attention::{Kernels, bytes, options, upload_starts};
use crate::kernel_tests::pointwise::poisoned;
use crate::numbers::normal;
use cubecl::prelude::*;
use kernels_cubecl::attention::dkdv::{DkDvOutputs, DkDvPlan};
use kernels_cubecl::attention::{self, CallOptions, Tensor4, Variant, dq::DqPlan, forward::ForwardPlan};

/// Length of the random pattern that tensors repeat, as a host generates numbers slowly. A prime, so that no two rows
/// are equal.
const BLOCK: usize = 1_000_003;

/// TFLOP/s of the forward and of the backward pass. With `sweep`, also prints those of other plans.
pub fn bench(client: &Client, case: &Case, sweep: bool) -> [f64; 2] {
    let shape = case.problem.shape;
    let starts = upload_starts(client, &case.problem);
    let options = options(&case.problem, &starts, case.element);
    let block = bytes(&normal(BLOCK, 1).collect::<Vec<_>>(), Kernels::Mma(case.element).element());
    let tensor = |shape: [usize; 4], seed: usize| {
        let pattern = block.iter().copied().cycle().skip(2 * 1001 * seed);
        let bytes: Vec<u8> = pattern.take(2 * shape.iter().product::<usize>()).collect();
        Tensor4::contiguous(client.create_from_slice(&bytes), shape)
    };
    let [q, dq] = [1, 2].map(|seed| tensor(shape.query_shape(), seed));
    let [k, dk] = [3, 4].map(|seed| tensor(shape.key_shape(), seed));
    let [v, dv] = [5, 6].map(|seed| tensor(shape.value_shape(), seed));
    let [out, dout] = [7, 8].map(|seed| tensor(shape.out_shape(), seed));
    let lse = poisoned::<f32>(client, shape.statistics_len());
    let (scale, flops) = (case.problem.scale as f32, case.flops());
    let forward = clock::kernel(client, |_| {
        attention::forward(client, &shape, scale, &options, (&q, &k, &v), &out, &lse).expect("a legal call")
    });
    let saved = attention::Saved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
    let gradients = attention::Gradients { dq: &dq, dk: &dk, dv: &dv };
    let backward = |options: &CallOptions| {
        clock::kernel(client, |_| {
            attention::backward(client, &shape, scale, options, saved, &dout, gradients).expect("a legal call")
        })
    };
    let speeds = [flops / forward / 1e12, 2.5 * flops / backward(&options) / 1e12];
    if sweep {
        let line = |what: String, flops: f64, seconds: f64| {
            println!("{:<16} | {what:<44} {}", case.name, speed(flops, seconds));
        };
        let variant = Variant::of(&shape, &options);
        let deterministic = CallOptions { deterministic: true, ..options };
        line("backward, deterministic".into(), 2.5 * flops, backward(&deterministic));
        for plan in forward_plans(variant) {
            let seconds = clock::kernel(client, |_| {
                let tensors = (&q, &k, &v);
                attention::forward_planned(client, &shape, scale, &options, tensors, &out, &lse, plan).expect("legal")
            });
            let ForwardPlan { block, stages, intra_wg_overlap, ping_pong, .. } = plan;
            let what = format!("forward {block} × {stages} overlap {intra_wg_overlap} ping-pong {ping_pong}");
            line(what, flops, seconds);
        }
        let stats = attention::preprocess(client, &shape, &options, &out, &dout, &lse).expect("legal");
        for plan in dq_plans(variant) {
            let seconds = clock::kernel(client, |_| {
                attention::launch_dq(client, &shape, scale, &options, saved, &dout, &stats, &dq, plan).expect("legal")
            });
            line(format!("dQ {} × {}", plan.block, plan.stages), 1.5 * flops, seconds);
        }
        for plans in dkdv_plans(variant) {
            let dkdv = (&dk, &dv);
            let seconds = clock::kernel(client, |_| {
                attention::launch_dkdv(client, &shape, scale, &options, saved, &dout, &stats, dkdv, &plans)
                    .expect("legal")
            });
            let choices: Vec<_> = plans.iter().map(|p| (p.outputs, p.block, p.stages, p.early_dp)).collect();
            line(format!("dK, dV {choices:?}"), 2.0 * flops, seconds);
        }
    }
    speeds
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
