//! Matrices whose output a model takes apart: every rank has its share of each part, and nothing is gathered where they part.

use crate::harness::{Case, LAYOUTS, ints, tensor};
use crate::sequence;
use backend_dist::logical::Placement::Shard;
use backend_dist::mesh::Axis;
use backend_dist::mesh_backend::{Redistribute, Report};
use backend_dist::parallelize::Plan;
use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::{silu, softmax};
use burn::tensor::{Bool, Device, Tensor};

const WIDTH: usize = 16;
const HEADS: usize = 4;
const HIDDEN: usize = 24;

fn linear(from: usize, to: usize, device: &Device) -> Linear {
    LinearConfig::new(from, to).init(device)
}

/// Causal attention of `[batch, sequence, WIDTH]`, with fewer heads of keys and values than of queries, or as many.
fn attention([q, k, v]: [Tensor<3>; 3]) -> Tensor<3> {
    let [b, s, width] = q.dims();
    let head = width / HEADS;
    let heads = |x: Tensor<3>| {
        let [.., width] = x.dims();
        let (own, shared) = (width / head, HEADS * head / width);
        let x = x.reshape([b, s, own, head]).swap_dims(1, 2);
        x.unsqueeze_dim::<5>(2).expand([b, own, shared, s, head]).reshape([b, HEADS, s, head])
    };
    let [q, k, v] = [q, k, v].map(heads);
    let later = Tensor::<2, Bool>::tril_mask([s, s], 0, &q.device()).unsqueeze::<4>();
    let scores = q.matmul(k.transpose()) / (head as f64).sqrt();
    let context = softmax(scores.mask_fill(later, f32::NEG_INFINITY), 3).matmul(v);
    context.swap_dims(1, 2).reshape([b, s, width])
}

/// A block of nanoGPT, whose MLP is gated.
#[derive(Module, Debug)]
struct Block {
    norm: LayerNorm,
    c_attn: Linear,
    c_proj: Linear,
    gate_up: Linear,
    down: Linear,
}

