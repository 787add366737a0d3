//! A detector of objects: boxes, which of them are objects, and of which class.

use std::ops::Range;

use burn::nn::PaddingConfig2d;
use burn::nn::conv::Conv2d;
use burn::nn::interpolate::{Interpolate2d, Interpolate2dConfig, InterpolateMode};
use burn::nn::loss::{BinaryCrossEntropyLossConfig, CrossEntropyLossConfig};
use burn::nn::pool::{AvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use burn::prelude::*;
use burn::tensor::activation::silu;
use burn_megatron::prelude::*;

use crate::vision::same;
use crate::{PLAIN, classes, numbers, plan, proven};

/// YOLOX: focus, spatial pyramid, a decoupled head; boxes, objects and classes.
#[derive(Module, Debug)]
struct Detector {
    focus: Conv2d,
    pools: [MaxPool2d; 3],
    neck: Conv2d,
    up: Interpolate2d,
    lateral: Conv2d,
    boxes: Conv2d,
    objects: Conv2d,
    kinds: Conv2d,
}

#[test]
fn detector() {
    let pool = |k: usize| {
        MaxPool2dConfig::new([k, k])
            .with_strides([1, 1])
            .with_padding(PaddingConfig2d::Explicit(k / 2, k / 2, k / 2, k / 2))
            .init()
    };
    let make = |device: &Device| Detector {
        focus: same([12, 4], 3, true, device),
        pools: [pool(3), pool(5), pool(7)],
        neck: same([16, 4], 1, true, device),
        up: Interpolate2dConfig::new().with_scale_factor(Some([2.0, 2.0])).with_mode(InterpolateMode::Nearest).init(),
        lateral: same([8, 4], 3, true, device),
        boxes: same([4, 4], 1, true, device),
        objects: same([4, 1], 1, true, device),
        kinds: same([4, 3], 1, true, device),
    };
    let loss = |model: &Detector, items: Range<usize>, device: &Device| {
        let n = items.len();
        let x = numbers(&items, [n, 3, 8, 8], 2, device);
        let part = |top: i32, left: i32| x.clone().slice(s![.., .., top..;2, left..;2]);
        let x = Tensor::cat(vec![part(0, 0), part(1, 0), part(0, 1), part(1, 1)], 1);
        let fine = silu(model.focus.forward(x));
        let coarse = pool2(fine.clone());
        let mut pyramid = vec![coarse.clone()];
        pyramid.extend(model.pools.iter().map(|pool| pool.forward(coarse.clone())));
        let coarse = silu(model.neck.forward(Tensor::cat(pyramid, 1)));
        let x = Tensor::cat(vec![model.up.forward(coarse), fine], 1);
        let x = silu(model.lateral.forward(x));
        // [n, anchors, ..]
        let anchors = |x: Tensor<4>| x.flatten::<3>(2, 3).swap_dims(1, 2);
        let (boxes, objects, kinds) = (
            anchors(model.boxes.forward(x.clone())),
            anchors(model.objects.forward(x.clone())),
            anchors(model.kinds.forward(x)),
        );
        let grid = Tensor::<1, Int>::arange(0..16, device);
        let (column, row) = (grid.clone() % 4, grid / 4);
        let grid: Tensor<2> = Tensor::stack(vec![column.float(), row.float()], 1);
        let grid = grid.unsqueeze::<3>().repeat_dim(0, n);
        let centre = boxes.clone().slice(s![.., .., 0..2]) + grid.clone();
        let size = boxes.slice(s![.., .., 2..4]).exp();
        let wanted = grid + numbers(&items, [n, 16, 2], 3, device) * 0.3;
        let (low, high) = (centre.clone() - size.clone() / 2.0, centre + size.clone() / 2.0);
        let (wanted_low, wanted_high) = (wanted.clone() - 0.5, wanted + 0.5);
        let both = (high.min_pair(wanted_high) - low.max_pair(wanted_low)).clamp_min(0.0).prod_dim(2);
        let iou = both.clone() / (size.prod_dim(2) + 1.0 - both + 1e-9);
        // The best anchors are those that learn.
        let (_, best) = iou.clone().detach().topk_with_indices(3, 1);
        let chosen = iou.clone().gather(1, best.clone());
        let is_object = iou.zeros_like().int().scatter(
            1,
            best.clone(),
            best.clone().ones_like(),
            burn::tensor::IndexingUpdateOp::Add,
        );
        let of_objects = BinaryCrossEntropyLossConfig::new().with_logits(true).init(device);
        let of_objects = of_objects.forward(objects, is_object);
        let kinds = kinds.gather(1, best.repeat_dim(2, 3)).reshape([n * 3, 3]);
        let of_kinds = CrossEntropyLossConfig::new().with_weights(Some(vec![1.0, 1.0, 1.0])).init(device);
        let of_kinds = of_kinds.forward(kinds, classes(&items, [n, 3], 3, device).reshape([n * 3]));
        (chosen.neg() + 1.0).mean() * 5.0 + of_objects + of_kinds
    };
    proven(make, loss, PLAIN, plan(Plan::default().columns("focus|neck").rows("lateral")));
}

fn pool2(x: Tensor<4>) -> Tensor<4> {
    AvgPool2dConfig::new([2, 2]).with_strides([2, 2]).init().forward(x)
}
