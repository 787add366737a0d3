//! The operations of a rank for one micro-batch: the only table of the tensors that each operation saves for
//! backward, of its communication and its cost. Memory, communication and time are sums over it.

mod adapters;
mod chain;
mod dense;
mod head;
mod head_parallel;
mod latent;
mod linear;
mod mamba;
mod moe;

use std::ops::Range;

use layouts::mesh::ParallelLayout;
use layouts::recompute::{Granularity, Method, Module, Recompute};

use super::Job;
use super::collective::Collective;
use super::decoder::{Decoder, LocalSizes};
pub use adapters::Adapters;
use chain::Chain;
use host::schedule::stages::Stage;

/// Bytes of a token or label.
const ID: u64 = 8;

/// A tensor of the forward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Activation {
    /// Identifies its storage within a unit.
    pub id: usize,
    /// Its size.
    pub bytes: u64,
    /// The module whose recomputation makes saving it unnecessary.
    pub module: Option<Module>,
    /// It is the residual stream, which a forward pass without autodiff needs too.
    pub stream: bool,
}

/// Communication in the forward and the backward pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Communication {
    /// In the forward pass.
    pub forward: Option<Collective>,
    /// In the backward pass, of the gradient.
    pub backward: Option<Collective>,
    /// Bytes of the whole tensor, the larger side of an all-gather or reduce-scatter.
    pub bytes: u64,
    /// The group.
    pub over: Over,
    /// The forward communication is repeated in the backward pass.
    pub again: bool,
}

/// The group of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// Tensor-parallel ranks.
    Tensor,
    /// Context-parallel ranks.
    Context,
    /// Expert-parallel ranks, with their tensor-parallel ranks.
    Experts,
}

/// An operation.
#[derive(Clone, Debug, Default)]
pub struct Op {
    /// Input.
    pub input: Activation,
    /// Output.
    pub output: Activation,
    /// Tensors saved for backward.
    pub saves: Vec<Activation>,
    /// Elements of its weight and bias.
    pub weight: u64,
    /// Number of these elements in matrices.
    pub matrix: u64,
    /// Bytes of its parameters that are not trained.
    pub frozen: u64,
    /// Bytes of intermediate results next to its output.
    pub temporary: u64,
    /// The gradient of its input is written over the input.
    pub in_place: bool,
    /// The weight belongs to experts, which have data-parallel groups of their own.
    pub expert: bool,
    /// A GEMM whose weight gradient a zero-bubble schedule can defer.
    pub linear: bool,
    /// Bytes of an FP8 GEMM.
    pub fp8: Option<Fp8Bytes>,
    /// Forward, input gradient, weight gradient.
    pub flops: [f64; 3],
    /// It is attention, which has a rate of its own.
    pub attention: bool,
    /// The backward pass recomputes it, by the selected modules.
    pub again: bool,
    /// Its communication.
    pub communication: Option<Communication>,
}

/// Bytes of FP8 tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Bytes {
    /// Of the weight, as it is and transposed, for a whole step.
    pub weight: u64,
    /// Of the input and the output's gradient, until a deferred weight gradient.
    pub deferred: u64,
}

/// One autodiff graph of the engine: the embedding, a layer (or several under uniform recomputation), the head.
#[derive(Clone, Debug)]
pub struct Unit {
    /// In order.
    pub ops: Vec<Op>,
    /// Only the input is saved; the backward pass recomputes the forward.
    pub recomputed: bool,
    /// The attention output and its statistics are saved too.
    pub saves_attention: bool,
    /// It is the head: final norm, logits, loss.
    pub head: bool,
    /// The operations of each layer; of the head those of each multi-token prediction module.
    pub layers: Vec<Range<usize>>,
    /// Modules whose outputs are recomputed instead of saved.
    pub dropped: Vec<Module>,
    /// Nothing is trained here and in what comes before: there is no backward pass.
    pub constant: bool,
}

impl Unit {
    /// Whether the backward pass recomputes an operation.
    pub fn repeats(&self, op: &Op) -> bool {
        op.again || self.recomputed && !(self.saves_attention && op.attention)
    }

    /// Bytes of saved attention outputs, in units that recompute all else.
    pub fn saved_attention(&self) -> u64 {
        let attentions = self.ops.iter().filter(|op| self.saves_attention && op.attention);
        // The output and the statistics follow the queries, keys and values.
        let kept = attentions.flat_map(|op| op.saves.iter().skip_while(|kept| kept.id != op.output.id));
        kept.map(|kept| kept.bytes).sum()
    }
}

/// The units of a stage. With `again` all are recomputed, so that ZeRO 3 can free their weights between the passes
/// on CPU ranks; on GPUs weights are gathered into the same buffers again.
pub fn units(job: &Job, local: &LocalSizes, stage: &Stage, again: bool) -> Vec<Unit> {
    let Job { decoder, layout, element, recompute, fp8, fp8_experts, logits_at_once, adapters, .. } = job;
    // The emulation on CPU ranks saves floats, one for both forms of a weight.
    let quantised = if job.gpu { [1, 2] } else { [job.wide(); 2] };
    let (element, fp8_experts, logits_at_once, adapters) = (*element, *fp8_experts, *logits_at_once, *adapters);
    let builder = UnitBuilder {
        job,
        decoder,
        local,
        layout,
        element,
        recompute,
        fp8,
        fp8_experts,
        quantised,
        logits_at_once,
        adapters,
    };
    let mut units = Vec::new();
    if stage.embedding {
        units.push(builder.embedding());
    }
    let layers = stage.layers.len();
    match (recompute.granularity, recompute.method) {
        (Granularity::Full, Method::Uniform) => {
            let each = recompute.num_layers.max(1);
            let parts = (0..layers).step_by(each).map(|first| first..(first + each).min(layers));
            units.extend(parts.map(|part| builder.layers(stage, part, true)));
        }
        (Granularity::Full, Method::Block) => {
            let again = |layer| layer < recompute.num_layers;
            units.extend((0..layers).map(|layer| builder.layers(stage, layer..layer + 1, again(layer))));
        }
        _ => units.extend((0..layers).map(|layer| builder.layers(stage, layer..layer + 1, false))),
    }
    if stage.loss {
        units.push(builder.head());
    }
    let saves_attention = recompute.granularity == Granularity::Full && recompute.keep_attention;
    let mut constant = stage.embedding;
    for unit in &mut units {
        if constant {
            // What has no gradient behind it is not recorded.
            for op in unit.ops.iter_mut().take_while(|op| op.weight == 0) {
                (op.saves, op.flops[1]) = (Vec::new(), 0.0);
            }
        }
        constant &= unit.ops.iter().all(|op| op.weight == 0) && !unit.head;
        unit.constant = constant;
        unit.recomputed |= again;
        unit.recomputed &= !constant;
        unit.saves_attention = saves_attention && unit.recomputed && !unit.head;
    }
    units
}

struct UnitBuilder<'a> {
    job: &'a Job,
    decoder: &'a Decoder,
    local: &'a LocalSizes,
    layout: &'a ParallelLayout,
    element: u64,
    recompute: &'a Recompute,
    /// Layers of the model that are in FP8.
    fp8: &'a Range<usize>,
    /// FP8 layers have routed experts in FP8 too.
    fp8_experts: bool,
    /// Bytes of an FP8 activation, and of all FP8 copies of a weight.
    quantised: [u64; 2],
    logits_at_once: usize,
    adapters: Option<Adapters>,
}
