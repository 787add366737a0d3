//! A stage of the model on this rank: its passes, segment by segment.

use super::ContextConfig;
use super::segments::{Link, Segment, segments};
use super::share::Share;
use crate::optim::{BucketSpec, Optimizer};
use crate::schedule::Pass as Kind;
use crate::trace::{Recorder, What};
use backend_dist::ops::context::ContextParallel;
use backend_dist::ops::{Tape, weight_grads};
use backend_dist::shard::Unit;
use burn::module::{ModuleVisitor, Param};
use burn::tensor::{DType, Device, Gradients, Tensor};
use models::layers::moe::stats;
use models::{CausalLm, MicroBatch, Recompute};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

/// A stage's model and what its passes have left for later ones.
pub(super) struct Chunk<M> {
    /// Always there between calls; the optimizer takes it apart and puts it together again.
    model: Option<M>,
    steps: Vec<Step>,
    /// Of this stage, in the order of the model: unit and index of its bucket in the optimizer.
    pub buckets: Vec<(Unit, usize)>,
    /// What is cut over the replicas: from 2 on gradients are reduced after every micro-batch, with 3 parameters are
    /// gathered for each use.
    zero: u8,
    /// Parameters leave the model between the passes.
    leaves: bool,
    /// By micro-batch, one entry per segment.
    live: HashMap<usize, Vec<Kept>>,
    /// By micro-batch: weight gradients that are still to be computed.
    late: HashMap<usize, Vec<Late<M>>>,
    /// Gradients have been seen to belong where they come from; that does not change from step to step.
    checked: bool,
}

/// A segment and its parameters.
struct Step {
    segment: Segment,
    /// Buckets with its parameters.
    uses: Vec<usize>,
    /// Those that no earlier segment uses: after the backward pass their gradients are complete.
    completes: Vec<usize>,
}

/// What a forward pass leaves of a segment for the backward pass.
struct Kept {
    /// Missing in front of the embedding; the end of the graph if there is one.
    input: Option<Tensor<3>>,
    /// Missing where the segment is computed again.
    tape: Option<Tape>,
}

struct Late<M> {
    step: usize,
    rest: Gradients,
    deferred: weight_grads::Deferred,
    /// With the parameters that the gradients are of, where those are gone from the stage's model by now.
    model: Option<M>,
}

/// What a pass of one micro-batch works with.
pub(super) struct Pass<'a> {
    pub optimizer: &'a mut Optimizer,
    pub recorder: &'a mut Recorder,
    /// Without autodiff.
    pub device: &'a Device,
    /// This rank's part of the micro-batch.
    pub share: &'a Share,
    /// How layers reach across context parallel ranks.
    pub context: &'a ContextConfig,
    /// A backward pass will follow.
    pub keep: bool,
    /// No other pass of the step adds to this stage's gradients.
    pub last: bool,
    /// Type of the losses.
    pub loss_type: DType,
    /// What the gradient of each counted loss is.
    pub loss_grad: f64,
    /// Chunk and micro-batch, for the timeline.
    pub place: (usize, usize),
    /// Buckets that the pass after this one uses first.
    pub next: &'a [usize],
}

/// What a forward pass makes: activations for the next stage, or the losses `[rows, seq]`.
pub(super) enum Output {
    Activation(Tensor<3>),
    Losses(Tensor<2>),
}

/// Position of a unit in a model, the same in every layout.
fn key(unit: Unit) -> usize {
    match unit {
        Unit::Tied => 0,
        Unit::Embedding => 1,
        Unit::Layer(layer) => 2 + 2 * layer,
        Unit::Experts(layer) => 3 + 2 * layer,
        Unit::Head => usize::MAX,
    }
}

