//! Sequences that begin with the same tokens share their blocks, and say what they would say alone.

use models::layers::LayerPattern;
use models::{
    DeepSeekV3, DeepSeekV3Config, Gpt, GptConfig, LlamaVariant, Mamba2, Mamba2Config, Mixtral, MixtralConfig,
    MixtralVariant, NemotronH, NemotronHConfig,
};

use super::*;

/// Prompts that have 21, 9 or no tokens in common, and two of them twice.
fn requests() -> Vec<Request> {
    let request = |index: usize| {
        let prompt = index % 12;
        let (common, own) = ([21, 9, 0][prompt % 3], prompt * 5 % 11);
        let first = (0..common).map(|at| (at * 5 % 61) as i64);
        let prompt: Vec<i64> = first.chain((0..=own).map(|at| ((at * 7 + prompt * 13) % 61) as i64)).collect();
        let sampling = match index % 4 {
            0 => Sampling::greedy(),
            _ => drawn(index),
        };
        Request { sampling, logprobs: Some(2), ..Request::greedy(prompt, 2 + index * 11 % 13) }
    };
    (0..14).map(request).collect()
}

/// New tokens and their log-probabilities.
fn said(events: &[Event]) -> (Vec<i64>, Vec<f64>) {
    let token = |event: &Event| match event {
        Event::Token { token, logprobs: Some(logprobs), .. } => Some((*token, logprobs.logprob)),
        _ => None,
    };
    events.iter().filter_map(token).unzip()
}

fn cached(events: &[Event]) -> usize {
    events.iter().map(|event| if let Event::Cached(tokens) = event { *tokens } else { 0 }).sum()
}

/// With the cache and without it, with room for all and with blocks for one and a half of the sequences.
fn assert_shares<M: CausalLm>(config: &M::Config, layouts: &[&str], shares: bool) {
    let build = |rank: &Rank| {
        M::build(config, ParamBuilder::new(rank, FloatDType::F64, 11).without_autodiff()).expect("a legal model")
    };
    let asked = requests();
    let alone: Vec<Vec<i64>> = asked.iter().map(|request| alone_by(build, request)).collect();
    for layout in layouts {
        // In the last one sequences come one after the other: what is found was left behind.
        for (num_blocks, max_num_seqs) in [(60, 5), (14, 5), (14, 1)] {
            let run = |enable_prefix_caching| {
                let sizes = SchedulerConfig { num_blocks, max_num_seqs, enable_prefix_caching, ..sizes() };
                served_by(build, layout, sizes, &asked)
            };
            let what = format!("{layout}, {num_blocks} blocks, {max_num_seqs} sequences");
            let ((with, statistics), (without, of_none)) = (run(true), run(false));
            for ((request, alone), (with, without)) in asked.iter().zip(&alone).zip(with.iter().zip(&without)) {
                let ((tokens, found), (expected, known)) = (said(with), said(without));
                assert_eq!((&tokens, &expected), (alone, alone), "{what}: {request:?}");
                let gap = found.iter().zip(&known).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(gap < 1e-11, "{what}: log-probabilities differ by {gap}");
                assert_eq!(cached(without), 0);
                assert!(cached(with) < request.prompt.len() && cached(with).is_multiple_of(4));
            }
            let hits: usize = with.iter().map(|events| cached(events)).sum();
            assert_eq!((statistics.prefix_cache_hits, of_none.prefix_cache_hits), (hits as u64, 0), "{what}");
            assert_eq!((statistics.used_blocks, of_none.used_blocks), (0, 0));
            assert_eq!(statistics.full, asked.len() as u64);
            let prompts: usize = asked.iter().map(|request| request.prompt.len()).sum();
            match shares {
                true => assert_eq!(statistics.prefix_cache_queries, prompts as u64),
                false => assert_eq!((hits, statistics.prefix_cache_queries), (0, 0), "{what}"),
            }
            let least = if num_blocks == 60 { 4 * 20 + 4 * 8 } else { 40 };
            assert!(!shares || hits >= least, "{what}: {hits} of {prompts} tokens were found");
            assert!(num_blocks != 14 || max_num_seqs == 1 || of_none.preemptions > 0, "{what}");
        }
    }
}

#[test]
fn llama() {
    assert_shares::<Llama>(&config(), &["TP1", "TP2", "TP2 SP"], true);
}

