//! A stage in generation, segment by segment.

use super::Chunk;
use crate::engine::segments::Link;
use crate::optim::Optimizer;
use burn::tensor::Tensor;
use models::layers::paged::Step;
use models::{CausalLm, PagedKvCache};

impl<M: CausalLm> Chunk<M> {
    /// The activations of a step's tokens behind the stage's layers; `x` is missing on the first stage.
    pub fn extend(
        &mut self,
        mut x: Option<Tensor<3>>,
        step: &Step,
        cache: &mut PagedKvCache,
        optimizer: &Optimizer,
    ) -> Tensor<3> {
        for at in 0..self.steps.len() {
            let link = self.steps[at].segment.link.clone();
            x = Some(match link {
                Link::Head => break,
                Link::Embedding => self.with_weights(at, optimizer, |model| model.extend_embed(step)),
                Link::Layers(layers) => self.with_weights(at, optimizer, |model| {
                    let x = x.take().expect("only the embedding has no input");
                    layers.fold(x, |x, layer| model.extend_layer(layer, x, step, cache))
                }),
            });
        }
        x.expect("a stage has a segment")
    }

    /// The logits that the step asks for, of the last stage.
    pub fn extend_head(&mut self, x: Tensor<3>, step: &Step, optimizer: &Optimizer) -> Tensor<2> {
        let at = self.steps.len() - 1;
        self.with_weights(at, optimizer, |model| model.extend_head(x, step))
    }

    fn with_weights<T>(&mut self, at: usize, optimizer: &Optimizer, of: impl FnOnce(&M) -> T) -> T {
        self.gather_weights(at, optimizer);
        let value = of(&self.valid());
        self.release_weights(at, optimizer);
        value
    }
}
