//! A Llama of burn-nn's modules.

use crate::harness::{Case, LAYOUTS, ints, tensor};
use backend_dist::logical::Placement::Shard;
use backend_dist::mesh::Axis;
use backend_dist::mesh_backend::Redistribute;
use backend_dist::parallelize::Plan;
use burn::module::Module;
use burn::nn::{
    Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, RotaryEncoding, RotaryEncodingConfig,
    SwiGlu, SwiGluConfig,
};
use burn::tensor::activation::{log_softmax, softmax};
use burn::tensor::{Device, Int, Tensor, module::attention, ops::AttentionModuleOptions};

/// Heads of queries, and of keys and values.
const HEADS: [usize; 2] = [8, 4];
const HEAD: usize = 4;
const HIDDEN: usize = 16;

#[derive(Module, Debug)]
struct Attention {
    wq: Linear,
    wk: Linear,
    wv: Linear,
    wo: Linear,
}

#[derive(Module, Debug)]
struct Block {
    attention_norm: LayerNorm,
    attention: Attention,
    mlp_norm: LayerNorm,
    gate: SwiGlu,
    down: Linear,
}

#[derive(Module, Debug)]
struct Llama {
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
    rope: RotaryEncoding,
}

fn linear(input: usize, output: usize, device: &Device) -> Linear {
    LinearConfig::new(input, output).with_bias(false).init(device)
}

impl Llama {
    fn new(device: &Device) -> Self {
        let block = |_| Block {
            // burn-nn's RMS norm computes in f32 whatever the input.
            attention_norm: LayerNormConfig::new(HIDDEN).init(device),
            attention: Attention {
                wq: linear(HIDDEN, HEADS[0] * HEAD, device),
                wk: linear(HIDDEN, HEADS[1] * HEAD, device),
                wv: linear(HIDDEN, HEADS[1] * HEAD, device),
                wo: linear(HEADS[0] * HEAD, HIDDEN, device),
            },
            mlp_norm: LayerNormConfig::new(HIDDEN).init(device),
            gate: SwiGluConfig::new(HIDDEN, 32).init(device),
            down: linear(32, HIDDEN, device),
        };
        Self {
            embedding: EmbeddingConfig::new(24, HIDDEN).init(device),
            blocks: (0..2).map(block).collect(),
            norm: LayerNormConfig::new(HIDDEN).init(device),
            head: linear(HIDDEN, 24, device),
            rope: RotaryEncodingConfig::new(16, HEAD).init(device),
        }
    }

    fn loss(&self, tokens: Tensor<2, Int>) -> Tensor<1> {
        self.loss_with(tokens, written_out)
    }

    fn loss_with(&self, tokens: Tensor<2, Int>, attend: Attend) -> Tensor<1> {
        let [batch, length] = tokens.dims();
        let labels: Tensor<2, Int> = ints([batch, length], 23, &tokens.device());
        let mut x = self.embedding.forward(tokens);
        for block in &self.blocks {
            x = x.clone() + block.attention.forward(block.attention_norm.forward(x), &self.rope, attend);
            let hidden = block.gate.forward(block.mlp_norm.forward(x.clone()));
            x = x + block.down.forward(hidden);
        }
        let logits = self.head.forward(self.norm.forward(x));
        let losses = log_softmax(logits, 2).gather(2, labels.reshape([batch, length, 1]));
        losses.mean().neg()
    }
}

impl Attention {
    fn forward(&self, x: Tensor<3>, rope: &RotaryEncoding, attend: Attend) -> Tensor<3> {
        let [batch, length, _] = x.dims();
        let heads = |x: Tensor<3>, n: usize| x.reshape([batch, length, n, HEAD]).swap_dims(1, 2);
        let q = rope.forward(heads(self.wq.forward(x.clone()), HEADS[0]));
        let k = rope.forward(heads(self.wk.forward(x.clone()), HEADS[1]));
        let v = heads(self.wv.forward(x), HEADS[1]);
        let out = attend(q, k, v).swap_dims(1, 2).reshape([batch, length, HEADS[0] * HEAD]);
        self.wo.forward(out)
    }
}

type Attend = fn(Tensor<4>, Tensor<4>, Tensor<4>) -> Tensor<4>;

/// Causal attention, as users write it.
fn written_out(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
    let [batch, heads, length, _] = q.dims();
    let repeated = |x: Tensor<4>| {
        let x = x.reshape([batch, HEADS[1], 1, length, HEAD]);
        x.expand([batch, HEADS[1], HEADS[0] / HEADS[1], length, HEAD]).reshape([batch, heads, length, HEAD])
    };
    let future = Tensor::<2, Int>::ones([length, length], &q.device()).triu(1).bool().unsqueeze::<4>();
    let scores = q.matmul(repeated(k).swap_dims(2, 3)) / (HEAD as f64).sqrt();
    softmax(scores.mask_fill(future, -1e9), 3).matmul(repeated(v))
}

/// The same as one operation.
fn in_one(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
    attention(q, k, v, None, None, AttentionModuleOptions { is_causal: true, ..Default::default() })
}

fn plan() -> Plan {
    Plan::auto().columns("wq|wk|wv").rows("wo|down")
}

#[test]
fn a_llama_of_burn_nn() {
    let case = Case::<Llama> { init: Llama::new, loss: |model, device, _| model.loss(ints([2, 8], 24, device)) };
    for layout in LAYOUTS {
        let report = case.check(layout, &plan());
        assert!(report.fallbacks.is_empty(), "{layout}: {report}");
    }
}

/// Burn computes the softmax of the operation in f32, and flash attention in f64.
#[test]
fn attention_of_grouped_queries_is_one_operation_on_each_rank() {
    let written = Case::<Llama> {
        init: Llama::new,
        loss: |model, device, rank| {
            let attend = if rank.is_some() { in_one } else { written_out };
            model.loss_with(ints([2, 8], 24, device), attend)
        },
    };
    for layout in LAYOUTS {
        let report = written.check_with(layout, &[Axis::Tp], &[plan()], true);
        assert!(report.fallbacks.is_empty(), "{layout}: {report}");
        let counts = ["attention", "attention gradient"].map(|kernel| report.kernels.get(kernel));
        assert_eq!(counts, [Some(&2); 2], "{layout}: {report}");
    }
}

#[test]
fn a_llama_of_burn_nn_sharded_by_sequence() {
    let case = Case::<Llama> {
        init: Llama::new,
        loss: |model, device, rank| {
            let mut tokens = ints([2, 8], 24, device);
            if let Some(rank) = rank {
                tokens = tokens.redistribute(rank, Axis::Tp, Shard(1));
            }
            model.loss(tokens) + tensor([1], 1, device)
        },
    };
    for layout in LAYOUTS {
        let report = case.check(layout, &plan().replicate("embedding"));
        assert!(report.fallbacks.is_empty(), "{layout}: {report}");
    }
}
