//! Burn's optimizers, and its clipping of each gradient, over shards.

use std::ops::Range;

use burn::grad_clipping::GradientClippingConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::{
    AdaGradConfig, AdafactorConfig, AdamConfig, AdanConfig, LambConfig, LionConfig, ModuleOptimizer, RmsPropConfig,
    SgdConfig,
};
use burn::prelude::*;
use burn_megatron::prelude::*;

use crate::{PLAIN, numbers, plan, proven};

type Net = (Linear, Linear, Linear);

fn net(device: &Device) -> Net {
    let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
    (linear(4, 8), linear(8, 8), linear(8, 2))
}

fn loss(net: &Net, items: Range<usize>, device: &Device) -> Tensor<1> {
    let n = items.len();
    let x = net.0.forward(numbers::<2>(&items, [n, 4], 0, device)).tanh();
    let y = net.2.forward(net.1.forward(x).tanh());
    (y - numbers(&items, [n, 2], 1, device)).powi_scalar(2).mean() * 3.0
}

const OPTIMIZERS: [fn() -> ModuleOptimizer; 9] = [
    || AdaGradConfig::new().with_weight_decay(Some(WeightDecayConfig::new(0.1))).init(),
    || RmsPropConfig::new().with_centered(true).init(),
    || AdamConfig::new().with_amsgrad(true).with_grad_clipping(Some(GradientClippingConfig::Norm(0.05))).init(),
    || AdamConfig::new().with_grad_clipping(Some(GradientClippingConfig::Value(0.01))).init(),
    || AdanConfig::new().init(),
    || LambConfig::new().init(),
    || LionConfig::new().init(),
    || AdafactorConfig::new().init(),
    || SgdConfig::new().with_gradient_clipping(Some(GradientClippingConfig::Norm(0.1))).init(),
];

#[test]
fn every_optimizer() {
    for optimizer in OPTIMIZERS {
        // The second layer is sharded although neither neighbour wants it so.
        proven(net, loss, PLAIN, plan(Plan::default().columns("0|1").rows("2.weight")).optimizer(optimizer));
    }
}
