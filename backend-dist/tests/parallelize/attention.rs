//! Attention that is written as a softmax between two GEMMs runs as FlashAttention where nobody reads the scores.

use crate::harness::{Case, tensor};
use backend_dist::mesh::Axis;
use backend_dist::mesh_backend::Report;
use backend_dist::parallelize::Plan;
use burn::module::{Module, ModuleDisplay};
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::tensor::activation::softmax;
use burn::tensor::{Device, Tensor};

pub fn fused<M: Module + ModuleDisplay>(case: &Case<M>, layout: &str) -> Report {
    case.check_with(layout, &[Axis::Tp], &[Plan::auto()], true)
}

pub fn attention(report: &Report) -> [usize; 2] {
    ["attention", "attention gradient"].map(|kernel| report.kernels.get(kernel).copied().unwrap_or(0))
}

pub fn mha(device: &Device) -> MultiHeadAttention {
    MultiHeadAttentionConfig::new(16, 4).with_dropout(0.0).init(device)
}

pub fn input(device: &Device) -> MhaInput {
    let [x, memory] = [([2, 6, 16], 3), ([2, 5, 16], 4)].map(|(shape, seed)| tensor(shape, seed, device));
    MhaInput::new(x, memory.clone(), memory)
}

#[test]
fn an_encoder_has_no_scores_in_memory() {
    let case = Case::<TransformerEncoder> {
        init: |device| TransformerEncoderConfig::new(16, 32, 4, 2).with_dropout(0.0).init(device),
        loss: |model, device, _| {
            model.forward(TransformerEncoderInput::new(tensor([4, 8, 16], 3, device))).powf_scalar(3.0).mean()
        },
    };
    for layout in ["TP1", "TP2"] {
        let report = fused(&case, layout);
        assert_eq!(attention(&report), [2, 2], "{layout}: {report}");
        // Two layers of six matrices: forward, and the gradients of the weight and, but for the first three, of the input.
        assert_eq!(report.kernels["GEMM"], 33, "{layout}: {report}");
    }
}

#[test]
fn queries_may_see_other_keys_than_their_own() {
    let case = Case {
        init: mha,
        loss: |model: &MultiHeadAttention, device, _| model.forward(input(device)).context.powf_scalar(3.0).mean(),
    };
    for layout in ["TP1", "TP2"] {
        assert_eq!(attention(&fused(&case, layout)), [1, 1], "{layout}");
    }
}

#[test]
fn weights_that_are_read_are_computed() {
    let case = Case {
        init: mha,
        loss: |model: &MultiHeadAttention, device, _| {
            let out = model.forward(input(device));
            out.context.powf_scalar(3.0).mean() + out.weights.powf_scalar(2.0).mean()
        },
    };
    for layout in ["TP1", "TP2"] {
        // The gradient of the scores comes from two places, that of the values from one.
        assert_eq!(attention(&fused(&case, layout)), [1, 1], "{layout}");
    }
}

#[test]
fn weights_may_be_read_while_their_gradients_are_not_wanted() {
    let case = Case {
        init: mha,
        loss: |model: &MultiHeadAttention, device, _| {
            let out = model.forward(input(device));
            let factor = out.weights.detach().powf_scalar(2.0).mean();
            (out.context.powf_scalar(3.0) * factor.unsqueeze()).mean()
        },
    };
    assert_eq!(attention(&fused(&case, "TP2")), [1, 1]);
}

/// The context of `weights` of the scores, by hand.
fn by_hand(model: &MultiHeadAttention, device: &Device, weights: fn(Tensor<4>) -> Tensor<4>) -> Tensor<1> {
    let x = tensor::<3>([2, 6, 16], 3, device);
    let heads = |x: Tensor<3>| x.reshape([2, 6, 4, 4]).swap_dims(1, 2);
    let [q, k, v] = [&model.query, &model.key, &model.value].map(|linear| heads(linear.forward(x.clone())));
    weights(q.matmul(k.transpose())).matmul(v).powf_scalar(3.0).mean()
}

#[test]
fn other_functions_of_the_scores_are_not_mistaken_for_a_softmax() {
    let softmaxed: Case<MultiHeadAttention> =
        Case { init: mha, loss: |model, device, _| by_hand(model, device, |scores| softmax(scores * 0.3, 3)) };
    assert_eq!(attention(&fused(&softmaxed, "TP1")), [1, 1]);
    let others: [Case<MultiHeadAttention>; 4] = [
        Case { init: mha, loss: |model, device, _| by_hand(model, device, |x| softmax(x.clamp(-0.01, 0.01), 3)) },
        Case { init: mha, loss: |model, device, _| by_hand(model, device, |x| softmax(x.tanh(), 3)) },
        Case { init: mha, loss: |model, device, _| by_hand(model, device, |x| softmax(x, 3) * 2.0) },
        Case { init: mha, loss: |model, device, _| by_hand(model, device, |x| softmax(x, 2)) },
    ];
    for (number, case) in others.iter().enumerate() {
        assert_eq!(attention(&fused(case, "TP1")), [0, 0], "case {number}");
    }
}

#[test]
fn what_else_is_computed_from_scores_of_attention_is_right() {
    // The exponentials, and weights with a tensor of another width, transposed as in the gradient of the values.
    let case = Case::<MultiHeadAttention> {
        init: mha,
        loss: |model, device, _| {
            let x = tensor::<3>([2, 6, 16], 3, device);
            let heads = |x: Tensor<3>| x.reshape([2, 6, 4, 4]).swap_dims(1, 2);
            let [q, k, v] = [&model.query, &model.key, &model.value].map(|linear| heads(linear.forward(x.clone())));
            let scores = q.matmul(k.transpose());
            let exponentials = (scores.clone() - scores.detach().max_dim(3)).exp();
            let weights = exponentials.clone() / exponentials.clone().sum_dim(3);
            let context = weights.clone().matmul(v.clone());
            let others = exponentials.transpose().matmul(v);
            let narrow = weights.transpose().matmul(tensor([2, 4, 6, 3], 9, device));
            context.powf_scalar(3.0).mean() + others.powf_scalar(2.0).mean() + narrow.powf_scalar(2.0).mean()
        },
    };
    for layout in ["TP1", "TP2"] {
        assert_eq!(attention(&fused(&case, layout)), [1, 1], "{layout}");
    }
}
