//! A linear layer with its prologue, as one autograd node.
//!
//! One node decides what is saved for backward: always the prologue's input, and its output unless it is recomputed. An
//! input that is sharded along the sequence is saved as a shard and gathered again in the backward pass, as in
//! Megatron-LM (`LinearWithGradAccumulationAndAsyncCommunication` in `megatron/core/tensor_parallel/layers.py`).

mod node;

use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;

use super::gemm::{Gemms, InputCollective, LinearCollectives, OutputCollective};
use crate::{
    blockwise::QuantizedWeight,
    context,
    fp8::{self, Fp8Linear, Purpose, SavedFp8},
    operation::{Tensors, apply_to_all},
    pass::PassContext,
    prologue::Prologue,
    residual::Joint,
    shared_input::SharedInput,
    step::{PrologueOutput, Step},
};
pub(crate) use node::Linear;

/// Options of a linear layer.
#[derive(Clone, Debug, Default)]
pub struct LinearOptions {
    /// The collective on the input.
    pub entry: InputCollective,
    /// The collective on the output.
    pub exit: OutputCollective,
    /// Run the GEMMs in FP8 if all sizes are multiples of 16.
    pub fp8: Option<Fp8Linear>,
    /// The weight is this one's value: the backward pass computes it again instead of saving it.
    pub stored: Option<QuantizedWeight>,
    /// Recompute the GEMM's input in the backward pass instead of saving it; for attention also its log-sum-exp.
    pub recompute: bool,
    /// On GPUs with an NCCL link, overlap the collectives with the GEMMs, in two chunks where that is faster.
    pub overlap: bool,
    /// Another linear layer reads the input too. Only without prologue.
    pub shared_input: Option<SharedInput>,
    /// The pass that the layer is part of.
    pub pass: PassContext,
}

/// `prologue(x) · wᵀ + bias` for `w [out, in]` and `bias [out]`. Values and gradients are, bit for bit, those of the
/// separate operations: the prologue, the input collective, [`linear`](crate::linear), the output collective and
/// [`add_bias`](crate::add_bias). One exception: on CUDA a GEMM without output collective adds the bias before
/// rounding.
///
/// The weight's gradient can be [deferred](crate::weight_grads::Deferral) by the pass.
///
/// # Panics
///
/// If shapes do not fit; see the operations.
pub fn linear_with<const D: usize>(
    x: Tensor<D>,
    prologue: Prologue,
    w: Tensor<2>,
    bias: Option<Tensor<1>>,
    options: LinearOptions,
) -> Tensor<3> {
    linear_of(x, None, prologue, w, bias, options)
}

/// [`linear_with`], with the residual joint of `x` if the prologue is a norm.
pub(crate) fn linear_of<const D: usize>(
    x: Tensor<D>,
    joint: Option<Joint>,
    prologue: Prologue,
    w: Tensor<2>,
    bias: Option<Tensor<1>>,
    options: LinearOptions,
) -> Tensor<3> {
    let (shape, [out, inner]) = (x.dims(), w.dims());
    let rank = if prologue.is_attention() { 4 } else { 3 };
    assert_eq!(D, rank, "linear: the input of {prologue:?} is {shape:?}");
    let context = prologue.context(&shape);
    let (step, params) = prologue.split("linear", &shape);
    let input = step.features(&shape);
    assert_eq!(input, inner, "linear: input has {input} features, weight [{out}, {inner}] takes {inner}");
    if let Some(bias) = &bias {
        assert_eq!(bias.dims(), [out], "linear: the bias does not fit the weight [{out}, {inner}]");
    }
    let LinearOptions { entry, exit, fp8, stored, recompute, overlap, shared_input, pass } = options;
    let joint = joint.filter(|_| step.is_norm());
    let shared_input = shared_input.filter(|_| matches!(step, Step::None));
    let recompute = recompute || context.is_some();
    let config = LinearConfig {
        step,
        context,
        collectives: LinearCollectives { entry, exit, overlap },
        fp8,
        stored,
        recompute,
        bias: bias.is_some(),
        joint,
        shared_input,
        pass,
    };
    let last = bias.map(Tensor::into_dispatch).into_iter().chain([w.into_dispatch()]);
    apply_to_all(Linear { config }, [x.into_dispatch()].into_iter().chain(params).chain(last), Tensors::none())
}

/// Everything about the operation but its tensors; by default a layer without prologue, bias or collectives.
#[derive(Clone, Debug, Default)]
pub(crate) struct LinearConfig {
    pub step: Step,
    /// Context plan of attention; attention is then recomputed in the backward pass.
    pub context: Option<context::ContextOptions>,
    pub collectives: LinearCollectives,
    pub fp8: Option<Fp8Linear>,
    /// What the weight is computed from, if it is not saved for backward.
    pub stored: Option<QuantizedWeight>,
    pub recompute: bool,
    /// Whether there is a bias.
    pub bias: bool,
    /// Residual joint of a norm's input.
    pub joint: Option<Joint>,
    /// Another linear layer reads the input too.
    pub shared_input: Option<SharedInput>,
    pub pass: PassContext,
}

/// The output of a forward pass.
struct Output<B: Gemms> {
    y: FloatTensor<B>,
    /// The prologue's output.
    prologue: PrologueOutput<B>,
    /// Saved by a GEMM in FP8.
    fp8: Option<SavedFp8<B>>,
}

/// `extras` are the prologue's parameters and the bias; `purpose` is that of an FP8 GEMM.
fn forward<B: Gemms>(
    x: FloatTensor<B>,
    extras: &[FloatTensor<B>],
    w: FloatTensor<B>,
    config: &LinearConfig,
    purpose: Purpose,
) -> Output<B> {
    let prologue = match (config.joint.as_ref().and_then(Joint::take_normed::<B>), config.step, &config.context) {
        (Some(out), ..) => PrologueOutput { out, statistics: None },
        (None, step, Some(context)) if step.is_attention() => {
            let heads = step.heads::<B>(x, extras);
            PrologueOutput { out: context::attend::<B>(heads, context, &config.pass.attention).0, statistics: None }
        }
        _ => config.step.forward::<B>(x, extras, &config.pass.attention),
    };
    let bias = extras.last().filter(|_| config.bias).cloned();
    let fp8 = config.fp8.as_ref();
    let in_fp8 = fp8.and_then(|fp8| {
        let operands = (prologue.out.clone(), w.clone(), bias.clone());
        fp8::forward::<B>(fp8, operands, &config.collectives, (purpose, &config.pass.sharing))
    });
    let (y, fp8) = match in_fp8 {
        Some((y, saved)) => (y, Some(saved)),
        None => (B::gemm(prologue.out.clone(), w, bias, &config.collectives), None),
    };
    Output { y, prologue, fp8 }
}
