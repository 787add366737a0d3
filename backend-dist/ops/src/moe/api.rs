//! The public operations: shape checks, then the extension.

use std::sync::Arc;

use burn::backend::Dispatch;
use burn::tensor::{Device, Tensor};

use super::activation::ExpertActivation;
use super::expert_pipeline::{ExpertPipeline, ThroughExperts};
use super::operations::{GatherRows, GroupedActivatedLinear, GroupedLinear, Inject, RouterLogits};
use super::{biased::ClampedSwiGlu, clamped_linear::GroupedClampedLinear, row_map::RowMap};
use crate::dtype::wide;
use crate::operation::{Tensors, apply, apply_with};
use crate::{blockwise::QuantizedWeight, pass::PassContext};
use ranks::collective_ops::{Collective, CollectiveOps};
use ranks::comm::Group;

/// Gathers rows of `x [rows, n]` by `map`: an output row is a sum of rows of `x`, or a copy of one for a map that
/// picks.
///
/// # Panics
/// If the map takes another number of rows.
pub fn gather_rows(x: Tensor<2>, map: &RowMap) -> Tensor<2> {
    assert_eq!(x.dims()[0], map.inputs(), "gather_rows: x is {:?}, the map takes {} rows", x.dims(), map.inputs());
    let (to, back) = map.tables();
    apply_with(GatherRows {}, [x.into_dispatch()], Tensors::ints([to, back].map(Tensor::into_dispatch)))
}

/// Rows `send[j]` of dimension 0 go to member `j`, the output has `receive[i]` rows of each member `i`; gradients are
/// sent back.
pub fn all_to_all(x: Tensor<2>, send: &[usize], receive: &[usize], group: &Group) -> Tensor<2> {
    if group.size() == 1 {
        return x;
    }
    let collective =
        |send: &[usize], receive: &[usize]| Collective::AllToAll { send: send.into(), receive: receive.into() };
    let (forward, backward) = (collective(send, receive), collective(receive, send));
    Tensor::from_dispatch(Dispatch::collective(x.into_dispatch(), forward, Some(backward), group.clone()))
}

/// `x · wᵀ` for `x [tokens, hidden]` and `w [experts, hidden]`, computed and returned in f32, or f64 for f64
/// (Megatron's `--moe-router-dtype fp32`). Gradients have the types of `x` and `w`; that of `w` is accumulated in f32.
///
/// # Panics
/// If the shapes do not fit.
pub fn router_logits(x: Tensor<2>, w: Tensor<2>) -> Tensor<2> {
    assert_eq!(x.dims()[1], w.dims()[1], "router: input is {:?}, weight {:?}", x.dims(), w.dims());
    apply(RouterLogits {}, [x, w].map(Tensor::into_dispatch))
}

/// The matrices of groups, `[groups · out, in]`, one after the other.
#[derive(Clone, Debug)]
pub struct GroupWeights {
    /// For the GEMM.
    pub value: Tensor<2>,
    /// What it was computed from: then the backward pass computes it again instead of saving it.
    pub stored: Option<QuantizedWeight>,
}

impl From<Tensor<2>> for GroupWeights {
    fn from(value: Tensor<2>) -> Self {
        Self { value, stored: None }
    }
}

/// Grouped GEMM: `x · w_gᵀ` for the `counts[g]` consecutive tokens of group `g` of `x [tokens, in]`. `w [groups · out,
/// in]` has the groups' matrices one after the other; the output is `[tokens, out]`.
///
/// The weight's gradient can be [deferred](crate::weight_grads::Deferral) by `pass`, and goes to its
/// [main gradient](crate::main_grads) if it has one.
///
/// # Panics
/// If the shapes do not fit.
pub fn grouped_linear(
    x: Tensor<2>,
    w: impl Into<GroupWeights>,
    counts: &Arc<[usize]>,
    pass: &PassContext,
) -> Tensor<2> {
    let GroupWeights { value: w, stored } = w.into();
    check_groups(x.dims(), x.dims()[1], w.dims(), counts);
    let operation = GroupedLinear { stored, counts: counts.clone(), deferral: pass.weight_grads.clone() };
    apply(operation, [x, w].map(Tensor::into_dispatch))
}

