//! Inputs of a pass, and how a segment runs in it.

use crate::engine::ContextConfig;
use crate::engine::distill::{self, DistillConfig, Taught};
use crate::engine::local_batch::LocalBatch;
use crate::engine::segments::Link;
use crate::optim::Optimizer;
use crate::trace::Recorder;
use backend_dist::ops::context::ContextParallel;
use backend_dist::ops::weight_grads::Deferral;
use backend_dist::ops::{PassContext, PassKind, Tape, log_sum_exp};
use burn::tensor::{DType, Device, Int, Tensor};
use models::layers::AttentionLogits;
use models::layers::moe::RouterRecords;
use models::{CausalLm, MicroBatch};
use std::borrow::Cow;

/// Inputs of one pass of one micro-batch.
pub(in crate::engine) struct Pass<'a> {
    pub optimizer: &'a mut Optimizer,
    pub recorder: &'a mut Recorder,
    /// Without autodiff.
    pub device: &'a Device,
    /// This rank's share of the micro-batch.
    pub local: &'a LocalBatch,
    /// How layers communicate across context parallel ranks.
    pub sharing: &'a ContextConfig,
    /// What routers record, and whose experts they use.
    pub routers: &'a RouterRecords,
    /// Where the greatest attention logit is noted.
    pub attention_logits: Option<AttentionLogits>,
    /// Another number for every training step.
    pub step: u64,
    /// Sums on GPUs have one order.
    pub deterministic: bool,
    /// A backward pass will follow.
    pub keep: bool,
    /// No other pass of the step adds to this stage's gradients.
    pub last: bool,
    /// Type of the losses.
    pub loss_type: DType,
    /// What the gradient of each counted loss is.
    pub loss_grad: f64,
    /// Factors of these gradients by token, of a loss that is no mean over tokens.
    pub factors: Option<Vec<f64>>,
    /// The logits are divided by it.
    pub temperature: f64,
    /// In distillation.
    pub distill: Option<DistillConfig>,
    /// The teacher's logits `[sequences, seq, vocab]`; without a teacher the batch says what a file has.
    pub taught: Option<Tensor<3>>,
    /// Chunk and micro-batch, for the timeline.
    pub index: (usize, usize),
    /// Whether it is wanted which labels are the likeliest tokens; only without a backward pass.
    pub accuracy: bool,
    /// Buckets that the pass after this one uses first.
    pub next: &'a [usize],
}

impl Pass<'_> {
    /// What the operations of a segment must know of this pass.
    pub(super) fn context(&self, kind: PassKind) -> PassContext {
        PassContext {
            kind,
            step: self.step,
            micro_batch: self.index.1,
            deterministic: self.deterministic,
            weight_grads: Deferral::possible(),
            ..PassContext::default()
        }
    }
}

/// Output of a forward pass: activations for the next stage, or the losses `[sequences, seq]` and, of the same shape, where
/// they are wanted 1 where the label is the likeliest token, in distillation the KL divergences.
pub(in crate::engine) enum Output {
    Activation(Tensor<3>),
    Losses(Tensor<2>, Option<Box<Tensor<2>>>),
}

impl Output {
    /// The value without its graph, and the graph; `None` where nothing has a gradient, as with a frozen embedding.
    pub(super) fn split(self) -> (Output, Option<Tape>) {
        fn tape<const D: usize>(x: Tensor<D>) -> Option<Tape> {
            x.is_tracked().then(|| Tape::of(x))
        }
        match self {
            Output::Activation(x) => (Output::Activation(x.clone().inner()), tape(x)),
            Output::Losses(x, hits) => (Output::Losses(x.clone().inner(), hits), tape(x)),
        }
    }
}

/// A segment's input, as the end of its graph: a leaf if its gradient is needed.
pub(super) fn entry(x: Tensor<3>, needs_grad: bool) -> Tensor<3> {
    Tensor::from_inner(x).set_require_grad(needs_grad)
}

/// A segment's value in a pass, with a graph if `tracked`.
pub(super) fn run<M: CausalLm>(
    model: &M,
    link: &Link,
    x: Option<Tensor<3>>,
    pass: &Pass,
    (context, tracked): (PassContext, bool),
) -> Output {
    let input = || x.expect("only the embedding has no input");
    let device = if tracked { pass.device.clone().autodiff() } else { pass.device.clone() };
    let LocalBatch { tokens, micro_batch, .. } = pass.local;
    let (routers, attention_logits) = (pass.routers.clone(), pass.attention_logits.clone());
    let of = &MicroBatch { pass: context, routers, attention_logits, ..micro_batch.clone() };
    match link {
        Link::Embedding => Output::Activation(model.embed(tokens.tokens_on(&device), of)),
        Link::Layers(layers) => {
            let layer = |x, layer| model.layer(layer, x, &for_layer(of, pass.sharing, layer));
            Output::Activation(layers.clone().fold(input(), layer))
        }
        Link::Head => {
            let labels = tokens.labels_on(&device);
            if pass.accuracy && !tracked {
                let (losses, hits) = hits(model.head_logits(input()), labels);
                return Output::Losses(losses.cast(pass.loss_type), Some(Box::new(hits.cast(pass.loss_type))));
            }
            let taught = || pass.taught.clone().map(Taught::Logits).or_else(|| Taught::of_file(tokens, pass.device));
            let (losses, more) = match pass.distill.and_then(|config| Some((taught()?, config))) {
                None if pass.temperature == 1.0 => (model.head_losses(input(), labels, of), None),
                None => (cross_entropies(wide(model.head_logits(input())).div_scalar(pass.temperature), labels), None),
                Some((taught, config)) => {
                    let (losses, kl) = distill::losses(model.head_logits(input()), taught, labels, &config);
                    (losses, Some(Box::new(kl)))
                }
            };
            Output::Losses(if losses.dtype() == pass.loss_type { losses } else { losses.cast(pass.loss_type) }, more)
        }
    }
}

/// In fp32 at least.
fn wide(logits: Tensor<3>) -> Tensor<3> {
    if logits.dtype() == DType::F64 { logits } else { logits.cast(DType::F32) }
}

/// The losses of labels.
fn cross_entropies(logits: Tensor<3>, labels: Tensor<2, Int>) -> Tensor<2> {
    let shape = labels.dims();
    (log_sum_exp(logits.clone()) - logits.gather(2, labels.unsqueeze_dim(2))).reshape(shape)
}

/// The losses of labels, and 1 where the label is the likeliest token.
fn hits(logits: Tensor<3>, labels: Tensor<2, Int>) -> (Tensor<2>, Tensor<2>) {
    let wide = wide(logits);
    let chosen = wide.clone().gather(2, labels.clone().unsqueeze_dim(2));
    let hits = chosen.greater_equal(wide.clone().max_dim(2)).float().cast(wide.dtype());
    let shape = labels.dims();
    (cross_entropies(wide, labels), hits.reshape(shape))
}

/// What a layer must know of a micro-batch, with its own context parallel communication type.
fn for_layer<'a>(of: &'a MicroBatch, config: &ContextConfig, layer: usize) -> Cow<'a, MicroBatch> {
    let comm = config.of_layer(layer);
    match &of.context {
        Some(context) if context.comm != comm => {
            let context = Some(ContextParallel { comm, ..context.clone() });
            Cow::Owned(MicroBatch { context, ..of.clone() })
        }
        _ => Cow::Borrowed(of),
    }
}
