//! The public operations: shape checks, then the extension.

use std::sync::Arc;

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Tensor};

use super::autodiff::MoeOps;
use super::journey::Journey;
use super::rows::RowMap;
use crate::comm::Group;
use crate::exchange::{Exchange, ExchangeOps};
use crate::ops::fp8;

/// Rows of `x [rows, n]` as `map` says: a row of the result is the sum of rows of `x`, of at most one for a map that
/// picks.
///
/// # Panics
/// If the map takes another number of rows.
pub fn gather_rows(x: Tensor<2>, map: &RowMap) -> Tensor<2> {
    assert_eq!(x.dims()[0], map.inputs(), "gather_rows: x is {:?}, the map takes {} rows", x.dims(), map.inputs());
    let (to, back) = map.tables();
    Tensor::from_dispatch(<Dispatch as MoeOps>::op_gather_rows(
        x.into_dispatch(),
        to.into_dispatch(),
        back.into_dispatch(),
    ))
}

/// Rows `send[j]` of dimension 0 go to member `j`, the result has `receive[i]` rows of each member `i`; gradients go
/// back.
pub fn all_to_all(x: Tensor<2>, send: &[usize], receive: &[usize], group: &Group) -> Tensor<2> {
    if group.size() == 1 {
        return x;
    }
    let exchange =
        |send: &[usize], receive: &[usize]| Exchange::AllToAll { send: send.into(), receive: receive.into() };
    let (forward, backward) = (exchange(send, receive), exchange(receive, send));
    Tensor::from_dispatch(Dispatch::exchange(x.into_dispatch(), forward, Some(backward), group.clone()))
}

/// `x · wᵀ` for `x [rows, hidden]` and `w [experts, hidden]`, computed and given in f32, for f64 in f64 (Megatron's
/// `--moe-router-dtype fp32`). Gradients have the types of `x` and `w`; that of `w` is summed up in f32.
///
/// # Panics
/// If the shapes do not fit.
pub fn router_logits(x: Tensor<2>, w: Tensor<2>) -> Tensor<2> {
    assert_eq!(x.dims()[1], w.dims()[1], "router: input is {:?}, weight {:?}", x.dims(), w.dims());
    Tensor::from_dispatch(<Dispatch as MoeOps>::op_router_logits(x.into_dispatch(), w.into_dispatch()))
}

/// A matrix for each group of rows: `x · w_gᵀ` for the `counts[g]` rows of group `g` of `x [rows, in]`, which follow
/// each other. `w [groups · out, in]` has the groups' matrices below each other; the result is `[rows, out]`.
///
/// The weight's gradient can be [deferred](crate::ops::weight_grads::deferred), and goes to its
/// [main gradient](crate::ops::main_grads) if it has one.
///
/// # Panics
/// If the shapes do not fit.
pub fn grouped_linear(x: Tensor<2>, w: Tensor<2>, counts: &Arc<[usize]>) -> Tensor<2> {
    check_groups(x.dims(), x.dims()[1], w.dims(), counts);
    Tensor::from_dispatch(<Dispatch as MoeOps>::op_grouped_linear(x.into_dispatch(), w.into_dispatch(), counts.clone()))
}

/// [`grouped_linear`] of `silu(gate) up p` for `x [rows, 2 in] = [gate | up]` and a factor `p [rows]` of each row, in
/// f32 or f64: with the factor in front of the product nobody needs the product's result again. With `recompute` the
/// product's input is made again in the backward pass.
///
/// # Panics
/// If the shapes or types do not fit.
pub fn grouped_swiglu_linear(
    x: Tensor<2>,
    p: Tensor<1>,
    w: Tensor<2>,
    counts: &Arc<[usize]>,
    recompute: bool,
) -> Tensor<2> {
    let [rows, double] = x.dims();
    assert!(double.is_multiple_of(2), "grouped_swiglu_linear: {double} features are not [gate | up]");
    assert_eq!(p.dims(), [rows], "grouped_swiglu_linear: a factor for each of {rows} rows");
    let wide = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    assert_eq!(p.dtype(), wide, "grouped_swiglu_linear: the type of the factors of {:?}", x.dtype());
    check_groups([rows, double], double / 2, w.dims(), counts);
    let (x, p, w) = (x.into_dispatch(), p.into_dispatch(), w.into_dispatch());
    Tensor::from_dispatch(<Dispatch as MoeOps>::op_grouped_swiglu_linear(x, p, w, counts.clone(), recompute))
}

