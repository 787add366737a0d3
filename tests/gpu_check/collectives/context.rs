//! Attention over a context-parallel group of GPUs against one GPU with the whole sequence: results and times.

use crate::verdict;
use backend_dist::collective::broadcast;
use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use backend_dist::ops::context::{ContextParallel, CpCommType, Documents, attention_in_context};
use backend_dist::ops::{AttentionDropout, AttentionOptions, PackedHeads, PassContext};
use burn::tensor::{DType, Device, Distribution, Tensor};
use std::time::Instant;

const HEAD_DIM: usize = 128;

/// Sizes and masks of an attention.
#[derive(Clone)]
struct Case {
    name: &'static str,
    positions: usize,
    batch: usize,
    heads: PackedHeads,
    options: AttentionOptions,
    documents: Option<Documents>,
}

impl Case {
    fn attention(&self, qkv: Tensor<4>, context: Option<&ContextParallel>) -> Tensor<4> {
        attention_in_context(qkv, self.heads, self.options, context, self.documents.as_ref(), &PassContext::default())
    }
}

/// The CP communication types that `gpus` ranks and these heads allow.
fn comm_types(gpus: usize, heads: PackedHeads) -> Vec<CpCommType> {
    let all = [CpCommType::P2p, CpCommType::AllGather, CpCommType::A2a, CpCommType::A2aP2p { inner: 2 }];
    let is_new = |comm: &CpCommType| gpus > 2 || !matches!(comm, CpCommType::A2aP2p { .. });
    all.into_iter().filter(is_new).filter(|comm| comm.check(gpus, heads.heads).is_ok()).collect()
}

fn cases(gpus: usize) -> Vec<Case> {
    // Chunks of 320 positions: two and a half blocks of the kernels.
    let positions = 2 * gpus * 320;
    let options = AttentionOptions::causal(HEAD_DIM);
    let heads = PackedHeads { heads: 2 * gpus, kv_heads: gpus };
    let plain = Case { name: "causal", positions, batch: 2, heads, options, documents: None };
    let window = AttentionOptions { window: Some(200), ..options };
    let dropout = AttentionDropout { p: 0.1, seed: 3, first_sample: 1, first_head: 0, heads: 2 * gpus };
    let dropout = AttentionOptions { dropout: Some(dropout), ..options };
    let documents =
        Documents::new(vec![vec![0, 100, 330, positions - 700], vec![0, 1, 500, positions / 2, positions - 1]]);
    let single_kv = PackedHeads { heads: 2 * gpus, kv_heads: 1 };
    vec![
        plain.clone(),
        Case { name: "one key head", heads: single_kv, ..plain.clone() },
        Case { name: "not causal", options: AttentionOptions { causal: false, ..options }, ..plain.clone() },
        Case { name: "window", options: window, ..plain.clone() },
        Case { name: "documents", documents: Some(documents.clone()), ..plain.clone() },
        Case { name: "documents, window", documents: Some(documents.clone()), options: window, ..plain.clone() },
        Case { name: "documents, dropout", documents: Some(documents), options: dropout, ..plain },
    ]
}

/// Number of wrong checks.
pub fn check(gpus: usize) -> usize {
    let all = on_ranks(gpus, |rank| cases(gpus).iter().flat_map(|case| errors(rank, case)).collect::<Vec<_>>());
    let all = match all {
        Ok(all) => all,
        Err(why) => return verdict("context-parallel attention", Err(why)),
    };
    let judge = |i: usize| {
        let Error { name, bound, .. } = &all[0][i];
        let worst = all.iter().flat_map(|errors| errors[i].relative).find(|error| error.is_nan() || *error > *bound);
        let why = |error| format!("output or gradient off by {error:.1e}, more than {bound:.0e}");
        verdict(name, worst.map_or(Ok(()), |error| Err(why(error))))
    };
    (0..all[0].len()).map(judge).sum()
}

/// Runs `f` on `gpus` ranks of a context-parallel group.
pub fn on_ranks<T: Send>(gpus: usize, f: impl Fn(&Rank) -> T + Sync) -> Result<Vec<T>, String> {
    let mesh = Mesh::new(ParallelLayout { cp: gpus, ..Default::default() }).expect("one axis is always legal");
    let devices: Vec<Device> = (0..gpus).map(Device::cuda).collect();
    launch(&mesh, &devices, |rank| Ok(f(&rank))).map_err(|error| error.to_string())
}

/// The same random numbers on all ranks: `[q | k | v]`, and the weights of the output in the loss.
fn inputs(rank: &Rank, case: &Case, dtype: DType) -> [Tensor<4>; 2] {
    [case.heads.total(), case.heads.heads].map(|heads| {
        let shape = [case.positions, case.batch, heads, HEAD_DIM];
        let own = Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), (&rank.device, DType::F32));
        broadcast(own, 0, &rank.group(Axis::Cp)).cast(dtype)
    })
}

/// A rank's positions.
fn local_positions(x: Tensor<4>, context: &ContextParallel) -> Tensor<4> {
    let local = x.dims()[0] / context.group.size();
    let parts = context.positions(local).map(|range| x.clone().slice([range]));
    Tensor::cat(parts.into(), 0)
}

