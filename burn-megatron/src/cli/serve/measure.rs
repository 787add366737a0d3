//! How fast a server would answer: synthetic requests through the ranks, without HTTP.

use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use backend_dist::shard::stable_hash;

use crate::generate::Sampling;
use crate::serve::{Event, Request, Requests, SchedulerConfig};

/// A measurement in place of a server.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Measurement")]
pub(super) struct Load {
    /// Serve nothing: answer so many synthetic requests, and print tokens/s and latencies
    #[arg(long, value_name = "N")]
    requests: Option<usize>,
    /// Requests at a time; each that ends is followed by the next. Default: --max-num-seqs
    #[arg(long, value_name = "N", requires = "requests")]
    concurrency: Option<usize>,
    /// Tokens of each prompt
    #[arg(long, alias = "prompt", value_name = "N", default_value_t = 512)]
    prompt_tokens: usize,
    /// Tokens with which all prompts begin, of --prompt-tokens
    #[arg(long, value_name = "N", default_value_t = 0)]
    prefix_tokens: usize,
    /// Tokens of each answer
    #[arg(long, alias = "output", value_name = "N", default_value_t = 256)]
    output_tokens: usize,
    /// How the tokens of answers are drawn; 0 takes the likeliest
    #[arg(long, value_name = "X", default_value_t = 0.0, requires = "requests", allow_negative_numbers = true)]
    temperature: f64,
    /// Draw among so many likeliest tokens
    #[arg(long, value_name = "N", requires = "temperature")]
    top_k: Option<usize>,
    /// Draw among the likeliest tokens that together have this probability
    #[arg(long, value_name = "P", requires = "temperature", allow_negative_numbers = true)]
    top_p: Option<f64>,
}

/// Sizes of a measurement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Play {
    requests: usize,
    concurrency: usize,
    prompt: usize,
    prefix: usize,
    output: usize,
    vocab_size: usize,
    sampling: Sampling,
    /// Another one has other prompts.
    round: u64,
}

/// When a request was made, and when each of its tokens came.
struct Timeline {
    submitted: Instant,
    tokens: Vec<Instant>,
}

impl Load {
    pub fn is_asked(&self) -> bool {
        self.requests.is_some()
    }

    /// # Errors
    /// If a size is zero, or a sequence would be longer than the server takes.
    pub fn resolve(&self, vocab_size: usize, sizes: &SchedulerConfig) -> Result<Play> {
        let Self { prompt_tokens: prompt, prefix_tokens: prefix, output_tokens: output, .. } = *self;
        let concurrency = self.concurrency.unwrap_or(sizes.max_num_seqs);
        let requests = self.requests.unwrap_or(1);
        let flags = [
            ("requests", requests),
            ("concurrency", concurrency),
            ("prompt-tokens", prompt),
            ("output-tokens", output),
        ];
        if let Some((flag, _)) = flags.into_iter().find(|(_, value)| *value == 0) {
            bail!("--{flag} 0 measures nothing; nearest legal: 1");
        }
        let most = sizes.max_model_len;
        if prompt >= most {
            bail!(
                "--prompt-tokens {prompt}: --max-model-len is {most}, and an answer has a token; nearest legal: {}",
                most - 1
            );
        }
        if prompt.saturating_add(output) > most {
            let nearest = most - prompt;
            bail!(
                "--output-tokens {output}: {prompt} tokens of prompt leave less of the {most} of --max-model-len; nearest legal: {nearest}"
            );
        }
        if prefix > prompt {
            bail!("--prefix-tokens {prefix}: a prompt has {prompt} tokens (--prompt-tokens); nearest legal: {prompt}");
        }
        let Self { temperature, top_k, top_p, .. } = *self;
        let sampling = Sampling { temperature, top_k, top_p, ..Sampling::greedy() };
        sampling.check()?;
        Ok(Play { requests, concurrency, prompt, prefix, output, vocab_size, sampling, round: 0 })
    }
}

impl Play {
    /// Makes the requests, and says how long they took.
    pub fn report(self, requests: &Requests) -> Result<String> {
        // Once with all shapes, so that no kernel is compiled or tuned in the measurement, and with other prompts, so that the
        // cache holds none of its.
        Self { requests: self.concurrency, ..self }.play(requests)?;
        let (before, start) = (requests.statistics(), Instant::now());
        let timelines = Self { round: 1, ..self }.play(requests)?;
        let seconds = start.elapsed().as_secs_f64();
        let after = requests.statistics();
        let Self { requests: count, concurrency, prompt, output, .. } = self;
        let mut first: Vec<f64> = timelines.iter().map(|of| milliseconds(of.tokens[0] - of.submitted)).collect();
        let between = |of: &Timeline| of.tokens.windows(2).map(|two| milliseconds(two[1] - two[0])).collect::<Vec<_>>();
        let mut between: Vec<f64> = timelines.iter().flat_map(between).collect();
        let tokens = (count * output) as f64;
        let latency = |values: &mut Vec<f64>| {
            let [median, last] = [0.5, 0.99].map(|share| percentile(values, share));
            format!("p50 {median:.2} ms, p99 {last:.2} ms")
        };
        Ok(format!(
            "{count} requests of {prompt} + {output} tokens, {concurrency} at a time: {seconds:.2} s\n\
             {:<22}{:.1} tokens/s\n{:<22}{:.1} tokens/s\n{:<22}{:.2} requests/s\n{:<22}{}\n{:<22}{}\n{:<22}{} steps, {} preemptions\n\
             {:<22}{} of {} tokens of prompts\n",
            "output",
            tokens / seconds,
            "prompts and output",
            (count * (prompt + output)) as f64 / seconds,
            "requests",
            count as f64 / seconds,
            "time to first token",
            latency(&mut first),
            "inter-token latency",
            latency(&mut between),
            "scheduler",
            after.steps - before.steps,
            after.preemptions - before.preemptions,
            "prefix cache",
            after.prefix_cache_hits - before.prefix_cache_hits,
            after.prompt_tokens - before.prompt_tokens,
        ))
    }

