//! DeepSeek-V3's tensors under Megatron-LM's names, as one rank stores them
//! (`megatron/core/transformer/{multi_latent_attention,multi_token_prediction}.py`).

use std::ops::Range;

use super::config::DeepSeekV3Config;
use super::rows;
use crate::megatron::feed_forward;
use crate::names::{Foreign, NameMap};

impl DeepSeekV3Config {
    /// All of the model's tensors.
    pub(super) fn megatron_core_names(&self) -> NameMap {
        let (hidden, mut map) = (self.hidden_size, NameMap::default());
        let table = [self.vocab_size, hidden];
        map.same("embed_tokens.weight", "embedding.word_embeddings.weight", &table);
        for layer in 0..self.num_hidden_layers {
            block(&mut map, self, layer, &format!("decoder.layers.{layer}"));
        }
        map.same("norm.weight", "decoder.final_layernorm.weight", &[hidden]);
        for module in 0..self.num_nextn_predict_layers {
            let layer = self.num_hidden_layers + module;
            let (ours, theirs) = (format!("layers.{layer}"), format!("mtp.layers.{module}"));
            for (our, their) in [("enorm", "enorm"), ("hnorm", "hnorm"), ("shared_head.norm", "final_layernorm")] {
                map.same(format!("{ours}.{our}.weight"), format!("{theirs}.{their}.weight"), &[hidden]);
            }
            map.same(format!("{ours}.eh_proj.weight"), format!("{theirs}.eh_proj.weight"), &[hidden, 2 * hidden]);
            block(&mut map, self, layer, &format!("{theirs}.transformer_layer"));
        }
        map.same("lm_head.weight", "output_layer.weight", &table);
        map
    }
}

fn block(map: &mut NameMap, config: &DeepSeekV3Config, layer: usize, theirs: &str) {
    let (ours, hidden) = (format!("layers.{layer}"), config.hidden_size);
    for (our, their) in [("input_layernorm", "input_layernorm"), ("post_attention_layernorm", "pre_mlp_layernorm")] {
        map.same(format!("{ours}.{our}.weight"), format!("{theirs}.{their}.weight"), &[hidden]);
    }
    attention(map, config, &format!("{ours}.attention"), &format!("{theirs}.self_attention"));
    feed_forward(map, &config.block(layer).mlp, &format!("{ours}.mlp"), &format!("{theirs}.mlp"));
}

fn attention(map: &mut NameMap, config: &DeepSeekV3Config, ours: &str, theirs: &str) {
    let (hidden, heads) = (config.hidden_size, config.num_attention_heads);
    let (queries, latent) = (config.query_width(), config.kv_lora_rank + config.qk_rope_head_dim);
    let mut add = |our: &str, their: &str, shape: &[usize], rows: Option<Vec<Range<usize>>>| {
        let (name, shape) = (format!("{theirs}.{their}.weight"), shape.to_vec());
        map.add(format!("{ours}.{our}.weight"), Foreign { name, transposed: false, rows, stack: None, shape });
    };
    match config.q_lora_rank {
        Some(rank) => {
            add("q_a_proj", "linear_q_down_proj", &[rank, hidden], None);
            add("q_a_layernorm", "q_layernorm", &[rank], None);
            add("q_b_proj", "linear_q_up_proj", &[queries, rank], Some(rows::queries(config)));
        }
        None => add("q_proj", "linear_q_proj", &[queries, hidden], Some(rows::queries(config))),
    }
    add("kv_a_proj_with_mqa", "linear_kv_down_proj", &[latent, hidden], Some(rows::latent(config)));
    add("kv_a_layernorm", "kv_layernorm", &[config.kv_lora_rank], None);
    let keys = heads * (config.qk_nope_head_dim + config.v_head_dim);
    add("kv_b_proj", "linear_kv_up_proj", &[keys, config.kv_lora_rank], None);
    add("o_proj", "linear_proj", &[hidden, heads * config.v_head_dim], None);
}
