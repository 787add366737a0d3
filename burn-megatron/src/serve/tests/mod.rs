mod families;
mod prefix;

use parking_lot::Mutex;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};

use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::Mesh;
use burn::tensor::{Device, FloatDType};
use models::{CausalLm, Llama, LlamaConfig, ParamBuilder};

use super::*;
use crate::generate::{GenerateOptions, Sampling, generate};
use crate::logits::LogitsProcessors;

fn config() -> LlamaConfig {
    LlamaConfig {
        vocab_size: 61,
        hidden_size: 32,
        intermediate_size: 48,
        num_key_value_heads: 2,
        initializer_range: 0.4,
        ..LlamaConfig::tiny()
    }
}

fn model(rank: &Rank) -> Llama {
    Llama::build(&config(), ParamBuilder::new(rank, FloatDType::F64, 11).without_autodiff()).unwrap()
}

/// With all options of draws, and a seed.
fn drawn(seed: usize) -> Sampling {
    Sampling { temperature: 1.1, top_k: Some(40), top_p: Some(0.9), seed: seed as u64, ..Sampling::default() }
}

/// Requests of different lengths, seeds and kinds.
fn requests() -> Vec<Request> {
    let request = |index: usize| {
        let prompt = (0..1 + index * 5 % 17).map(|at| ((at * 7 + index * 13) % 61) as i64).collect();
        let sampling = match index % 3 {
            0 => Sampling::greedy(),
            _ => drawn(index),
        };
        let sampling = Sampling { repetition_penalty: [1.0, 1.3][index % 2], ..sampling };
        Request { sampling, ..Request::greedy(prompt, 3 + index * 11 % 20) }
    };
    (0..12).map(request).collect()
}

/// What `generate` says to a request.
fn alone(request: &Request) -> Vec<i64> {
    alone_by(model, request)
}

fn alone_by<M: CausalLm>(model: impl Fn(&Rank) -> M, request: &Request) -> Vec<i64> {
    let rank = Rank::single(Device::flex());
    let options = GenerateOptions {
        stop_tokens: request.stop_tokens.clone(),
        ..GenerateOptions::new(request.max_tokens, request.sampling)
    };
    generate(&rank, &model(&rank), &request.prompt, &options, |_| ControlFlow::Continue(())).unwrap().tokens
}

/// What a server in this layout says, and its statistics at the end.
fn served(layout: &str, config: SchedulerConfig, asked: &[Request]) -> (Vec<Vec<Event>>, Statistics) {
    served_by(model, layout, config, asked)
}

fn served_by<M: CausalLm>(
    model: impl Fn(&Rank) -> M + Sync,
    layout: &str,
    config: SchedulerConfig,
    asked: &[Request],
) -> (Vec<Vec<Event>>, Statistics) {
    served_by_models(|rank| vec![model(rank)], layout, config, asked)
}

fn served_by_models<M: CausalLm>(
    models: impl Fn(&Rank) -> Vec<M> + Sync,
    layout: &str,
    config: SchedulerConfig,
    asked: &[Request],
) -> (Vec<Vec<Event>>, Statistics) {
    let (requests, queue) = Requests::channel();
    let (events, tickets): (Vec<Receiver<Event>>, Vec<Ticket>) = (asked.iter())
        .map(|request| {
            let (send, receive) = channel();
            let on_event = move |event| send.send(event).map_or(ControlFlow::Break(()), ControlFlow::Continue);
            (receive, requests.submit(request.clone(), on_event).unwrap())
        })
        .unzip();
    let statistics = requests.clone();
    let queue = Mutex::new(Some(queue));
    requests.finish();
    let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
    launch(&mesh, &[Device::flex()], |rank: Rank| {
        let queue = if rank.rank == 0 { queue.lock().take() } else { None };
        Ok(run(&rank, &models(&rank), config, queue)?)
    })
    .unwrap();
    drop(tickets);
    (events.into_iter().map(|events| events.into_iter().collect()).collect(), statistics.statistics())
}

