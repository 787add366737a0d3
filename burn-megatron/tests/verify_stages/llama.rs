//! A Llama of burn-nn's modules, with an output layer of its own and with that of the embedding.

use std::ops::Range;

use burn::nn::{
    Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, RotaryEncoding, RotaryEncodingConfig,
    SwiGlu, SwiGluConfig,
};
use burn::prelude::*;
use burn::tensor::activation::{log_softmax, softmax};
use burn::train::RegressionOutput;
use burn_megatron::prelude::*;
use burn_megatron::steps_of_stages;

use crate::{adamw, layouts, muon, proven, sgd};

/// Heads of queries, and of keys and values.
const HEADS: [usize; 2] = [8, 4];
const HEAD: usize = 4;
const HIDDEN: usize = 16;
const VOCABULARY: usize = 24;
const LENGTH: usize = 8;

#[derive(Module, Debug)]
struct Block {
    attention_norm: LayerNorm,
    wq: Linear,
    wk: Linear,
    wv: Linear,
    wo: Linear,
    mlp_norm: LayerNorm,
    gate: SwiGlu,
    down: Linear,
}

#[derive(Module, Debug)]
struct Llama {
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    /// Without it the embedding is the output layer.
    head: Option<Linear>,
    rope: RotaryEncoding,
}

#[derive(Module, Debug)]
struct Tokens {
    /// `[batch, length + 1]`.
    tokens: Tensor<2, Int>,
}

fn linear(input: usize, output: usize, device: &Device) -> Linear {
    LinearConfig::new(input, output).with_bias(false).init(device)
}

impl Llama {
    fn new(device: &Device, blocks: usize, is_tied: bool) -> Self {
        let block = |_| Block {
            // burn-nn's RMS norm computes in f32 whatever the input.
            attention_norm: LayerNormConfig::new(HIDDEN).init(device),
            wq: linear(HIDDEN, HEADS[0] * HEAD, device),
            wk: linear(HIDDEN, HEADS[1] * HEAD, device),
            wv: linear(HIDDEN, HEADS[1] * HEAD, device),
            wo: linear(HEADS[0] * HEAD, HIDDEN, device),
            mlp_norm: LayerNormConfig::new(HIDDEN).init(device),
            gate: SwiGluConfig::new(HIDDEN, 32).init(device),
            down: linear(32, HIDDEN, device),
        };
        Self {
            embedding: EmbeddingConfig::new(VOCABULARY, HIDDEN).init(device),
            blocks: (0..blocks).map(block).collect(),
            norm: LayerNormConfig::new(HIDDEN).init(device),
            head: (!is_tied).then(|| linear(HIDDEN, VOCABULARY, device)),
            rope: RotaryEncodingConfig::new(16, HEAD).init(device),
        }
    }
}

impl Block {
    fn attention(&self, x: Tensor<3>, rope: &RotaryEncoding) -> Tensor<3> {
        let [batch, length, _] = x.dims();
        let heads = |x: Tensor<3>, n: usize| x.reshape([batch, length, n, HEAD]).swap_dims(1, 2);
        let q = rope.forward(heads(self.wq.forward(x.clone()), HEADS[0]));
        let k = rope.forward(heads(self.wk.forward(x.clone()), HEADS[1]));
        let v = heads(self.wv.forward(x), HEADS[1]);
        let groups = HEADS[0] / HEADS[1];
        let repeated = |x: Tensor<4>| {
            let x = x.reshape([batch, HEADS[1], 1, length, HEAD]).expand([batch, HEADS[1], groups, length, HEAD]);
            x.reshape([batch, HEADS[0], length, HEAD])
        };
        let (k, v) = (repeated(k), repeated(v));
        let future = Tensor::<2, Int>::ones([length, length], &q.device()).triu(1).bool().unsqueeze::<4>();
        let scores = q.matmul(k.swap_dims(2, 3)) / (HEAD as f64).sqrt();
        let weights = softmax(scores.mask_fill(future, -1e9), 3);
        let out = weights.matmul(v).swap_dims(1, 2).reshape([batch, length, HEADS[0] * HEAD]);
        self.wo.forward(out)
    }
}

impl Stages for Llama {
    type Activation = Tensor<3>;

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn owner(&self, path: &str) -> Option<Part> {
        Part::by_path(path, "embedding", "blocks", "norm|head")
    }