impl<M: CausalLm> Chunk<M> {
    /// A stage whose buckets are appended to `buckets`; `layers` are those of the whole model.
    ///
    /// Graphs hold the weights of a segment. Under ZeRO 3 these are freed between the passes, so that all segments are computed
    /// again, unless `in_place` says that they come back to the memory where the graph looks for them.
    pub fn new(
        model: M,
        layers: usize,
        recompute: &Recompute,
        (zero, in_place): (u8, bool),
        buckets: &mut Vec<BucketSpec>,
    ) -> Self {
        let mut units: BTreeMap<Unit, Vec<_>> = BTreeMap::new();
        for spec in model.registry().iter().filter(|spec| spec.trained) {
            units.entry(spec.unit).or_default().push(spec.clone());
        }
        let first = buckets.len();
        let own: Vec<_> = units.keys().copied().zip(first..).collect();
        buckets.extend(units.into_iter().map(|(unit, params)| {
            let hidden = unit.layer().is_some();
            BucketSpec { key: key(unit), params, hidden, at_once: 1 }
        }));
        let mut seen: Vec<usize> = Vec::new();
        let step = |segment: Segment| {
            let uses: Vec<usize> =
                own.iter().filter(|(unit, _)| segment.link.uses(*unit, layers)).map(|(_, bucket)| *bucket).collect();
            let completes: Vec<usize> = uses.iter().filter(|bucket| !seen.contains(bucket)).copied().collect();
            seen.extend(&completes);
            Step { segment, uses, completes }
        };
        let again = zero == 3 && !in_place;
        let steps: Vec<Step> = segments(model.part(), recompute, again).into_iter().map(step).collect();
        for Step { uses, .. } in &steps {
            for bucket in uses {
                let same = |other: &&usize| buckets[**other].grid() == buckets[*bucket].grid();
                buckets[*bucket].at_once = uses.iter().filter(same).count();
            }
        }
        let (live, late) = Default::default();
        Self { model: Some(model), steps, buckets: own, zero, leaves: again, live, late, checked: false }
    }

    /// The model; under ZeRO 3 without its weights, on GPUs with whatever is in their place.
    pub fn model(&self) -> &M {
        self.model.as_ref().expect("the model is in place between calls")
    }

    /// Replaces the model.
    pub fn change(&mut self, change: impl FnOnce(M) -> M) {
        let model = self.model.take().expect("the model is in place between calls");
        self.model = Some(change(model));
    }

    /// Hands the model to `change` for each of its buckets.
    pub fn for_buckets(&mut self, mut change: impl FnMut(usize, M) -> M) {
        for (_, bucket) in &self.buckets {
            let model = self.model.take().expect("the model is in place between calls");
            self.model = Some(change(*bucket, model));
        }
    }

    /// Buckets that a pass uses first; a pass for weight gradients none.
    pub fn first_used(&self, pass: Kind) -> &[usize] {
        let step = match pass {
            Kind::Forward => self.steps.first(),
            Kind::Backward | Kind::BackwardInput => self.steps.last(),
            Kind::BackwardWeight => None,
        };
        step.map_or(&[], |step| &step.uses)
    }

    /// Drops what passes have left for later ones.
    pub fn forget(&mut self) {
        self.live.clear();
        self.late.clear();
    }

    /// Micro-batches whose activations are kept.
    pub fn in_flight(&self) -> usize {
        self.live.len() + self.late.len()
    }

    /// The forward pass; `input` is missing on the first stage.
    pub fn forward(&mut self, pass: &mut Pass, input: Option<Tensor<3>>) -> Output {
        let (mut x, mut kept, mut losses) = (input, Vec::with_capacity(self.steps.len()), None);
        for index in 0..self.steps.len() {
            self.gather(index, pass);
            self.prefetch(index, index + 1, pass);
            let segment = &self.steps[index].segment;
            let value = match pass.keep && !segment.recompute {
                true => {
                    let leaf = x.take().map(leaf);
                    let (value, tape) = run(self.model(), &segment.link, leaf.clone(), pass, true).split();
                    kept.push(Kept { input: leaf, tape: Some(tape) });
                    value
                }
                false => {
                    let input = x.take();
                    let value = run(&self.model().valid(), &segment.link, input.clone(), pass, false);
                    if pass.keep {
                        kept.push(Kept { input, tape: None });
                    }
                    value
                }
            };
            match value {
                Output::Activation(activation) => x = Some(activation),
                Output::Losses(values) => losses = Some(values),
            }
            self.release(index, pass);
        }
        if pass.keep {
            self.live.insert(pass.place.1, kept);
        }
        match losses {
            Some(losses) => Output::Losses(losses),
            None => Output::Activation(x.expect("a stage has a segment")),
        }
    }

