//! Pruning by the importance of activations (Muralidharan et al., "Compact Language Models via Pruning and Knowledge
//! Distillation", 2024, Minitron): a smaller model of the same family from some of a model's weights, which distillation
//! then heals.
//!
//! [`importance()`] reads calibration texts, [`Kept::most_important`] chooses, and [`Pruned`] are the weights that are left.

mod importance;
mod keep;
mod weights;

pub use importance::{Loss, importance};
pub use keep::{Importance, Kept, PruneError, Sizes};
pub use weights::Pruned;
