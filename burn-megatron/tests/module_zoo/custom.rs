//! Parameters of one's own making: normalized weights, codebooks, learned latents, networks that make weights, graphs.

use std::ops::Range;

use burn::module::{Initializer, Param, ParamId};
use burn::nn::attention::{CrossAttention, CrossAttentionConfig};
use burn::nn::loss::CosineEmbeddingLossConfig;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::IndexingUpdateOp;
use burn::tensor::activation::{gelu, leaky_relu, softplus};
use burn_megatron::prelude::*;

use crate::{ALL, PLAIN, numbers, plan, proven};

/// A direction and a length for each output (weight normalization).
#[derive(Module, Debug)]
struct Normed {
    direction: Param<Tensor<2>>,
    length: Param<Tensor<1>>,
    bias: Param<Tensor<1>>,
}

impl Normed {
    fn new(from: usize, to: usize, device: &Device) -> Self {
        let normal = Initializer::Normal { mean: 0.0, std: 0.5 };
        Self {
            direction: normal.init([from, to], device),
            length: Initializer::Ones.init([to], device),
            bias: Initializer::Zeros.init([to], device),
        }
    }

    fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let direction = self.direction.val();
        let norm = direction.clone().powi_scalar(2).sum_dim(0).sqrt();
        let weight = direction / norm * self.length.val().unsqueeze();
        x.matmul(weight.unsqueeze()) + self.bias.val().unsqueeze()
    }
}

/// An autoencoder with a codebook: the nearest code of each latent, and gradients as if there were none.
#[derive(Module, Debug)]
struct Quantized {
    encoder: (Normed, Normed),
    codes: Param<Tensor<2>>,
    /// In which order features are read.
    order: Param<Tensor<1, Int>>,
    decoder: (Normed, Normed),
}