/// Output and gradient.
fn run(qkv: Tensor<4>, weights: Tensor<4>, f: impl Fn(Tensor<4>) -> Tensor<4>) -> [Tensor<4>; 2] {
    let x = qkv.autodiff().require_grad();
    let out = f(x.clone());
    let grads = (out.clone() * weights.autodiff()).sum().backward();
    [out.without_autodiff(), x.grad(&grads).expect("the input has a gradient").without_autodiff()]
}

/// Relative to the norm.
fn distance(found: Tensor<4>, expected: Tensor<4>) -> f64 {
    let [found, expected] = [found, expected].map(|x| x.cast(DType::F32));
    let square = |x: Tensor<4>| (x.clone() * x).sum().into_scalar::<f32>();
    f64::from(square(found - expected.clone()) / square(expected)).sqrt()
}

/// Distance of output and gradient of a group from those of one rank in f32.
struct Error {
    name: String,
    relative: [f64; 2],
    bound: f64,
}

/// Every communication type in bf16 and f32.
fn errors(rank: &Rank, case: &Case) -> Vec<Error> {
    let [qkv, weights] = inputs(rank, case, DType::BF16);
    let whole = [&qkv, &weights].map(|x| x.clone().cast(DType::F32));
    let [in_f32, weights_in_f32] = whole.clone();
    let expected = run(in_f32, weights_in_f32, |x| case.attention(x, None));
    let mut found = Vec::new();
    for comm in comm_types(rank.mesh.world_size(), case.heads) {
        let context = ContextParallel { group: rank.group(Axis::Cp), comm };
        for (dtype, bound) in [(DType::BF16, 2e-2), (DType::F32, 1e-5)] {
            let [local, weights] = whole.each_ref().map(|x| local_positions(x.clone(), &context).cast(dtype));
            let [out, grad] = run(local, weights, |x| case.attention(x, Some(&context)));
            let [out_alone, grad_alone] = expected.each_ref().map(|x| local_positions(x.clone(), &context));
            let relative = [distance(out, out_alone), distance(grad, grad_alone)];
            found.push(Error { name: format!("{comm:?}, {}, {dtype:?}", case.name), relative, bound });
        }
    }
    found
}

/// Prints the times of a layer's attention: the slowest rank's, on one GPU and over the group, and the group's errors
/// against one rank in bf16. 1 if a rank fails.
pub fn report(gpus: usize) -> usize {
    let heads = PackedHeads { heads: 32, kv_heads: 8 };
    let options = AttentionOptions::causal(HEAD_DIM);
    let case = Case { name: "causal", positions: 32_768, batch: 1, heads, options, documents: None };
    let all = on_ranks(gpus, |rank| {
        let [qkv, weights] = inputs(rank, &case, DType::BF16);
        let expected = run(qkv.clone(), weights.clone(), |x| case.attention(x, None));
        let [forward, both] = times(rank, &qkv, &weights, &|x| case.attention(x, None));
        let mut numbers = vec![[forward, both, 0.0, 0.0]];
        for comm in comm_types(gpus, heads) {
            let context = ContextParallel { group: rank.group(Axis::Cp), comm };
            let [local, local_weights] = [&qkv, &weights].map(|x| local_positions(x.clone(), &context));
            let [out, grad] = run(local.clone(), local_weights.clone(), |x| case.attention(x, Some(&context)));
            let [out_alone, grad_alone] = expected.each_ref().map(|x| local_positions(x.clone(), &context));
            let [forward, both] = times(rank, &local, &local_weights, &|x| case.attention(x, Some(&context)));
            numbers.push([forward, both, distance(out, out_alone), distance(grad, grad_alone)]);
        }
        numbers
    });
    let all = match all {
        Ok(all) => all,
        Err(why) => return verdict("times of context-parallel attention", Err(why)),
    };
    let worst = |i: usize, j: usize| all.iter().map(|times| times[i][j]).fold(0.0, f64::max);
    println!("attention of 32768 positions, 32 / 8 heads, head_dim 128, bf16, forward and forward with backward:");
    println!("  one GPU: {:.2} ms, {:.2} ms", worst(0, 0) * 1e3, worst(0, 1) * 1e3);
    for (i, comm) in comm_types(gpus, heads).into_iter().enumerate() {
        let [forward, both] = [0, 1].map(|j| worst(i + 1, j) * 1e3);
        let [out, grad] = [2, 3].map(|j| worst(i + 1, j));
        println!(
            "  {comm:?} over {gpus}: {forward:.2} ms, {both:.2} ms; output off by {out:.1e}, gradient by {grad:.1e}"
        );
    }
    0
}

/// Seconds of a forward pass, and of one with its backward pass.
fn times(rank: &Rank, qkv: &Tensor<4>, weights: &Tensor<4>, f: &dyn Fn(Tensor<4>) -> Tensor<4>) -> [f64; 2] {
    const TIMES: usize = 5;
    let time = |once: &dyn Fn()| {
        once();
        rank.device.sync().expect("the GPU works");
        rank.group(Axis::Cp).barrier();
        let start = Instant::now();
        (0..TIMES).for_each(|_| once());
        rank.device.sync().expect("the GPU works");
        start.elapsed().as_secs_f64() / TIMES as f64
    };
    let forward = time(&|| drop(f(qkv.clone())));
    let both = time(&|| drop(run(qkv.clone(), weights.clone(), f)));
    [forward, both]
}
