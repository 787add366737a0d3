//! T5, an encoder-decoder.

use std::ops::Range;

use burn::prelude::*;
use burn_megatron::learner::{T5Batch, T5Training};
use burn_megatron::prelude::*;
use models::encoders::t5::T5FeedForwardKind;
use models::{Activation, T5, T5Config};

use crate::{adamw, adapted, layouts, no_fallback, proven};

fn config() -> T5Config {
    models::sized! { T5Config::small();
        vocab_size: 24, d_model: 16, d_kv: 8, d_ff: 32, num_layers: 2, num_decoder_layers: 2, num_heads: 4,
        relative_attention_num_buckets: 8, relative_attention_max_distance: 6, dropout_rate: 0.0,
        feed_forward_proj: T5FeedForwardKind::Gated(Activation::GeluNew)
    }
}

fn training(device: &Device) -> T5Training {
    T5Training { t5: T5::new(&config(), device) }
}

/// Each item has three labels, so that the loss is a mean over the items, and padding of its own.
fn batch(items: Range<usize>, device: &Device) -> T5Batch {
    let ints = |length: usize, value: &dyn Fn(usize, usize) -> i64| {
        let places = items.clone().flat_map(|item| (0..length).map(move |at| (item, at)));
        let values: Vec<i64> = places.map(|(item, at)| value(item, at)).collect();
        Tensor::<2, Int>::from_data(TensorData::new(values, [items.len(), length]), device)
    };
    let token = |item: usize, at: usize| (1 + (item * 7 + at * at) % 23) as i64;
    T5Batch {
        input: ints(8, &token),
        padding: ints(8, &|item, at| i64::from(at >= 5 + item % 4)).equal_elem(1),
        output: ints(4, &|item, at| token(item + 3, at)),
        labels: ints(4, &|item, at| if at == item % 4 { -100 } else { token(item + 5, at) }),
    }
}

fn loss(model: &T5Training, items: Range<usize>, device: &Device) -> Tensor<1> {
    model.run(&batch(items, device)).0
}

#[test]
fn t5_trains_over_ranks_as_on_one_device() {
    let layouts = layouts("TP2, TP4, TP2 SP, TP4 SP, TP2 DP2, TP2 SP DP2 ZeRO1, DP4 ZeRO3, TP2 SP DP2 ZeRO3");
    let proof = Proof::default().plan(T5::plan());
    proven(verify_module_as(training, loss, &layouts, &proof), layouts.len());
}

/// The encoder's output goes to every stage of the decoder. Several stages hold the numbers for distances and the embedding:
/// that is read by the first stage, by the decoder's first, and by the last as the head.
#[test]
fn t5_trains_in_pipelines_as_on_one_device() {
    let list = layouts("PP2, PP4, PP2 VPP2, TP2 PP4, PP4 DP2 ZeRO1, PP2 DP2 ZeRO2, PP4 DP2 ZeRO3, TP2 SP PP2 DP2");
    let proof = Proof::default().plan(T5::plan()).optimizer(adamw);
    proven(verify_stages_as(training, batch, &list, &proof), list.len());
    let list = layouts("PP2, PP4, TP2 PP2");
    let gpipe = proof.clone().schedule(ScheduleKind::GPipe);
    proven(verify_stages_as(training, batch, &list, &gpipe), list.len());
    let recomputed = proof.recompute(Recompute::full());
    proven(verify_stages_as(training, batch, &list, &recomputed), list.len());
}

/// The second of two stages begins with the encoder's last block; the head has weights of its own.
#[test]
fn a_stage_with_blocks_of_encoder_and_decoder() {
    let sizes = T5Config { num_layers: 3, num_decoder_layers: 2, ..config() };
    let config = T5Config { tie_word_embeddings: false, scale_decoder_outputs: false, ..sizes };
    let training = |device: &Device| T5Training { t5: T5::new(&config, device) };
    let list = layouts("PP2, PP4 DP2, PP5");
    let proof = Proof::default().plan(T5::plan()).optimizer(adamw);
    proven(verify_stages_as(training, batch, &list, &proof), list.len());
}

#[test]
fn adapters_of_t5_train_as_on_one_device() {
    let training = |device: &Device| T5Training { t5: adapted(T5::new(&config(), device)) };
    let proof = Proof::default().plan(T5::plan()).optimizer(adamw);
    let whole = layouts("TP2, TP2 SP DP2 ZeRO3");
    proven(verify_module_as(training, loss, &whole, &proof), whole.len());
    let stages = layouts("PP4, TP2 PP2 DP2 ZeRO2");
    proven(verify_stages_as(training, batch, &stages, &proof), stages.len());
}

/// The backward pass of a Burn module computes all gradients at once.
#[test]
fn schedules_that_split_the_backward_pass_are_refused() {
    let proof = Proof::default().plan(T5::plan()).schedule(ScheduleKind::ZbH1);
    let error = verify_stages_as(training, batch, &layouts("PP2"), &proof).unwrap_err().to_string();
    says!(error, "computes gradients of inputs before those of weights", "nearest legal: 1f1b");
}

#[test]
fn no_operation_of_t5_falls_back() {
    no_fallback(training, T5::plan(), loss, &["TP2", "TP4"]);
}

/// Tensor parallelism divides attention between heads, of which there is a column of numbers for distances each.
#[test]
fn ranks_that_do_not_divide_the_heads_are_refused() {
    let error = verify_module_as(training, loss, &layouts("TP8"), &Proof::default().plan(T5::plan()));
    says!(error.unwrap_err(), "encoder.positions.bias` has 4 elements");
}
