//! The passes of a stage, segment by segment.

use super::pass::{Output, Pass, entry, run};
use super::saved::{Input, SavedSegment};
use super::{Chunk, DeferredGrads, Step};
use crate::engine::local_batch::LocalBatch;
use crate::engine::segments::Link;
use crate::optim::Optimizer;
use crate::trace::SpanKind;
use backend_dist::ops::{CoreAttention, PassContext, PassKind, SavedAttention};
use burn::module::{ModuleVisitor, Param};
use burn::tensor::{Gradients, Tensor};
use models::CausalLm;

impl<M: CausalLm> Chunk<M> {
    /// The forward pass; `input` is missing on the first stage.
    pub fn forward(&mut self, pass: &mut Pass, input: Option<Tensor<3>>) -> Output {
        let (mut x, mut kept, mut losses) = (input, Vec::with_capacity(self.steps.len()), None);
        for index in 0..self.steps.len() {
            self.gather(index, pass);
            self.prefetch(index, index + 1, pass);
            let Step { segment, is_constant, needs_input_grad, .. } = &self.steps[index];
            let value = match pass.keep && !segment.recompute && !is_constant {
                true => {
                    let leaf = x.take().map(|x| entry(x, *needs_input_grad));
                    let context = pass.context(PassKind::Training);
                    let weight_grads = context.weight_grads.clone();
                    let (value, tape) = run(self.model(), &segment.link, leaf.clone(), pass, (context, true)).split();
                    kept.push(SavedSegment {
                        input: Input::Here(leaf),
                        tape: tape.map(|tape| (tape, weight_grads)),
                        attention: None,
                    });
                    value
                }
                false => {
                    let input = x.take();
                    let kind = if pass.keep { PassKind::Training } else { PassKind::Evaluation };
                    let saved = (pass.keep && segment.keep_attention && !is_constant).then(SavedAttention::default);
                    let attention = saved.clone().map_or(CoreAttention::Compute, CoreAttention::Save);
                    let context = PassContext { attention, ..pass.context(kind) };
                    let value = run(&self.valid(), &segment.link, input.clone(), pass, (context, false));
                    if pass.keep {
                        let offloads = self.offloads && matches!(segment.link, Link::Layers(_));
                        let input = match input.filter(|_| !is_constant) {
                            Some(input) if offloads => Input::Host(self.host.store(input)),
                            input => Input::Here(input),
                        };
                        kept.push(SavedSegment { input, tape: None, attention: saved });
                    }
                    value
                }
            };
            match value {
                Output::Activation(activation) => x = Some(activation),
                Output::Losses(values, seen) => losses = Some((values, seen)),
            }
            self.release_weights(index, pass.optimizer);
        }
        if pass.keep {
            self.live.insert(pass.index.1, kept);
        }
        match losses {
            Some((losses, seen)) => Output::Losses(losses, seen),
            None => Output::Activation(x.expect("a stage has a segment")),
        }
    }

