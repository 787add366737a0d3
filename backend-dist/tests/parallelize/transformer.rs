//! burn-nn's transformers.

use crate::harness::{Case, LAYOUTS, ints, tensor};
use backend_dist::logical::Placement::Shard;
use backend_dist::mesh::Axis;
use backend_dist::mesh_backend::Redistribute;
use backend_dist::parallelize::Plan;
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::tensor::Tensor;

fn loss(y: Tensor<3>) -> Tensor<1> {
    let target = tensor(y.dims(), 5, &y.device());
    (y.clone() - target).powf_scalar(2.0).sum() + y.powf_scalar(3.0).mean()
}

fn encoder() -> Case<TransformerEncoder> {
    Case {
        init: |device| TransformerEncoderConfig::new(16, 32, 4, 2).with_dropout(0.0).with_norm_first(true).init(device),
        loss: |model, device, _| loss(model.forward(TransformerEncoderInput::new(tensor([4, 8, 16], 3, device)))),
    }
}

#[test]
fn the_encoder_in_tensor_parallel() {
    for layout in LAYOUTS {
        let report = encoder().check(layout, &Plan::auto());
        assert!(report.fallbacks.is_empty(), "{layout}: {report}");
        // Two layers: after attention and after the feed-forward network, forward and backward, as in Megatron-LM.
        let expected = if layout == "TP1" { 0 } else { 8 };
        assert_eq!(report.times("all-reduce"), expected, "{layout}: {report}");
        assert_eq!(report.collectives.len(), expected.min(1), "{layout}: {report}");
    }
}

#[test]
fn the_encoder_in_sequence_parallel() {
    let case = Case {
        loss: |model: &TransformerEncoder, device, rank| {
            let mut x = tensor([4, 8, 16], 3, device);
            if let Some(rank) = rank {
                x = x.redistribute(rank, Axis::Tp, Shard(1));
            }
            loss(model.forward(TransformerEncoderInput::new(x)))
        },
        ..encoder()
    };
    for layout in LAYOUTS {
        let report = case.check(layout, &Plan::auto());
        assert!(report.fallbacks.is_empty(), "{layout}: {report}");
        // Two layers of two blocks: one before and one after each, forward and backward.
        if layout != "TP1" {
            assert_eq!((report.times("all-gather"), report.times("reduce-scatter")), (8, 8), "{layout}: {report}");
            assert_eq!(report.collectives.len(), 2, "{layout}: {report}");
        }
    }
}

#[test]
fn the_encoder_with_norms_last_and_masks() {
    let case = Case::<TransformerEncoder> {
        init: |device| {
            TransformerEncoderConfig::new(16, 32, 4, 2).with_dropout(0.0).with_quiet_softmax(true).init(device)
        },
        loss: |model, device, _| {
            let padding = ints([2, 6], 5, device).equal_elem(1);
            let mask = generate_autoregressive_mask(2, 6, device);
            let input = TransformerEncoderInput::new(tensor([2, 6, 16], 3, device)).mask_pad(padding).mask_attn(mask);
            loss(model.forward(input))
        },
    };
    for layout in LAYOUTS {
        let report = case.check(layout, &Plan::auto());
        assert!(report.fallbacks.is_empty(), "{layout}: {report}");
    }
}

/// Masks of dropout are drawn where they are used, of a rank's share alone: none is in memory, whole or as a slice. Two axes
/// share the attention's, which are whole there.
#[test]
fn the_encoder_with_dropout_has_no_masks_in_memory() {
    let case = Case {
        init: |device| TransformerEncoderConfig::new(16, 32, 4, 2).with_dropout(0.1).with_norm_first(true).init(device),
        ..encoder()
    };
    let in_sequence = Case {
        loss: |model: &TransformerEncoder, device, rank| {
            let mut x = tensor([4, 8, 16], 3, device);
            if let Some(rank) = rank {
                x = x.redistribute(rank, Axis::Tp, Shard(1));
            }
            loss(model.forward(TransformerEncoderInput::new(x)))
        },
        ..case
    };
    let (axes, plans) = (&[Axis::Tp], &[Plan::auto()]);
    let expected = case.run("TP1", axes, plans, false).swap_remove(0).0;
    assert_ne!(expected.loss, encoder().alone().loss);
    for layout in LAYOUTS {
        for case in [&case, &in_sequence] {
            case.check_against(&expected, layout, axes, plans, false);
            let report = case.check_against(&expected, layout, axes, plans, true);
            assert!(report.fallbacks.is_empty(), "{layout}: {report}");
            assert_eq!(report.kernels.get("random numbers"), None, "{layout}: {report}");
        }
    }
    let samples = Case { loss: samples_sharded().loss, ..case };
    let report = samples.check_against(&expected, "TP2 DP2", &[Axis::Dp, Axis::Tp], plans, true);
    assert!(report.fallbacks.is_empty() && report.kernels["random numbers"] > 0, "{report}");
}

/// The encoder with its samples sharded along the data-parallel axis.
fn samples_sharded() -> Case<TransformerEncoder> {
    Case {
        loss: |model, device, rank| {
            let mut x = tensor([4, 8, 16], 3, device);
            if let Some(rank) = rank {
                x = x.redistribute(rank, Axis::Dp, Shard(0));
            }
            loss(model.forward(TransformerEncoderInput::new(x)))
        },
        ..encoder()
    }
}

#[test]
fn the_encoder_in_data_parallel_and_with_its_weights_sharded() {
    for layout in ["DP2", "DP4"] {
        let report = samples_sharded().check_on(layout, &[Axis::Dp], &[]);
        // Gradients are summed when they are read.
        assert!(report.fallbacks.is_empty() && report.times("all-gather") == 0, "{layout}: {report}");
        let sharded = Plan::default().along(Axis::Dp).columns("weight");
        let report = samples_sharded().check_on(layout, &[Axis::Dp], &[sharded]);
        assert!(report.fallbacks.is_empty(), "{layout}: {report}");
        // Two layers of six matrices, which are gathered forward and backward.
        assert_eq!(report.times("all-gather"), 24, "{layout}: {report}");
    }
}

#[test]
fn the_encoder_in_tensor_and_data_parallel() {
    for axes in [[Axis::Dp, Axis::Tp], [Axis::Tp, Axis::Dp]] {
        let report = samples_sharded().check_on("TP2 DP2", &axes, &[Plan::auto()]);
        assert!(report.fallbacks.is_empty(), "{report}");
        // The weights of tensor parallelism, sharded along another dimension for data parallelism.
        let other = Plan::default().along(Axis::Dp).rows("query|key|value|linear_inner").columns("output|linear_outer");
        let report = samples_sharded().check_on("TP2 DP2", &axes, &[Plan::auto(), other]);
        assert!(report.fallbacks.is_empty(), "{report}");
    }
}

#[test]
fn the_encoder_with_gradient_checkpointing() {
    let case = Case::<TransformerEncoder> {
        init: |device| {
            let device = device.clone().gradient_checkpointing();
            TransformerEncoderConfig::new(16, 32, 4, 1).with_dropout(0.0).init(&device)
        },
        loss: |model, device, _| {
            let device = device.clone().gradient_checkpointing();
            loss(model.forward(TransformerEncoderInput::new(tensor([4, 8, 16], 3, &device))))
        },
    };
    for layout in LAYOUTS {
        case.check(layout, &Plan::auto());
    }
}
