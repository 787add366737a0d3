//! `verify_module` of an encoder as Burn users build it, of convolutions and recurrent networks, and of modules that are
//! another function on ranks.

use std::ops::Range;

use burn::module::ParamGroup;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, Lstm, LstmConfig};
use burn::optim::{ModuleOptimizer, MuonConfig};
use burn::prelude::*;
use burn::tensor::Distribution;
use burn_megatron::prelude::*;

use crate::encoder::{Batch, Classifier, WIDTH, batch};
use crate::{adamw, layouts, muon, proven, sgd};

/// The loss with the encoder's own forward pass.
fn loss(model: &Classifier, items: Range<usize>, device: &Device) -> Tensor<1> {
    let Batch { tokens, padding, classes } = batch(items, device);
    let count = classes.dims()[0];
    let input = TransformerEncoderInput::new(model.tokens.forward(tokens)).mask_pad(padding);
    let first = model.encoder.forward(input).slice([0..count, 0..1]).reshape([count, WIDTH]);
    CrossEntropyLossConfig::new().init(device).forward(model.head.forward(first), classes)
}

#[test]
fn an_encoder_trains_over_ranks_as_on_one_device() {
    let layouts = layouts(
        "TP1, DP2, DP3, DP4, DP2 ZeRO1, DP3 ZeRO1, DP2 ZeRO2, DP4 ZeRO2, DP2 ZeRO3, DP4 ZeRO3, TP2, TP4, TP2 SP, \
         TP4 SP, TP2 DP2, TP2 DP2 ZeRO1, TP2 DP2 ZeRO2, TP2 DP2 ZeRO3, TP2 SP DP2 ZeRO1, TP2 SP DP2 ZeRO3",
    );
    proven(verify_module(|device| Classifier::new(device, 2), loss, &layouts), layouts.len());
}

#[test]
fn gradients_that_are_reduced_during_the_backward_pass_train_as_one_device() {
    let overlapped = layouts("DP2, DP4, DP2 ZeRO1, DP4 ZeRO2, TP2 DP2, TP2 SP DP2 ZeRO1, TP2 SP DP2 ZeRO2");
    for optimizer in [adamw as fn() -> ModuleOptimizer, muon] {
        let proof = Proof::default().optimizer(optimizer).overlap_grad_reduce();
        let make_model = |device: &Device| Classifier::new(device, 2);
        proven(verify_module_as(make_model, loss, &overlapped, &proof), overlapped.len());
    }
}

/// Layouts of tensor, sequence and data parallelism on 2 and 4 ranks.
const SHARDED: &str = "TP2, TP4, TP2 SP, TP4 SP, TP2 DP2, TP2 SP DP2 ZeRO1, TP2 DP2 ZeRO2, TP2 SP DP2 ZeRO3";

#[test]
fn every_optimizer_steps_shards_as_one_device() {
    for optimizer in [muon as fn() -> ModuleOptimizer, sgd] {
        let proof = Proof::default().optimizer(optimizer).plan(Plan::auto().rows("head.weight"));
        let make_model = |device: &Device| Classifier::new(device, 2);
        proven(verify_module_as(make_model, loss, &layouts(SHARDED), &proof), 8);
    }
}

/// `[items, 6, width]`, different for every item.
fn sequences(items: Range<usize>, width: usize, device: &Device) -> Tensor<3> {
    let count = items.len();
    let value = |item: usize, at: usize| ((item * 31 + at * (item % 5 + 1)) as f64 * 0.37).sin();
    let values: Vec<f64> = items.flat_map(|item| (0..6 * width).map(move |at| value(item, at))).collect();
    Tensor::from_data(TensorData::new(values, [count, 6, width]), device)
}

#[test]
fn an_encoder_without_an_embedding() {
    for optimizer in [adamw as fn() -> ModuleOptimizer, muon, sgd] {
        let make_model =
            |device: &Device| TransformerEncoderConfig::new(WIDTH, 32, 4, 2).with_dropout(0.0).init(device);
        let loss = |model: &TransformerEncoder, items: Range<usize>, device: &Device| {
            let y = model.forward(TransformerEncoderInput::new(sequences(items, WIDTH, device)));
            y.clone().powi_scalar(3).mean() + (y - 0.5).powi_scalar(2).mean()
        };
        let proof = Proof::default().optimizer(optimizer);
        proven(verify_module_as(make_model, loss, &layouts(SHARDED), &proof), 8);
    }
}

#[derive(Module, Debug)]
struct Recurrent {
    lstm: Lstm,
    head: Linear,
}

#[test]
fn a_recurrent_network() {
    let layouts = layouts("TP2, TP4, TP2 SP, TP2 DP2, TP2 DP2 ZeRO1, TP2 DP2 ZeRO2, TP2 DP2 ZeRO3");
    for optimizer in [adamw as fn() -> ModuleOptimizer, muon, sgd] {
        let make_model = |device: &Device| Recurrent {
            lstm: LstmConfig::new(8, 8, true).init(device),
            head: LinearConfig::new(8, 4).init(device),
        };
        let loss = |model: &Recurrent, items: Range<usize>, device: &Device| {
            let (y, _) = model.lstm.forward(sequences(items, 8, device), None);
            model.head.forward(y).powi_scalar(2).mean()
        };
        let plan = Plan::default().columns("lstm").rows("head.weight");
        let proof = Proof::default().optimizer(optimizer).plan(plan);
        proven(verify_module_as(make_model, loss, &layouts, &proof), layouts.len());
    }
}

#[derive(Module, Debug)]
struct Convolutional {
    first: Conv2d,
    norm: BatchNorm,
    second: Conv2d,
    head: Linear,
}

