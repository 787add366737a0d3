//! One way to train a model, in words. Pure.

use crate::engine::{CommWord, ContextConfig};
use crate::schedule::{PipelineConfig, ScheduleKind};
use backend_dist::mesh::{LayoutError, ParallelLayout};
use models::recompute::{Granularity, Method, Module, Recompute};
use std::fmt;
use std::str::FromStr;
use strsim::damerau_levenshtein;
use thiserror::Error;

/// A layout, how often a rank accumulates per step, and how its passes are ordered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Sizes of the parallel axes.
    pub layout: ParallelLayout,
    /// The algorithm of attention over context parallel ranks.
    pub context: ContextConfig,
    /// Micro-batches per rank and step.
    pub accumulation: usize,
    /// Schedule and stages.
    pub pipeline: PipelineConfig,
    /// What is recomputed.
    pub recompute: Recompute,
    /// All-to-alls of routed tokens are overlapped with the experts, in two chunks.
    pub moe_overlap: bool,
}

/// One device and one micro-batch.
impl Default for Candidate {
    fn default() -> Self {
        Self {
            layout: ParallelLayout::default(),
            context: ContextConfig::default(),
            accumulation: 1,
            pipeline: PipelineConfig::default(),
            recompute: Recompute::default(),
            moe_overlap: false,
        }
    }
}

/// Every module of selective recomputation.
pub(super) const MODULES: [Module; 3] = [Module::CoreAttention, Module::MlpActivation, Module::Norms];

/// Full recomputation.
pub(super) fn full(method: Method, num_layers: usize) -> Recompute {
    Recompute { granularity: Granularity::Full, method, num_layers, ..Recompute::default() }
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.layout)?;
        let ContextConfig { comm_type, hierarchical_sizes, dynamic, max_tokens_per_rank } = &self.context;
        if *comm_type != ContextConfig::default().comm_type {
            let words: Vec<&str> = comm_type.iter().map(|word| word.name()).collect();
            write!(f, " {}", words.join(","))?;
            if let Some([inner, _]) = hierarchical_sizes {
                write!(f, ":{inner}")?;
            }
        }
        if let Some(most) = max_tokens_per_rank.filter(|_| *dynamic) {
            write!(f, " dynamic:{most}")?;
        }
        if self.accumulation > 1 {
            write!(f, " x{}", self.accumulation)?;
        }
        if let Some(schedule) = self.pipeline.schedule {
            write!(f, " {schedule}")?;
        }
        if let Some(passes) = &self.pipeline.passes {
            let ranks: Vec<String> =
                passes.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(",")).collect();
            write!(f, " passes:{}", ranks.join("/"))?;
        }
        if let Some(stages) = &self.pipeline.layout {
            write!(f, " {stages}")?;
        }
        if self.moe_overlap {
            f.write_str(" moe-overlap")?;
        }
        match (self.recompute.granularity, self.recompute.method) {
            (Granularity::None, _) => {}
            (Granularity::Selective, _) => f.write_str(" selective")?,
            (Granularity::Full, Method::Uniform) => write!(f, " uniform{}", self.recompute.num_layers)?,
            (Granularity::Full, Method::Block) => write!(f, " block{}", self.recompute.num_layers)?,
        }
        let flags = [(self.recompute.keep_attention, " keep-attention"), (self.recompute.cpu_offload, " cpu-offload")];
        flags.iter().filter(|(on, _)| *on).try_for_each(|(_, word)| f.write_str(word))
    }
}

/// As it is shown: `TP2 PP2 DP2 ZeRO1 x4 zb-h1 Et|ttL uniform1` is four micro-batches in that layout, with this
/// schedule, these stages (Megatron's string), and all layers recomputed one by one; `block2` the first two of each
/// stage, with `keep-attention` all but their attention, with `cpu-offload` their inputs in host memory, `selective` all modules that can be. Under `DP2 EP2
/// moe-overlap` all-to-alls of tokens are overlapped with the experts. `CP4 a2a+p2p:2` has an all-to-all of heads in
/// blocks of two ranks, `CP2 p2p,a2a` an algorithm for each layer, and under `DP4 dynamic:8` a document is shared by
/// as many ranks as leave eight of its tokens on each. `PP2 passes:0F0,0B0/1F0,1B0` is a schedule of your own, a slash between
/// ranks.
impl FromStr for Candidate {
    type Err = CandidateError;