    /// The backward pass, from the gradient of the output, which is missing on the last stage, to that of the input. With
    /// `defer` the gradients of weights of linear layers are left for [`Chunk::weight_gradients`].
    pub fn backward(&mut self, pass: &mut Pass, grad: Option<Tensor<3>>, defer: bool) -> Option<Tensor<3>> {
        let mut kept = self.live.remove(&pass.place.1).expect("a forward pass comes before the backward pass");
        let (mut dy, mut late) = (grad, Vec::new());
        for index in (0..self.steps.len()).rev() {
            self.gather(index, pass);
            self.prefetch(index, index.wrapping_sub(1), pass);
            let (leaf, tape) = match kept.pop().expect("one entry per segment") {
                Kept { input, tape: Some(tape) } => (input, tape),
                Kept { input, tape: None } => {
                    let mark = pass.recorder.begin();
                    let leaf = input.map(leaf);
                    let link = &self.steps[index].segment.link;
                    let (_, tape) = stats::paused(|| run(self.model(), link, leaf.clone(), pass, true)).split();
                    pass.recorder.end(mark, What::Recompute, Some(pass.place.0), Some(pass.place.1));
                    (leaf, tape)
                }
            };
            if !defer {
                self.open(index, pass);
            }
            let back = || match self.steps[index].segment.link {
                Link::Head => tape.pull_back(pass.share.tokens.weights(pass.loss_grad, pass.device, pass.loss_type)),
                _ => tape.pull_back(dy.take().expect("the segment after this one made its gradient")),
            };
            let (mut grads, deferred) = match defer {
                true => {
                    let (grads, deferred) = weight_grads::deferred(back);
                    (grads, Some(deferred))
                }
                false => (back(), None),
            };
            if let Some(leaf) = leaf {
                let grad = leaf.grad_remove(&mut grads).map(Tensor::inner);
                dy = Some(grad.unwrap_or_else(|| leaf.inner().zeros_like()));
            }
            match deferred {
                Some(deferred) => {
                    let model = self.leaves.then(|| self.model().clone());
                    late.push(Late { step: index, rest: grads, deferred, model });
                }
                None => self.add(index, pass, self.model(), [grads]),
            }
            self.release(index, pass);
        }
        if defer {
            self.late.insert(pass.place.1, late);
        }
        self.checked |= !defer;
        dy
    }

    /// The weight gradients that [`Chunk::backward`] has left.
    pub fn weight_gradients(&mut self, pass: &mut Pass) {
        for late in self.late.remove(&pass.place.1).expect("the backward pass comes before") {
            let Late { step, rest, deferred, model } = late;
            self.open(step, pass);
            self.add(step, pass, model.as_ref().unwrap_or(self.model()), [rest, deferred.run()]);
        }
        self.checked = true;
    }

    /// Lets a backward pass of a segment add to main gradients, until [`Chunk::add`].
    fn open(&self, step: usize, pass: &mut Pass) {
        self.steps[step].uses.iter().for_each(|bucket| pass.optimizer.open(*bucket, self.model()));
    }

    /// Adds gradients of a segment's parameters, which `model` holds, to the main gradients.
    fn add<const N: usize>(&self, step: usize, pass: &mut Pass, model: &M, grads: [Gradients; N]) {
        let Step { uses, completes, .. } = &self.steps[step];
        for mut grads in grads {
            for bucket in uses {
                pass.optimizer.accumulate(*bucket, model, &mut grads);
            }
            if !self.checked {
                self.refuse_strangers(&self.steps[step].segment.link, model, &grads);
            }
        }
        pass.optimizer.close();
        if self.zero >= 2 || pass.last {
            let mark = pass.recorder.begin();
            for bucket in completes {
                pass.optimizer.complete(*bucket);
                if pass.last {
                    pass.optimizer.reduce(*bucket);
                }
            }
            pass.recorder.end(mark, What::ReduceGradients, Some(pass.place.0), Some(pass.place.1));
        }
    }

    /// A gradient that is left over belongs to a parameter of another unit: it would be lost.
    fn refuse_strangers(&self, link: &Link, model: &M, grads: &Gradients) {
        struct Left<'a>(&'a Gradients, Option<u64>);

