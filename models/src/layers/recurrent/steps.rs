//! States of sequences while tokens are read a few at a time.

use burn::tensor::Tensor;

use crate::layers::linear::pad_sequence;
use crate::layers::paged::{PagedKvCache, RecurrentState, Step};

/// `mix` of the projected tokens `[positions, 1, features]` of several sequences, one after the other, whose states are
/// in the cache as `layer`'s. It takes `[s, b, features]` with the state in front, if there is one, and gives the state
/// behind too. Positions beyond the step's tokens pad the sequence to a length that can be sharded; their output is
/// meaningless.
///
/// # Panics
/// If the model records gradients: the cache would hold the graph of everything read so far.
pub(in crate::layers) fn extend(
    projected: Tensor<3>,
    step: &Step,
    (layer, cache): (usize, &mut PagedKvCache),
    mix: impl Fn(Tensor<3>, Option<RecurrentState>) -> (Tensor<3>, RecurrentState),
) -> Tensor<3> {
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
        let (mixed, state) = mix(part, states.map(RecurrentState::side_by_side));
        of.push(mixed.reshape([(samples * new) as i64, 1, -1]));
        for (chunk, state) in chunks.iter().zip(state.apart(samples)) {
            cache.put_state(layer, chunk, state);
        }
    }
    let of = if of.len() == 1 { of.swap_remove(0) } else { Tensor::cat(of, 0) };
    pad_sequence(of, positions)
}
