//! What is written is what the whole forward pass says, in every layout.

use parking_lot::Mutex;
use std::ops::ControlFlow;
use std::sync::Arc;

use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::Mesh;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use models::layers::paged::Step;
use models::{CausalLm, Gpt, GptConfig, Llama, LlamaConfig, PagedKvCache, ParamBuilder};

use super::*;
use crate::logits::LogitsProcessors;

const PROMPT: [i64; 5] = [7, 3, 60, 3, 11];

/// Weights large enough that the text is no repetition; two key-value heads.
fn llama() -> LlamaConfig {
    LlamaConfig {
        vocab_size: 61,
        hidden_size: 32,
        intermediate_size: 48,
        num_key_value_heads: 2,
        initializer_range: 0.4,
        ..LlamaConfig::tiny()
    }
}

fn gpt() -> GptConfig {
    GptConfig {
        vocab_size: 61,
        max_position_embeddings: 24,
        hidden_size: 32,
        intermediate_size: 48,
        num_attention_heads: 4,
        initializer_range: 0.4,
        tie_word_embeddings: false,
        ..GptConfig::tiny()
    }
}

/// What rank 0 got, after checking that all ranks got it and that its reader alone was called.
fn write<M: CausalLm>(config: &M::Config, layout: &str, options: &GenerateOptions) -> Generated {
    let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
    options.check(config, &PROMPT).unwrap();
    let streamed = Mutex::new(Vec::new());
    let ranks = launch(&mesh, &[Device::flex()], |rank: Rank| {
        let model = M::build(config, ParamBuilder::new(&rank, FloatDType::F64, SEED).without_autodiff())?;
        let listen = |token| {
            streamed.lock().push(token);
            ControlFlow::Continue(())
        };
        Ok(generate(&rank, &model, &PROMPT, options, listen)?)
    });
    let ranks = ranks.unwrap_or_else(|error| panic!("{layout}: {error}"));
    assert!(ranks.iter().all(|rank| rank.tokens == ranks[0].tokens && rank.ended == ranks[0].ended), "{layout}");
    assert_eq!(streamed.into_inner(), ranks[0].tokens, "{layout}");
    ranks.into_iter().next().unwrap()
}

/// Of the random weights.
const SEED: u64 = 11;

/// The likeliest token after each beginning of `tokens` that has the prompt, by the whole forward pass.
fn likeliest<M: CausalLm>(config: &M::Config, tokens: &[i64]) -> Vec<i64> {
    let rank = Rank::single(Device::flex());
    let model = M::build(config, ParamBuilder::new(&rank, FloatDType::F64, SEED).without_autodiff()).unwrap();
    let argmax = |end: usize| {
        let data = TensorData::new(tokens[..end].to_vec(), [1, end]);
        let logits = model.logits(Tensor::<2, Int>::from_data(data, (&rank.device, DType::I64)));
        let best = logits.narrow(1, end - 1, 1).argmax(2).into_data();
        best.iter::<i64>().next().unwrap()
    };
    (PROMPT.len()..tokens.len()).map(argmax).collect()
}

fn assert_greedy_is_argmax<M: CausalLm>(config: &M::Config, layouts: &[&str]) {
    let options = GenerateOptions::new(20, Sampling::greedy());
    let mut first: Option<Generated> = None;
    for layout in layouts {
        let text = write::<M>(config, layout, &options);
        let all = [&PROMPT, text.tokens.as_slice()].concat();
        assert_eq!((text.tokens.len(), text.ended), (20, Ended::Length));
        assert_eq!(text.tokens, likeliest::<M>(config, &all), "{layout}");
        assert_eq!(text.tokens, first.get_or_insert(text.clone()).tokens, "{layout}");
    }
    let mut distinct = first.unwrap().tokens;
    distinct.sort_unstable();
    distinct.dedup();
    assert!(distinct.len() > 3, "a text that repeats itself proves little: {distinct:?}");
}

/// TP4 has more ranks than key-value heads.
#[test]
fn greedy_llama_is_the_argmax_of_the_whole_forward_pass() {
    assert_greedy_is_argmax::<Llama>(&llama(), &["TP1", "TP2", "TP4", "TP2 SP", "TP4 SP"]);
}

