//! From the last hidden states to logits and losses, with the vocabulary cut over the ranks.

use backend_dist::ops::conjugate::gather_from_tensor_parallel;
use backend_dist::ops::{linear, vocab_parallel_cross_entropy};
use backend_dist::shard::Init;
use burn::module::{Module, Param};
use burn::tensor::{Int, Tensor};

use super::embedding::{VocabParallelEmbedding, VocabRows};
use super::linear::enter_tensor_parallel;
use crate::param::{BuildError, ParamBuilder, TensorParallel};

/// The output projection; each rank computes the logits of its rows of the vocabulary. Without an own weight it uses the
/// embedding's (tied).
#[derive(Module, Debug)]
pub struct OutputLayer {
    weight: Option<Param<Tensor<2>>>,
    #[module(skip)]
    rows: VocabRows,
    #[module(skip)]
    parallel: TensorParallel,
}

impl OutputLayer {
    /// A projection with its own weight under the global name `name`, for the vocabulary of `embedding`.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn untied(
        params: &mut ParamBuilder,
        name: &str,
        embedding: &VocabParallelEmbedding,
        init: Init,
    ) -> Result<Self, BuildError> {
        let (at, rows) = (params.place(), embedding.rows());
        let hidden = embedding.weight().dims()[1];
        let weight = params.sections(vec![(rows.section(&format!("{name}.weight"), hidden, at), init)])?;
        Ok(Self { weight: Some(weight), rows, parallel: params.parallel().clone() })
    }

    /// A projection that shares the weight of `embedding`.
    pub fn tied(params: &ParamBuilder, embedding: &VocabParallelEmbedding) -> Self {
        Self { weight: None, rows: embedding.rows(), parallel: params.parallel().clone() }
    }

    /// `-log p(label)` of every token: hidden states `[s, b, hidden]` (or the rank's part of the sequence) and
    /// `labels [s, b]` to `[s, b]`, the same on all ranks.
    pub fn token_losses(&self, x: Tensor<3>, labels: Tensor<2, Int>, embedding: &VocabParallelEmbedding) -> Tensor<2> {
        let logits = self.local_logits(x, embedding);
        let VocabRows { first, vocab_size, .. } = self.rows;
        vocab_parallel_cross_entropy(logits, labels, first, vocab_size, &self.parallel.group)
    }

    /// All logits on every rank, without padding: `[s, b, vocab]`.
    pub fn logits(&self, x: Tensor<3>, embedding: &VocabParallelEmbedding) -> Tensor<3> {
        self.gather(self.local_logits(x, embedding))
    }

    /// [`logits`](Self::logits) of one position of the whole sequence, `[b, vocab]`.
    pub fn logits_at(&self, x: Tensor<3>, position: usize, embedding: &VocabParallelEmbedding) -> Tensor<2> {
        let x = enter_tensor_parallel(x, &self.parallel).narrow(0, position, 1);
        self.gather(linear(x, self.weight(embedding))).squeeze_dim(0)
    }

    fn gather(&self, local: Tensor<3>) -> Tensor<3> {
        gather_from_tensor_parallel(local, &self.parallel.group).narrow(2, 0, self.rows.vocab_size)
    }

    fn local_logits(&self, x: Tensor<3>, embedding: &VocabParallelEmbedding) -> Tensor<3> {
        linear(enter_tensor_parallel(x, &self.parallel), self.weight(embedding))
    }

    fn weight(&self, embedding: &VocabParallelEmbedding) -> Tensor<2> {
        self.weight.as_ref().map_or_else(|| embedding.weight(), Param::val)
    }
}
