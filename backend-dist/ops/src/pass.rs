//! What operations must know of the pass that they are part of. Whoever begins a pass makes its context and hands it
//! down; autograd nodes keep what their backward pass needs of it.

use super::{fp8::Sharing, saved_attention::CoreAttention, stash::HandOvers, weight_grads::Deferral};

/// A forward pass of a micro-batch, and the backward pass of its graph. Clones are the same pass. The default is a pass
/// of training that is alone in its step.
#[derive(Clone, Debug, Default)]
pub struct PassContext {
    /// What the pass is for.
    pub kind: PassKind,
    /// Another number for every training step.
    pub step: u64,
    /// The micro-batch, counted over those of this rank in the step.
    pub micro_batch: usize,
    /// Sums on GPUs have one order, so that the pass is bitwise reproducible.
    pub deterministic: bool,
    /// Whether attention outputs are computed, saved for another pass, or those of an earlier one.
    pub attention: CoreAttention,
    /// The ranks whose tokens have one scale in FP8.
    pub sharing: Sharing,
    /// Counts what operations have not handed each other.
    pub hand_overs: HandOvers,
    /// Where weight gradients wait if the backward pass defers them.
    pub weight_grads: Deferral,
}

/// What a forward pass is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PassKind {
    /// It is part of a training step: what routers count of it, counts.
    #[default]
    Training,
    /// It repeats an earlier pass of training for its graph.
    Recomputation,
    /// It leaves nothing behind.
    Evaluation,
}
