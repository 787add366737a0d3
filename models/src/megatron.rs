//! Megatron-LM's names of a decoder's parameters (`megatron/core/models/gpt/gpt_model.py`), as one rank stores them.

use std::ops::Range;

use crate::names::{Foreign, NameMap};

/// What decides the names and shapes of a decoder's parameters in Megatron-LM.
#[derive(Clone, Debug)]
pub(crate) struct MegatronDecoder {
    pub vocab: usize,
    pub hidden: usize,
    pub intermediate: usize,
    /// What most layers have in the place of the MLP, if any.
    pub experts: Option<MegatronExperts>,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// `linear_fc1` is `[gate; up]`.
    pub gated: bool,
    /// Norms have a bias.
    pub norm_bias: bool,
    /// Queries and keys are normalised head by head.
    pub head_norms: bool,
    /// The query, key and value projection has a bias.
    pub qkv_bias: bool,
    /// The attention's output projection has a bias.
    pub proj_bias: bool,
    /// The MLP's linear layers have biases.
    pub mlp_bias: bool,
    /// Learned positions, if any.
    pub positions: Option<usize>,
    /// The output layer shares the embedding.
    pub tied: bool,
}

/// What decides the names and shapes of a mixture's parameters. Experts are gated and have no biases.
#[derive(Clone, Debug)]
pub(crate) struct MegatronExperts {
    pub count: usize,
    /// Width of a routed expert.
    pub width: usize,
    /// Layers that have an MLP instead.
    pub dense_layers: Vec<usize>,
}

impl MegatronDecoder {
    /// All of the decoder's parameters.
    pub fn names(&self) -> NameMap {
        let mut map = NameMap::default();
        let table = [self.vocab, self.hidden];
        map.same("embed_tokens.weight", "embedding.word_embeddings.weight", &table);
        if let Some(positions) = self.positions {
            let shape = [positions, self.hidden];
            map.same("embed_positions.weight", "embedding.position_embeddings.weight", &shape);
        }
        for layer in 0..self.layers {
            let (ours, theirs) = (format!("layers.{layer}"), format!("decoder.layers.{layer}"));
            self.attention(&mut map, &ours, &theirs);
            self.norm(&mut map, &format!("{ours}.post_attention_layernorm"), &format!("{theirs}.pre_mlp_layernorm"));
            let (ours, theirs) = (format!("{ours}.mlp"), format!("{theirs}.mlp"));
            match self.experts.as_ref().filter(|experts| !experts.dense_layers.contains(&layer)) {
                Some(experts) => self.mixture(&mut map, &ours, &theirs, experts),
                None => self.mlp(&mut map, &ours, &theirs, self.intermediate),
            }
        }
        self.norm(&mut map, "norm", "decoder.final_layernorm");
        if !self.tied {
            map.same("lm_head.weight", "output_layer.weight", &table);
        }
        map
    }

    fn attention(&self, map: &mut NameMap, ours: &str, theirs: &str) {
        self.norm(map, &format!("{ours}.input_layernorm"), &format!("{theirs}.input_layernorm"));
        let qkv = format!("{theirs}.self_attention.linear_qkv");
        for (part, rows) in ["q", "k", "v"].iter().zip(self.qkv_rows()) {
            self.rows(map, &format!("{ours}.attention.{part}_proj"), &qkv, rows, self.qkv_height(), self.qkv_bias);
        }
        if self.head_norms {
            for (our, their) in [("q_norm", "q_layernorm"), ("k_norm", "k_layernorm")] {
                let (ours, theirs) = (format!("{ours}.attention.{our}"), format!("{theirs}.self_attention.{their}"));
                map.same(format!("{ours}.weight"), format!("{theirs}.weight"), &[self.head_dim]);
            }
        }
        let inner = self.heads * self.head_dim;
        let (o_proj, linear_proj) =
            (format!("{ours}.attention.o_proj"), format!("{theirs}.self_attention.linear_proj"));
        linear(map, &o_proj, &linear_proj, [self.hidden, inner], self.proj_bias);
    }

    /// `megatron/core/transformer/moe/{router,experts}.py`, with one module per expert.
    fn mixture(&self, map: &mut NameMap, ours: &str, theirs: &str, experts: &MegatronExperts) {
        let router = [experts.count, self.hidden];
        map.same(format!("{ours}.router.weight"), format!("{theirs}.router.weight"), &router);
        for expert in 0..experts.count {
            let (ours, theirs) =
                (format!("{ours}.experts.{expert}"), format!("{theirs}.experts.local_experts.{expert}"));
            self.mlp(map, &ours, &theirs, experts.width);
        }
    }

    fn mlp(&self, map: &mut NameMap, ours: &str, theirs: &str, width: usize) {
        let fc1 = format!("{theirs}.linear_fc1");
        if self.gated {
            let (gate, up) = (format!("{ours}.gate_proj"), format!("{ours}.up_proj"));
            self.rows(map, &gate, &fc1, one(0..width), 2 * width, self.mlp_bias);
            self.rows(map, &up, &fc1, one(width..2 * width), 2 * width, self.mlp_bias);
        } else {
            linear(map, &format!("{ours}.up_proj"), &fc1, [width, self.hidden], self.mlp_bias);
        }
        let (down, fc2) = (format!("{ours}.down_proj"), format!("{theirs}.linear_fc2"));
        linear(map, &down, &fc2, [self.hidden, width], self.mlp_bias);
    }

    /// Rows of the fused projection are ordered by key-value group: `q … q k v | q … q k v | …`
    /// (`megatron/core/transformer/attention.py`).
    fn qkv_rows(&self) -> [Vec<Range<usize>>; 3] {
        let (d, queries) = (self.head_dim, self.heads / self.kv_heads);
        let group = (queries + 2) * d;
        let part = |start: usize, heads: usize| -> Vec<Range<usize>> {
            (0..self.kv_heads).map(|g| g * group + start..g * group + start + heads * d).collect()
        };
        [part(0, queries), part(queries * d, 1), part((queries + 1) * d, 1)]
    }

    fn qkv_height(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Some rows of a fused linear layer of `height` outputs, and of its bias.
    fn rows(&self, map: &mut NameMap, ours: &str, theirs: &str, rows: Vec<Range<usize>>, height: usize, bias: bool) {
        let foreign = |what: &str, shape: Vec<usize>| {
            let (name, rows) = (format!("{theirs}.{what}"), Some(rows.clone()));
            Foreign { name, transposed: false, rows, shape }
        };
        map.add(format!("{ours}.weight"), foreign("weight", vec![height, self.hidden]));
        if bias {
            map.add(format!("{ours}.bias"), foreign("bias", vec![height]));
        }
    }

    fn norm(&self, map: &mut NameMap, ours: &str, theirs: &str) {
        map.same(format!("{ours}.weight"), format!("{theirs}.weight"), &[self.hidden]);
        if self.norm_bias {
            map.same(format!("{ours}.bias"), format!("{theirs}.bias"), &[self.hidden]);
        }
    }
}

fn one(rows: Range<usize>) -> Vec<Range<usize>> {
    std::iter::once(rows).collect()
}

fn linear(map: &mut NameMap, ours: &str, theirs: &str, shape: [usize; 2], bias: bool) {
    map.same(format!("{ours}.weight"), format!("{theirs}.weight"), &shape);
    if bias {
        map.same(format!("{ours}.bias"), format!("{theirs}.bias"), &shape[..1]);
    }
}
