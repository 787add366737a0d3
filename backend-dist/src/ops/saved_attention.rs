//! Attention outputs that outlive their graph, so that a pass is recomputed without its attention.

use std::any::Any;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;

/// The attention outputs and log-sum-exps of a pass, in order.
#[derive(Default)]
pub struct SavedAttention(VecDeque<Box<dyn Any + Send>>);

impl fmt::Debug for SavedAttention {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "SavedAttention({})", self.0.len())
    }
}

#[derive(Default)]
enum Mode {
    #[default]
    Compute,
    Save(SavedAttention),
    Replay(SavedAttention),
}

thread_local! {
    static MODE: RefCell<Mode> = const { RefCell::new(Mode::Compute) };
}

/// Returns to computing, also when a pass panics.
struct Reset;

impl Drop for Reset {
    fn drop(&mut self) {
        MODE.set(Mode::Compute);
    }
}

/// Runs `pass`, and saves the outputs of its attentions on this thread.
pub fn save_attention<R>(pass: impl FnOnce() -> R) -> (R, SavedAttention) {
    MODE.set(Mode::Save(SavedAttention::default()));
    let _reset = Reset;
    let result = pass();
    match MODE.take() {
        Mode::Save(saved) => (result, saved),
        _ => panic!("save_attention inside of a pass that saves or replays attention"),
    }
}

/// Repeats a pass with its `saved` attention outputs: neither attention nor the collectives in it are recomputed.
/// Gradients are those of the first pass, bit for bit.
///
/// # Panics
/// If the pass has other attentions than the first one.
pub fn with_saved_attention<R>(saved: SavedAttention, pass: impl FnOnce() -> R) -> R {
    MODE.set(Mode::Replay(saved));
    let _reset = Reset;
    let result = pass();
    let Mode::Replay(SavedAttention(left)) = MODE.take() else { panic!("with_saved_attention inside of another") };
    assert!(left.is_empty(), "{} saved attention outputs were not used by the recomputed pass", left.len());
    result
}

/// The outputs of an attention, saved or computed.
pub(super) fn saved_or_computed<T: Clone + Send + 'static>(compute: impl FnOnce() -> T) -> T {
    let saved = MODE.with_borrow_mut(|mode| match mode {
        Mode::Replay(SavedAttention(queue)) => {
            Some(queue.pop_front().expect("the forward pass saved an output for each attention of the recomputed pass"))
        }
        _ => None,
    });
    if let Some(saved) = saved {
        return *saved.downcast().expect("the recomputed pass runs the attentions of the forward pass in its order");
    }
    let computed = compute();
    MODE.with_borrow_mut(|mode| {
        if let Mode::Save(SavedAttention(queue)) = mode {
            queue.push_back(Box::new(computed.clone()));
        }
    });
    computed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::context::attention_over_context;
    use crate::ops::{AttentionOptions, PackedHeads, attention, attention_packed, pull_back};
    use burn::tensor::{Device, Distribution, Tensor};

    fn random(shape: [usize; 4]) -> Tensor<4> {
        Tensor::random(shape, Distribution::Default, &Device::flex())
    }

    fn same(a: &Tensor<4>, b: &Tensor<4>) -> bool {
        a.clone().inner().into_data() == b.clone().inner().into_data()
    }

    #[test]
    fn saved_attention_is_not_recomputed_and_gradients_are_the_same() {
        let heads = PackedHeads { heads: 2, kv_heads: 1 };
        let options = AttentionOptions::causal(4);
        let qkv = random([6, 2, heads.total(), 4]);
        let [q, k, v] = [2, 1, 1].map(|heads| random([6, 2, heads, 4]));
        let pass = |qkv: Tensor<4>| {
            let packed = attention_packed(qkv, heads, options);
            [packed, attention(q.clone(), k.clone(), v.clone(), options)]
        };
        let (first, saved) = save_attention(|| pass(qkv.clone()));
        assert_eq!(format!("{saved:?}"), "SavedAttention(2)");
        // With other queries, so a recomputed attention would have another output.
        let other = Tensor::from_inner(random([6, 2, heads.total(), 4])).require_grad();
        let again = with_saved_attention(saved, || pass(other.clone()));
        assert!(same(&again[0].clone().inner(), &first[0]) && same(&again[1], &first[1]));
        assert!(!same(&pass(other)[0].clone().inner(), &first[0]), "recomputed after the pass");

        let gradient = |saved: Option<SavedAttention>| {
            let x = Tensor::from_inner(qkv.clone()).require_grad();
            let run = || attention_packed(x.clone(), heads, options);
            let y = match saved {
                Some(saved) => with_saved_attention(saved, run),
                None => run(),
            };
            x.grad_remove(&mut pull_back(y, first[0].clone().inner())).expect("it is used").inner()
        };
        let alone = save_attention(|| attention_packed(qkv.clone(), heads, options)).1;
        assert!(same(&gradient(Some(alone)), &gradient(None)));
    }

    #[test]
    fn another_pass_is_refused() {
        let [q, k, v] = [2, 1, 1].map(|heads| random([6, 2, heads, 4]));
        let attend =
            || attention_over_context(q.clone(), k.clone(), v.clone(), AttentionOptions::causal(4), None, None);
        let refused = |pass: &dyn Fn()| {
            let saved = save_attention(attend).1;
            let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| with_saved_attention(saved, pass)));
            panics.is_err()
        };
        assert!(refused(&|| {}));
        assert!(refused(&|| drop([attend(), attend()])));
        assert!(!refused(&|| drop(attend())), "a pass that panicked leaves nothing behind");
    }
}
