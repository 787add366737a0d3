//! Token and position embeddings.

use std::ops::Range;

use backend_dist::ops::tensor_parallel::Partial;
use backend_dist::ops::{embedding, expand_dim};
use backend_dist::shard::{GroupPosition, Init, Section};
use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::linear::pad_sequence;
use super::tensor_parallel::leave_tensor_parallel;
use crate::micro_batch::{MicroBatch, positions_in_documents, sub_ranges};
use crate::param::{ParamBuilder, Result, TensorParallel};

/// A rank's shard of the vocabulary. The table is padded with matrix rows that stand for no token until every tensor
/// parallel rank has the same number, as in Megatron-LM (`megatron/training/vocab_utils.py`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VocabShard {
    /// Number of tokens.
    pub vocab_size: usize,
    /// Number of matrix rows with padding: the next multiple of `divisor * tp`.
    pub padded: usize,
    /// First matrix row of this rank.
    pub first: usize,
}

/// The table that turns tokens into vectors, and hidden states into logits.
#[derive(Clone, Copy, Debug)]
pub struct Vocab {
    /// Number of tokens.
    pub size: usize,
    /// Features.
    pub hidden: usize,
    /// See [`VocabShard::new`].
    pub divisor: usize,
}

impl Vocab {
    /// The shard of one rank.
    pub fn shard(&self, at: GroupPosition) -> VocabShard {
        VocabShard::new(self.size, self.divisor, at)
    }
}

impl VocabShard {
    /// The shard of one rank. Its size is a multiple of `divisor` (Megatron's `--make-vocab-size-divisible-by`).
    pub fn new(vocab_size: usize, divisor: usize, at: GroupPosition) -> Self {
        let padded = vocab_size.next_multiple_of(divisor.max(1) * at.size);
        Self { vocab_size, padded, first: padded / at.size * at.rank }
    }

    /// The section of a `[vocab, hidden]` tensor that the rank holds; padding is zero.
    pub fn section(&self, name: &str, hidden: usize, at: GroupPosition) -> Section {
        Section::split_padded(name, &[self.vocab_size, hidden], 0, at.size, self.padded, at)
    }
}

/// Embeds tokens; each rank holds a shard of the table. `[s, b]` ids to `[s, b, hidden]`, under sequence parallelism
/// `[s/tp, b, hidden]`.
#[derive(Module, Debug)]
pub struct VocabParallelEmbedding {
    weight: Param<Tensor<2>>,
    #[module(skip)]
    shard: VocabShard,
    #[module(skip)]
    parallel: TensorParallel,
}

impl VocabParallelEmbedding {
    /// A table under the global name `name`.
    pub fn new(params: &mut ParamBuilder, name: &str, vocab: &Vocab, init: Init) -> Result<Self> {
        let (at, shard) = (params.place(), vocab.shard(params.place()));
        let weight = params.sections(vec![(shard.section(&format!("{name}.weight"), vocab.hidden, at), init)])?;
        Ok(Self { weight, shard, parallel: params.parallel().clone() })
    }

    /// The table `name` once more, on another pipeline stage than its own. It starts equal and, as the gradients of
    /// both are summed, stays equal.
    pub fn copy(params: &mut ParamBuilder, name: &str, vocab: &Vocab, init: Init) -> Result<Self> {
        let (at, shard) = (params.place(), vocab.shard(params.place()));
        let section = shard.section(&format!("{name}.weight"), vocab.hidden, at).held_elsewhere();
        Ok(Self { weight: params.sections(vec![(section, init)])?, shard, parallel: params.parallel().clone() })
    }

    /// The embeddings of `ids [s, b]`.
    pub fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let mine = embedding(self.weight.val(), ids, self.shard.first);
        leave_tensor_parallel(Partial::new(mine), &self.parallel)
    }

    /// The same for any number of positions: sequence parallelism gets zeros at the end.
    pub fn extend(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let positions = self.parallel.positions(ids.dims()[0]);
        let mine = embedding(self.weight.val(), ids, self.shard.first);
        leave_tensor_parallel(Partial::new(pad_sequence(mine, positions)), &self.parallel)
    }

    /// Where the table is.
    pub fn device(&self) -> Device {
        self.weight.val().device()
    }

    /// The rank's shard of the table, for an output layer that shares it.
    pub fn weight(&self) -> Tensor<2> {
        self.weight.val()
    }
}

/// A learned vector per position, replicated on every rank; added to `[s, b, hidden]`, under sequence parallelism to
/// the rank's `[s/tp, b, hidden]`.
#[derive(Module, Debug)]
pub struct LearnedPositions {
    weight: Param<Tensor<2>>,
    #[module(skip)]
    parallel: TensorParallel,
}

impl LearnedPositions {
    /// A table for positions `0..positions` under the global name `name`.
    pub fn new(params: &mut ParamBuilder, name: &str, positions: usize, hidden: usize, init: Init) -> Result<Self> {
        let weight = params.on_sequence(&format!("{name}.weight"), [positions, hidden], init)?;
        Ok(Self { weight, parallel: params.parallel().clone() })
    }

    /// Adds every position's vector to the activations of that position.
    ///
    /// # Panics
    /// If the sequence is longer than the table.
    pub fn forward(&self, x: Tensor<3>, batch: &MicroBatch) -> Tensor<3> {
        let [own, samples, _] = x.dims();
        let table = self.weight.val();
        let [positions, hidden] = table.dims();
        let places = sub_ranges(&batch.positions(self.parallel.sequence_length(own)), self.parallel.own_positions(own));
        let beyond =
            |end: usize| assert!(end <= positions, "sequence position {end} exceeds {positions} learned positions");
        if let Some(documents) = &batch.restarts {
            let ids: Vec<i64> = positions_in_documents(&places, documents).into_iter().map(|id| id as i64).collect();
            beyond(ids.iter().max().map_or(0, |last| *last as usize + 1));
            let ids = Tensor::from_data(TensorData::new(ids, [own, samples]), (&x.device(), DType::I64));
            return x + embedding(table, ids, 0);
        }
        let of = |place: &Range<usize>| {
            beyond(place.end);
            table.clone().slice([place.clone(), 0..hidden])
        };
        let own: Vec<Tensor<2>> = places.iter().map(of).collect();
        let own = if own.len() == 1 { own.into_iter().next() } else { Some(Tensor::cat(own, 0)) };
        x + expand_dim(own.expect("a rank has positions").unsqueeze_dim(1), 1, samples)
    }

    /// The same for positions of several sequences, one after the other.
    ///
    /// # Panics
    /// If one of them ends beyond the table.
    pub fn extend(&self, x: Tensor<3>, at: &[Range<usize>]) -> Tensor<3> {
        let own = x.dims()[0];
        let first = self.parallel.own_positions(own).start;
        let (positions, end) = (self.weight.dims()[0], at.iter().map(|range| range.end).max().unwrap_or(0));
        assert!(end <= positions, "sequence position {end} exceeds {positions} learned positions");
        let all = at.iter().cloned().flatten().chain(std::iter::repeat(positions));
        let ids = all.skip(first).take(own).map(|position| position as i64).collect();
        self.added(x, ids)
    }

    fn added(&self, x: Tensor<3>, ids: Vec<i64>) -> Tensor<3> {
        let count = ids.len();
        let ids = Tensor::from_data(TensorData::new(ids, [count, 1]), (&x.device(), DType::I64));
        x + embedding(self.weight.val(), ids, 0)
    }
}