#[test]
fn convolutions_with_batch_normalization() {
    // Data-parallel ranks would normalize by the statistics of their own images.
    let layouts = layouts("TP2, TP4");
    for optimizer in [adamw as fn() -> ModuleOptimizer, muon_of_the_head, sgd] {
        let make_model = |device: &Device| Convolutional {
            // A bias before a norm has no gradient but for rounding.
            first: Conv2dConfig::new([1, 8], [3, 3]).with_bias(false).init(device),
            norm: BatchNormConfig::new(8).init(device),
            second: Conv2dConfig::new([8, 4], [3, 3]).init(device),
            head: LinearConfig::new(4 * 4 * 4, 4).init(device),
        };
        let loss = |model: &Convolutional, items: Range<usize>, device: &Device| {
            let count = items.len();
            let pixels = sequences(items, 12, device).reshape([count, 72]).slice([0..count, 0..64]);
            let x = model.norm.forward(model.first.forward(pixels.reshape([count, 1, 8, 8])));
            let x = model.second.forward(burn::tensor::activation::relu(x));
            model.head.forward(x.reshape([count, 4 * 4 * 4])).powi_scalar(2).mean()
        };
        let proof = Proof::default().optimizer(optimizer).plan(Plan::default().columns("first").rows("second"));
        proven(verify_module_as(make_model, loss, &layouts, &proof), layouts.len());
    }
}

/// Muon is for matrices only.
fn muon_of_the_head() -> ModuleOptimizer {
    let muon = MuonConfig::new().with_weight_decay(None).build();
    adamw().with_group(ParamGroup::from_predicate("head.weight"), muon, None)
}

#[test]
fn a_plan_that_does_not_fit_is_a_layout_that_fails() {
    let make_model = |device: &Device| Classifier::new(device, 2);
    let proof = Proof::default().plan(Plan::auto().columns("haed"));
    let error = verify_module_as(make_model, loss, &layouts("TP2"), &proof).unwrap_err();
    assert!(error.to_string().contains("pattern `haed` matches no parameter; the nearest is `head."), "{error}");
}

#[test]
fn random_numbers_of_a_rank_are_found() {
    let layouts = layouts("DP2, DP2 ZeRO1");
    let error = verify_module(|device| Classifier::with_dropout(device, 2, 0.1), loss, &layouts).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("2 of 2 layouts do not train like one device; worst: DP2"), "{text}");
    assert!(text.contains("allowed 1.0e-10") && text.contains("DIFFERENT"), "{text}");
}

#[test]
fn batch_statistics_of_a_rank_are_found() {
    let make_model = |device: &Device| (LinearConfig::new(3, 2).init(device), BatchNormConfig::new(2).init(device));
    let loss = |(linear, norm): &(Linear, BatchNorm), items: Range<usize>, device: &Device| {
        let x: Vec<f64> = items.flat_map(|item| [0, 1, 2].map(|at| ((item * 3 + at) as f64).sin())).collect();
        let x = Tensor::<1>::from_data(x.as_slice(), device).reshape([-1, 3]);
        norm.forward(linear.forward(x)).powi_scalar(3).mean()
    };
    let text = verify_module(make_model, loss, &layouts("DP1, DP2")).unwrap_err().to_string();
    assert!(text.starts_with("1 of 2 layouts do not train like one device; worst: DP2: "), "{text}");
}

/// A loss that one parameter of enters by a factor which differs between ranks.
#[derive(Module, Debug)]
struct Noisy {
    right: Linear,
    wrong: Linear,
}

#[test]
fn the_parameter_that_is_wrong_is_named() {
    let make_model = |device: &Device| Noisy {
        right: LinearConfig::new(3, 2).init(device),
        wrong: LinearConfig::new(3, 2).init(device),
    };
    let loss = |model: &Noisy, items: Range<usize>, device: &Device| {
        let x: Vec<f64> = items.flat_map(|item| [0, 1, 2].map(|at| ((item * 3 + at) as f64).sin())).collect();
        let x = Tensor::<1>::from_data(x.as_slice(), device).reshape([-1, 3]);
        let noise = Tensor::<1>::random([1], Distribution::Uniform(0.5, 1.5), device);
        let wrong = model.wrong.forward(x.clone()).powi_scalar(2).mean() * noise;
        // Too small to show in the loss, and nothing to the gradients of the other layer.
        model.right.forward(x).powi_scalar(2).mean() + wrong * 3e-11
    };
    let text = verify_module(make_model, loss, &layouts("DP2")).unwrap_err().to_string();
    assert!(text.contains(" wrong.") && !text.contains(" right."), "{text}");
}

#[test]
fn a_rank_that_panics_is_a_layout_that_fails() {
    let make_model = |device: &Device| LinearConfig::new(1, 1).init(device);
    let loss = |model: &Linear, items: Range<usize>, device: &Device| {
        assert!(items.start == 0 || items.len() > 4, "item {} is not here", items.start);
        model.forward(Tensor::<2>::ones([items.len(), 1], device)).mean()
    };
    let text = verify_module(make_model, loss, &layouts("DP2")).unwrap_err().to_string();
    assert!(text.contains("item 4 is not here"), "{text}");
}

#[test]
fn a_parameter_in_single_precision_is_refused_by_name() {
    let make_model = |device: &Device| {
        let mut model = Classifier::new(device, 2);
        model.head.weight = model.head.weight.map(|weight| weight.detach().cast(burn::tensor::FloatDType::F32));
        model
    };
    let text = verify_module(make_model, loss, &layouts("DP2")).unwrap_err().to_string();
    assert!(text.starts_with("parameter head.weight is F32"), "{text}");
}
