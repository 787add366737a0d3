//! Which rank holds which stage.
//!
//! A model is split into `ranks × chunks` *stages*, numbered in the order of the layers.

/// How the stages are assigned to the pipeline ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Round and round: stage `s` is chunk `s / ranks` of rank `s % ranks`, as in Megatron-LM.
    Loop {
        /// Pipeline ranks.
        ranks: usize,
        /// Stages per rank.
        chunks: usize,
    },
    /// Down and up again, two stages per rank: the last stage is on the first rank (ZB-V, arXiv 2401.10241 section 6).
    V {
        /// Pipeline ranks.
        ranks: usize,
    },
}

impl Placement {
    /// Pipeline ranks.
    pub fn ranks(self) -> usize {
        match self {
            Placement::Loop { ranks, .. } | Placement::V { ranks } => ranks,
        }
    }

    /// Stages per rank.
    pub fn chunks(self) -> usize {
        match self {
            Placement::Loop { chunks, .. } => chunks,
            Placement::V { .. } => 2,
        }
    }

    /// Stages of the model.
    pub fn stages(self) -> usize {
        self.ranks() * self.chunks()
    }

    /// The stage that is chunk `chunk` of `rank`.
    pub fn stage(self, rank: usize, chunk: usize) -> usize {
        match self {
            Placement::V { ranks } if chunk == 1 => 2 * ranks - 1 - rank,
            _ => chunk * self.ranks() + rank,
        }
    }

    /// The rank and its chunk that hold a stage.
    pub fn holder(self, stage: usize) -> (usize, usize) {
        let ranks = self.ranks();
        match self {
            Placement::V { .. } if stage >= ranks => (2 * ranks - 1 - stage, 1),
            _ => (stage % ranks, stage / ranks),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stage_has_one_holder() {
        for ranks in 1..6 {
            let loops = (1..4).map(|chunks| Placement::Loop { ranks, chunks });
            for placement in loops.chain([Placement::V { ranks }]) {
                for stage in 0..placement.stages() {
                    let (rank, chunk) = placement.holder(stage);
                    assert!(rank < ranks && chunk < placement.chunks());
                    assert_eq!(placement.stage(rank, chunk), stage, "{placement:?}");
                }
            }
        }
    }

    #[test]
    fn a_v_turns_on_the_last_rank() {
        let v = Placement::V { ranks: 4 };
        assert_eq!((v.holder(3), v.holder(4), v.holder(7)), ((3, 0), (3, 1), (0, 1)));
    }
}
