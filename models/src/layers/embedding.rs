//! Token and position embeddings.

use std::ops::Range;

use backend_dist::ops::conjugate::Partial;
use backend_dist::ops::{embedding, expand_dim};
use backend_dist::shard::{Init, Place, Section};
use burn::module::{Module, Param};
use burn::tensor::{DType, Int, Tensor, TensorData};

use super::linear::{leave_tensor_parallel, pad_sequence};
use crate::micro_batch::{MicroBatch, part_of, positions_in_documents};
use crate::param::{BuildError, ParamBuilder, TensorParallel};

/// How a vocabulary is cut over the tensor parallel ranks: padded with rows that stand for no token until every rank
/// has the same number, as in Megatron-LM (`megatron/training/vocab_utils.py`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VocabRows {
    /// Number of tokens.
    pub vocab_size: usize,
    /// Number of rows with padding: the next multiple of `divisor * tp`.
    pub padded: usize,
    /// First row of this rank.
    pub first: usize,
}

/// The table that turns tokens into vectors, and hidden states into logits.
#[derive(Clone, Copy, Debug)]
pub struct Vocab {
    /// Number of tokens.
    pub size: usize,
    /// Features.
    pub hidden: usize,
    /// See [`VocabRows::new`].
    pub divisor: usize,
}

impl Vocab {
    /// The rows of one rank.
    pub fn rows(&self, at: Place) -> VocabRows {
        VocabRows::new(self.size, self.divisor, at)
    }
}

impl VocabRows {
    /// The rows of one rank. `divisor` makes the rows of a rank a round number (Megatron's
    /// `--make-vocab-size-divisible-by`).
    pub fn new(vocab_size: usize, divisor: usize, at: Place) -> Self {
        let padded = vocab_size.next_multiple_of(divisor.max(1) * at.size);
        Self { vocab_size, padded, first: padded / at.size * at.rank }
    }

    /// The section of a `[vocab, hidden]` tensor that the rank holds; padding rows are zero.
    pub fn section(&self, name: &str, hidden: usize, at: Place) -> Section {
        Section::split_padded(name, &[self.vocab_size, hidden], 0, at.size, self.padded, at)
    }
}

/// Embeds tokens; each rank holds some rows of the table. `[s, b]` ids to `[s, b, hidden]`, under sequence parallelism
/// `[s/tp, b, hidden]`.
#[derive(Module, Debug)]
pub struct VocabParallelEmbedding {
    weight: Param<Tensor<2>>,
    #[module(skip)]
    rows: VocabRows,
    #[module(skip)]
    parallel: TensorParallel,
}

impl VocabParallelEmbedding {
    /// A table under the global name `name`.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn new(params: &mut ParamBuilder, name: &str, vocab: &Vocab, init: Init) -> Result<Self, BuildError> {
        let (at, rows) = (params.place(), vocab.rows(params.place()));
        let weight = params.sections(vec![(rows.section(&format!("{name}.weight"), vocab.hidden, at), init)])?;
        Ok(Self { weight, rows, parallel: params.parallel().clone() })
    }

    /// The table `name` once more, on another pipeline stage than its own. It starts equal and, as the gradients of
    /// both are summed, stays equal.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn copy(params: &mut ParamBuilder, name: &str, vocab: &Vocab, init: Init) -> Result<Self, BuildError> {
        let (at, rows) = (params.place(), vocab.rows(params.place()));
        let section = rows.section(&format!("{name}.weight"), vocab.hidden, at).held_elsewhere();
        Ok(Self { weight: params.sections(vec![(section, init)])?, rows, parallel: params.parallel().clone() })
    }

    /// The embeddings of `ids [s, b]`.
    pub fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let mine = embedding(self.weight.val(), ids, self.rows.first);
        leave_tensor_parallel(Partial::new(mine), &self.parallel)
    }

    /// The same for any number of positions: sequence parallelism gets zeros at the end.
    pub fn extend(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let rows = self.parallel.positions(ids.dims()[0]);
        let mine = embedding(self.weight.val(), ids, self.rows.first);
        leave_tensor_parallel(Partial::new(pad_sequence(mine, rows)), &self.parallel)
    }

    /// The rank's rows of the table, for an output layer that shares them.
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
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn new(
        params: &mut ParamBuilder,
        name: &str,
        positions: usize,
        hidden: usize,
        init: Init,
    ) -> Result<Self, BuildError> {
        let weight = params.on_sequence(&format!("{name}.weight"), [positions, hidden], init)?;
        Ok(Self { weight, parallel: params.parallel().clone() })
    }

    /// Adds every position's vector to the activations of that position.
    ///
    /// # Panics
    /// If the sequence is longer than the table.
    pub fn forward(&self, x: Tensor<3>, batch: &MicroBatch) -> Tensor<3> {
        let [rows, samples, _] = x.dims();
        let table = self.weight.val();
        let [positions, hidden] = table.dims();
        let places = part_of(&batch.places(self.parallel.sequence_length(rows)), self.parallel.own_rows(rows));
        let beyond =
            |end: usize| assert!(end <= positions, "sequence position {end} exceeds {positions} learned positions");
        if let Some(documents) = &batch.restarts {
            let ids: Vec<i64> = positions_in_documents(&places, documents).into_iter().map(|id| id as i64).collect();
            beyond(ids.iter().max().map_or(0, |last| *last as usize + 1));
            let ids = Tensor::from_data(TensorData::new(ids, [rows, samples]), (&x.device(), DType::I64));
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

    /// The same for positions that follow others; `x` may be longer than `at`, as [`VocabParallelEmbedding::extend`]
    /// makes it.
    ///
    /// # Panics
    /// If `at` ends beyond the table.
    pub fn extend(&self, x: Tensor<3>, at: &Range<usize>) -> Tensor<3> {
        let rows = x.dims()[0];
        let first = at.start + if self.parallel.sequence { rows * self.parallel.group.rank() } else { 0 };
        let table = self.weight.val();
        let positions = table.dims()[0];
        assert!(at.end <= positions, "sequence position {} exceeds {positions} learned positions", at.end);
        let ids: Vec<i64> = (first..first + rows).map(|position| position as i64).collect();
        let ids = Tensor::from_data(TensorData::new(ids, [rows, 1]), (&x.device(), DType::I64));
        // What lies beyond the table gets zeros.
        x + embedding(table, ids, 0)
    }
}