/// Prompt and text need all 24 positions: the last token is not read.
#[test]
fn greedy_gpt_is_the_argmax_of_the_whole_forward_pass() {
    assert_greedy_is_argmax::<Gpt>(&gpt(), &["TP1", "TP2", "TP4", "TP4 SP"]);
}

#[test]
fn drawn_text_is_the_same_in_every_layout() {
    let sampling = Sampling { temperature: 1.2, top_k: Some(40), top_p: Some(0.95), seed: 5, ..Sampling::default() };
    let options = GenerateOptions::new(30, sampling);
    let first = write::<Llama>(&llama(), "TP1", &options).tokens;
    for layout in ["TP2", "TP4", "TP2 SP"] {
        assert_eq!(write::<Llama>(&llama(), layout, &options).tokens, first, "{layout}");
    }
    let other = GenerateOptions::new(30, Sampling { seed: 6, ..sampling });
    assert_ne!(write::<Llama>(&llama(), "TP1", &other).tokens, first);
}

#[test]
fn a_stop_token_or_the_reader_ends_the_text_on_all_ranks() {
    let mut options = GenerateOptions::new(20, Sampling::greedy());
    let text = write::<Llama>(&llama(), "TP1", &options).tokens;
    let end = (1..20).find(|at| !text[..*at].contains(&text[*at])).unwrap();
    options.stop_tokens = vec![99, text[end]];
    let stopped = write::<Llama>(&llama(), "TP2", &options);
    assert_eq!((stopped.tokens.as_slice(), stopped.ended), (&text[..=end], Ended::StopToken));

    let mesh = Mesh::new("TP2".parse().unwrap()).unwrap();
    options.stop_tokens.clear();
    let ranks = launch(&mesh, &[Device::flex()], |rank: Rank| {
        let model = Llama::build(&llama(), ParamBuilder::new(&rank, FloatDType::F64, SEED).without_autodiff())?;
        let mut left = 3;
        let listen = |_| {
            left -= 1;
            if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        Ok(generate(&rank, &model, &PROMPT, &options, listen)?)
    });
    for generated in ranks.unwrap() {
        assert_eq!((generated.tokens.as_slice(), generated.ended), (&text[..3], Ended::Reader));
    }
}

/// Within the window nothing changes; beyond it each token is what the model says of the tokens it still sees.
#[test]
fn a_text_longer_than_the_window_goes_on_from_its_last_half() {
    let options = GenerateOptions { window: Some(8), ..GenerateOptions::new(12, Sampling::greedy()) };
    let text = write::<Gpt>(&gpt(), "TP2", &options).tokens;
    let all = [&PROMPT, text.as_slice()].concat();
    let rank = Rank::single(Device::flex());
    let model = Gpt::build(&gpt(), ParamBuilder::new(&rank, FloatDType::F64, SEED).without_autodiff()).unwrap();
    // Tokens 0..8 are read, then token 8 would be the ninth: 5..9, and again at token 13: 10..14.
    for (at, seen) in [(5, 0), (8, 0), (9, 5), (13, 5), (14, 10), (16, 10)] {
        let data = TensorData::new(all[seen..at].to_vec(), [1, at - seen]);
        let logits = model.logits(Tensor::<2, Int>::from_data(data, (&rank.device, DType::I64)));
        let best = logits.narrow(1, at - seen - 1, 1).argmax(2).into_data();
        assert_eq!(best.iter::<i64>().next().unwrap(), all[at], "token {at}, of those from {seen}");
    }
}

#[test]
fn texts_of_a_batch_are_what_each_is_alone() {
    let prompts = [&PROMPT[..], &[1, 2, 3, 4, 5, 6, 7], &PROMPT];
    let sampling = Sampling { temperature: 1.0, seed: 3, ..Sampling::greedy() };
    let mut options = GenerateOptions::new(12, sampling);
    let alone = |prompt: &[i64], seed: u64, options: &GenerateOptions| {
        let rank = Rank::single(Device::flex());
        let model = Llama::build(&llama(), ParamBuilder::new(&rank, FloatDType::F64, SEED).without_autodiff()).unwrap();
        let options = GenerateOptions { sampling: Sampling { seed, ..options.sampling }, ..options.clone() };
        let text = generate(&rank, &model, prompt, &options, |_| ControlFlow::Continue(())).unwrap();
        (text.tokens, text.ended)
    };
    // One ends early; the others continue.
    options.stop_tokens = vec![alone(&PROMPT, 7, &options).0[4]];
    let mesh = Mesh::new("TP2".parse().unwrap()).unwrap();
    let ranks = launch(&mesh, &[Device::flex()], |rank: Rank| {
        let model = Llama::build(&llama(), ParamBuilder::new(&rank, FloatDType::F64, SEED).without_autodiff())?;
        let batch: Vec<(&[i64], u64)> = prompts.into_iter().zip([7, 8, 9]).collect();
        Ok(generate_batch(&rank, &model, &batch, &options, |_, _| ControlFlow::Continue(()))?)
    });
    let texts = ranks.unwrap().remove(0);
    assert!(texts[0].ended == Ended::StopToken && texts.iter().any(|text| text.tokens.len() > texts[0].tokens.len()));
    for ((text, prompt), seed) in texts.into_iter().zip(prompts).zip([7, 8, 9]) {
        assert_eq!((text.tokens, text.ended), alone(prompt, seed, &options), "{seed}");
    }
}

#[test]
fn what_cannot_be_written_is_refused_before_anything_runs() {
    let refuse = |options: &GenerateOptions, prompt: &[i64]| options.check(&gpt(), prompt).unwrap_err().to_string();
    let options = |new| GenerateOptions::new(new, Sampling::greedy());
    assert_eq!(options(20).check(&gpt(), &PROMPT), Ok(()));
    assert_eq!(
        refuse(&options(21), &PROMPT),
        "a prompt of 5 tokens and 21 new ones need 25 positions, the model has 24; at most 20 new tokens"
    );
    let long = [1; 30];
    assert!(refuse(&options(1), &long).ends_with("need 30 positions, the model has 24; at most 24 tokens of prompt"));
    assert_eq!(options(1000).check(&llama(), &long), Ok(()), "rotary positions have no end");
    let window = |window| GenerateOptions { window: Some(window), ..options(1000) };
    assert_eq!(window(24).check(&gpt(), &long), Ok(()));
    assert_eq!(refuse(&window(25), &PROMPT), "a window of 25 tokens; nearest legal: 24");
    assert_eq!(refuse(&window(1), &PROMPT), "a window of 1 tokens; nearest legal: 2");
    assert!(refuse(&options(1), &[]).starts_with("the prompt has no tokens"));
    assert_eq!(refuse(&options(1), &[0, 61]), "the prompt has token 61, the model knows 0..61");
    let cold = GenerateOptions::new(1, Sampling { temperature: -0.5, ..Sampling::default() });
    assert!(refuse(&cold, &PROMPT).starts_with("temperature -0.5"));
    let nan = GenerateOptions { processors: never(f64::NAN), ..options(1) };
    assert!(refuse(&nan, &PROMPT).starts_with("sequence_bias = NaN of [1] is not"));
}

fn never(bias: f64) -> Arc<LogitsProcessors> {
    Arc::new(LogitsProcessors { sequence_bias: vec![(vec![1], bias)], ..LogitsProcessors::default() })
}

/// Also without a check before.
#[test]
fn rules_that_leave_no_logits_or_no_token_are_named() {
    let rank = Rank::single(Device::flex());
    let model = Llama::build(&llama(), ParamBuilder::new(&rank, FloatDType::F32, SEED).without_autodiff()).unwrap();
    let error = |processors| {
        let options = GenerateOptions { processors, ..GenerateOptions::new(4, Sampling::greedy()) };
        generate(&rank, &model, &PROMPT, &options, |_| ControlFlow::Continue(())).unwrap_err()
    };
    assert!(matches!(error(never(f64::NEG_INFINITY)), GenerateError::Processors(_)));
    let once =
        LogitsProcessors { allowed_token_ids: vec![1, 2], no_repeat_ngram_size: 1, ..LogitsProcessors::default() };
    let rules = "no_repeat_ngram_size, allowed_token_ids".to_string();
    assert_eq!(error(Arc::new(once)), GenerateError::Forbidden { position: 7, rules });
}

#[test]
fn broken_weights_are_named() {
    let rank = Rank::single(Device::flex());
    let config = LlamaConfig { initializer_range: f64::MAX, ..llama() };
    let model = Llama::build(&config, ParamBuilder::new(&rank, FloatDType::F32, SEED).without_autodiff()).unwrap();
    let options = GenerateOptions::new(4, Sampling::greedy());
    let error = generate(&rank, &model, &PROMPT, &options, |_| ControlFlow::Continue(())).unwrap_err().to_string();
    assert!(error.starts_with("after 5 tokens the model gives a logit of NaN"), "{error}");
}

/// What GRPO draws: several texts of each of some prompts. Two prompts have one block in common, one has two full blocks.
#[test]
fn prompts_that_begin_alike_are_read_once() {
    let prompt = |len: usize, last: i64| (0..len as i64).map(|at| at * 7 % 60).chain([last]).collect::<Vec<i64>>();
    let prompts = [prompt(130, 1), prompt(130, 1), prompt(70, 2), prompt(127, 3), prompt(127, 3), prompt(20, 4)];
    let batch: Vec<(&[i64], u64)> = prompts.iter().zip(7..).map(|(prompt, seed)| (prompt.as_slice(), seed)).collect();
    let sampling = Sampling { temperature: 1.0, seed: 3, ..Sampling::greedy() };
    for layout in ["TP1", "TP2", "TP2 SP"] {
        let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
        let texts = |enable_prefix_caching: bool| {
            let options = GenerateOptions { enable_prefix_caching, ..GenerateOptions::new(70, sampling) };
            let ranks = launch(&mesh, &[Device::flex()], |rank: Rank| {
                let model = Llama::build(&llama(), ParamBuilder::new(&rank, FloatDType::F64, SEED).without_autodiff())?;
                let read = Mutex::new(Vec::new());
                let step = |step: &Step, cache: &mut PagedKvCache| {
                    read.lock().push(step.len());
                    Some(model.extend(step, cache))
                };
                let listen = &mut |_: usize, _: i64| ControlFlow::Continue(());
                let texts = generate_by(step, &ModelRanks::whole(&rank), &batch, &options, listen)?;
                let tokens: Vec<Vec<i64>> = texts.into_iter().map(|text| text.tokens).collect();
                Ok((tokens, read.into_inner()))
            });
            ranks.unwrap().remove(0)
        };
        let ((shared, read), (alone, all)) = (texts(true), texts(false));
        assert_eq!(shared, alone, "{layout}");
        // Two blocks of 64 are found by the second, one each by the third and fourth, and by the fifth, whose last token is read.
        assert_eq!((all[0], read[0]), (131 + 131 + 71 + 128 + 128 + 21, 131 + 3 + 7 + 64 + 64 + 21), "{layout}");
        assert_eq!(all[1..], read[1..]);
    }
}

/// What a window moves on from is written over.
#[test]
fn a_window_shares_nothing() {
    let prompt: Vec<i64> = (0..100).map(|at| at * 7 % 60).collect();
    let options = GenerateOptions { window: Some(110), ..GenerateOptions::new(30, Sampling::greedy()) };
    let rank = Rank::single(Device::flex());
    let model = Llama::build(&llama(), ParamBuilder::new(&rank, FloatDType::F64, SEED).without_autodiff()).unwrap();
    let batch = [(prompt.as_slice(), 0), (prompt.as_slice(), 0)];
    let texts = generate_batch(&rank, &model, &batch, &options, |_, _| ControlFlow::Continue(())).unwrap();
    let alone = generate(&rank, &model, &prompt, &options, |_| ControlFlow::Continue(())).unwrap();
    assert_eq!([&texts[0].tokens, &texts[1].tokens], [&alone.tokens; 2]);
}