    /// The backward pass, from the gradient of the output, which is missing on the last stage, to that of the input.
    /// With `defer` the gradients of weights of linear layers are left for [`Chunk::weight_gradients`].
    pub fn backward(&mut self, pass: &mut Pass, grad: Option<Tensor<3>>, defer: bool) -> Option<Tensor<3>> {
        let mut kept = self.live.remove(&pass.index.1).expect("a forward pass comes before the backward pass");
        let (mut dy, mut late) = (grad, Vec::new());
        for index in (0..self.steps.len()).rev() {
            if self.steps[index].is_constant {
                kept.pop();
                dy = None;
                continue;
            }
            self.gather(index, pass);
            self.prefetch(index, index.wrapping_sub(1), pass);
            let SavedSegment { input, tape, attention } = kept.pop().expect("one entry per segment");
            let input = input.take(&mut self.host);
            if let Some(next) = kept.last_mut() {
                next.input.prefetch(&mut self.host);
            }
            let (leaf, (tape, weight_grads)) = match tape {
                Some(tape) => (input, tape),
                None => {
                    let mark = pass.recorder.begin();
                    let leaf = input.map(|input| entry(input, self.steps[index].needs_input_grad));
                    let link = &self.steps[index].segment.link;
                    let replayed = attention.clone().map_or(CoreAttention::Compute, CoreAttention::Replay);
                    let context = PassContext { attention: replayed, ..pass.context(PassKind::Recomputation) };
                    let weight_grads = context.weight_grads.clone();
                    let (_, tape) = run(self.model(), link, leaf.clone(), pass, (context, true)).split();
                    attention.iter().for_each(SavedAttention::finish);
                    let tape = tape.expect("a segment that is not constant has a gradient");
                    pass.recorder.end(mark, SpanKind::Recompute, Some(pass.index.0), Some(pass.index.1));
                    (leaf, (tape, weight_grads))
                }
            };
            if !defer {
                self.open(index, pass);
            }
            let back = || match self.steps[index].segment.link {
                Link::Head => {
                    let LocalBatch { tokens, .. } = pass.local;
                    let factors = pass.factors.as_deref();
                    tape.pull_back(tokens.weights(pass.loss_grad, factors, pass.device, pass.loss_type))
                }
                _ => tape.pull_back(dy.take().expect("the segment after this one made its gradient")),
            };
            let (mut grads, deferred) = match defer {
                true => {
                    let (grads, deferred) = weight_grads.deferred(back);
                    (grads, Some(deferred))
                }
                false => (back(), None),
            };
            if let Some(leaf) = leaf.filter(|_| self.steps[index].needs_input_grad) {
                let grad = leaf.grad_remove(&mut grads).map(Tensor::inner);
                dy = Some(grad.unwrap_or_else(|| leaf.inner().zeros_like()));
            }
            match deferred {
                Some(deferred) => {
                    let model = self.leaves.then(|| self.model().clone());
                    late.push(DeferredGrads { step: index, rest: grads, deferred, model });
                }
                None => self.add(index, pass, self.model(), [grads]),
            }
            self.release_weights(index, pass.optimizer);
        }
        if defer {
            self.late.insert(pass.index.1, late);
        }
        self.checked |= !defer;
        dy
    }

    /// The weight gradients that [`Chunk::backward`] has left.
    pub fn weight_gradients(&mut self, pass: &mut Pass) {
        for late in self.late.remove(&pass.index.1).expect("the backward pass comes before") {
            let DeferredGrads { step, rest, deferred, model } = late;
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
            pass.recorder.end(mark, SpanKind::ReduceGradients, Some(pass.index.0), Some(pass.index.1));
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
                "parameter `{}` belongs to {:?} but is used in {link:?} too: create it in the unit that uses it (`ParamBuilder::begin`), or as `Unit::Tied` if embedding and head local it",
                spec.name(),
                spec.unit
            );
        }
    }

    fn gather(&mut self, step: usize, pass: &mut Pass) {
        if self.has_whole_weights() {
            return self.gather_weights(step, pass.optimizer);
        }
        let mark = pass.recorder.begin();
        self.gather_weights(step, pass.optimizer);
        pass.recorder.end(mark, SpanKind::GatherParameters, Some(pass.index.0), Some(pass.index.1));
    }

    /// Makes the weights of a segment whole.
    pub(super) fn gather_weights(&mut self, step: usize, optimizer: &Optimizer) {
        if self.has_whole_weights() {
            return self.steps[step].uses.iter().for_each(|bucket| optimizer.ready(*bucket));
        }
        for bucket in &self.steps[step].uses {
            let model = self.model.take().expect("the model is in place between calls");
            self.model = Some(optimizer.gather(*bucket, model));
        }
    }

    /// Starts to gather the weights that the next segment needs, overlapped with this one where possible.
    fn prefetch(&self, step: usize, next: usize, pass: &Pass) {
        if self.zero == 3 {
            let next = self.steps.get(next).map_or(pass.next, |next| &next.uses);
            next.iter().for_each(|bucket| pass.optimizer.prefetch(*bucket, &self.steps[step].uses));
        }
    }

    /// Frees the weights of a segment under ZeRO 3.
    pub(super) fn release_weights(&mut self, step: usize, optimizer: &Optimizer) {
        if self.has_whole_weights() {
            return;
        }
        for bucket in &self.steps[step].uses {
            let model = self.model.take().expect("the model is in place between calls");
            self.model = Some(optimizer.release(*bucket, model));
        }
    }
}