    fn first(&self, batch: &Tokens) -> Tensor<3> {
        self.embedding.forward(batch.tokens.clone().narrow(1, 0, LENGTH))
    }

    fn block(&self, index: usize, x: Tensor<3>, _: &Tokens) -> Tensor<3> {
        let block = &self.blocks[index];
        let x = x.clone() + block.attention(block.attention_norm.forward(x), &self.rope);
        let hidden = block.gate.forward(block.mlp_norm.forward(x.clone()));
        x + block.down.forward(hidden)
    }

    fn last(&self, x: Tensor<3>, batch: &Tokens) -> (Tensor<1>, RegressionOutput) {
        let x = self.norm.forward(x);
        let logits = match &self.head {
            Some(head) => head.forward(x),
            None => x.matmul(self.embedding.weight.val().transpose().unsqueeze()),
        };
        let [batch_size, _] = batch.tokens.dims();
        let labels = batch.tokens.clone().narrow(1, 1, LENGTH).reshape([batch_size, LENGTH, 1]);
        let losses = log_softmax(logits, 2).gather(2, labels).neg();
        let flat = losses.clone().reshape([batch_size, LENGTH]);
        (losses.mean(), RegressionOutput::new(flat.clone().mean(), flat.clone(), flat))
    }
}

steps_of_stages!(Llama, Tokens, RegressionOutput);

/// A [`Llama`] whose embedding is its output layer.
#[derive(Module, Debug)]
struct Tied {
    llama: Llama,
}

impl Stages for Tied {
    type Activation = Tensor<3>;

    fn blocks(&self) -> usize {
        self.llama.blocks()
    }

    fn owner(&self, path: &str) -> Option<Part> {
        if path == "llama.embedding.weight" {
            return Some(Part::Tied);
        }
        Part::by_path(path, "", "llama.blocks", "llama.norm")
    }

    fn first(&self, batch: &Tokens) -> Tensor<3> {
        self.llama.first(batch)
    }

    fn block(&self, index: usize, x: Tensor<3>, batch: &Tokens) -> Tensor<3> {
        self.llama.block(index, x, batch)
    }

    fn last(&self, x: Tensor<3>, batch: &Tokens) -> (Tensor<1>, RegressionOutput) {
        self.llama.last(x, batch)
    }
}

steps_of_stages!(Tied, Tokens, RegressionOutput);

fn batch(items: Range<usize>, device: &Device) -> Tokens {
    let count = items.len();
    let token = |item: usize, at: usize| ((item * 31 + at * (item % 5 + 1) + at * at) % VOCABULARY) as i64;
    let tokens: Vec<i64> = items.flat_map(|item| (0..=LENGTH).map(move |at| token(item, at))).collect();
    Tokens { tokens: Tensor::from_data(TensorData::new(tokens, [count, LENGTH + 1]), device) }
}

fn plan() -> Plan {
    Plan::auto().columns("wq|wk|wv").rows("wo|down")
}

#[test]
fn a_llama_trains_in_pipelines_as_on_one_device() {
    let layouts =
        layouts("PP2, PP4, PP2 VPP2, TP2 PP2, TP2 SP PP2, PP2 DP2 ZeRO1, TP2 PP2 DP2 ZeRO2, PP2 VPP2 DP2 ZeRO3");
    for optimizer in [adamw as fn() -> burn::optim::ModuleOptimizer, muon, sgd] {
        let proof = Proof::default().optimizer(optimizer).plan(plan());
        proven(verify_stages_as(|device| Llama::new(device, 4, false), batch, &layouts, &proof), layouts.len());
    }
}

#[test]
fn tied_embeddings_have_the_gradients_of_both_ends() {
    let layouts = layouts("TP1, PP2, PP3, PP2 VPP2, TP2 PP2, PP2 DP2 ZeRO1, PP2 VPP2 DP2 ZeRO2, PP2 DP2 ZeRO3");
    for recompute in [Recompute::default(), Recompute::full()] {
        let proof = Proof::default().plan(plan()).recompute(recompute);
        let make_model = |device: &Device| Tied { llama: Llama::new(device, 4, true) };
        proven(verify_stages_as(make_model, batch, &layouts, &proof), layouts.len());
    }
}
