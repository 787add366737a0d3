//! What a rank computes for one micro-batch, operation by operation. This is the only table of what each operation
//! keeps for its backward pass (backend-dist/src/ops/autodiff.rs), sends, and costs; memory, traffic and time are sums
//! over it.

mod chain;
mod dense;
mod head;
mod latent;
mod mixture;

use std::ops::Range;

use backend_dist::mesh::ParallelLayout;
use models::recompute::{Granularity, Method, Module, Recompute};

use super::Job;
use super::decoder::{Decoder, Share};
use super::traffic::Collective;
use crate::schedule::stages::Stage;
use chain::Chain;

/// Bytes of a token or label.
const ID: u64 = 8;

/// A tensor of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Activation {
    /// Equal for equal storage within a unit.
    pub id: usize,
    /// Its size.
    pub bytes: u64,
    /// The module whose recomputation makes it unnecessary to keep.
    pub module: Option<Module>,
    /// It is the residual stream: a branch that is not recorded needs it too.
    pub stream: bool,
}

/// An exchange with the forward's or the backward's direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exchange {
    /// In the forward pass.
    pub forward: Option<Collective>,
    /// Of the gradient.
    pub backward: Option<Collective>,
    /// Bytes of the whole tensor, the larger side of a gather or scatter.
    pub bytes: u64,
    /// Who takes part.
    pub over: Over,
    /// The forward exchange is repeated in the backward pass.
    pub again: bool,
}

/// The ranks of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// Tensor parallel ranks.
    Tensor,
    /// Those that have other parts of the sequence.
    Context,
    /// Those that together hold all experts of a layer.
    Experts,
}

/// An operation.
#[derive(Clone, Debug)]
pub struct Op {
    /// What it reads.
    pub input: Activation,
    /// What it makes.
    pub output: Activation,
    /// What it keeps until its own backward pass.
    pub keeps: Vec<Activation>,
    /// Elements of its weight and bias.
    pub weight: u64,
    /// How many of them are in matrices.
    pub matrix: u64,
    /// The weight is one of experts, which have replicas of their own.
    pub expert: bool,
    /// A matrix product whose weight gradient a zero-bubble schedule can put off.
    pub linear: bool,
    /// Of a matrix product in FP8.
    pub fp8: Option<Fp8Bytes>,
    /// Forward, input gradient, weight gradient.
    pub flops: [f64; 3],
    /// It is attention, which runs at another rate than matrix products.
    pub attention: bool,
    /// What is computed again in the backward pass under the given recomputation.
    pub again: bool,
    /// What it exchanges.
    pub exchange: Option<Exchange>,
}

/// Bytes of quantised tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Bytes {
    /// Of the weight, as it lies and transposed, from an update to the next.
    pub weight: u64,
    /// Of the input and of the output's gradient, until a weight gradient that is put off.
    pub deferred: u64,
}

/// One autodiff graph of the engine: the embedding, a layer (or several under uniform recomputation), the head.
#[derive(Clone, Debug)]
pub struct Unit {
    /// In order.
    pub ops: Vec<Op>,
    /// Only the input is kept; the forward runs again before the backward.
    pub recomputed: bool,
    /// But for attention, whose output and statistics are kept too.
    pub keeps_attention: bool,
    /// It is the head: final norm, logits, loss.
    pub head: bool,
    /// The operations of each of its layers; of the head those of each module of multi-token prediction.
    pub layers: Vec<Range<usize>>,
    /// Modules whose outputs are not kept but computed again.
    pub dropped: Vec<Module>,
}

impl Unit {
    /// Whether the backward pass computes an operation of the forward pass again.
    pub fn repeats(&self, op: &Op) -> bool {
        op.again || self.recomputed && !(self.keeps_attention && op.attention)
    }

    /// Bytes of what attention gives, where only that is kept beside the input.
    pub fn attended(&self) -> u64 {
        let attentions = self.ops.iter().filter(|op| self.keeps_attention && op.attention);
        // The output and the statistics stand behind the queries, keys and values.
        let kept = attentions.flat_map(|op| op.keeps.iter().skip_while(|kept| kept.id != op.output.id));
        kept.map(|kept| kept.bytes).sum()
    }
}

/// The units of a stage; with `again` all are computed again, so that ZeRO 3 can free their weights between the passes,
/// which on GPUs come back to where they were.
pub fn units(job: &Job, share: &Share, stage: &Stage, again: bool) -> Vec<Unit> {
    let Job { decoder, layout, element, recompute, fp8, fp8_experts, logits_at_once, .. } = job;
    // The emulation on CPU ranks keeps floats, one for both forms of a weight.
    let quantised = if job.gpu { [1, 2] } else { [job.wide(); 2] };
    let (element, fp8_experts, logits_at_once) = (*element, *fp8_experts, *logits_at_once);
    let maker = Maker { decoder, share, layout, element, recompute, fp8, fp8_experts, quantised, logits_at_once };
    let mut units = Vec::new();
    if stage.embedding {
        units.push(maker.embedding());
    }
    let layers = stage.layers.len();
    match (recompute.granularity, recompute.method) {
        (Granularity::Full, Method::Uniform) => {
            let each = recompute.num_layers.max(1);
            let parts = (0..layers).step_by(each).map(|first| first..(first + each).min(layers));
            units.extend(parts.map(|part| maker.layers(stage, part, true)));
        }
        (Granularity::Full, Method::Block) => {
            let again = |layer| layer < recompute.num_layers;
            units.extend((0..layers).map(|layer| maker.layers(stage, layer..layer + 1, again(layer))));
        }
        _ => units.extend((0..layers).map(|layer| maker.layers(stage, layer..layer + 1, false))),
    }
    if stage.loss {
        units.push(maker.head());
    }
    let keeps_attention = recompute.granularity == Granularity::Full && recompute.keep_attention;
    for unit in &mut units {
        unit.recomputed |= again;
        unit.keeps_attention = keeps_attention && unit.recomputed;
    }
    units
}

struct Maker<'a> {
    decoder: &'a Decoder,
    share: &'a Share,
    layout: &'a ParallelLayout,
    element: u64,
    recompute: &'a Recompute,
    /// Layers of the model that are in FP8.
    fp8: &'a Range<usize>,
    /// With their routed experts.
    fp8_experts: bool,
    /// Bytes of a quantised activation, and of a weight in all forms that are kept.
    quantised: [u64; 2],
    logits_at_once: usize,
}