    fn from_str(text: &str) -> Result<Self, CandidateError> {
        let mut candidate = Self::default();
        let (mut sizes, mut blocks, mut keep_attention, mut cpu_offload) = (Vec::new(), None, false, false);
        let number = |word: &str, name: &str| {
            word.strip_prefix(name).and_then(|count| count.parse().ok()).filter(|count: &usize| *count > 0)
        };
        for word in text.split_whitespace() {
            if let Some(count) = number(word, "x") {
                candidate.accumulation = count;
            } else if let Ok(schedule) = word.parse::<ScheduleKind>() {
                candidate.pipeline.schedule = Some(schedule);
            } else if let Some(passes) = word.strip_prefix("passes:") {
                candidate.pipeline.passes = Some(passes.replace('/', "\n"));
            } else if word.starts_with('E') && word.ends_with('L') {
                candidate.pipeline.layout = Some(word.into());
            } else if let Some(most) = number(word, "dynamic:") {
                (candidate.context.dynamic, candidate.context.max_tokens_per_rank) = (true, Some(most));
            } else if let Some((words, inner)) = algorithms(word) {
                candidate.context.comm_type = words;
                blocks = inner;
            } else if word == "moe-overlap" {
                candidate.moe_overlap = true;
            } else if word == "keep-attention" {
                keep_attention = true;
            } else if word == "cpu-offload" {
                cpu_offload = true;
            } else if word == "selective" {
                candidate.recompute = Recompute::selective(&MODULES);
            } else if let Some(layers) = number(word, "uniform") {
                candidate.recompute = full(Method::Uniform, layers);
            } else if let Some(layers) = number(word, "block") {
                candidate.recompute = full(Method::Block, layers);
            } else if is_size(word) {
                sizes.push(word);
            } else {
                return Err(unknown(word));
            }
        }
        match candidate.recompute.granularity {
            Granularity::Full => {
                candidate.recompute = Recompute { keep_attention, cpu_offload, ..candidate.recompute };
            }
            _ if keep_attention => return Err(CandidateError::NothingRecomputed("keep-attention")),
            _ if cpu_offload => return Err(CandidateError::NothingRecomputed("cpu-offload")),
            _ => {}
        }
        candidate.layout = sizes.join(" ").parse()?;
        candidate.context.hierarchical_sizes = blocks.map(|inner| [inner, candidate.layout.cp / inner]);
        Ok(candidate)
    }
}