fn tokens(events: &[Event]) -> Vec<i64> {
    let token = |event: &Event| match event {
        Event::Token { token, .. } => Some(*token),
        _ => None,
    };
    events.iter().filter_map(token).collect()
}

fn sizes() -> SchedulerConfig {
    let max_model_len = 48;
    SchedulerConfig {
        max_num_seqs: 5,
        max_num_batched_tokens: 12,
        max_model_len,
        block_size: 4,
        num_blocks: 40,
        enable_prefix_caching: true,
        enforce_eager: false,
    }
}

/// More requests than places; prompts longer than a step.
#[test]
fn each_request_gets_what_generate_gives_it() {
    let asked = requests();
    for layout in ["TP1", "TP2", "TP2 SP"] {
        let (events, statistics) = served(layout, sizes(), &asked);
        for (request, events) in asked.iter().zip(&events) {
            assert_eq!(tokens(events), alone(request), "{layout}: {request:?}");
            assert!(matches!(events.last(), Some(Event::Token { finish: Some(Finish::Length), .. })));
        }
        let new: usize = asked.iter().map(|request| request.max_tokens).sum();
        let prompts: usize = asked.iter().map(|request| request.prompt.len()).sum();
        assert_eq!((statistics.generation_tokens, statistics.prompt_tokens), (new as u64, prompts as u64));
        assert_eq!((statistics.full, statistics.used_blocks, statistics.running), (12, 0, 0));
    }
}

#[test]
fn a_sequence_that_gave_its_blocks_up_says_the_same() {
    let asked = requests();
    let (events, statistics) = served("TP1", SchedulerConfig { num_blocks: 12, ..sizes() }, &asked);
    assert!(statistics.preemptions > 0);
    for (request, events) in asked.iter().zip(&events) {
        assert_eq!(tokens(events), alone(request), "{request:?}");
    }
}

#[test]
fn a_stop_token_ends_one_sequence_and_not_the_others() {
    let mut asked = requests();
    let text = alone(&asked[3]);
    asked[3].stop_tokens = vec![text[2]];
    let (events, statistics) = served("TP1", sizes(), &asked);
    let first = text.iter().position(|token| *token == text[2]).unwrap();
    assert_eq!(tokens(&events[3]), text[..=first]);
    assert!(matches!(events[3].last(), Some(Event::Token { finish: Some(Finish::Stop), .. })));
    assert_eq!((statistics.stopped, statistics.full), (1, 11));
}

/// Also when the prompt is read in several steps, and again after a preemption.
#[test]
fn log_probabilities_are_the_log_softmax_of_the_whole_forward_pass() {
    let mut asked = requests();
    asked.iter_mut().for_each(|request| (request.logprobs, request.prompt_logprobs) = (Some(3), true));
    let rank = Rank::single(Device::flex());
    let model = model(&rank);
    for num_blocks in [40, 12] {
        let (events, _) = served("TP1", SchedulerConfig { num_blocks, ..sizes() }, &asked);
        for (request, events) in asked.iter().zip(&events) {
            let all = [request.prompt.clone(), tokens(events)].concat();
            let data = burn::tensor::TensorData::new(all.clone(), [1, all.len()]);
            let logits = model.logits(burn::tensor::Tensor::from_data(data, (&rank.device, burn::tensor::DType::I64)));
            let expected = burn::tensor::activation::log_softmax(logits, 2).into_data();
            let expected: Vec<f64> = expected.iter::<f64>().collect();
            let Event::Prompt(prompt) = &events[0] else { panic!("{:?}", events[0]) };
            assert_eq!(prompt.len(), request.prompt.len() - 1);
            let new = events[1..].iter().map(|event| match event {
                Event::Token { logprobs: Some(logprobs), .. } => logprobs.clone(),
                other => panic!("{other:?}"),
            });
            let found: Vec<TokenLogprobs> = prompt.iter().cloned().chain(new).collect();
            assert_eq!(found.len(), all.len() - 1);
            for (position, found) in found.iter().enumerate() {
                let expected = &expected[position * 61..][..61];
                assert!((found.logprob - expected[all[position + 1] as usize]).abs() < 1e-10);
                let highest = expected.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                assert!((found.top[0].logprob - highest).abs() < 1e-10 && found.top.len() == 3);
                assert!(found.top.iter().all(|top| (top.logprob - expected[top.token as usize]).abs() < 1e-10));
            }
        }
    }
}

