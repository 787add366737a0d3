//! The passes of one stage, piece by piece. Each piece has an autodiff graph of its own.

use std::collections::HashMap;

use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::{Device, Tensor};

use super::division::Piece;
use super::{Activation, Stages};
use crate::engine::segments::Link;

/// A stage on this rank.
pub(super) struct Chunk<M: Stages> {
    pieces: Vec<Piece>,
    /// What forward passes have left for backward passes, by micro-batch: one entry per piece.
    saved: HashMap<usize, Vec<Saved<M>>>,
}

/// What a forward pass keeps of a piece.
#[allow(clippy::large_enum_variant, reason = "an activation is a tensor too")]
enum Saved<M: Stages> {
    /// The leaf and the end of a graph.
    Graph { leaf: Option<M::Activation>, y: M::Activation },
    /// The same of the last piece, which ends with the loss.
    Loss { leaf: Option<M::Activation>, loss: Tensor<1> },
    /// Only the input: the piece will run again.
    Input(Option<M::Activation>),
}

/// The value of a piece.
#[allow(clippy::large_enum_variant, reason = "an activation is a tensor too")]
pub(super) enum Value<M: Stages> {
    Activation(M::Activation),
    Loss(Tensor<1>, M::Output),
}

/// Where random numbers begin: the same part of the same micro-batch draws the same in every layout, and when it runs
/// again.
#[derive(Clone, Copy)]
pub(super) struct Seed {
    /// Of the run, epoch and data-parallel rank.
    pub base: u64,
    /// Counted from the beginning of the epoch.
    pub micro_batch: u64,
}

impl Seed {
    /// Before part `part` of the model: 0 is the first, then the blocks.
    fn set(self, part: u64, device: &Device) {
        let position = (self.micro_batch << 20 | part).wrapping_mul(0xd6e8_feb8_6659_fd93);
        device.seed(self.base ^ position);
    }
}

/// What runs a piece: the model, where, and on what.
pub(super) struct Run<'a, M: Stages> {
    pub model: &'a M,
    /// The same without gradients, for pieces that are recomputed.
    pub frozen: &'a Option<M>,
    pub device: &'a Device,
    pub batch: &'a M::Input,
    pub seed: Seed,
}

impl<M: Stages> Run<'_, M> {
    /// The value of a piece.
    fn piece(&self, model: &M, piece: &Piece, input: Option<M::Activation>) -> Value<M> {
        const BEFORE: &str = "a stage begins with the first part, or with an activation";
        let mut x = input;
        for link in &piece.links {
            match link {
                Link::Embedding => {
                    self.seed.set(0, self.device);
                    x = Some(model.first(self.batch));
                }
                Link::Layers(blocks) => {
                    for index in blocks.clone() {
                        self.seed.set(1 + index as u64, self.device);
                        x = Some(model.block(index, x.take().expect(BEFORE), self.batch));
                    }
                }
                Link::Head => {
                    self.seed.set(1 + model.blocks() as u64, self.device);
                    let (loss, output) = model.last(x.take().expect(BEFORE), self.batch);
                    return Value::Loss(loss, output);
                }
            }
        }
        Value::Activation(x.expect(BEFORE))
    }
}

impl<M: Stages> Chunk<M> {
    pub fn new(pieces: Vec<Piece>) -> Self {
        Self { pieces, saved: HashMap::new() }
    }

    /// The forward pass of a micro-batch, which a backward pass follows; `input` is missing on the first stage.
    pub fn forward(&mut self, run: &Run<M>, micro_batch: usize, input: Option<M::Activation>) -> Value<M> {
        let (mut x, mut saved) = (input, Vec::with_capacity(self.pieces.len()));
        for piece in &self.pieces {
            if piece.recompute {
                let frozen = run.frozen.as_ref().expect("a rank that recomputes has a model without gradients");
                let input = x.take();
                let value = run.piece(frozen, piece, input.clone().map(|x| x.untracked(run.device)));
                let Value::Activation(y) = value else { unreachable!("the last part is not recomputed") };
                saved.push(Saved::Input(input));
                x = Some(y.inner());
                continue;
            }
            let leaf = x.take().map(|x| x.leaf(run.device));
            match run.piece(run.model, piece, leaf.clone()) {
                Value::Activation(y) => {
                    x = Some(y.clone().inner());
                    saved.push(Saved::Graph { leaf, y });
                }
                Value::Loss(loss, output) => {
                    saved.push(Saved::Loss { leaf, loss: loss.clone() });
                    self.saved.insert(micro_batch, saved);
                    return Value::Loss(loss, output);
                }
            }
        }
        self.saved.insert(micro_batch, saved);
        Value::Activation(x.expect("a stage has a piece"))
    }

    /// The backward pass, from the gradient of the output, which is missing on the last stage, to that of the input.
    pub fn backward(
        &mut self,
        run: &Run<M>,
        micro_batch: usize,
        grad: Option<M::Activation>,
        into: &mut GradientsAccumulator<M>,
    ) -> Option<M::Activation> {
        let saved = self.saved.remove(&micro_batch).expect("a forward pass comes before the backward pass");
        let mut dy = grad;
        for (piece, saved) in self.pieces.iter().zip(saved).rev() {
            let mut dy_taken = || dy.take().expect("the piece after this one made its gradient");
            let (leaf, root) = match saved {
                Saved::Loss { leaf, loss } => (leaf, loss.is_tracked().then_some(loss)),
                Saved::Graph { leaf, y } => (leaf, y.root(dy_taken())),
                Saved::Input(input) => {
                    let leaf = input.map(|x| x.leaf(run.device));
                    let value = run.piece(run.model, piece, leaf.clone());
                    let Value::Activation(y) = value else { unreachable!("the last part is not recomputed") };
                    (leaf, y.root(dy_taken()))
                }
            };
            // A first part that is frozen has no gradient.
            if let Some(root) = root {
                let mut gradients = root.backward();
                dy = leaf.map(|leaf| leaf.gradient(&mut gradients));
                into.accumulate(run.model, GradientsParams::from_grads(gradients, run.model));
            } else if leaf.is_some() {
                panic!(
                    "the output of a stage does not depend on its input: `Stages::block` or `Stages::last` detaches it"
                );
            }
        }
        dy
    }

    /// A forward pass for evaluation.
    pub fn evaluate(&self, run: &Run<M>, input: Option<M::Activation>) -> Value<M> {
        let mut x = input;
        for piece in &self.pieces {
            match run.piece(run.model, piece, x.take()) {
                Value::Activation(y) => x = Some(y),
                loss => return loss,
            }
        }
        Value::Activation(x.expect("a stage has a piece"))
    }
}