/// What its expert makes of each of the rows `x [rows, hidden]` that `journey` sends, on whichever rank:
/// [`grouped_linear`] with `gate_up` and [`grouped_swiglu_linear`] with `down`, or the same in FP8, between two
/// [`all_to_all`]s, which run beside the experts where every member has a GPU. `p [rows, 1]` are the probabilities. All
/// members must call it.
///
/// # Panics
/// If the shapes or types do not fit.
pub fn through_experts(
    x: Tensor<2>,
    p: Tensor<2>,
    [gate_up, down]: [Tensor<2>; 2],
    journey: &Arc<Journey>,
    recompute: bool,
) -> Tensor<2> {
    let ([count, hidden], [rows, inner], experts) = (x.dims(), gate_up.dims(), journey.experts());
    assert_eq!(count, journey.rows(), "experts: rows, and those that are sent");
    let wide = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    assert_eq!((p.dims(), p.dtype()), ([count, 1], wide), "experts: a probability for each row of {:?}", x.dtype());
    let fits =
        inner == hidden && rows.is_multiple_of(2 * experts) && down.dims() == [experts * hidden, rows / experts / 2];
    assert!(fits, "{experts} experts: matrices {:?} and {:?}, {hidden} features", [rows, inner], down.dims());
    if journey.fp8.is_some() {
        let groups = journey.pieces.iter().flat_map(|piece| piece.counts.iter().copied());
        let sizes: Vec<usize> = [hidden, down.dims()[1]].into_iter().chain(groups).collect();
        let multiple = sizes.iter().all(|size| size.is_multiple_of(fp8::MULTIPLE));
        assert!(
            multiple,
            "FP8 experts: features and groups of rows, {sizes:?}, must be multiples of {}",
            fp8::MULTIPLE
        );
    }
    let [gate_up, down] = [gate_up, down].map(Tensor::into_dispatch);
    let (x, p, journey) = (x.into_dispatch(), p.into_dispatch(), journey.clone());
    Tensor::from_dispatch(<Dispatch as MoeOps>::op_through_experts(x, p, gate_up, down, journey, recompute))
}

/// Whether [`through_experts`] is quicker with a rank's experts in two pieces than one after the other, if every rank
/// has a GPU, an exchange brings `bytes` to a rank and the experts have this many features outside and inside.
#[cfg(feature = "cuda")]
pub fn is_quicker_in_two(bytes: usize, features: [usize; 2]) -> bool {
    crate::ops::pieces::is_worth_a_piece(bytes, features)
}

/// Never: on CPU ranks nothing runs beside anything.
#[cfg(not(feature = "cuda"))]
pub fn is_quicker_in_two(_: usize, _: [usize; 2]) -> bool {
    false
}

/// `x`, through which `loss [1]` gets the gradient `scale` when `x` gets one: an auxiliary loss that is added to no
/// other loss (Megatron's `MoEAuxLossAutoScaler`).
pub fn inject<const D: usize>(x: Tensor<D>, loss: Tensor<1>, scale: f64) -> Tensor<D> {
    assert_eq!(loss.dims(), [1], "inject: a loss is one number");
    Tensor::from_dispatch(<Dispatch as MoeOps>::op_inject(x.into_dispatch(), loss.into_dispatch(), scale))
}

/// What the number of rows of a group should be a multiple of on this device. On GPUs there is a plan for every size of
/// a product, so sizes that change with every call are rounded up, with rows of zeros.
pub fn row_multiple(device: &Device) -> usize {
    if is_gpu(device) { 128 } else { 1 }
}

#[cfg(feature = "cuda")]
fn is_gpu(device: &Device) -> bool {
    let anchor = Tensor::<1>::empty([1], (&device.clone().without_autodiff(), DType::F32));
    anchor.try_into_primitive::<burn::backend::Cube>().is_ok_and(|x| matches!(x.device, cubecl::Device::Cuda(_)))
}

#[cfg(not(feature = "cuda"))]
fn is_gpu(_: &Device) -> bool {
    false
}

fn check_groups([rows, _]: [usize; 2], inner: usize, w: [usize; 2], counts: &[usize]) {
    assert!(
        !counts.is_empty() && w[0].is_multiple_of(counts.len()) && w[1] == inner,
        "grouped linear: weight {w:?} for {} groups of rows of {inner} features",
        counts.len()
    );
    assert_eq!(counts.iter().sum::<usize>(), rows, "grouped linear: groups {counts:?} make up the rows");
}
