//! Receives ahead of time: where a rank starts them if that is all they do.

use super::{Action, Schedule};

impl Schedule {
    /// The lists with every receive a pass earlier, in the same order, for transports on which a receive only posts its
    /// buffer: the transfer then overlaps with that pass instead of running between it and the next (Megatron's
    /// `--overlap-p2p-communication`). A buffer more per neighbour is the price; a whole pass is enough for any
    /// message. [`Schedule::check`] proves these lists too.
    pub fn posted(&self) -> Schedule {
        let ahead = |list: &Vec<Action>| {
            let mut moved: Vec<Action> = Vec::with_capacity(list.len());
            // The position of the pass before, after what has been posted before it.
            let mut last = None;
            for &action in list {
                match (action, last) {
                    (Action::Recv(_), Some(at)) => {
                        moved.insert(at, action);
                        last = Some(at + 1);
                    }
                    _ => {
                        if matches!(action, Action::Compute(_)) {
                            last = Some(moved.len());
                        }
                        moved.push(action);
                    }
                }
            }
            moved
        };
        Schedule { spec: self.spec, ranks: self.ranks.iter().map(ahead).collect() }
    }
}
