//! The flags that choose the next token.

use std::sync::Arc;

use crate::generate::{GenerateOptions, Sampling};
use crate::hf::GenerationConfig;
use crate::logits::LogitsProcessors;

/// How tokens are drawn.
#[derive(clap::Args, Clone, Debug)]
pub(super) struct SamplingArgs {
    /// Take the likeliest token each time: the default, unless a flag below or the model's generation_config.json says
    /// to draw
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p", "min_p"])]
    greedy: bool,
    /// Flattens the distribution above 1, sharpens it below; 0 is --greedy. Default: the model's, or 1
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    temperature: Option<f64>,
    /// Draw among so many likeliest tokens; 0 is all. Default: the model's, or 50
    #[arg(long, value_name = "N")]
    top_k: Option<usize>,
    /// Draw among the likeliest tokens that together have this probability. Default: the model's, or 1
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f64>,
    /// Draw among the tokens that are at least P times as likely as the likeliest. Default: the model's, or 0
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f64>,
    /// Divide positive logits of the tokens in prompt and text by X and multiply negative ones: above 1 they come less often,
    /// also with --greedy. Default: the model's, or 1
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repetition_penalty: Option<f64>,
    /// No sequence of N tokens comes twice in prompt and text; 0 is no rule. Default: the model's, or 0
    #[arg(long, value_name = "N")]
    no_repeat_ngram_size: Option<usize>,
    /// New tokens before one that ends the text may come. Default: the model's, or 0
    #[arg(long, alias = "min-tokens", value_name = "N")]
    min_new_tokens: Option<usize>,
    /// Seed of the draws
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true)]
    seed: u64,
}

impl SamplingArgs {
    /// The flags over the model's own defaults over transformers': a model whose `generation_config.json` does not say
    /// `do_sample` is greedy, and one that is drawn from without more words has temperature 1 and top-k 50.
    fn over(&self, generation: &GenerationConfig) -> Sampling {
        let of = suggested(generation);
        let repetition_penalty = self.repetition_penalty.unwrap_or(of.repetition_penalty);
        let flags = [self.temperature, self.top_p, self.min_p];
        let asked = self.top_k.is_some() || flags.iter().any(Option::is_some);
        if self.greedy || !(asked || generation.do_sample == Some(true)) {
            return Sampling { repetition_penalty, ..Sampling::greedy() };
        }
        Sampling {
            temperature: self.temperature.unwrap_or(of.temperature),
            top_k: Some(self.top_k.or(generation.top_k).unwrap_or(50)).filter(|k| *k > 0),
            top_p: self.top_p.or(of.top_p),
            min_p: self.min_p.or(of.min_p),
            repetition_penalty,
            seed: self.seed,
            ..of
        }
    }

    /// So many new tokens, chosen as [`over`](Self::over) says, by the model's rules and those of the flags.
    pub fn options(
        &self,
        generation: &GenerationConfig,
        max_new_tokens: usize,
        stop_tokens: Vec<i64>,
    ) -> GenerateOptions {
        let of = &generation.processors;
        let processors = LogitsProcessors {
            no_repeat_ngram_size: self.no_repeat_ngram_size.unwrap_or(of.no_repeat_ngram_size),
            ..of.clone()
        };
        let processors = Arc::new(processors.with_min_new_tokens(self.min_new_tokens));
        GenerateOptions { stop_tokens, processors, ..GenerateOptions::new(max_new_tokens, self.over(generation)) }
    }
}

/// What a model's author suggests for draws, without transformers' defaults: among all tokens, if nothing else is said.
pub(super) fn suggested(generation: &GenerationConfig) -> Sampling {
    Sampling {
        temperature: generation.temperature.unwrap_or(1.0),
        top_k: generation.top_k.filter(|k| *k > 0),
        // 0 leaves the likeliest token.
        top_p: generation.top_p.map(|p| if p == 0.0 { f64::MIN_POSITIVE } else { p }),
        min_p: generation.min_p,
        top_h: generation.top_h,
        typical_p: generation.typical_p,
        epsilon_cutoff: generation.epsilon_cutoff.unwrap_or(0.0),
        eta_cutoff: generation.eta_cutoff.unwrap_or(0.0),
        repetition_penalty: generation.repetition_penalty.unwrap_or(1.0),
        seed: 0,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        sampling: SamplingArgs,
    }

    fn over(flags: &[&str], generation: &GenerationConfig) -> Sampling {
        Flags::parse_from([&["generate"][..], flags].concat()).sampling.over(generation)
    }

    #[test]
    fn flags_come_over_the_models_suggestions() {
        let of = GenerationConfig {
            do_sample: Some(true),
            temperature: Some(0.6),
            top_k: Some(0),
            min_p: Some(0.1),
            repetition_penalty: Some(1.2),
            ..GenerationConfig::default()
        };
        let drawn =
            Sampling { temperature: 0.6, min_p: Some(0.1), repetition_penalty: 1.2, seed: 1, ..Sampling::greedy() };
        assert_eq!(over(&[], &of), drawn);
        let flags = ["--min-p", "0.2", "--repetition-penalty", "1.5"];
        assert_eq!(over(&flags, &of), Sampling { min_p: Some(0.2), repetition_penalty: 1.5, ..drawn });
        // The penalty counts for the likeliest token too.
        assert_eq!(over(&["--greedy"], &of), Sampling { repetition_penalty: 1.2, ..Sampling::greedy() });
        let none = GenerationConfig::default();
        assert_eq!(
            over(&["--repetition-penalty", "1.5"], &none),
            Sampling { repetition_penalty: 1.5, ..Sampling::greedy() }
        );
        let min_p = Sampling { temperature: 1.0, top_k: Some(50), min_p: Some(0.2), seed: 1, ..Sampling::greedy() };
        assert_eq!(over(&["--min-p", "0.2"], &none), min_p);
    }

    /// `tests/golden/published`: what `generate` does without flags.
    #[test]
    fn published_models_are_drawn_from_as_their_authors_suggest() {
        let published = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/published");
        let of = |model: &str| over(&[], &GenerationConfig::of_folder(&published.join(model)).unwrap());
        let drawn = |temperature, top_k, top_p| Sampling {
            temperature,
            top_k: Some(top_k),
            top_p,
            seed: 1,
            ..Sampling::greedy()
        };
        assert_eq!(of("Qwen--Qwen3-8B"), drawn(0.6, 20, Some(0.95)));
        assert_eq!(of("meta-llama--Llama-3.2-1B-Instruct"), drawn(0.6, 50, Some(0.9)));
        assert_eq!(of("google--gemma-3-27b-it"), drawn(1.0, 64, Some(0.95)));
        assert_eq!(of("openai--gpt-oss-20b"), drawn(1.0, 50, None));
        // It has a temperature, and does not say that tokens are drawn.
        assert_eq!(of("meta-llama--Llama-2-7b-hf"), Sampling::greedy());
    }
}
