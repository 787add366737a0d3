//! How ranks that share sequences compute attention together. Pure.

use std::fmt;
use std::str::FromStr;

use crate::schedule::dynamic_context::block_sizes;
use backend_dist::mesh::{Nearest, ParallelLayout};
use backend_dist::ops::context::CpCommType;
use models::layout::{ModelDims, ModelLayoutError};
use serde::{Deserialize, Serialize};

/// Megatron's words for a [`CpCommType`] (`--cp-comm-type`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CommWord {
    /// Keys and values go round a ring.
    #[default]
    #[serde(rename = "p2p")]
    P2p,
    /// Keys and values are gathered.
    #[serde(rename = "all_gather")]
    AllGather,
    /// All-to-all: a rank gets all positions of some heads.
    #[serde(rename = "a2a")]
    A2a,
    /// Heads inside blocks of ranks, a ring of the blocks.
    #[serde(rename = "a2a+p2p")]
    A2aP2p,
}

impl CommWord {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::P2p, Self::AllGather, Self::A2a, Self::A2aP2p];

    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::P2p => "p2p",
            Self::AllGather => "all_gather",
            Self::A2a => "a2a",
            Self::A2aP2p => "a2a+p2p",
        }
    }
}

impl fmt::Display for CommWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for CommWord {
    type Err = ();

    fn from_str(word: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|known| known.name() == word).ok_or(())
    }
}

/// How attention reaches across the ranks of a context parallel group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct ContextConfig {
    /// One for all layers, or one for each.
    pub comm_type: Vec<CommWord>,
    /// Of `a2a+p2p`: ranks of a block, in which heads are redistributed by all-to-all, and number of blocks.
    pub hierarchical_sizes: Option<[usize; 2]>,
    /// Each document of a step is shared by as many of the data-parallel ranks as its length asks for
    /// ([`DynamicContext`](crate::schedule::dynamic_context::DynamicContext)).
    pub dynamic: bool,
    /// With `dynamic`: the most tokens per rank of one document or packed sequence.
    pub max_tokens_per_rank: Option<usize>,
}

impl Default for ContextConfig {
    fn default() -> Self {
        Self {
            comm_type: vec![CommWord::default()],
            hierarchical_sizes: None,
            dynamic: false,
            max_tokens_per_rank: None,
        }
    }
}

/// Why attention cannot be computed so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum ContextError {
    /// Neither one word for all layers nor one for each.
    #[error("context.comm-type has {given} entries for {layers} layers; nearest legal: 1 (for all layers), {layers}")]
    Layers { given: usize, layers: usize },
    /// The blocks do not make up the group.
    #[error(
        "context.comm-type a2a+p2p needs context.hierarchical-sizes whose product is context-parallel {cp}, not {given}; \
         nearest legal: {inner} {outer}"
    )]
    Sizes { cp: usize, given: String, inner: usize, outer: usize },
    /// The size of groups is chosen by length, but nothing says how long is too long.
    #[error("context.dynamic needs context.max-tokens-per-rank, the most tokens of a document that a rank may have")]
    NoLimit,
    /// Groups of all sizes cannot be blocks of blocks.
    #[error("context.dynamic chooses the sizes of groups: context.comm-type a2a+p2p is not for it; nearest legal: p2p")]
    BlocksOfBlocks,
    /// Documents are assigned one by one, so a mean per micro-batch has no meaning, and documents must be separate.
    #[error("context.dynamic assigns documents one by one: {0}")]
    Alone(&'static str),
    /// As many ranks as a document may have cannot share the states of recurrent layers.
    #[error("context.dynamic shares documents over blocks of all sizes: {0}")]
    States(ModelLayoutError),
    /// The ranks of the all-to-all do not divide the heads.
    #[error(
        "context.comm-type {word}: the all-to-all over {ranks} ranks redistributes heads, but a tensor parallel rank has {heads} query heads; nearest \
         legal: heads over {nearest} ranks, or p2p or all_gather"
    )]
    Heads { word: CommWord, ranks: usize, heads: usize, nearest: Nearest },
}

impl ContextConfig {
    /// One communication type for all layers; `inner` ranks of a block for [`CommWord::A2aP2p`] in a group of `cp`.
    pub fn all(word: CommWord, inner: usize, cp: usize) -> Self {
        let sizes = (word == CommWord::A2aP2p).then(|| [inner, cp / inner.max(1)]);
        Self { comm_type: vec![word], hierarchical_sizes: sizes, ..Self::default() }
    }

    /// Whether the ranks of `layout` can compute a model's attention so.
    ///
    /// # Errors
    /// With the nearest legal values.
    pub fn check(&self, layout: &ParallelLayout, dims: &ModelDims) -> Result<(), ContextError> {
        let given = self.comm_type.len();
        if given != 1 && given != dims.layers {
            return Err(ContextError::Layers { given, layers: dims.layers });
        }
        if self.dynamic {
            self.check_dynamic()?;
        }
        let shared = |cp: usize| {
            dims.check_cp(layout.tp, cp).map_err(ContextError::States)?;
            self.check_shared(&ParallelLayout { cp, ..layout.clone() }, dims)
        };
        match self.dynamic {
            true => block_sizes(layout.cp * layout.dp).into_iter().try_for_each(shared),
            false => self.check_shared(layout, dims),
        }
    }

    fn check_dynamic(&self) -> Result<(), ContextError> {
        match self.max_tokens_per_rank {
            None => Err(ContextError::NoLimit),
            Some(_) if self.comm_type.contains(&CommWord::A2aP2p) => Err(ContextError::BlocksOfBlocks),
            Some(_) => Ok(()),
        }
    }

