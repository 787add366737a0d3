//! The flags that choose the next token.

use crate::generate::Sampling;
use crate::hf::GenerationConfig;

/// How tokens are drawn.
#[derive(clap::Args, Clone, Debug)]
pub(super) struct SamplingArgs {
    /// Take the likeliest token each time: the default, unless a flag below or the model's generation_config.json says
    /// to draw
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p"])]
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
    /// Seed of the draws
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true)]
    seed: u64,
}

impl SamplingArgs {
    /// The flags over the model's own defaults over transformers': a model whose `generation_config.json` does not say
    /// `do_sample` is greedy, and one that is drawn from without more words has temperature 1 and top-k 50.
    pub fn over(&self, generation: &GenerationConfig) -> Sampling {
        let asked = self.temperature.is_some() || self.top_k.is_some() || self.top_p.is_some();
        if self.greedy || !(asked || generation.do_sample == Some(true)) {
            return Sampling::greedy();
        }
        Sampling {
            temperature: self.temperature.or(generation.temperature).unwrap_or(1.0),
            top_k: Some(self.top_k.or(generation.top_k).unwrap_or(50)).filter(|k| *k > 0),
            top_p: self.top_p.or(generation.top_p),
            seed: self.seed,
        }
    }
}
