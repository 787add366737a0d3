//! What the attention kernels share: rings of tiles, products of tiles, masks, and the way of an accumulator to memory.
mod masks;
mod output;
mod products;
mod rings;

pub use masks::{Draws, HIDDEN, draws, hide, survives};
pub use output::store;
pub use products::{issue_product, issue_scores, operand, pack_operand, pin_operand};
pub use rings::{Ring, Slot, arrived, fetch, load, offset, release, ring, slot};