impl Quantized {
    fn new(device: &Device) -> Self {
        Self {
            encoder: (Normed::new(6, 8, device), Normed::new(8, 4, device)),
            codes: Initializer::Uniform { min: -1.0, max: 1.0 }.init([10, 4], device),
            order: Param::initialized(ParamId::new(), Tensor::from_data([5, 0, 3, 1, 4, 2], device)),
            decoder: (Normed::new(4, 8, device), Normed::new(8, 6, device)),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let x = x.select(1, self.order.val());
        let z = self.encoder.1.forward(self.encoder.0.forward(x.clone()).tanh());
        let codes = self.codes.val();
        let distance = z.clone().powi_scalar(2).sum_dim(1) - z.clone().matmul(codes.clone().transpose()) * 2.0
            + codes.clone().powi_scalar(2).sum_dim(1).transpose();
        let nearest = distance.argmin(1).squeeze_dim::<1>(1);
        let code = codes.select(0, nearest);
        let commitment = (z.clone() - code.clone().detach()).powi_scalar(2).mean() * 0.25;
        let codebook = (code.clone() - z.clone().detach()).powi_scalar(2).mean();
        let through = z.clone() + (code - z).detach();
        let y = self.decoder.1.forward(gelu(self.decoder.0.forward(through)));
        (y - x).powi_scalar(2).mean() + commitment + codebook
    }
}

#[test]
fn a_codebook_of_normalized_layers() {
    let loss = |model: &Quantized, items: Range<usize>, device: &Device| {
        model.loss(numbers(&items, [items.len(), 6], 0, device))
    };
    let both = Plan::default().columns("encoder.0|decoder.0").rows("encoder.1.direction|decoder.1.direction");
    proven(Quantized::new, loss, PLAIN, plan(both));
    proven(Quantized::new, loss, "TP2, TP2 DP2 ZeRO3", plan(Plan::default().rows("codes").columns("encoder.1")));
    proven(Quantized::new, loss, "TP2, TP4", plan(Plan::default().columns("codes|decoder.0.length")));
}

/// Learned latents that read a long input, and a network that makes the weights of the last layer.
#[derive(Module, Debug)]
struct Perceiver {
    latents: Param<Tensor<2>>,
    read: CrossAttention,
    norms: [LayerNorm; 2],
    mix: (Linear, Linear),
    /// Temperature, kept above 0.
    temperature: Param<Tensor<1>>,
    hyper: Linear,
}

impl Perceiver {
    fn new(device: &Device) -> Self {
        let norm = || LayerNormConfig::new(8).init(device);
        Self {
            latents: Initializer::Normal { mean: 0.0, std: 1.0 }.init([4, 8], device),
            read: CrossAttentionConfig::new(8, 5, 4, 4, 2).with_dropout(0.0).init(device),
            norms: [norm(), norm()],
            mix: (LinearConfig::new(8, 16).init(device), LinearConfig::new(16, 8).init(device)),
            temperature: Initializer::Constant { value: 0.5 }.init([1], device),
            hyper: LinearConfig::new(8, 8 * 3).init(device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<2> {
        let n = x.dims()[0];
        let mut z = self.latents.val().unsqueeze::<3>().expand([n, 4, 8]);
        // The same layers twice.
        for _ in 0..2 {
            z = z.clone() + self.read.forward(self.norms[0].forward(z), x.clone(), None);
            let y = self.mix.1.forward(gelu(self.mix.0.forward(self.norms[1].forward(z.clone()))));
            z = z + y * softplus(self.temperature.val(), 1.0).unsqueeze();
        }
        let weights = self.hyper.forward(z.clone().mean_dim(1)).reshape([n, 8, 3]);
        z.max_dim(1).matmul(weights).reshape([n, 3])
    }
}

#[test]
fn latents_and_weights_that_a_network_makes() {
    let loss = |model: &Perceiver, items: Range<usize>, device: &Device| {
        let n = items.len();
        let y = model.forward(numbers(&items, [n, 7, 5], 0, device));
        (y - numbers(&items, [n, 3], 1, device)).abs().mean()
    };
    proven(Perceiver::new, loss, ALL, plan(Plan::auto().columns("mix.0").rows("mix.1.weight")));
    proven(Perceiver::new, loss, "TP2, TP4, TP2 DP2 ZeRO3", plan(Plan::default().columns("latents|hyper")));
}

/// Graph attention: nodes of all items are one list, edges are pairs of their numbers.
#[derive(Module, Debug)]
struct Graph {
    layers: Vec<(Linear, Linear)>,
    head: Linear,
    edges: Param<Tensor<2, Int>>,
}

const NODES: usize = 4;

impl Graph {
    fn new(device: &Device) -> Self {
        let layer = |from| (LinearConfig::new(from, 8).init(device), LinearConfig::new(16, 1).init(device));
        let edges = Tensor::from_data([[0, 1, 2, 3, 0, 2, 1], [1, 2, 3, 0, 2, 0, 3]], device);
        Self {
            layers: vec![layer(3), layer(8)],
            head: LinearConfig::new(8, 2).init(device),
            edges: Param::initialized(ParamId::new(), edges),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<2> {
        let [n, nodes, features] = x.dims();
        let edges = self.edges.val();
        let [_, count] = edges.dims();
        let offset = Tensor::<1, Int>::arange(0..n as i64, &x.device()).reshape([n, 1, 1]) * nodes as i64;
        let edges = (edges.unsqueeze::<3>().expand([n, 2, count]) + offset).swap_dims(0, 1).reshape([2, n * count]);
        let (from, to) =
            (edges.clone().slice(s![0..1, ..]).flatten::<1>(0, 1), edges.slice(s![1..2, ..]).flatten::<1>(0, 1));
        let mut x = x.reshape([n * nodes, features]);
        for (linear, score) in &self.layers {
            let h = linear.forward(x);
            let (source, target) = (h.clone().select(0, from.clone()), h.clone().select(0, to.clone()));
            let scores = score.forward(Tensor::cat(vec![source.clone(), target], 1));
            let weights = leaky_relu(scores, 0.2).exp();
            let zeros = |width| Tensor::<2>::zeros([n * nodes, width], (&h.device(), h.dtype()));
            let sums = zeros(8).select_assign(0, to.clone(), source * weights.clone(), IndexingUpdateOp::Add);
            let norm = zeros(1).select_assign(0, to.clone(), weights, IndexingUpdateOp::Add);
            x = (h + sums / (norm + 1e-6)).tanh();
        }
        self.head.forward(x.reshape([n, nodes, 8]).sum_dim(1).squeeze_dim::<2>(1))
    }
}

#[test]
fn attention_over_edges() {
    let loss = |model: &Graph, items: Range<usize>, device: &Device| {
        let n = items.len();
        let y = model.forward(numbers(&items, [n, NODES, 3], 0, device));
        let same = (crate::classes(&items, [n], 2, device)) * 2 - 1;
        let of_cosine = CosineEmbeddingLossConfig::new().with_margin(0.1).init();
        of_cosine.forward(y, numbers(&items, [n, 2], 1, device), same)
    };
    proven(Graph::new, loss, PLAIN, plan(Plan::default().columns("layers.*.0").rows("head.weight")));
    proven(Graph::new, loss, "TP2, TP2 DP2 ZeRO1", plan(Plan::default().rows("layers.*.1.weight").columns("head")));
}
