//! Attention over a context-parallel group of GPUs against one GPU with the whole sequence: results and times.

use crate::clock::on_rank;
use crate::numbers::{most, relative_on_device};
use crate::ranks::{on_gpus, slowest};
use crate::report::Report;
use backend_dist::collective::broadcast;
use backend_dist::launch::Rank;
use backend_dist::mesh::{Axis, ParallelLayout};
use backend_dist::ops::context::{ContextParallel, CpCommType, Documents, attention_in_context};
use backend_dist::ops::{AttentionDropout, AttentionOptions, PackedHeads, PassContext};
use burn::tensor::{DType, Distribution, Tensor};

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

pub fn check(gpus: usize, report: &mut Report) {
    let all =
        on_gpus(&layout(gpus), |rank| Ok(cases(gpus).iter().flat_map(|case| errors(rank, case)).collect::<Vec<_>>()));
    let Some(all) = report.attempt("context-parallel attention", all) else { return };
    for (i, Error { name, bound, .. }) in all[0].iter().enumerate() {
        report.error(name, most(all.iter().flat_map(|errors| errors[i].relative)), *bound);
    }
}

fn layout(gpus: usize) -> ParallelLayout {
    ParallelLayout { cp: gpus, ..Default::default() }
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
            let relative = [relative_on_device(out, out_alone), relative_on_device(grad, grad_alone)];
            found.push(Error { name: format!("{comm:?}, {}, {dtype:?}", case.name), relative, bound });
        }
    }
    found
}

/// Prints the times of a layer's attention: the slowest rank's, on one GPU and over the group, and the group's errors
/// against one rank in bf16.
pub fn speed(gpus: usize, report: &mut Report) {
    let heads = PackedHeads { heads: 32, kv_heads: 8 };
    let options = AttentionOptions::causal(HEAD_DIM);
    let case = Case { name: "causal", positions: 32_768, batch: 1, heads, options, documents: None };
    let all = on_gpus(&layout(gpus), |rank| {
        let [qkv, weights] = inputs(rank, &case, DType::BF16);
        let expected = run(qkv.clone(), weights.clone(), |x| case.attention(x, None));
        let [forward, both] = times(rank, &qkv, &weights, &|x| case.attention(x, None));
        let mut numbers = vec![[forward, both, 0.0, 0.0]];
        for comm in comm_types(gpus, heads) {
            let context = ContextParallel { group: rank.group(Axis::Cp), comm };
            let local = |x: &Tensor<4>| local_positions(x.clone(), &context);
            let (own, own_weights) = (local(&qkv), local(&weights));
            let attention = |x| case.attention(x, Some(&context));
            let [out, grad] = run(own.clone(), own_weights.clone(), attention);
            let errors = [relative_on_device(out, local(&expected[0])), relative_on_device(grad, local(&expected[1]))];
            let [forward, both] = times(rank, &own, &own_weights, &attention);
            numbers.push([forward, both, errors[0], errors[1]]);
        }
        Ok(numbers)
    });
    let Some(all) = report.attempt("times of context-parallel attention", all) else { return };
    println!("attention of 32768 positions, 32 / 8 heads, head_dim 128, bf16, forward and forward with backward:");
    let ways = comm_types(gpus, heads).into_iter().map(|comm| format!("{comm:?} over {gpus}"));
    for (i, way) in std::iter::once("one GPU".into()).chain(ways).enumerate() {
        let [forward, both, out, grad] = std::array::from_fn(|j| slowest(&all, |numbers| numbers[i][j]));
        let (forward, both) = (forward * 1e3, both * 1e3);
        println!("  {way}: {forward:.2} ms, {both:.2} ms; output off by {out:.1e}, gradient by {grad:.1e}");
    }
}

/// Seconds of a forward pass, and of one with its backward pass.
fn times(rank: &Rank, qkv: &Tensor<4>, weights: &Tensor<4>, f: &dyn Fn(Tensor<4>) -> Tensor<4>) -> [f64; 2] {
    let time = |once: &dyn Fn()| on_rank(rank, &rank.group(Axis::Cp), 2, once).done;
    [time(&|| drop(f(qkv.clone()))), time(&|| drop(run(qkv.clone(), weights.clone(), f)))]
}
