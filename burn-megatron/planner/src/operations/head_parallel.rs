//! Recurrent layers over ranks that share a sequence: an all-to-all before and behind what runs over all positions
//! (models/src/layers/recurrent/head_parallel.rs).

use super::super::collective::Collective;
use super::{Activation, Chain, Communication, Over, UnitBuilder};

impl UnitBuilder<'_> {
    /// How many context-parallel ranks have the same of a rank's `groups` groups of heads.
    pub(super) fn copies(&self, groups: u64) -> u64 {
        (self.layout.cp as u64 / groups).max(1)
    }

    /// Sends so many features of each of the rank's tokens to the ranks of their heads, or back.
    pub(super) fn head_all_to_all(&self, chain: &mut Chain, features: u64) {
        if self.layout.cp == 1 {
            return;
        }
        let (bytes, both) = (self.local.tokens * features * self.element, Some(Collective::AllToAll));
        let communication = Communication { forward: both, backward: both, bytes, over: Over::Context, again: false };
        chain.op(bytes, |op| {
            op.communication = Some(communication);
            op.temporary = 2 * bytes;
        });
    }

    /// What keeps the output's gate, of `features` features, where it is not kept with what is convolved: the projection, of
    /// which it is a view on CPU ranks.
    pub(super) fn gate(&self, chain: &mut Chain, projected: Activation, features: u64) -> Option<Activation> {
        let copy = self.local.tokens * features * self.element;
        let gate = |chain: &mut Chain| if self.job.gpu { chain.tensor(copy, None) } else { projected };
        (self.layout.cp > 1).then(|| gate(chain))
    }
}
