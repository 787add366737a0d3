//! The linear layer as an operation: what it saves for backward and which gradients it computes.

use burn::backend::tensor::FloatTensor;

use super::super::gemm::{Weight, weight_grad};
use super::{LinearConfig, Output, forward};
use crate::{
    context::attend,
    fp8::{self, Fp8Weight, Purpose, SavedFp8},
    kernels::LocalKernels,
    main_grads::deliver,
    operation::{Parents, operation},
    prologue::step_grads,
    saved_attention::CoreAttention,
    shared_input::SharedInput,
    step::{Step, side_by_side},
};

/// Saved for the backward pass of a linear layer.
#[derive(Clone, Debug)]
pub struct Saved<B: LocalKernels> {
    config: LinearConfig,
    /// The prologue's input, unless nothing before the GEMM needs it.
    x: Option<FloatTensor<B>>,
    params: Vec<FloatTensor<B>>,
    /// The GEMM's input if the weight needs a gradient; `None` also if it is recomputed from `x`.
    out: Option<FloatTensor<B>>,
    /// Of attention, unless recomputed.
    statistics: Option<[FloatTensor<B>; 2]>,
    /// If something before the GEMM needs a gradient, unless it is stored in few bits.
    w: Option<FloatTensor<B>>,
    /// If something before the GEMM needs a gradient.
    needs_w: bool,
    /// Of a GEMM in FP8, which saves its own form of `out`.
    fp8: Option<SavedFp8<B>>,
}

operation! {
    /// Of the input, the prologue's parameters, the bias if there is one, and the weight.
    pub Linear { config: LinearConfig } for N, N, Saved<B>,
    |inputs, _, tracked| {
        let mut tensors = Vec::from(inputs);
        let (w, x) = (tensors.pop().expect("a linear layer has a weight"), tensors.remove(0));
        if !tracked.any() {
            return (forward::<B>(x, &tensors, w, &config, Purpose::Evaluate).y, None);
        }
        let inputs_end = N - 1 - usize::from(config.bias);
        let (weight, others) = (tracked.0[N - 1], tracked.0[..inputs_end].contains(&true));
        let (plain, recompute) = (matches!(config.step, Step::None), config.recompute);
        let attention = config.step.is_attention();
        let keep = weight && !attention && (plain || !recompute);
        let Output { y, prologue, fp8 } =
            forward::<B>(x.clone(), &tensors, w.clone(), &config, Purpose::Train { keep });
        // Backward does not need the bias.
        tensors.truncate(inputs_end - 1);
        let saved = Saved {
            x: (!plain && (others || recompute)).then_some(x),
            params: tensors,
            out: (keep && fp8.is_none()).then_some(prologue.out),
            statistics: prologue.statistics.filter(|_| !recompute),
            w: (others && config.stored.is_none()).then_some(w),
            needs_w: others,
            fp8,
            config: LinearConfig { recompute: recompute && !plain, ..config },
        };
        (y, Some(saved))
    },
    |Saved { config, x, params, out, mut statistics, w, needs_w, fp8 }, grad, mut parents| {
        let other = config.joint.as_ref().and_then(|joint| joint.take_gradient::<B, N>(&mut parents));
        let Parents { ops, grads } = parents;
        let LinearConfig {
            step, context, collectives, fp8: layer, stored, recompute, bias, shared_input, pass, ..
        } = config;
        let shared = shared_input.filter(|_| needs_w);
        // A GEMM that is left to the other layer runs without collectives.
        let leaves = shared.as_ref().is_some_and(SharedInput::is_first) && collectives.are_local();
        let w = w.or_else(|| stored.filter(|_| needs_w).map(|stored| stored.primitive::<B>()));
        let (weight, others) = (&ops.parents[N - 1], &ops.parents[..N - 1]);
        let (inputs, biases) = others.split_at(others.len() - usize::from(bias));
        if let [Some(node)] = biases {
            deliver::<B>(grads, node.id, B::bias_grad(grad.clone()));
        }
        let mut out = out.or_else(|| statistics.as_ref().map(|[out, _]| side_by_side::<B>(out.clone())));
        let used = weight.is_some() || step.is_attention();
        let mut recomputed = None;
        if let (true, Some(x)) = (recompute && used, &x) {
            if let (true, Some(context)) = (step.is_attention(), &context) {
                let (attention, saved) =
                    attend::<B>(step.heads::<B>(x.clone(), &params), context, &CoreAttention::Compute);
                (out, recomputed) = (Some(attention), Some((saved, context)));
            } else {
                let prologue = step.forward::<B>(x.clone(), &params, &CoreAttention::Compute);
                (out, statistics) = (Some(prologue.out), prologue.statistics);
            }
        }
        let weight = weight.as_ref().map(|node| (node.id, pass.weight_grads.of(node.order)));
        let grad = match layer.zip(fp8) {
            Some((layer, saved)) => {
                let weight = weight.map(|(id, deferral)| Fp8Weight { id, deferral, input: out });
                fp8::backward::<B>(&layer, saved, grad, w, weight, &collectives, grads)
            }
            None => {
                let weight = weight.zip(out).map(|((id, deferral), input)| Weight { id, deferral, input });
                if let (true, Some(shared), Some(w)) = (leaves, &shared, &w) {
                    weight_grad::<B>(grad.clone(), weight, &collectives.entry, grads);
                    return shared.leave::<B>([grad, w.clone()]);
                }
                B::gemm_grads(grad, w, weight, &collectives, grads)
            }
        };
        let grad = match (grad, shared) {
            (Some(grad), Some(shared)) => Some(shared.with_left::<B>(grad)),
            (grad, _) => grad,
        };
        match (grad, recomputed) {
            (Some(grad), Some((saved, context))) => {
                for (node, grad) in inputs.iter().zip(step.grads_of_heads::<B>(saved.grads(grad, context))) {
                    if let Some(node) = node {
                        deliver::<B>(grads, node.id, grad);
                    }
                }
            }
            (Some(grad), None) => {
                let needed: [bool; N] = std::array::from_fn(|i| inputs.get(i).is_some_and(Option::is_some));
                let x = x.unwrap_or_else(|| grad.clone());
                for (node, grad) in
                    inputs.iter().zip(step_grads::<B, N>(step, x, &params, statistics, grad, other, needed))
                {
                    if let (Some(node), Some(grad)) = (node, grad) {
                        deliver::<B>(grads, node.id, grad);
                    }
                }
            }
            (None, _) => {}
        }
    },
}