impl Block {
    fn new(device: &Device) -> Self {
        Self {
            norm: LayerNormConfig::new(WIDTH).init(device),
            c_attn: linear(WIDTH, 3 * WIDTH, device),
            c_proj: linear(WIDTH, WIDTH, device),
            gate_up: linear(WIDTH, 2 * HIDDEN, device),
            down: linear(HIDDEN, WIDTH, device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let qkv = self.c_attn.forward(self.norm.forward(x.clone())).split(WIDTH, 2);
        let x = x + self.c_proj.forward(attention(qkv.try_into().unwrap()));
        let mut parts = self.gate_up.forward(self.norm.forward(x.clone())).chunk(2, 2);
        let (up, gate) = (parts.pop().unwrap(), parts.pop().unwrap());
        x + self.down.forward(silu(gate) * up)
    }
}

/// The same with a matrix each.
#[derive(Module, Debug)]
struct Apart {
    norm: LayerNorm,
    qkv: Vec<Linear>,
    c_proj: Linear,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Apart {
    fn new(device: &Device) -> Self {
        Self {
            norm: LayerNormConfig::new(WIDTH).init(device),
            qkv: (0..3).map(|_| linear(WIDTH, WIDTH, device)).collect(),
            c_proj: linear(WIDTH, WIDTH, device),
            gate: linear(WIDTH, HIDDEN, device),
            up: linear(WIDTH, HIDDEN, device),
            down: linear(HIDDEN, WIDTH, device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let normed = self.norm.forward(x.clone());
        let qkv = [0, 1, 2].map(|i| self.qkv[i].forward(normed.clone()));
        let x = x + self.c_proj.forward(attention(qkv));
        let normed = self.norm.forward(x.clone());
        x + self.down.forward(silu(self.gate.forward(normed.clone())) * self.up.forward(normed))
    }
}

fn block() -> Case<Block> {
    Case {
        init: Block::new,
        loss: |model, device, _| model.forward(tensor([2, 8, WIDTH], 3, device)).powf_scalar(3.0).mean(),
    }
}

fn in_parts() -> Plan {
    Plan::auto().columns_in_parts("c_attn", 3).columns_in_parts("gate_up", 2).rows("c_proj|down")
}

fn times(report: &Report) -> [usize; 4] {
    ["all-reduce", "all-gather", "reduce-scatter", "all-to-all"].map(|name| report.times(name))
}

#[test]
fn a_block_of_fused_matrices_communicates_as_one_of_a_matrix_each() {
    let apart = Case::<Apart> {
        init: Apart::new,
        loss: |model, device, _| model.forward(tensor([2, 8, WIDTH], 3, device)).powf_scalar(3.0).mean(),
    };
    let plan = Plan::default().columns("qkv|gate|up").rows("c_proj|down");
    for layout in LAYOUTS {
        let fused = block().check(layout, &in_parts());
        assert!(fused.fallbacks.is_empty(), "{layout}: {fused}");
        // Three gradients of one activation are added before they are reduced, as are those of fused matrices in their GEMM.
        assert_eq!(times(&fused), times(&apart.check(layout, &plan)), "{layout}: {fused}");
    }
    let whole = block().check("TP2", &Plan::default().columns("c_attn|gate_up").rows("c_proj|down"));
    assert!(whole.times("all-gather") > 0, "{whole}");
}

/// A device without data plans it alike, which the case checks.
#[test]
fn under_sequence_parallelism_too() {
    let fused = sequence::Case::<(Embedding, Block)> {
        init: |device| (EmbeddingConfig::new(12, WIDTH).init(device), Block::new(device)),
        encode: |(words, block), device| block.forward(words.forward(ints([2, 8], 12, device))),
    };
    let apart = sequence::Case::<(Embedding, Apart)> {
        init: |device| (EmbeddingConfig::new(12, WIDTH).init(device), Apart::new(device)),
        encode: |(words, block), device| block.forward(words.forward(ints([2, 8], 12, device))),
    };
    for layout in ["TP2", "TP2 SP", "TP4 SP"] {
        let (report, at) = fused.check_by(layout, &in_parts());
        let (expected, _) = apart.check_by(layout, &Plan::auto().columns("qkv|gate|up").rows("c_proj|down"));
        assert!(at.is_shard() == layout.contains("SP") && report.fallbacks.is_empty(), "{layout}: {report}");
        assert_eq!(times(&report), times(&expected), "{layout}: {report}");
    }
}

/// PyTorch's attention takes parts of the weight instead of the output. Of one sample, ranks have positions.
#[test]
fn parts_of_a_weight_stay_where_they_are() {
    let case = sequence::Case::<(Embedding, Block)> {
        init: |device| (EmbeddingConfig::new(12, WIDTH).init(device), Block::new(device)),
        encode: |(words, block), device| {
            let x = words.forward(ints([1, 8], 12, device));
            let (normed, weights) = (block.norm.forward(x.clone()), block.c_attn.weight.val());
            let qkv = [0, 1, 2].map(|i| {
                let weight = weights.clone().slice([0..WIDTH, i * WIDTH..(i + 1) * WIDTH]);
                normed.clone().matmul(weight.unsqueeze())
            });
            x + block.c_proj.forward(attention(qkv))
        },
    };
    let of_output = sequence::Case::<(Embedding, Block)> {
        encode: |(words, block), device| {
            let x = words.forward(ints([1, 8], 12, device));
            let qkv = block.c_attn.forward(block.norm.forward(x.clone())).split(WIDTH, 2);
            x + block.c_proj.forward(attention(qkv.try_into().unwrap()))
        },
        ..case
    };
    for layout in ["TP2", "TP2 SP"] {
        let (report, _) = case.check_by(layout, &in_parts());
        let (expected, _) = of_output.check_by(layout, &in_parts());
        assert!(report.fallbacks.is_empty(), "{layout}: {report}");
        assert_eq!(times(&report), times(&expected), "{layout}: {report}");
    }
}

#[test]
fn data_parallel_ranks_gather_matrices_in_parts() {
    let samples = Case::<Block> {
        init: Block::new,
        loss: |model, device, rank| {
            let x = tensor([2, 8, WIDTH], 3, device);
            let x = match rank {
                Some(rank) => x.redistribute(rank, Axis::Dp, Shard(0)),
                None => x,
            };
            model.forward(x).powf_scalar(3.0).mean()
        },
    };
    let over_samples = Plan::default().columns("c_attn|gate_up").rows("c_proj|down").along(Axis::Dp);
    for axes in [[Axis::Tp, Axis::Dp], [Axis::Dp, Axis::Tp]] {
        samples.check_on("TP2 DP2", &axes, &[in_parts(), over_samples.clone()]);
        samples.check_on("TP2 DP2", &axes, &[in_parts().along(Axis::Dp)]);
    }
}

/// One matrix as timm's vision transformers take it apart, and one with fewer keys and values.
#[derive(Module, Debug)]
struct Attentions {
    qkv: Linear,
    proj: Linear,
    few: Linear,
    last: Linear,
}

#[test]
fn a_reshape_takes_parts_apart_and_so_do_ranges_of_different_sizes() {
    const FEW: usize = WIDTH / 2;
    let case = Case::<Attentions> {
        init: |device| Attentions {
            qkv: linear(WIDTH, 3 * WIDTH, device),
            proj: linear(WIDTH, WIDTH, device),
            few: linear(WIDTH, WIDTH + 2 * FEW, device),
            last: linear(WIDTH, WIDTH, device),
        },
        loss: |model, device, _| {
            let x = tensor::<3>([2, 8, WIDTH], 3, device);
            let qkv = model.qkv.forward(x).reshape([2, 8, 3, HEADS, WIDTH / HEADS]).permute([2, 0, 3, 1, 4]);
            let [q, k, v] = [0, 1, 2].map(|i| qkv.clone().slice([i..i + 1]).squeeze_dim::<4>(0));
            let context = softmax(q.matmul(k.transpose()), 3).matmul(v).swap_dims(1, 2).reshape([2, 8, WIDTH]);
            let parts = model.few.forward(model.proj.forward(context)).split_with_sizes(vec![WIDTH, FEW, FEW], 2);
            model.last.forward(attention(parts.try_into().unwrap())).powf_scalar(3.0).mean()
        },
    };
    let plan = Plan::default().columns_in_parts("qkv", 3).columns_in("few", &[WIDTH, FEW, FEW]).rows("proj|last");
    for layout in ["TP1", "TP2"] {
        let report = case.check(layout, &plan);
        assert!(report.fallbacks.is_empty() && report.times("all-gather") == 0, "{layout}: {report}");
    }
    // Two heads of keys cannot be on four ranks: what is taken apart is gathered there.
    let report = case.check("TP4", &plan);
    assert!(report.fallbacks.keys().all(|name| name.starts_with("Reshape")), "{report}");
}