/// Why a text is no layout.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CandidateError {
    /// A word is none of those that describe a layout.
    #[error("`{word}` is not a part of a layout; {}: {nearest}", if nearest.contains(' ') { "legal" } else { "nearest legal" })]
    Word {
        /// The word.
        word: String,
        /// The most similar one, or some if none is similar.
        nearest: &'static str,
    },
    /// `keep-attention` or `cpu-offload` without layers that are recomputed.
    #[error("`{0}` needs recomputed layers; nearest legal: uniform1 {0}")]
    NothingRecomputed(&'static str),
    /// The sizes contradict each other.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

/// An example of every word.
const WORDS: &str = "\
    TP2 SP CP2 EP2 ETP2 PP2 VPP2 DP2 ZeRO1 Group2 x2 gpipe 1f1b interleaved zb-h1 zb-v Et|tL p2p all_gather a2a \
    a2a+p2p:2 dynamic:8 moe-overlap selective uniform1 block1 keep-attention cpu-offload";

/// Whether a word is one or several sizes of parallel axes, whatever their values.
fn is_size(word: &str) -> bool {
    let is_one =
        |part: &str| !part.is_empty() && !matches!(part.parse::<ParallelLayout>(), Err(LayoutError::Word { .. }));
    word.split(|c: char| "+,x×".contains(c)).all(is_one)
}

/// What is proposed for a word that resembles none.
const AXES: &str = "TP2, SP, CP2, EP2, PP2, DP2, ZeRO1, x2 (two micro-batches) and others";

fn unknown(word: &str) -> CandidateError {
    let written = word.to_lowercase();
    let stem = |word: &str| word.trim_end_matches(|c: char| c.is_ascii_digit()).to_lowercase();
    // A number that is missing or wrong is no difference. Of two letters one other is another word.
    let far = |known: &&str| match stem(known) == stem(&written) {
        true => 0,
        false => damerau_levenshtein(&written, &known.to_lowercase()),
    };
    let nearest = WORDS.split(' ').min_by_key(far).expect("there are words");
    let is_near = far(&nearest) == 0 || written.len() > 2 && 2 * far(&nearest) <= written.len();
    CandidateError::Word { word: word.into(), nearest: if is_near { nearest } else { AXES } }
}

/// `p2p`, `p2p,a2a` or `a2a+p2p:2`.
fn algorithms(word: &str) -> Option<(Vec<CommWord>, Option<usize>)> {
    let (words, inner) = match word.split_once(':') {
        Some((words, inner)) => (words, Some(inner.parse().ok().filter(|inner: &usize| *inner > 0)?)),
        None => (word, None),
    };
    Some((words.split(',').map(|word| word.parse().ok()).collect::<Option<_>>()?, inner))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_as_they_are_shown() {
        for text in [
            "TP2 SP DP2 x2",
            "TP1 x2",
            "DP4 ZeRO3 uniform2",
            "TP2 CP4 a2a+p2p:2 x2",
            "CP2 p2p,all_gather,a2a",
            "CP2 DP2 all_gather dynamic:8",
            "TP2 SP PP2 DP2 ZeRO1 x4 zb-h1 Et|ttL block1",
            "CP2 uniform1 keep-attention",
            "CP2 block2 keep-attention cpu-offload",
            "PP2 VPP2 x2 interleaved selective",
            "EP2 DP2 x2 moe-overlap selective",
        ] {
            assert_eq!(text.parse::<Candidate>().unwrap().to_string(), text);
        }
        assert_eq!("x3".parse::<Candidate>().unwrap().accumulation, 3);
        assert_eq!("tp2+sp,dp2".parse::<Candidate>().unwrap().to_string(), "TP2 SP DP2");
        assert_eq!("EP2 DP2".parse::<Candidate>().unwrap().layout.ep, 2, "sizes are checked together");
    }

    #[test]
    fn unknown_words_are_refused_with_the_nearest() {
        let refuse = |text: &str| text.parse::<Candidate>().unwrap_err().to_string();
        for (text, word, nearest) in [
            ("TP2 x", "x", "x2"),
            ("TP2 x0", "x0", "x2"),
            ("TP2x DP2", "TP2x", "TP2"),
            ("PP2 x2 1b1f", "1b1f", "1f1b"),
            ("DP2 zero", "zero", "ZeRO1"),
            ("DP2 uniform", "uniform", "uniform1"),
            ("CP2 allgather", "allgather", "all_gather"),
        ] {
            assert_eq!(refuse(text), format!("`{word}` is not a part of a layout; nearest legal: {nearest}"));
        }
        for word in ["XX", ",", "FOO"] {
            let said = format!("`{word}` is not a part of a layout; legal: TP2, SP, CP2, EP2, PP2, DP2, ZeRO1, x2");
            assert!(refuse(&format!("TP2 {word}")).starts_with(&said), "{}", refuse(&format!("TP2 {word}")));
        }
        assert!(refuse("DP2 selective keep-attention").contains("nearest legal: uniform1 keep-attention"));
        assert!(refuse("DP2 cpu-offload").contains("nearest legal: uniform1 cpu-offload"));
        assert!(refuse("DP2 EP4").contains("expert-parallel 4"));
    }
}
