//! Where the passes get their inputs from and where their results go.

use super::{Pass, Payload, Placement, Schedule, Transfer, Work};

/// Where a pass gets its input from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// A pass on the same rank.
    Local(Work),
    /// Another rank.
    Remote(Transfer),
}

impl Input {
    /// The transfer, if there is one.
    pub fn transfer(self) -> Option<Transfer> {
        match self {
            Input::Local(_) => None,
            Input::Remote(transfer) => Some(transfer),
        }
    }
}

impl Schedule {
    /// Where a forward gets its activation and a backward its gradient from: a neighbouring stage, on another rank or
    /// on the same. `None` at the ends of the model and for weight gradients.
    pub fn input(&self, rank: usize, work: Work) -> Option<Input> {
        let placement = self.placement();
        let stage = placement.stage(rank, work.chunk);
        let (payload, from) = match work.pass {
            Pass::Forward if stage > 0 => (Payload::Activation, stage - 1),
            Pass::Backward | Pass::BackwardInput if stage + 1 < placement.stages() => (Payload::Gradient, stage + 1),
            _ => return None,
        };
        Some(match placement.holder(from) {
            (holder, chunk) if holder == rank => Input::Local(Work { chunk, ..work }),
            (peer, _) => Input::Remote(self.transfer(payload, placement, stage.max(from), work, peer)),
        })
    }

    /// The transfer that a pass's result needs; `None` if it stays on the rank.
    pub fn output(&self, rank: usize, work: Work) -> Option<Transfer> {
        let placement = self.placement();
        let stage = placement.stage(rank, work.chunk);
        let (payload, to) = match work.pass {
            Pass::Forward if stage + 1 < placement.stages() => (Payload::Activation, stage + 1),
            Pass::Backward | Pass::BackwardInput if stage > 0 => (Payload::Gradient, stage - 1),
            _ => return None,
        };
        let (peer, _) = placement.holder(to);
        (peer != rank).then(|| self.transfer(payload, placement, stage.max(to), work, peer))
    }

    /// `boundary` is the later of the two stages.
    fn transfer(&self, payload: Payload, placement: Placement, boundary: usize, work: Work, peer: usize) -> Transfer {
        let Work { chunk, micro_batch, .. } = work;
        let tag = (payload as usize * placement.stages() + boundary) * self.spec.micro_batches + micro_batch;
        Transfer { payload, chunk, micro_batch, peer, tag }
    }

    /// One more than the largest tag.
    pub fn tags(&self) -> usize {
        2 * self.placement().stages() * self.spec.micro_batches
    }
}
