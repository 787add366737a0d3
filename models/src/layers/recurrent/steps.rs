//! A layer around a linear recurrence, and the states of sequences while tokens are read a few at a time.

use backend_dist::ops::{Prologue, Residual};
use burn::tensor::Tensor;

use crate::layers::linear::{ColumnParallelLinear, pad_sequence};
use crate::layers::norm::Norm;
use crate::layers::paged::{PagedKvCache, RecurrentState, Step};
use crate::layers::row_linear::RowParallelLinear;
use crate::micro_batch::MicroBatch;

/// The output of a recurrence `[s, b, features]`, and the state behind it if it was asked for.
pub type Mixed = (Tensor<3>, Option<RecurrentState>);

/// A recurrence between two projections.
pub trait Recurrence {
    /// The projections of the input and of the output.
    fn projections(&self) -> (&ColumnParallelLinear, &RowParallelLinear);

    /// The gated output `[s, b, features]` of the projected input `[s, b, …]`, with the state behind it if asked for.
    fn mix(&self, projected: Tensor<3>, state: Option<RecurrentState>, batch: &MicroBatch, with_state: bool) -> Mixed;

    /// The layer's output for `norm(x)`: `[s, b, hidden]` to the same, or the rank's parts of the sequence to the same.
    ///
    /// # Panics
    /// If ranks that share the sequence cannot share the heads.
    fn forward(&self, x: Residual, norm: &Norm, batch: &MicroBatch) -> Tensor<3> {
        let (input, output) = self.projections();
        let (of, _) = self.mix(input.forward(x, norm, batch), None, batch, false);
        output.forward(of, Prologue::None, false, batch)
    }

    /// The same for tokens of several sequences, one after the other, whose states are in the cache as `layer`'s. Positions
    /// beyond the step's tokens pad the sequence to a length that can be sharded; their output is meaningless.
    ///
    /// # Panics
    /// If the model records gradients: the cache would hold the graph of everything read so far.
    fn extend(&self, x: Residual, norm: &Norm, step: &Step, (layer, cache): (usize, &mut PagedKvCache)) -> Tensor<3> {
        let ((input, output), batch) = (self.projections(), &MicroBatch::default());
        let projected = input.forward(x, norm, batch);
        assert!(!projected.is_autodiff(), "a cache needs a model that records no gradients: take `model.valid()`");
        let positions = projected.dims()[0];
        let (mut of, mut first) = (Vec::new(), 0);
        for chunks in step.alike() {
            let [samples, new] = [chunks.len(), chunks[0].tokens.len()];
            let part = projected.clone().narrow(0, first, samples * new);
            first += samples * new;
            // Chunks of several tokens come one at a time, so this is `[new, samples, ..]` in either case.
            let part = part.reshape([new as i64, samples as i64, -1]);
            let states = chunks.iter().map(|chunk| cache.take_state(layer, chunk)).collect::<Option<Vec<_>>>();
            let (mixed, state) = self.mix(part, states.map(RecurrentState::side_by_side), batch, true);
            of.push(mixed.reshape([(samples * new) as i64, 1, -1]));
            for (chunk, state) in chunks.iter().zip(state.expect("it was asked for").apart(samples)) {
                cache.put_state(layer, chunk, state);
            }
        }
        let of = if of.len() == 1 { of.swap_remove(0) } else { Tensor::cat(of, 0) };
        output.forward(pad_sequence(of, positions), Prologue::None, false, batch)
    }
}
