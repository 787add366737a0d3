//! Sentences by ALBERT's shared layer: losses of triplets and of whole batches.

use std::ops::Range;

use burn::module::Param;
use burn::nn::loss::{
    CosineEmbeddingLossConfig, CrossEntropyLossConfig, KLDivLossConfig, Reduction, TripletMarginLossConfig,
};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::activation::{log_softmax, softmax};
use burn_megatron::prelude::*;

use crate::sequences::{LENGTH, WIDTH, WORDS};
use crate::{ALL, TENSOR, classes, numbers, plan, proven};

/// One layer for all depths, a small embedding made wide, positions by the mask.
#[derive(Module, Debug)]
struct Albert {
    words: Embedding,
    positions: Embedding,
    wide: Linear,
    norm: LayerNorm,
    layer: TransformerEncoder,
    pooler: Linear,
}

impl Albert {
    fn new(device: &Device) -> Self {
        Self {
            words: EmbeddingConfig::new(WORDS, 4).init(device),
            positions: EmbeddingConfig::new(LENGTH + 2, 4).init(device),
            wide: LinearConfig::new(4, WIDTH).init(device),
            norm: LayerNormConfig::new(4).init(device),
            layer: TransformerEncoderConfig::new(WIDTH, 16, 4, 1).with_dropout(0.0).with_norm_first(true).init(device),
            pooler: LinearConfig::new(WIDTH, WIDTH).init(device),
        }
    }

    /// `[n, LENGTH] -> [n, WIDTH]`, of length one; words 0 are padding.
    fn sentence(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        let n = tokens.dims()[0];
        let padding = tokens.clone().equal_elem(0);
        let present = padding.clone().bool_not().int();
        let positions = present.clone().cumsum(1) * present.clone() + 1;
        let x = self.words.forward(tokens) + self.positions.forward(positions);
        let mut x = self.wide.forward(self.norm.forward(x));
        for _ in 0..3 {
            x = self.layer.forward(TransformerEncoderInput::new(x).mask_pad(padding.clone()));
        }
        let weights = present.float().unsqueeze_dim::<3>(2);
        let mean = (x * weights.clone()).sum_dim(1) / weights.sum_dim(1).clamp_min(1e-9);
        let x = self.pooler.forward(mean.reshape([n, WIDTH])).tanh();
        x.clone() / (x.powi_scalar(2).sum_dim(1) + 1e-12).sqrt()
    }
}

pub fn sentences(items: &Range<usize>, seed: usize, device: &Device) -> Tensor<2, Int> {
    let n = items.len();
    let tokens = classes(items, [n, LENGTH], WORDS - 1, device);
    let tokens = (tokens + seed as i64) % (WORDS as i64 - 1) + 1;
    // The end of every second sentence is padding.
    let at = Tensor::<1, Int>::arange(0..LENGTH as i64, device).reshape([1, LENGTH]).repeat_dim(0, n);
    let last = (classes(items, [n, 1], 3, device) + 3).repeat_dim(1, LENGTH);
    tokens.mask_fill(at.greater_equal(last), 0)
}

#[test]
fn sentences_of_a_shared_layer_by_triplets() {
    let loss = |model: &Albert, items: Range<usize>, device: &Device| {
        let n = items.len();
        let [a, p, q] = [0, 3, 7].map(|seed| model.sentence(sentences(&items, seed, device)));
        let triplet = TripletMarginLossConfig::new().with_margin(0.7).init();
        let triplet = triplet.forward(a.clone(), p.clone(), q.clone(), Reduction::Mean);
        let cosine = CosineEmbeddingLossConfig::new().init();
        let labels = classes(&items, [n], 2, device) * 2 - 1;
        let cosine = cosine.forward(a.clone(), p.clone(), labels);
        let teacher = softmax(q.detach() * 3.0, 1);
        let kl = KLDivLossConfig::new().init().forward(log_softmax(a * 2.0, 1), teacher, Reduction::BatchMean);
        triplet + cosine + kl + p.powi_scalar(4).mean()
    };
    proven(Albert::new, loss, ALL, Proof::default());
    proven(Albert::new, loss, "TP4, TP2 SP, TP2 SP DP2 ZeRO3", plan(Plan::auto().columns("wide").rows("pooler")));
}

/// Contrastive over the batch, as CLIP: every sentence against all others.
#[derive(Module, Debug)]
struct Clip {
    texts: Albert,
    images: Linear,
    scale: Param<Tensor<1>>,
}

#[test]
fn contrastive_over_the_batch() {
    let make = |device: &Device| Clip {
        texts: Albert::new(device),
        images: LinearConfig::new(10, WIDTH).with_bias(false).init(device),
        scale: Param::from_tensor(Tensor::from_data([0.7], device)),
    };
    let loss = |model: &Clip, items: Range<usize>, device: &Device| {
        let n = items.len();
        let texts = model.texts.sentence(sentences(&items, 0, device));
        let images = model.images.forward(numbers(&items, [n, 10], 5, device));
        let images = images.clone() / images.powi_scalar(2).sum_dim(1).sqrt();
        let logits = images.matmul(texts.transpose()) * model.scale.val().exp().reshape([1, 1]);
        let targets = Tensor::<1, Int>::arange(0..n as i64, device);
        let entropy = CrossEntropyLossConfig::new().init(device);
        (entropy.forward(logits.clone(), targets.clone()) + entropy.forward(logits.transpose(), targets)) / 2.0
    };
    proven(make, loss, TENSOR, Proof::default());
    proven(make, loss, "TP2, TP4", plan(Plan::auto().columns("images|pooler")));
}
