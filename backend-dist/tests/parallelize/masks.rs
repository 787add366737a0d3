//! Attention with masks and dropout, as modules of Burn write it, runs as FlashAttention.

use crate::attention::{attention, fused, input, mha};
use crate::harness::{Case, Step, cpu, floats, tensor};
use backend_dist::launch::launch;
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::mesh_backend::{LogicalDevice, LogicalOptions, explain};
use backend_dist::parallelize::Plan;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::tensor::activation::softmax;
use burn::tensor::{Bool, DType, Device, Distribution, Tensor, TensorData};

/// The last keys of each sample are padding: all that are not among the first `lengths`.
fn padding<const N: usize>(lengths: [usize; N], keys: usize, device: &Device) -> Tensor<2, Bool> {
    let is_padding: Vec<bool> = lengths.iter().flat_map(|length| (0..keys).map(move |key| key >= *length)).collect();
    Tensor::from_data(TensorData::new(is_padding, [N, keys]), device)
}

fn self_attention(device: &Device) -> MhaInput {
    MhaInput::self_attn(tensor([2, 6, 16], 3, device))
}

fn loss(model: &MultiHeadAttention, input: MhaInput) -> Tensor<1> {
    model.forward(input).context.powf_scalar(3.0).mean()
}

fn dropping(device: &Device) -> MultiHeadAttention {
    MultiHeadAttentionConfig::new(16, 4).with_dropout(0.1).init(device)
}

