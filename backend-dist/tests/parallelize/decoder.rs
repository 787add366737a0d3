//! burn-nn's decoder and cross-attention.

use crate::harness::{Case, LAYOUTS, ints, tensor};
use backend_dist::mesh::Axis;
use backend_dist::parallelize::Plan;
use burn::nn::attention::{CrossAttention, CrossAttentionConfig, generate_autoregressive_mask};
use burn::nn::transformer::{TransformerDecoder, TransformerDecoderConfig, TransformerDecoderInput};

#[test]
fn the_decoder() {
    let case = Case::<TransformerDecoder> {
        init: |device| TransformerDecoderConfig::new(16, 32, 4, 2).with_dropout(0.0).init(device),
        loss: |model, device, _| {
            let (target, memory) = (tensor([2, 6, 16], 3, device), tensor([2, 5, 16], 4, device));
            let mask = generate_autoregressive_mask(2, 6, device);
            let padding = ints([2, 5], 4, device).equal_elem(0);
            let input = TransformerDecoderInput::new(target, memory).target_mask_attn(mask).memory_mask_pad(padding);
            let y = model.forward(input);
            (y.clone() - tensor([2, 6, 16], 5, device)).powf_scalar(2.0).sum() + y.powf_scalar(3.0).mean()
        },
    };
    for layout in LAYOUTS {
        let plan = [Plan::auto()];
        case.check_with(layout, &[Axis::Tp], &plan, false);
        let report = case.check_with(layout, &[Axis::Tp], &plan, true);
        assert!(report.fallbacks.is_empty(), "{layout}: {report}");
        // Two layers, of themselves and of the memory.
        assert_eq!(report.kernels["attention"], 4, "{layout}: {report}");
        assert_eq!(report.kernels["attention gradient"], 4, "{layout}: {report}");
    }
}

#[test]
fn cross_attention() {
    let case = Case::<CrossAttention> {
        init: |device| CrossAttentionConfig::new(16, 12, 8, 4, 2).with_dropout(0.0).init(device),
        loss: |model, device, _| {
            let y = model.forward(tensor([2, 6, 16], 3, device), tensor([2, 5, 12], 4, device), None);
            (y.clone() - tensor([2, 6, 16], 5, device)).powf_scalar(2.0).sum() + y.powf_scalar(3.0).mean()
        },
    };
    for layout in LAYOUTS {
        case.check(layout, &Plan::auto());
    }
}
