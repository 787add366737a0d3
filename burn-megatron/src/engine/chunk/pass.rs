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
    /// What is wanted of held-out tokens; nothing with a backward pass.
    pub held_out: HeldOut,
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

/// What is wanted of held-out tokens besides their losses.
#[derive(Clone, Copy, Default)]
pub(in crate::engine) struct HeldOut {
    /// Which labels are the likeliest tokens.
    pub accuracy: bool,
    /// How far the model is from its teacher, both with logits divided by this temperature.
    pub divergence: Option<DistillConfig>,
}

/// Of the tokens `[sequences, seq]`, what is wanted besides their losses.
#[derive(Default)]
pub(in crate::engine) struct Seen {
    /// 1 where the label is the likeliest token.
    pub hits: Option<Tensor<2>>,
    /// The KL divergences from the teacher's distributions, in distillation.
    pub divergence: Option<Tensor<2>>,
}

/// Output of a forward pass: activations for the next stage, or the losses `[sequences, seq]`.
pub(in crate::engine) enum Output {
    Activation(Tensor<3>),
    Losses(Tensor<2>, Box<Seen>),
}

impl Output {
    /// The value without its graph, and the graph; `None` where nothing has a gradient, as with a frozen embedding.
    pub(super) fn split(self) -> (Output, Option<Tape>) {
        fn tape<const D: usize>(x: Tensor<D>) -> Option<Tape> {
            x.is_tracked().then(|| Tape::of(x))
        }
        match self {
            Output::Activation(x) => (Output::Activation(x.clone().inner()), tape(x)),
            Output::Losses(x, seen) => (Output::Losses(x.clone().inner(), seen), tape(x)),
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
            let cast = |x: Tensor<2>| if x.dtype() == pass.loss_type { x } else { x.cast(pass.loss_type) };
            let taught = || pass.taught.clone().map(Taught::Logits).or_else(|| Taught::of_file(tokens, pass.device));
            let HeldOut { accuracy, divergence } = pass.held_out;
            if accuracy || divergence.is_some() {
                let logits = model.head_logits(input());
                let of = |config| Some(distill::losses(logits.clone(), taught()?, labels.clone(), &config).1);
                let divergence = divergence.and_then(of).map(cast);
                let logits = wide(logits);
                let hits = accuracy.then(|| cast(hits(logits.clone(), labels.clone())));
                return Output::Losses(cast(cross_entropies(logits, labels)), Box::new(Seen { hits, divergence }));
            }
            let (losses, divergence) = match pass.distill.and_then(|config| Some((taught()?, config))) {
                None if pass.temperature == 1.0 => (model.head_losses(input(), labels, of), None),
                None => (cross_entropies(wide(model.head_logits(input())).div_scalar(pass.temperature), labels), None),
                Some((taught, config)) => {
                    let (losses, kl) = distill::losses(model.head_logits(input()), taught, labels, &config);
                    (losses, Some(kl))
                }
            };
            Output::Losses(cast(losses), Box::new(Seen { hits: None, divergence: divergence.map(cast) }))
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

/// 1 where the label is the likeliest token.
fn hits(logits: Tensor<3>, labels: Tensor<2, Int>) -> Tensor<2> {
    let shape = labels.dims();
    let chosen = logits.clone().gather(2, labels.unsqueeze_dim(2));
    chosen.greater_equal(logits.max_dim(2)).float().reshape(shape)
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