/// The keys of all positions stay in the cache, whatever a window sees of them. Some layers have sinks.
#[test]
fn sliding_windows_and_sinks() {
    let mistral = LlamaConfig { variant: LlamaVariant::Mistral, sliding_window: Some(6), ..config() };
    assert_shares::<Llama>(&mistral, &["TP1", "TP2"], true);
    let gpt_oss = models::sized! { MixtralConfig::tiny();
        variant: MixtralVariant::GptOss, vocab_size: 61, initializer_range: 0.4,
        sliding_window: Some(6), sliding_window_pattern: Some(LayerPattern::Every(2)), attention_bias: true
    };
    assert_shares::<Mixtral>(&gpt_oss, &["TP1"], true);
}

#[test]
fn learned_positions_and_latents() {
    let gpt = GptConfig { vocab_size: 61, initializer_range: 0.4, max_position_embeddings: 48, ..GptConfig::tiny() };
    assert_shares::<Gpt>(&gpt, &["TP1"], true);
    let deepseek = DeepSeekV3Config { vocab_size: 61, initializer_range: 0.4, ..DeepSeekV3Config::tiny() };
    assert_shares::<DeepSeekV3>(&deepseek, &["TP1", "TP2"], true);
}

/// The state behind a prefix is nowhere, so all of a prompt is read.
#[test]
fn recurrent_layers_share_nothing() {
    let mamba = Mamba2Config { vocab_size: 61, initializer_range: 0.4, ..Mamba2Config::tiny() };
    assert_shares::<Mamba2>(&mamba, &["TP1"], false);
    let next = MixtralConfig { vocab_size: 61, initializer_range: 0.4, ..MixtralConfig::qwen3_next_tiny() };
    assert_shares::<Mixtral>(&next, &["TP1"], false);
    let nemotron = NemotronHConfig { vocab_size: 61, initializer_range: 0.4, ..NemotronHConfig::tiny() };
    assert_shares::<NemotronH>(&nemotron, &["TP1"], false);
}

/// Two sequences with the same prompt of which one wants its log-probabilities: that one reads it.
#[test]
fn log_probabilities_of_a_prompt_are_computed() {
    let prompt: Vec<i64> = (0..22).map(|at| at * 5 % 61).collect();
    let plain = Request { logprobs: Some(0), ..Request::greedy(prompt, 4) };
    let echo = Request { prompt_logprobs: true, ..plain.clone() };
    let asked = [plain.clone(), echo.clone(), plain];
    let (events, statistics) =
        served("TP1", SchedulerConfig { max_num_seqs: 1, max_num_batched_tokens: 9, ..sizes() }, &asked);
    assert_eq!([0, 1, 2].map(|at| cached(&events[at])), [0, 0, 20]);
    assert_eq!((statistics.prefix_cache_queries, statistics.prefix_cache_hits), (44, 20));
    let Event::Prompt(found) = &events[1][0] else { panic!("{:?}", events[1][0]) };
    let (alone, _) = served("TP1", sizes(), &[echo]);
    let Event::Prompt(expected) = &alone[0][0] else { panic!("{:?}", alone[0][0]) };
    assert_eq!(found.len(), 21);
    assert!(found.iter().zip(expected).all(|(a, b)| (a.logprob - b.logprob).abs() < 1e-12));
    assert_eq!(tokens(&events[1]), tokens(&events[2]));
}

/// Of two models with the same prompts each has its own keys and values.
#[test]
fn models_share_nothing_with_each_other() {
    let prompt: Vec<i64> = (0..22).map(|at| at * 5 % 61).collect();
    let of = |model| Request { model, ..Request::greedy(prompt.clone(), 8) };
    let build = |rank: &Rank, seed| {
        Llama::build(&config(), ParamBuilder::new(rank, FloatDType::F64, seed).without_autodiff())
            .expect("a legal model")
    };
    let asked = [of(0), of(1), of(0), of(1)];
    let both = |rank: &Rank| vec![build(rank, 11), build(rank, 12)];
    let (events, _) = served_by_models(both, "TP1", sizes(), &asked);
    let texts: Vec<Vec<i64>> = events.iter().map(|events| tokens(events)).collect();
    let expected = [11, 12].map(|seed| alone_by(|rank| build(rank, seed), &asked[0]));
    assert_eq!(texts, [0, 1, 0, 1].map(|model: usize| expected[model].clone()));
    assert_ne!(expected[0], expected[1]);
    assert_eq!([0, 1, 2, 3].map(|at| cached(&events[at])), [0, 0, 20, 20]);
}