/// [`grouped_linear`] of `act(x) p` for `x [tokens, inputs in]`, of SwiGLU `[gate | up]`, and a probability `p [tokens]`,
/// in f32 or f64. With the probability before the GEMM, backward does not need the GEMM's output. With `recompute`, the
/// GEMM's input is recomputed in the backward pass.
///
/// # Panics
/// If the shapes or types do not fit.
pub fn grouped_activated_linear(
    x: Tensor<2>,
    p: Tensor<1>,
    w: impl Into<GroupWeights>,
    act: ExpertActivation,
    counts: &Arc<[usize]>,
    recompute: bool,
    pass: &PassContext,
) -> Tensor<2> {
    let GroupWeights { value: w, stored } = w.into();
    check_activated("grouped_activated_linear", &x, &p, &w, act, counts);
    let (counts, deferral) = (counts.clone(), pass.weight_grads.clone());
    let operation = GroupedActivatedLinear { stored, act, counts, recompute, deferral };
    apply(operation, [x.into_dispatch(), p.into_dispatch(), w.into_dispatch()])
}

/// [`grouped_linear`] of `act(x + b) p`, plus `c p`: the second layer of experts with the biases `[b, c]` behind their
/// activation, for `x [tokens, 2 in] = [gate | up]`, a probability `p [tokens]`, in f32 or f64, `b [groups · 2 in]` and
/// `c [groups · out]`. With `recompute`, the GEMM's input is recomputed in the backward pass.
///
/// # Panics
/// If the shapes or types do not fit.
#[allow(clippy::too_many_arguments)]
pub fn grouped_clamped_linear(
    x: Tensor<2>,
    p: Tensor<1>,
    w: impl Into<GroupWeights>,
    [first, second]: [Tensor<1>; 2],
    act: ClampedSwiGlu,
    counts: &Arc<[usize]>,
    recompute: bool,
    pass: &PassContext,
) -> Tensor<2> {
    let GroupWeights { value: w, stored } = w.into();
    check_activated("grouped_clamped_linear", &x, &p, &w, ExpertActivation::SwiGlu, counts);
    let (groups, [_, double]) = (counts.len(), x.dims());
    let biases = [first.dims(), second.dims()];
    assert_eq!(biases, [[groups * double], [w.dims()[0]]], "grouped_clamped_linear: the biases of {groups} groups");
    let [first, second] = [first, second].map(Tensor::into_dispatch);
    let (counts, deferral) = (counts.clone(), pass.weight_grads.clone());
    let operation = GroupedClampedLinear { stored, act, counts, recompute, deferral };
    apply(operation, [x.into_dispatch(), p.into_dispatch(), w.into_dispatch(), first, second])
}

/// The output of its expert, on whichever rank, for each of the tokens `x [tokens, hidden]` that `pipeline` dispatches:
/// [`grouped_linear`] with `gate_up` and [`grouped_activated_linear`] with `down`, or the same in FP8, between two
/// [`all_to_all`]s. These overlap the experts if every member has a GPU. `p [tokens, 1]` are the probabilities. All
/// members must call it.
///
/// # Panics
/// If the shapes or types do not fit.
pub fn through_experts(
    x: Tensor<2>,
    p: Tensor<2>,
    [gate_up, down]: [Tensor<2>; 2],
    pipeline: &Arc<ExpertPipeline>,
    recompute: bool,
) -> Tensor<2> {
    let ([count, hidden], [rows, inner], experts) = (x.dims(), gate_up.dims(), pipeline.experts());
    assert_eq!(count, pipeline.rows(), "experts: tokens, and those that are sent");
    let wide = wide(x.dtype());
    assert_eq!((p.dims(), p.dtype()), ([count, 1], wide), "experts: a probability for each row of {:?}", x.dtype());
    let inputs = pipeline.act.inputs();
    let fits = inner == hidden
        && rows.is_multiple_of(inputs * experts)
        && down.dims() == [experts * hidden, rows / experts / inputs];
    assert!(fits, "{experts} experts: matrices {:?} and {:?}, {hidden} features", [rows, inner], down.dims());
    if let Some(multiple) = pipeline.fp8.as_ref().map(|[first, _]| first.multiple()) {
        let groups = pipeline.chunks.iter().flat_map(|chunk| chunk.counts.iter().copied());
        let sizes: Vec<usize> = [hidden, down.dims()[1]].into_iter().chain(groups).collect();
        assert!(
            sizes.iter().all(|size| size.is_multiple_of(multiple)),
            "FP8 experts: features and groups of rows, {sizes:?}, must be multiples of {multiple}"
        );
    }
    let operation = ThroughExperts { pipeline: pipeline.clone(), recompute };
    apply(operation, [x, p, gate_up, down].map(Tensor::into_dispatch))
}

