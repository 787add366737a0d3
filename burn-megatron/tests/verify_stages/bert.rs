//! BERT, whose embedding of tokens is also the weight of its head.

use std::ops::Range;

use burn::prelude::*;
use burn_megatron::learner::{BertBatch, BertTraining};
use burn_megatron::prelude::*;
use models::{Bert, BertConfig};

use crate::{adamw, adapted, layouts, no_fallback, proven};

fn config() -> BertConfig {
    models::sized! { BertConfig::base();
        vocab_size: 24, hidden_size: 16, num_hidden_layers: 4, num_attention_heads: 4, intermediate_size: 32,
        max_position_embeddings: 12, hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0
    }
}

fn training(device: &Device) -> BertTraining {
    BertTraining { bert: Bert::new(&config(), device) }
}

/// Each item has two labels, so that the loss is a mean over the items, and padding of its own.
fn batch(items: Range<usize>, device: &Device) -> BertBatch {
    let ints = |value: &dyn Fn(usize, usize) -> i64| {
        let values: Vec<i64> =
            items.clone().flat_map(|item| (0..8).map(move |at| (item, at))).map(|(i, a)| value(i, a)).collect();
        Tensor::<2, Int>::from_data(TensorData::new(values, [items.len(), 8]), device)
    };
    let token = |item: usize, at: usize| (1 + (item * 7 + at * at) % 23) as i64;
    let next: Vec<i64> = items.clone().map(|item| (item % 2) as i64).collect();
    BertBatch {
        tokens: ints(&token),
        types: ints(&|item, at| i64::from(at > 2 + item % 3)),
        padding: ints(&|item, at| i64::from(at >= 5 + item % 4)).equal_elem(1),
        labels: ints(&|item, at| if at == item % 4 || at == 4 { token(item + 1, at) } else { -100 }),
        next_sentence: Tensor::from_data(next.as_slice(), device),
    }
}

fn loss(model: &BertTraining, items: Range<usize>, device: &Device) -> Tensor<1> {
    model.run(&batch(items, device)).0
}

#[test]
fn bert_trains_over_ranks_as_on_one_device() {
    let layouts =
        layouts("TP2, TP4, TP2 SP, TP4 SP, TP2 DP2, TP2 SP DP2 ZeRO1, DP2 ZeRO2, DP4 ZeRO3, TP2 SP DP2 ZeRO3");
    let proof = Proof::default().plan(Bert::plan());
    proven(verify_module_as(training, loss, &layouts, &proof), layouts.len());
}

#[test]
fn bert_trains_in_pipelines_as_on_one_device() {
    let layouts = layouts("PP2, PP4, PP2 VPP2, PP2 DP2 ZeRO1, TP2 SP PP2 DP2");
    let proof = Proof::default().plan(Bert::plan()).optimizer(adamw);
    proven(verify_stages_as(training, batch, &layouts, &proof), layouts.len());
}

#[test]
fn adapters_of_bert_train_as_on_one_device() {
    let adapted = |device: &Device| BertTraining { bert: adapted(Bert::new(&config(), device)) };
    let proof = Proof::default().plan(Bert::plan()).optimizer(adamw);
    let whole = layouts("TP2, TP2 SP DP2 ZeRO1, DP2 ZeRO2, TP2 DP2 ZeRO3");
    proven(verify_module_as(adapted, loss, &whole, &proof), whole.len());
    let stages = layouts("PP2, TP2 SP PP2 DP2 ZeRO1, PP2 VPP2 DP2 ZeRO3");
    proven(verify_stages_as(adapted, batch, &stages, &proof), stages.len());
}

#[test]
fn no_operation_of_bert_falls_back() {
    no_fallback(training, Bert::plan(), loss, &["TP2", "TP4"]);
}