        impl ModuleVisitor for Left<'_> {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                if param.val().grad(self.0).is_some() {
                    self.1 = Some(param.id.val());
                }
            }
        }
        let mut left = Left(grads, None);
        model.visit(&mut left);
        if let Some(spec) = left.1.and_then(|id| self.model().registry().get(id)) {
            panic!(
                "parameter `{}` belongs to {:?} but is used in {link:?} too: create it in the unit that uses it (`ParamBuilder::begin`), or as `Unit::Tied` if embedding and head share it",
                spec.name(),
                spec.unit
            );
        }
    }

    fn gather(&mut self, step: usize, pass: &mut Pass) {
        if self.zero < 3 {
            return self.steps[step].uses.iter().for_each(|bucket| pass.optimizer.ready(*bucket));
        }
        let mark = pass.recorder.begin();
        for bucket in &self.steps[step].uses {
            let model = self.model.take().expect("the model is in place between calls");
            self.model = Some(pass.optimizer.gather(*bucket, model));
        }
        pass.recorder.end(mark, What::GatherParameters, Some(pass.place.0), Some(pass.place.1));
    }

    /// Starts to gather what is needed after a segment, where that can run beside it.
    fn prefetch(&self, step: usize, next: usize, pass: &Pass) {
        if self.zero == 3 {
            let next = self.steps.get(next).map_or(pass.next, |next| &next.uses);
            next.iter().for_each(|bucket| pass.optimizer.prefetch(*bucket, &self.steps[step].uses));
        }
    }

    fn release(&mut self, step: usize, pass: &mut Pass) {
        if self.zero < 3 {
            return;
        }
        for bucket in &self.steps[step].uses {
            let model = self.model.take().expect("the model is in place between calls");
            self.model = Some(pass.optimizer.release(*bucket, model));
        }
    }
}

impl Output {
    /// The value without its graph, and the graph.
    fn split(self) -> (Output, Tape) {
        match self {
            Output::Activation(x) => (Output::Activation(x.clone().inner()), Tape::of(x)),
            Output::Losses(x) => (Output::Losses(x.clone().inner()), Tape::of(x)),
        }
    }
}

/// A segment's input, as the end of its graph.
fn leaf(x: Tensor<3>) -> Tensor<3> {
    Tensor::from_inner(x).require_grad()
}

/// A segment's value, with a graph if `tracked`.
fn run<M: CausalLm>(model: &M, link: &Link, x: Option<Tensor<3>>, pass: &Pass, tracked: bool) -> Output {
    let input = || x.expect("only the embedding has no input");
    let device = if tracked { pass.device.clone().autodiff() } else { pass.device.clone() };
    let Share { tokens, of, .. } = pass.share;
    match link {
        Link::Embedding => Output::Activation(model.embed(tokens.tokens_on(&device), of)),
        Link::Layers(layers) => {
            let layer = |x, layer| model.layer(layer, x, &of_layer(of, pass.context, layer));
            Output::Activation(layers.clone().fold(input(), layer))
        }
        Link::Head => {
            let losses = model.head_losses(input(), tokens.labels_on(&device), of);
            Output::Losses(if losses.dtype() == pass.loss_type { losses } else { losses.cast(pass.loss_type) })
        }
    }
}

/// What a layer must know of a micro-batch, with its own way across the context parallel ranks.
fn of_layer<'a>(of: &'a MicroBatch, how: &ContextConfig, layer: usize) -> Cow<'a, MicroBatch> {
    let comm = how.of_layer(layer);
    match &of.context {
        Some(context) if context.comm != comm => {
            let context = Some(ContextParallel { comm, ..context.clone() });
            Cow::Owned(MicroBatch { context, ..of.clone() })
        }
        _ => Cow::Borrowed(of),
    }
}

/// Element type of a model's parameters; `None` if it has none.
pub(super) fn dtype_of<M: CausalLm>(model: &M) -> Option<DType> {
    struct First(Option<DType>);

    impl ModuleVisitor for First {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.get_or_insert_with(|| param.val().dtype());
        }
    }
    let mut first = First(None);
    model.visit(&mut first);
    first.0
}
