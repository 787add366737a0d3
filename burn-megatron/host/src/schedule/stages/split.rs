//! Equal stages, with exceptions at the ends.

use layouts::mesh::Nearest;

use super::{StageError, StageLayout};
use crate::schedule::Placement;

/// How to divide layers; the rules are those of `get_num_layers_to_build` in Megatron-LM's
/// megatron/core/transformer/transformer_block.py.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Transformer layers of the model.
    pub layers: usize,
    /// Ranks and chunks.
    pub placement: Placement,
    /// Layers of the first rank, over all its chunks (Megatron: `--decoder-first-pipeline-num-layers`).
    pub first: Option<usize>,
    /// Layers of the last rank, over all its chunks (Megatron: `--decoder-last-pipeline-num-layers`).
    pub last: Option<usize>,
    /// The embedding counts as a layer (Megatron: `--account-for-embedding-in-pipeline-split`).
    pub count_embedding: bool,
    /// The loss counts as a layer (Megatron: `--account-for-loss-in-pipeline-split`).
    pub count_loss: bool,
}

impl Split {
    /// Equal stages without exceptions.
    pub fn equal(layers: usize, placement: Placement) -> Self {
        Self { layers, placement, first: None, last: None, count_embedding: false, count_loss: false }
    }

    /// The stages.
    ///
    /// # Errors
    /// If a stage is not a whole number of layers; names the nearest numbers that are, and the layout with nearly equal
    /// stages.
    pub fn layout(&self) -> Result<StageLayout, StageError> {
        match (self.first.map(|n| ("first-stage-layers", n)), self.last.map(|n| ("last-stage-layers", n))) {
            (None, None) => self.equal_stages(),
            (Some(end), other) | (other, Some(end)) => {
                if let Some(other) = self.counted() {
                    return Err(StageError::Together { key: end.0, other });
                }
                if self.placement.ranks() == 1 {
                    return Err(StageError::OneRank { key: end.0, value: end.1 });
                }
                self.given_ends(other.is_some())
            }
        }
    }

    fn counted(&self) -> Option<&'static str> {
        if self.count_embedding { Some("count-embedding") } else { self.count_loss.then_some("count-loss") }
    }

    fn equal_stages(&self) -> Result<StageLayout, StageError> {
        let stages = self.placement.stages();
        let (embedding, loss) = (usize::from(self.count_embedding), usize::from(self.count_loss));
        let legal = |layers: usize| layers > 0 && (layers + embedding + loss).is_multiple_of(stages);
        if !legal(self.layers) {
            let also = match (self.count_embedding, self.count_loss) {
                (false, false) => "",
                (true, false) => " and the embedding",
                (false, true) => " and the loss",
                (true, true) => ", the embedding and the loss",
            };
            return Err(StageError::NotEqual {
                key: "layers",
                layers: self.layers,
                also,
                over: format!("{} ranks of {} stages", self.placement.ranks(), self.placement.chunks()),
                nearest: Nearest::where_legal(self.layers, self.layers + 2 * stages, legal),
                layout: (self.layers >= stages).then(|| StageLayout::balanced(self.layers, stages)),
            });
        }
        let mut counts = vec![(self.layers + embedding + loss) / stages; stages];
        counts[0] -= embedding;
        counts[stages - 1] -= loss;
        Ok(StageLayout::from_layer_counts(&counts))
    }

    /// The first or the last rank, or both, have their own number of layers; the ranks between share the rest.
    fn given_ends(&self, both: bool) -> Result<StageLayout, StageError> {
        let (ranks, chunks) = (self.placement.ranks(), self.placement.chunks());
        let mut left = self.layers;
        for (key, value) in [("first-stage-layers", self.first), ("last-stage-layers", self.last)] {
            let Some(value) = value else { continue };
            if value > left {
                return Err(StageError::TooMany { key, value, left });
            }
            divides(key, value, chunks, left)?;
            left -= value;
        }
        let between = ranks - 1 - usize::from(both);
        if between == 0 && left > 0 {
            let last = self.layers - self.first.unwrap_or(0);
            return Err(StageError::NobodyLeft { left, layers: self.layers, last });
        }
        let parts = between * chunks;
        if parts > 0 && !left.is_multiple_of(parts) {
            return Err(StageError::NotEqual {
                key: "layers",
                layers: self.layers,
                also: if both { " less those of the first and last rank" } else { " less those of one end" },
                over: format!("{between} ranks of {chunks} stages"),
                nearest: Nearest::where_legal(self.layers, self.layers + parts, |layers| {
                    layers >= self.layers - left && (layers - (self.layers - left)).is_multiple_of(parts)
                }),
                layout: None,
            });
        }
        let mut counts = vec![0; self.placement.stages()];
        for rank in 0..ranks {
            let own = match rank {
                0 => self.first,
                _ if rank == ranks - 1 => self.last,
                _ => None,
            };
            let each = own.map_or_else(|| left / parts, |own| own / chunks);
            for chunk in 0..chunks {
                counts[self.placement.stage(rank, chunk)] = each;
            }
        }
        Ok(StageLayout::from_layer_counts(&counts))
    }
}

fn divides(key: &'static str, value: usize, chunks: usize, max: usize) -> Result<(), StageError> {
    if value.is_multiple_of(chunks) {
        return Ok(());
    }
    let nearest = Nearest::where_legal(value, max, |value| value.is_multiple_of(chunks));
    let over = format!("the {chunks} stages of their rank");
    Err(StageError::NotEqual { key, layers: value, also: "", over, nearest, layout: None })
}
