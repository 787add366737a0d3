//! Experts in pipelines: blocks add up a loss of their routers, share a router, and count what goes where.

use std::ops::Range;

use burn::module::{Initializer, Param};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::IndexingUpdateOp;
use burn::tensor::activation::{gelu, log_softmax, softmax};
use burn::train::ClassificationOutput;
use burn_megatron::prelude::*;
use burn_megatron::steps_of_stages;

use crate::{layouts, proven};

const WIDTH: usize = 8;
const WORDS: usize = 10;
const LENGTH: usize = 4;
const EXPERTS: usize = 4;

#[derive(Module, Debug)]
struct Routed {
    words: Embedding,
    /// Of every second block.
    router: Linear,
    blocks: Vec<Block>,
    norm: LayerNorm,
    temperature: Param<Tensor<1>>,
}

#[derive(Module, Debug)]
struct Block {
    norm: LayerNorm,
    /// Its own, or the one of all.
    router: Option<Linear>,
    up: Param<Tensor<3>>,
    down: Param<Tensor<3>>,
}

/// Words `[batch, length]`; each is to be told from those before.
#[derive(Module, Debug)]
struct Words {
    words: Tensor<2, Int>,
}

impl Routed {
    fn new(device: &Device) -> Self {
        let normal = Initializer::Normal { mean: 0.0, std: 0.4 };
        let router = || LinearConfig::new(WIDTH, EXPERTS).with_bias(false).init(device);
        let block = |at: usize| Block {
            norm: LayerNormConfig::new(WIDTH).init(device),
            router: at.is_multiple_of(2).then(router),
            up: normal.init([EXPERTS, WIDTH, 2 * WIDTH], device),
            down: normal.init([EXPERTS, 2 * WIDTH, WIDTH], device),
        };
        Self {
            words: EmbeddingConfig::new(WORDS, WIDTH).init(device),
            router: router(),
            blocks: (0..4).map(block).collect(),
            norm: LayerNormConfig::new(WIDTH).init(device),
            temperature: Initializer::Ones.init([1], device),
        }
    }
}

impl Stages for Routed {
    /// Tokens, and the loss of the routers so far.
    type Activation = (Tensor<3>, Tensor<1>);

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn owner(&self, path: &str) -> Option<Part> {
        match path.split('.').next()? {
            "words" => Some(Part::Tied),
            "router" => Some(Part::Shared(vec![Part::Block(1), Part::Block(3)])),
            _ => Part::by_path(path, "", "blocks", "norm|temperature"),
        }
    }

    fn first(&self, batch: &Words) -> Self::Activation {
        let x = self.words.forward(batch.words.clone());
        let [n, length, _] = x.dims();
        let before = x.clone().slice(s![.., 0..length - 1, ..]);
        let start = Tensor::zeros([n, 1, WIDTH], (&x.device(), x.dtype()));
        let zero = Tensor::zeros([1], (&x.device(), x.dtype()));
        (Tensor::cat(vec![start, before], 1), zero)
    }

    fn block(&self, index: usize, (x, loss): Self::Activation, _: &Words) -> Self::Activation {
        let Block { norm, router, up, down } = &self.blocks[index];
        let [n, length, width] = x.dims();
        let tokens = norm.forward(x.clone()).reshape([n * length, width]);
        let logits = router.as_ref().unwrap_or(&self.router).forward(tokens.clone());
        let z = logits.clone().exp().sum_dim(1).log().powi_scalar(2).mean();
        let (best, chosen) = softmax(logits, 1).topk_with_indices(2, 1);
        let zeros = Tensor::zeros([n * length, EXPERTS], (&x.device(), x.dtype()));
        let weights = zeros.scatter(1, chosen, best, IndexingUpdateOp::Add).transpose().unsqueeze_dim::<3>(2);
        let tokens = tokens.unsqueeze::<3>().expand([EXPERTS, n * length, width]);
        let y = gelu(tokens.matmul(up.val())).matmul(down.val()) * weights;
        (x + y.sum_dim(0).reshape([n, length, width]), loss + z * 0.1)
    }

    fn last(&self, (x, aux): Self::Activation, batch: &Words) -> (Tensor<1>, ClassificationOutput) {
        let [n, length, width] = x.dims();
        let x = self.norm.forward(x).reshape([n * length, width]) * self.temperature.val().unsqueeze();
        let logits = x.matmul(self.words.weight.val().transpose());
        let words = batch.words.clone().reshape([n * length]);
        let loss = -log_softmax(logits.clone(), 1).gather(1, words.clone().reshape([n * length, 1])).mean() + aux;
        (loss.clone(), ClassificationOutput::new(loss, logits, words))
    }
}

steps_of_stages!(Routed, Words, ClassificationOutput);

fn batch(items: Range<usize>, device: &Device) -> Words {
    let n = items.len();
    let word = |item: usize, at: usize| ((item * 7 + at * (item % 3 + 2) + at * at) % WORDS) as i64;
    let words: Vec<i64> = items.flat_map(|item| (0..LENGTH).map(move |at| word(item, at))).collect();
    Words { words: Tensor::from_data(TensorData::new(words, [n, LENGTH]), device) }
}

#[test]
fn losses_of_routers_and_a_router_of_several_stages() {
    let layouts = layouts(
        "TP1, PP2, PP4, PP2 VPP2, PP2 DP2, PP2 DP2 ZeRO1, PP2 VPP2 DP2 ZeRO2, PP2 DP2 ZeRO3, TP2 PP2, TP2 SP PP2 DP2",
    );
    let plan = || Plan::auto().columns("up").rows("down");
    proven(verify_stages_as(Routed::new, batch, &layouts, &Proof::default().plan(plan())), layouts.len());
    let proof = Proof::default().plan(plan()).recompute(Recompute::full()).overlap_grad_reduce();
    proven(verify_stages_as(Routed::new, batch, &layouts, &proof), layouts.len());
}
