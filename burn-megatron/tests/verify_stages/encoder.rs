//! A text classifier around burn-nn's `TransformerEncoder`.

use std::ops::Range;

use burn::nn::attention::generate_padding_mask;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::train::ClassificationOutput;
use burn_megatron::prelude::*;
use burn_megatron::steps_of_stages;

use crate::{adamw, layouts, muon, proven, sgd};

const VOCABULARY: usize = 23;
const CLASSES: usize = 3;
pub const WIDTH: usize = 16;

#[derive(Module, Debug)]
pub struct Classifier {
    pub tokens: Embedding,
    pub encoder: TransformerEncoder,
    pub head: Linear,
}

/// Tokens and padding `[batch, 9]`, and the class of each item.
#[derive(Module, Debug)]
pub struct Batch {
    pub tokens: Tensor<2, Int>,
    pub padding: Tensor<2, Bool>,
    pub classes: Tensor<1, Int>,
}

impl Classifier {
    pub fn new(device: &Device, layers: usize) -> Self {
        Self::with_dropout(device, layers, 0.0)
    }

    pub fn with_dropout(device: &Device, layers: usize, dropout: f64) -> Self {
        let encoder = TransformerEncoderConfig::new(WIDTH, 32, 4, layers).with_norm_first(true).with_dropout(dropout);
        Self {
            tokens: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            encoder: encoder.init(device),
            head: LinearConfig::new(WIDTH, CLASSES).init(device),
        }
    }
}

impl Stages for Classifier {
    type Activation = Tensor<3>;

    fn blocks(&self) -> usize {
        self.encoder.layers.len()
    }

    fn owner(&self, path: &str) -> Option<Part> {
        Part::by_path(path, "tokens", "encoder.layers", "head")
    }

    fn first(&self, batch: &Batch) -> Tensor<3> {
        self.tokens.forward(batch.tokens.clone())
    }

    fn block(&self, index: usize, x: Tensor<3>, batch: &Batch) -> Tensor<3> {
        self.encoder.layers[index].forward(x, Some(batch.padding.clone()), None)
    }

    fn last(&self, x: Tensor<3>, batch: &Batch) -> (Tensor<1>, ClassificationOutput) {
        let [count, _, _] = x.dims();
        let output = self.head.forward(x.slice([0..count, 0..1]).reshape([count, WIDTH]));
        let classes = batch.classes.clone();
        let loss = CrossEntropyLossConfig::new().init(&output.device()).forward(output.clone(), classes.clone());
        (loss.clone(), ClassificationOutput::new(loss, output, classes))
    }
}

steps_of_stages!(Classifier, Batch, ClassificationOutput);

/// Each item is a sequence of its own length.
pub fn batch(items: Range<usize>, device: &Device) -> Batch {
    let tokens = |item: usize| (0..4 + item % 5).map(|at| 1 + (item * 7 + at * at) % (VOCABULARY - 1)).collect();
    let padded = generate_padding_mask(0, items.clone().map(tokens).collect(), Some(9), device);
    let classes: Vec<i64> = items.map(|item| (item % CLASSES) as i64).collect();
    Batch { tokens: padded.tensor, padding: padded.mask, classes: Tensor::from_data(classes.as_slice(), device) }
}

#[test]
fn an_encoder_trains_in_pipelines_as_on_one_device() {
    let layouts = layouts(
        "TP1, DP2 ZeRO1, TP2 SP, PP2, PP4, PP2 VPP2, PP2 DP2, PP2 DP2 ZeRO1, PP2 DP2 ZeRO2, PP2 DP2 ZeRO3, \
         TP2 SP PP2 VPP2 DP2 ZeRO3, TP2 PP2, TP2 SP PP2, TP2 SP PP2 VPP2 DP2 ZeRO1",
    );
    for optimizer in [adamw as fn() -> burn::optim::ModuleOptimizer, muon, sgd] {
        let proof = Proof::default().optimizer(optimizer);
        proven(verify_stages_as(|device| Classifier::new(device, 4), batch, &layouts, &proof), layouts.len());
    }
}

#[test]
fn gradients_that_are_reduced_during_the_last_micro_batch() {
    let layouts = layouts("PP2 DP2, PP2 VPP2 DP2 ZeRO1, PP2 DP2 ZeRO2, TP2 SP PP2 DP2");
    let proof = Proof::default().overlap_grad_reduce();
    proven(verify_stages_as(|device| Classifier::new(device, 4), batch, &layouts, &proof), layouts.len());
}

#[test]
fn every_schedule_that_does_not_split_the_backward_pass() {
    let make_model = |device: &Device| Classifier::new(device, 7);
    let cases = [
        (ScheduleKind::GPipe, "PP2", 4),
        (ScheduleKind::GPipe, "PP3", 3),
        (ScheduleKind::OneFOneB, "PP3", 2),
        (ScheduleKind::OneFOneB, "PP2 DP2", 3),
        (ScheduleKind::Interleaved, "PP2 VPP3", 4),
        (ScheduleKind::Interleaved, "PP3 VPP2", 6),
        (ScheduleKind::NoPipeline, "DP2", 4),
    ];
    for (schedule, layout, micro_batches) in cases {
        let proof = Proof::default().schedule(schedule).micro_batches(micro_batches);
        proven(verify_stages_as(make_model, batch, &layouts(layout), &proof), 1);
    }
}

#[test]
fn blocks_that_are_recomputed() {
    let layouts = layouts("TP1, PP2, PP2 VPP2 DP2 ZeRO1, TP2 SP PP2");
    let block = Recompute { method: models::recompute::Method::Block, ..Recompute::full() };
    for recompute in [Recompute::full(), Recompute { num_layers: 2, ..Recompute::full() }, block] {
        let proof = Proof::default().recompute(recompute);
        proven(verify_stages_as(|device| Classifier::new(device, 5), batch, &layouts, &proof), layouts.len());
    }
}
