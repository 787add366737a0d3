//! From the last hidden states to logits and losses, with the vocabulary sharded over the ranks.

use backend_dist::ops::tensor_parallel::gather_from_tensor_parallel;
use backend_dist::ops::{
    Head, LinearOptions, Prologue, linear, linear_cross_entropy, linear_with, positions_at_once, softcap,
    vocab_parallel_cross_entropy,
};
use backend_dist::shard::{Init, Unit};
use burn::module::{Module, Param};
use burn::tensor::{DType, Int, Tensor, TensorData};

use super::embedding::{Vocab, VocabParallelEmbedding, VocabShard};
use super::linear::entry;
use super::tensor_parallel::enter_tensor_parallel;
use crate::micro_batch::MicroBatch;
use crate::param::{ParamBuilder, Result, TensorParallel};

/// The output projection; each rank computes the logits of its shard of the vocabulary. Without an own weight it uses
/// the embedding's (tied).
#[derive(Module, Debug)]
pub struct OutputLayer {
    weight: Option<Param<Tensor<2>>>,
    #[module(skip)]
    shard: VocabShard,
    #[module(skip)]
    softcap: Option<f64>,
    #[module(skip)]
    parallel: TensorParallel,
}

impl OutputLayer {
    /// A projection with its own weight under the global name `name`.
    pub fn untied(params: &mut ParamBuilder, name: &str, vocab: &Vocab, init: Init) -> Result<Self> {
        let (at, shard) = (params.place(), vocab.shard(params.place()));
        let weight = params.sections(vec![(shard.section(&format!("{name}.weight"), vocab.hidden, at), init)])?;
        Ok(Self { weight: Some(weight), shard, softcap: None, parallel: params.parallel().clone() })
    }

    /// A projection that shares the weight of the embedding `name`. Where the embedding is on another pipeline stage it
    /// holds a copy, which starts equal and, as the gradients of both are summed, stays equal.
    pub fn tied(params: &mut ParamBuilder, name: &str, vocab: &Vocab, init: Init) -> Result<Self> {
        let (at, shard) = (params.place(), vocab.shard(params.place()));
        let weight = match params.part().is_some_and(|part| !part.embedding) {
            true => {
                let section = shard.section(&format!("{name}.weight"), vocab.hidden, at).held_elsewhere();
                params.begin(Unit::Tied);
                let weight = params.sections(vec![(section, init)])?;
                params.begin(Unit::Head);
                Some(weight)
            }
            false => None,
        };
        Ok(Self { weight, shard, softcap: None, parallel: params.parallel().clone() })
    }

    /// A logit `z` becomes `c tanh(z/c)`, if there is a `c` (Gemma 2).
    pub fn with_softcap(self, softcap: Option<f64>) -> Self {
        Self { softcap, ..self }
    }

    /// `-log p(label)` of every token: hidden states `[s, b, hidden]` (or the rank's part of the sequence) and
    /// `labels [s, b]` to `[s, b]`, the same on all ranks. Of long sequences not all logits exist at a time
    /// ([`linear_cross_entropy`]).
    ///
    /// # Panics
    /// If the weight is the embedding's and `embedding` is not given.
    pub fn token_losses(
        &self,
        x: Tensor<3>,
        labels: Tensor<2, Int>,
        embedding: Option<&VocabParallelEmbedding>,
        batch: &MicroBatch,
    ) -> Tensor<2> {
        let (VocabShard { first, vocab_size, .. }, group) = (self.shard, &self.parallel.group);
        let (w, [seq, samples]) = (self.weight(embedding), labels.dims());
        let positions = positions_at_once(seq, samples * w.dims()[0], self.parallel.logits_at_once);
        if positions >= seq {
            let logits = self.local_logits(x, embedding, batch);
            return vocab_parallel_cross_entropy(logits, labels, first, vocab_size, group);
        }
        let (entry, group, softcap) = (entry(&self.parallel), group.clone(), self.softcap);
        linear_cross_entropy(x, w, labels, Head { entry, group, first_row: first, vocab_size, softcap, positions })
    }

    /// All logits on every rank, without padding: `[s, b, vocab]`.
    pub fn logits(&self, x: Tensor<3>, embedding: Option<&VocabParallelEmbedding>) -> Tensor<3> {
        self.gather(self.local_logits(x, embedding, &MicroBatch::default()))
    }

    /// [`logits`](Self::logits) of some positions of a sequence, `[1, b = 1]` each, as `[positions, vocab]`.
    pub fn logits_of(&self, x: Tensor<3>, of: &[usize], embedding: Option<&VocabParallelEmbedding>) -> Tensor<2> {
        let x = enter_tensor_parallel(x, &self.parallel);
        let ids: Vec<i64> = of.iter().map(|position| *position as i64).collect();
        let ids = Tensor::from_data(TensorData::new(ids, [of.len()]), (&x.device(), DType::I64));
        self.gather(self.capped(linear(x.select(0, ids), self.weight(embedding)))).squeeze_dim(1)
    }

    fn gather(&self, local: Tensor<3>) -> Tensor<3> {
        gather_from_tensor_parallel(local, &self.parallel.group).narrow(2, 0, self.shard.vocab_size)
    }

    fn local_logits(&self, x: Tensor<3>, embedding: Option<&VocabParallelEmbedding>, batch: &MicroBatch) -> Tensor<3> {
        let (entry, overlap) = (entry(&self.parallel), self.parallel.overlap);
        let options = LinearOptions { entry, overlap, pass: batch.pass_context(), ..Default::default() };
        self.capped(linear_with(x, Prologue::None, self.weight(embedding), None, options))
    }

    fn capped(&self, logits: Tensor<3>) -> Tensor<3> {
        match self.softcap {
            Some(cap) => softcap(logits, cap),
            None => logits,
        }
    }

    fn weight(&self, embedding: Option<&VocabParallelEmbedding>) -> Tensor<2> {
        let tied = || embedding.expect("a tied output layer is on the embedding's stage or holds a copy").weight();
        self.weight.as_ref().map_or_else(tied, Param::val)
    }
}