    /// Makes the requests, so many at a time.
    fn play(self, requests: &Requests) -> Result<Vec<Timeline>> {
        let (ended, ends) = channel();
        let (mut tickets, mut timelines) = (Vec::new(), Vec::new());
        for index in 0..self.requests {
            if index >= self.concurrency {
                timelines.push(next(&ends)?);
            }
            let (ended, submitted, mut tokens) = (ended.clone(), Instant::now(), Vec::with_capacity(self.output));
            let on_event = move |event| {
                match event {
                    Event::Token { finish, .. } => {
                        tokens.push(Instant::now());
                        if finish.is_some() {
                            let timeline = Timeline { submitted, tokens: std::mem::take(&mut tokens) };
                            return ended.send(Ok(timeline)).map_or(ControlFlow::Break(()), ControlFlow::Continue);
                        }
                    }
                    Event::Failed(why) | Event::Refused(why) => drop(ended.send(Err(why))),
                    Event::Prompt(_) | Event::Cached(_) => {}
                }
                ControlFlow::Continue(())
            };
            tickets.push(requests.submit(self.request(index), on_event)?);
        }
        while timelines.len() < self.requests {
            timelines.push(next(&ends)?);
        }
        Ok(timelines)
    }

    /// Arbitrary tokens: the prefix of all requests of a round, then those of this one.
    fn request(&self, index: usize) -> Request {
        let token = |at: usize| {
            let of = if at < self.prefix { 0 } else { index + 1 };
            (stable_hash(&format!("{} {of} {at}", self.round)) % self.vocab_size as u64) as i64
        };
        let sampling = Sampling { seed: index as u64, ..self.sampling };
        Request { sampling, ..Request::greedy((0..self.prompt).map(token).collect(), self.output) }
    }
}

fn next(ends: &Receiver<Result<Timeline, String>>) -> Result<Timeline> {
    ends.recv()?.map_err(|why| anyhow!(why))
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The value that this share of all values does not exceed (nearest rank); 0 of none.
fn percentile(values: &mut [f64], share: f64) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let rank = (share * values.len() as f64).ceil() as usize;
    values.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_by_rank() {
        let mut values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!([0.5, 0.99, 1.0].map(|share| percentile(&mut values, share)), [50.0, 99.0, 100.0]);
        assert_eq!((percentile(&mut [3.0], 0.5), percentile(&mut [], 0.5)), (3.0, 0.0));
    }

    #[test]
    fn a_measurement_of_nothing_is_refused() {
        let load = Load {
            requests: Some(4),
            concurrency: None,
            prompt_tokens: 8,
            prefix_tokens: 0,
            output_tokens: 8,
            temperature: 0.0,
            top_k: None,
            top_p: None,
        };
        let sizes = SchedulerConfig { max_model_len: 16, ..SchedulerConfig::default() };
        assert_eq!(load.resolve(10, &sizes).unwrap().concurrency, 64);
        let refuse = |load: Load| load.resolve(10, &sizes).unwrap_err().to_string();
        assert_eq!(
            refuse(Load { concurrency: Some(0), ..load.clone() }),
            "--concurrency 0 measures nothing; nearest legal: 1"
        );
        assert!(refuse(Load { prefix_tokens: 9, ..load.clone() }).ends_with("nearest legal: 8"));
        assert!(refuse(Load { prompt_tokens: 16, ..load.clone() }).ends_with("has a token; nearest legal: 15"));
        assert!(refuse(Load { top_p: Some(1.5), ..load.clone() }).starts_with("top-p 1.5 is not above 0"));
        assert!(refuse(Load { output_tokens: 9, ..load }).ends_with("nearest legal: 8"));
    }

    /// Else a cache of prefixes would make what is measured faster than it is.
    #[test]
    fn prompts_have_the_prefix_in_common_and_nothing_else() {
        let sampling = Sampling::greedy();
        let play = Play {
            requests: 2,
            concurrency: 1,
            prompt: 40,
            prefix: 16,
            output: 1,
            vocab_size: 1000,
            sampling,
            round: 0,
        };
        let common = |a: Request, b: Request| a.prompt.iter().zip(&b.prompt).take_while(|(a, b)| a == b).count();
        assert_eq!(common(play.request(0), play.request(0)), 40);
        assert_eq!(common(play.request(0), play.request(1)), 16);
        assert_eq!(common(play.request(0), Play { round: 1, ..play }.request(0)), 0);
    }
}