/// The input of an attention with masks, and their name.
type Masked = (&'static str, fn(&Device) -> MhaInput);

const MASKED: [Masked; 5] = [
    ("padding", |device| self_attention(device).mask_pad(padding([6, 3], 6, device))),
    ("an attention mask", |device| self_attention(device).mask_attn(generate_autoregressive_mask(2, 6, device))),
    ("both", |device| {
        let input = self_attention(device).mask_pad(padding([4, 6], 6, device));
        input.mask_attn(generate_autoregressive_mask(2, 6, device))
    }),
    ("a sample of padding alone", |device| self_attention(device).mask_pad(padding([5, 0], 6, device))),
    ("padding of other keys", |device| input(device).mask_pad(padding([2, 4], 5, device))),
];

#[test]
fn masks_are_part_of_the_kernel() {
    let cases: [Case<MultiHeadAttention>; 5] = [
        Case { init: mha, loss: |model, device, _| loss(model, MASKED[0].1(device)) },
        Case { init: mha, loss: |model, device, _| loss(model, MASKED[1].1(device)) },
        Case { init: mha, loss: |model, device, _| loss(model, MASKED[2].1(device)) },
        Case { init: mha, loss: |model, device, _| loss(model, MASKED[3].1(device)) },
        Case { init: mha, loss: |model, device, _| loss(model, MASKED[4].1(device)) },
    ];
    for (case, (name, _)) in cases.iter().zip(MASKED) {
        for layout in ["TP1", "TP2"] {
            let report = fused(case, layout);
            assert_eq!(attention(&report), [1, 1], "{name}, {layout}: {report}");
            // Four matrices: forward, and the gradients of the weight and of the input if that is not the model's.
            assert_eq!(report.kernels["GEMM"], 9, "{name}, {layout}: {report}");
        }
    }
}

#[test]
fn dropout_is_part_of_the_kernel() {
    let cases: [Case<MultiHeadAttention>; 2] = [
        Case { init: dropping, loss: |model, device, _| loss(model, self_attention(device)) },
        Case { init: dropping, loss: |model, device, _| loss(model, MASKED[2].1(device)) },
    ];
    for (number, case) in cases.iter().enumerate() {
        let (axes, plans) = (&[Axis::Tp], &[Plan::auto()]);
        // One device of Burn draws other numbers.
        let expected: Step = case.run("TP1", axes, plans, false).swap_remove(0).0;
        for layout in ["TP1", "TP2"] {
            let report = case.check_against(&expected, layout, axes, plans, true);
            assert_eq!(attention(&report), [1, 1], "case {number}, {layout}: {report}");
        }
    }
}

#[test]
fn an_encoder_with_padding_and_dropout_has_no_scores_in_memory() {
    let case = Case::<TransformerEncoder> {
        init: |device| TransformerEncoderConfig::new(16, 32, 4, 2).with_dropout(0.1).init(device),
        loss: |model, device, _| {
            let input = TransformerEncoderInput::new(tensor([4, 8, 16], 3, device));
            model.forward(input.mask_pad(padding([8, 3, 5, 1], 8, device))).powf_scalar(3.0).mean()
        },
    };
    let (axes, plans) = (&[Axis::Tp], &[Plan::auto()]);
    let expected = case.run("TP1", axes, plans, false).swap_remove(0).0;
    for layout in ["TP1", "TP2"] {
        let report = case.check_against(&expected, layout, axes, plans, true);
        assert_eq!(attention(&report), [2, 2], "{layout}: {report}");
        assert_eq!(report.kernels["GEMM"], 33, "{layout}: {report}");
    }
}

#[test]
fn masked_weights_that_are_read_are_computed() {
    let case = Case {
        init: dropping,
        loss: |model: &MultiHeadAttention, device, _| {
            let out = model.forward(MASKED[2].1(device));
            let factor = out.weights.detach().powf_scalar(2.0).mean();
            (out.context.powf_scalar(3.0) * factor.unsqueeze()).mean()
        },
    };
    let (axes, plans) = (&[Axis::Tp], &[Plan::auto()]);
    let expected = case.run("TP1", axes, plans, false).swap_remove(0).0;
    for layout in ["TP1", "TP2"] {
        assert_eq!(attention(&case.check_against(&expected, layout, axes, plans, true)), [1, 1], "{layout}");
    }
}

/// What is hidden by `mask` has the score `-∞`; a row of which all is hidden by `rows`, zeros; the weights are zero where
/// `after` is true.
fn weights(scores: Tensor<4>, [mask, rows, after]: [Tensor<4, Bool>; 3]) -> Tensor<4> {
    let scores = scores.mask_fill(mask, f32::NEG_INFINITY).mask_fill(rows.all_dim(3), 0.0);
    softmax(scores, 3).mask_fill(after, 0.0)
}

/// [`weights`] with these masks, by hand.
fn by_hand(model: &MultiHeadAttention, device: &Device, masks: [Tensor<4, Bool>; 3]) -> Tensor<1> {
    let x = tensor::<3>([2, 6, 16], 3, device);
    let heads = |x: Tensor<3>| x.reshape([2, 6, 4, 4]).swap_dims(1, 2);
    let [q, k, v] = [&model.query, &model.key, &model.value].map(|linear| heads(linear.forward(x.clone())));
    weights(q.matmul(k.transpose()) * 0.3, masks).matmul(v).powf_scalar(3.0).mean()
}

fn mask(lengths: [usize; 2], device: &Device) -> Tensor<4, Bool> {
    padding(lengths, 6, device).reshape([2, 1, 1, 6])
}

fn nothing(device: &Device) -> Tensor<4, Bool> {
    mask([6, 6], device)
}

#[test]
fn masks_that_differ_are_not_mistaken_for_one() {
    let one: Case<MultiHeadAttention> = Case {
        init: mha,
        loss: |model, device, _| {
            let mask = mask([4, 0], device);
            by_hand(model, device, [mask.clone(), mask.clone(), mask])
        },
    };
    assert_eq!(attention(&fused(&one, "TP1")), [1, 1]);
    let others: [Case<MultiHeadAttention>; 4] = [
        Case {
            init: mha,
            loss: |model, device, _| {
                let mask = mask([4, 2], device);
                by_hand(model, device, [mask.clone(), mask, nothing(device)])
            },
        },
        Case {
            init: mha,
            loss: |model, device, _| {
                let hidden = mask([4, 2], device);
                by_hand(model, device, [hidden.clone(), mask([4, 0], device), hidden])
            },
        },
        Case {
            init: mha,
            loss: |model, device, _| {
                let hidden = mask([4, 0], device);
                by_hand(model, device, [hidden.clone(), hidden, mask([3, 0], device)])
            },
        },
        Case {
            init: |device| MultiHeadAttentionConfig::new(16, 4).with_dropout(0.0).with_quiet_softmax(true).init(device),
            loss: |model, device, _| loss(model, MASKED[2].1(device)),
        },
    ];
    for (number, case) in others.iter().enumerate() {
        assert_eq!(attention(&fused(case, "TP1")), [0, 0], "case {number}");
    }
}

/// Attention, and the gradient of its queries; `others` says whether another mask hides, and another draw drops, gradients
/// of weights than weights.
fn output_and_gradient(device: &Device, others: [bool; 2]) -> Vec<f64> {
    device.seed(5);
    let tensor = |seed| Tensor::<4>::from_data(floats(&[2, 4, 6, 4], seed), (device, DType::F64));
    let drawn = || Tensor::<4>::random([2, 4, 6, 6], Distribution::Bernoulli(0.9), (device, DType::F64));
    let [q, k, v, grad] = [1, 2, 3, 4].map(tensor);
    let (hidden, kept) = (mask([4, 0], device), drawn());
    let other_hidden = if others[0] { mask([3, 5], device) } else { hidden.clone() };
    let other_kept = if others[1] { drawn() } else { kept.clone() };
    let scores = q.matmul(k.clone().transpose()) * 0.3;
    let scores = scores.mask_fill(hidden.clone(), f32::NEG_INFINITY).mask_fill(hidden.clone().all_dim(3), 0.0);
    let p = softmax(scores, 3);
    let out = (p.clone().mask_fill(hidden, 0.0) * kept * 1.25).matmul(v.clone());
    let dp = (grad.matmul(v.transpose()) * 1.25 * other_kept).mask_fill(other_hidden.clone(), 0.0);
    let ds = p.clone() * (dp.clone() - (p * dp).sum_dim(3));
    let dq = (ds.mask_fill(other_hidden, 0.0) * 0.3).matmul(k);
    Tensor::cat(vec![out, dq], 0).into_data().iter::<f64>().collect()
}

#[test]
fn gradients_with_another_mask_are_not_those_of_the_attention() {
    let run = |others, fusion| {
        launch(&Mesh::new("TP1".parse().unwrap()).unwrap(), &[cpu()], |rank| {
            let options = LogicalOptions { fusion: Some(fusion), ..Default::default() };
            let device = rank.logical_device_with(&[Axis::Tp], options);
            Ok((output_and_gradient(&device, others), attention(&explain(&device))))
        })
        .unwrap()
        .remove(0)
    };
    for (others, gradients) in [([false, false], 1), ([true, false], 0), ([false, true], 0)] {
        let (found, kernels) = run(others, true);
        assert_eq!(kernels, [1, gradients], "{others:?}");
        for (x, y) in found.iter().zip(run(others, false).0) {
            assert!((x - y).abs() < 1e-12, "{others:?}: {x} instead of {y}");
        }
    }
}