/// Whether [`through_experts`] is faster with a rank's experts in two chunks than in one, if every rank has a GPU, a
/// collective transfers `bytes` per rank, and the experts have feature sizes `[hidden, intermediate]`.
#[cfg(feature = "cuda")]
pub fn is_faster_in_two_chunks(bytes: usize, features: [usize; 2]) -> bool {
    layouts::gemm_split::is_worth_chunking(gpu::first_model(), bytes, features)
}

/// Never: CPU ranks overlap nothing.
#[cfg(not(feature = "cuda"))]
pub fn is_faster_in_two_chunks(_: usize, _: [usize; 2]) -> bool {
    false
}

/// Returns `x`. When `x` gets a gradient, `loss [1]` gets the gradient `scale`: an auxiliary loss that is not added to
/// another loss (Megatron's `MoEAuxLossAutoScaler`).
pub fn inject<const D: usize>(x: Tensor<D>, loss: Tensor<1>, scale: f64) -> Tensor<D> {
    assert_eq!(loss.dims(), [1], "inject: a loss is one number");
    apply(Inject { scale }, [x.into_dispatch(), loss.into_dispatch()])
}

/// The tokens of a group should be a multiple of this on this device. On GPUs every GEMM size needs its own plan, so
/// sizes that change with every call are padded with zeros.
pub fn row_multiple(device: &Device) -> usize {
    if is_gpu(device) { 128 } else { 1 }
}

#[cfg(feature = "cuda")]
fn is_gpu(device: &Device) -> bool {
    let anchor = Tensor::<1>::empty([1], (&device.clone().without_autodiff(), burn::tensor::DType::F32));
    anchor.try_into_primitive::<burn::backend::Cube>().is_ok_and(|x| matches!(x.device, cubecl::Device::Cuda(_)))
}

#[cfg(not(feature = "cuda"))]
fn is_gpu(_: &Device) -> bool {
    false
}

/// Of a layer behind an activation, times factors.
fn check_activated(
    operation: &str,
    x: &Tensor<2>,
    p: &Tensor<1>,
    w: &Tensor<2>,
    act: ExpertActivation,
    counts: &[usize],
) {
    let ([rows, features], inputs) = (x.dims(), act.inputs());
    assert!(features.is_multiple_of(inputs), "{operation}: {features} features are not [gate | up]");
    assert_eq!(p.dims(), [rows], "{operation}: a factor for each of {rows} rows");
    let wide = wide(x.dtype());
    assert_eq!(p.dtype(), wide, "{operation}: the type of the factors of {:?}", x.dtype());
    check_groups([rows, features], features / inputs, w.dims(), counts);
}

fn check_groups([rows, _]: [usize; 2], inner: usize, w: [usize; 2], counts: &[usize]) {
    assert!(
        !counts.is_empty() && w[0].is_multiple_of(counts.len()) && w[1] == inner,
        "grouped linear: weight {w:?} for {} groups of rows of {inner} features",
        counts.len()
    );
    assert_eq!(counts.iter().sum::<usize>(), rows, "grouped linear: groups {counts:?} make up the rows");
}