#[test]
fn who_wants_no_more_leaves_no_blocks_behind() {
    let (requests, queue) = Requests::channel();
    let (send, events) = channel();
    let long = Request::greedy(vec![1, 2, 3], 40);
    // One listener breaks off after two tokens, one is gone before anything is read, one waits for all.
    let mut left = 2;
    let breaks = requests.submit(long.clone(), move |_| {
        left -= 1;
        if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    drop(requests.submit(long.clone(), |_| panic!("nobody listens")).unwrap());
    let stays = requests.submit(long.clone(), move |event| {
        send.send(event).unwrap();
        ControlFlow::Continue(())
    });
    requests.finish();
    let rank = Rank::single(Device::flex());
    run(&rank, &[model(&rank)], sizes(), Some(queue)).unwrap();
    let events: Vec<Event> = events.try_iter().collect();
    assert_eq!(tokens(&events), alone(&long));
    let statistics = requests.statistics();
    assert_eq!((statistics.cancelled, statistics.full, statistics.used_blocks), (2, 1, 0));
    assert_eq!(requests.submit(long, |_| ControlFlow::Continue(())).unwrap_err().to_string(), "the server has stopped");
    drop((breaks, stays));
}

#[test]
fn a_cache_that_there_is_no_memory_for_ends_ranks_before_they_are_ready() {
    let ready = AtomicUsize::new(0);
    let start = |config: SchedulerConfig| {
        let (requests, queue) = Requests::channel();
        requests.finish();
        let queue = Mutex::new(Some(queue));
        launch(&Mesh::new("TP1".parse().unwrap()).unwrap(), &[Device::flex()], |rank: Rank| {
            let ready = || {
                ready.fetch_add(1, Ordering::Relaxed);
            };
            Ok(run_from(&rank, &[model(&rank)], config, queue.lock().take(), ready)?)
        })
    };
    start(sizes()).unwrap();
    assert_eq!(ready.load(Ordering::Relaxed), 1);
    let many = SchedulerConfig { num_blocks: 1 << 32, ..sizes() };
    says!(start(many).unwrap_err().to_string(), "nearest legal: 4294967295");
    // More bytes than a pointer counts.
    assert!(start(SchedulerConfig { block_size: 1 << 58, ..sizes() }).is_err());
    assert_eq!(ready.load(Ordering::Relaxed), 1);
}

#[test]
fn what_cannot_be_answered_is_named() {
    let refuse = |request: Request| request.check(61, 48).unwrap_err().to_string();
    let good = Request::greedy(vec![1, 2, 3], 45);
    assert_eq!(good.check(61, 48), Ok(()));
    let long = Request { max_tokens: 46, ..good.clone() };
    let said = "a prompt of 3 tokens and max_tokens 46 are more than the 48 of --max-model-len; at most 45 new tokens";
    assert_eq!(refuse(long), said);
    assert!(refuse(Request { prompt: vec![1; 48], ..good.clone() }).ends_with("at most 47 tokens of prompt"));
    assert!(refuse(Request { prompt: vec![61], ..good.clone() }).contains("the model knows 0..61"));
    assert!(refuse(Request { prompt: Vec::new(), ..good.clone() }).contains("no tokens"));
    let processors =
        Arc::new(LogitsProcessors { encoder_repetition_penalty: Some(0.0), ..LogitsProcessors::default() });
    assert!(refuse(Request { processors, ..good.clone() }).starts_with("encoder_repetition_penalty = 0 is not"));
    assert!(refuse(Request { max_tokens: 0, ..good }).starts_with("max_tokens 0"));
}