    fn check_shared(&self, layout: &ParallelLayout, dims: &ModelDims) -> Result<(), ContextError> {
        if layout.cp == 1 {
            return Ok(());
        }
        let heads = dims.heads / layout.tp;
        let legal = |ranks: usize| heads.is_multiple_of(ranks);
        for word in &self.comm_type {
            let ranks = match (word, self.hierarchical_sizes) {
                (CommWord::P2p | CommWord::AllGather, _) => continue,
                (CommWord::A2a, _) => layout.cp,
                (CommWord::A2aP2p, Some([inner, outer])) if inner * outer == layout.cp => inner,
                (CommWord::A2aP2p, sizes) => {
                    let cp = layout.cp;
                    let inner = (1..=cp).rev().find(|inner| cp.is_multiple_of(*inner) && legal(*inner)).unwrap_or(1);
                    let given = sizes.map_or("none".into(), |[inner, outer]| format!("{inner} {outer}"));
                    return Err(ContextError::Sizes { cp, given, inner, outer: cp / inner });
                }
            };
            if !legal(ranks) {
                let nearest = Nearest::where_legal(ranks, heads, legal);
                return Err(ContextError::Heads { word: *word, ranks, heads, nearest });
            }
        }
        Ok(())
    }

    /// The communication type of a layer's attention.
    pub fn of_layer(&self, layer: usize) -> CpCommType {
        let word = self.comm_type.get(layer).or(self.comm_type.first()).copied().unwrap_or_default();
        match word {
            CommWord::P2p => CpCommType::P2p,
            CommWord::AllGather => CpCommType::AllGather,
            CommWord::A2a => CpCommType::A2a,
            CommWord::A2aP2p => CpCommType::A2aP2p { inner: self.hierarchical_sizes.map_or(1, |[inner, _]| inner) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use models::layout::StateDims;

    const DIMS: ModelDims = ModelDims {
        vocab: 96,
        hidden: 32,
        heads: 8,
        kv_heads: 4,
        intermediate: 64,
        experts: None,
        layers: 3,
        max_positions: None,
        states: None,
    };

    fn check(layout: &str, words: &[CommWord], sizes: Option<[usize; 2]>) -> Result<(), String> {
        let config = ContextConfig { comm_type: words.to_vec(), hierarchical_sizes: sizes, ..ContextConfig::default() };
        config.check(&layout.parse().unwrap(), &DIMS).map_err(|error| error.to_string())
    }

    #[test]
    fn refusals_name_the_nearest_legal_values() {
        use CommWord::*;
        assert_eq!(check("CP8", &[P2p], None), Ok(()));
        assert_eq!(check("CP4", &[P2p, A2a, AllGather], None), Ok(()));
        assert_eq!(check("CP8", &[A2aP2p], Some([4, 2])), Ok(()));
        assert_eq!(check("TP2", &[A2aP2p], None), Ok(()), "nobody to share with");
        assert!(check("CP2", &[P2p, A2a], None).unwrap_err().contains("2 entries for 3 layers; nearest legal: 1"));
        let heads = check("TP4 CP4", &[A2a], None).unwrap_err();
        assert!(heads.contains("has 2 query heads; nearest legal: heads over 2 ranks"), "{heads}");
        for sizes in [None, Some([2, 2])] {
            let said = check("TP2 CP8", &[A2aP2p], sizes).unwrap_err();
            assert!(said.contains("product is context-parallel 8") && said.ends_with("nearest legal: 4 2"), "{said}");
        }
    }

    #[test]
    fn dynamic_groups_need_a_limit_and_one_communication_type() {
        let check = |layout: &str, word: CommWord, most: Option<usize>| {
            let config = ContextConfig { dynamic: true, max_tokens_per_rank: most, ..ContextConfig::all(word, 2, 4) };
            config.check(&layout.parse().unwrap(), &DIMS).map_err(|error| error.to_string())
        };
        for layout in ["TP2 DP4 ZeRO1", "PP3 DP4", "DP4 ZeRO3", "DP4 EP2"] {
            assert_eq!(check(layout, CommWord::P2p, Some(8)), Ok(()), "{layout}");
        }
        for (layout, word, most, said) in [
            ("DP4", CommWord::P2p, None, "needs context.max-tokens-per-rank"),
            ("DP4", CommWord::A2aP2p, Some(8), "nearest legal: p2p"),
            ("TP4 DP4", CommWord::A2a, Some(8), "heads over 2 ranks"),
        ] {
            let error = check(layout, word, most).unwrap_err();
            assert!(error.contains(said), "{layout}: {error}");
        }
        let dims = ModelDims { states: Some(StateDims::mamba2(8, 4)), ..DIMS };
        let config = ContextConfig { dynamic: true, max_tokens_per_rank: Some(8), ..ContextConfig::default() };
        assert_eq!(config.check(&"TP2 DP4".parse().unwrap(), &dims), Ok(()));
        let error = config.check(&"DP6".parse().unwrap(), &dims).unwrap_err().to_string();
        assert!(error.starts_with("context.dynamic shares documents") && error.ends_with("legal: 4, 8"), "{error}");
    }

    #[test]
    fn each_layer_may_have_its_own() {
        let config = ContextConfig { comm_type: vec![CommWord::P2p, CommWord::A2a], ..ContextConfig::default() };
        assert_eq!([0, 1].map(|layer| config.of_layer(layer)), [CpCommType::P2p, CpCommType::A2a]);
        let all = ContextConfig::all(CommWord::A2aP2p, 2, 8);
        assert_eq!((all.hierarchical_sizes, all.of_layer(7)), (Some([2, 4]), CpCommType::A2aP2p { inner: 2 }));
    }
}
