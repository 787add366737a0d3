//! The loop: read, choose, repeat.

use std::ops::ControlFlow;
use std::time::Instant;

use backend_dist::launch::Rank;
use burn::tensor::Tensor;
use models::layers::paged::{Chunk, Outputs, Step};
use models::{CausalLm, PagedKvCache};

use super::choice::{Choice, Chosen};
use super::choose::choose;
use super::error::NoChoice;
use super::options::GenerateOptions;
use super::ranks::ModelRanks;
use super::texts::{BLOCK_SIZE, Ended, Text};
use super::{GenerateError, Sampling};

/// A text and how long it took.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// The new tokens.
    pub tokens: Vec<i64>,
    /// Why there are no more.
    pub ended: Ended,
    /// Seconds until the first token: reading the prompt.
    pub prompt_seconds: f64,
    /// Seconds for all tokens after the first.
    pub decode_seconds: f64,
}

/// Continues `prompt`. All tensor-parallel ranks of a model make the same call and get the same tokens; the first of
/// them chooses, and calls `on_token` with each token as it comes.
///
/// `model` is in any layout and records no gradients: one built `without_autodiff`, or a trained one's
/// [`valid`](burn::module::Module::valid).
///
/// ```
/// use std::ops::ControlFlow;
/// use burn::tensor::{Device, FloatDType};
/// use burn_megatron::prelude::*;
///
/// let rank = Rank::single(Device::flex());
/// let model = Llama::build(&LlamaConfig::tiny(), ParamBuilder::new(&rank, FloatDType::F32, 1).without_autodiff())?;
/// let options = GenerateOptions::new(5, Sampling::greedy());
/// let text = generate(&rank, &model, &[1, 2, 3], &options, |token| {
///     println!("{token}");
///     ControlFlow::Continue(())
/// })?;
/// assert_eq!(text.tokens.len(), 5);
/// # Ok::<(), BoxError>(())
/// ```
///
/// # Errors
/// If the options are wrong ([`GenerateOptions::check`] says so before a model is there) or a logit is not a number.
pub fn generate<M: CausalLm>(
    rank: &Rank,
    model: &M,
    prompt: &[i64],
    options: &GenerateOptions,
    mut on_token: impl FnMut(i64) -> ControlFlow<()>,
) -> Result<Generated, GenerateError> {
    let prompts = [(prompt, options.sampling.seed)];
    let mut all = generate_batch(rank, model, &prompts, options, |_, token| on_token(token))?;
    all.pop().ok_or(GenerateError::EmptyPrompt)
}

/// [`generate`] for several prompts at once, each with the seed of its own draws in place of that of the options: what is
/// written does not depend on the other prompts. `on_token` is called with the index of the prompt too.
pub fn generate_batch<M: CausalLm>(
    rank: &Rank,
    model: &M,
    prompts: &[(&[i64], u64)],
    options: &GenerateOptions,
    mut on_token: impl FnMut(usize, i64) -> ControlFlow<()>,
) -> Result<Vec<Generated>, GenerateError> {
    let read = |step: &Step, cache: &mut PagedKvCache| Some(model.extend(step, cache));
    let options = options.sharing_if(model.shares_prefixes());
    generate_by(read, &ModelRanks::whole(rank), prompts, &options, &mut on_token)
}

/// [`generate_batch`] with a model that `read` reads a step with; only ranks with the head get logits.
pub(crate) fn generate_by(
    mut read: impl FnMut(&Step, &mut PagedKvCache) -> Option<Tensor<2>>,
    ranks: &ModelRanks,
    prompts: &[(&[i64], u64)],
    options: &GenerateOptions,
    on_token: &mut impl FnMut(usize, i64) -> ControlFlow<()>,
) -> Result<Vec<Generated>, GenerateError> {
    options.check_choices()?;
    if prompts.iter().any(|(prompt, _)| prompt.is_empty()) {
        return Err(GenerateError::EmptyPrompt);
    }
    let (mut texts, blocks) = Text::all(prompts, options);
    // Of a rank that has nothing left to write, while others have: a token that is no text's.
    let idle = Chunk { tokens: vec![0], positions: 0..1, blocks: vec![blocks], outputs: Outputs::Last };
    let mut cache = PagedKvCache::new(blocks as usize + usize::from(ranks.together.is_some()), BLOCK_SIZE);
    if options.enforce_eager || !ranks.may_record {
        cache = cache.eager();
    }
    let (mut clock, mut prompt_seconds) = (Instant::now(), 0.0);
    for index in 0..options.max_new_tokens {
        // Those with one new token, which are read together, come first.
        let mut reading: Vec<(usize, Chunk)> = (texts.iter_mut().enumerate())
            .filter(|(_, text)| text.ended.is_none())
            .map(|(at, text)| (at, text.next_chunk(options)))
            .collect();
        if !ranks.any(!reading.is_empty()) {
            break;
        }
        reading.sort_by_key(|(_, chunk)| chunk.tokens.len() > 1);
        let (at, chunks): (Vec<usize>, Vec<Chunk>) = reading.into_iter().unzip();
        let logits = read(&Step::new(if chunks.is_empty() { vec![idle.clone()] } else { chunks }), &mut cache);
        if at.is_empty() {
            continue;
        }
        let choices = ranks.chosen(logits, |logits| next(logits, (&texts, &at), options, on_token))?;
        for (at, (token, ended)) in at.into_iter().zip(choices) {
            texts[at].push(token);
            texts[at].ended = ended;
        }
        if index == 0 {
            prompt_seconds = clock.elapsed().as_secs_f64();
            clock = Instant::now();
        }
    }
    let decode_seconds = clock.elapsed().as_secs_f64();
    let generated = |mut text: Text| Generated {
        tokens: text.tokens.split_off(text.prompt),
        ended: text.ended.unwrap_or(Ended::Length),
        prompt_seconds,
        decode_seconds,
    };
    Ok(texts.into_iter().map(generated).collect())
}

/// The next token of the texts `at`, told to the reader, and why it is the text's last if it is.
fn next(
    logits: Tensor<2>,
    (texts, at): (&[Text], &[usize]),
    options: &GenerateOptions,
    on_token: &mut impl FnMut(usize, i64) -> ControlFlow<()>,
) -> Result<Vec<(i64, Option<Ended>)>, GenerateError> {
    let choice = |at: &usize| {
        let Text { seed, rules, tokens, prompt, .. } = &texts[*at];
        let sampling = Sampling { seed: *seed, ..options.sampling };
        Choice::next(sampling, rules, tokens.len() - prompt, None)
    };
    let choices: Vec<Choice> = at.iter().map(choice).collect();
    let told = |(at, chosen): (&usize, Result<Chosen, NoChoice>)| {
        let (token, _) = chosen.map_err(|why| why.after(texts[*at].read.len()))?;
        let reader = on_token(*at, token);
        let end = match options.stop_tokens.contains(&token) {
            true => Some(Ended::StopToken),
            false => reader.is_break().then_some(Ended::Reader),
        };
        Ok((token, end))
    };
    at.iter().zip(choose(logits, &choices)).map(told).collect()
}
