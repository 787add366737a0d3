//! Results of attention that outlive their graph, for a pass that is computed again without its attention.

use std::any::Any;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;

/// What the attentions of a pass gave, in their order: outputs and log-sum-exps.
#[derive(Default)]
pub struct Attended(VecDeque<Box<dyn Any + Send>>);

impl fmt::Debug for Attended {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Attended({})", self.0.len())
    }
}

#[derive(Default)]
enum Mode {
    #[default]
    Compute,
    Keep(Attended),
    Give(Attended),
}

thread_local! {
    static MODE: RefCell<Mode> = const { RefCell::new(Mode::Compute) };
}

/// Computes again what a pass that panics has begun.
struct Reset;

impl Drop for Reset {
    fn drop(&mut self) {
        MODE.set(Mode::Compute);
    }
}

/// Runs `pass`, and keeps what its attentions on this thread give.
pub fn keep_attended<R>(pass: impl FnOnce() -> R) -> (R, Attended) {
    MODE.set(Mode::Keep(Attended::default()));
    let _reset = Reset;
    let result = pass();
    match MODE.take() {
        Mode::Keep(attended) => (result, attended),
        _ => panic!("keep_attended inside of a pass whose attentions are kept or given"),
    }
}

/// Runs the same pass again: its attentions, and the exchanges in them, are not computed but `attended`. Gradients are
/// those of the pass before, bit for bit.
///
/// # Panics
/// If the pass has other attentions than the one before.
pub fn with_attended<R>(attended: Attended, pass: impl FnOnce() -> R) -> R {
    MODE.set(Mode::Give(attended));
    let _reset = Reset;
    let result = pass();
    let Mode::Give(Attended(left)) = MODE.take() else { panic!("with_attended inside of another") };
    assert!(left.is_empty(), "{} attentions of the pass before were not asked for", left.len());
    result
}

/// What an attention gives: from the pass before, or computed.
pub(super) fn attended<T: Clone + Send + 'static>(compute: impl FnOnce() -> T) -> T {
    let given = MODE.with_borrow_mut(|mode| match mode {
        Mode::Give(Attended(queue)) => Some(queue.pop_front().expect("the pass before had as many attentions")),
        _ => None,
    });
    if let Some(given) = given {
        return *given.downcast().expect("the pass before had the same attentions");
    }
    let computed = compute();
    MODE.with_borrow_mut(|mode| {
        if let Mode::Keep(Attended(queue)) = mode {
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
    fn attention_is_given_and_not_computed_and_gradients_are_the_same() {
        let heads = PackedHeads { heads: 2, kv_heads: 1 };
        let options = AttentionOptions::causal(4);
        let qkv = random([6, 2, heads.total(), 4]);
        let [q, k, v] = [2, 1, 1].map(|heads| random([6, 2, heads, 4]));
        let pass = |qkv: Tensor<4>| {
            let packed = attention_packed(qkv, heads, options);
            [packed, attention(q.clone(), k.clone(), v.clone(), options)]
        };
        let (first, attended) = keep_attended(|| pass(qkv.clone()));
        assert_eq!(format!("{attended:?}"), "Attended(2)");
        // Of other queries, so an attention that was computed would give something else.
        let other = Tensor::from_inner(random([6, 2, heads.total(), 4])).require_grad();
        let again = with_attended(attended, || pass(other.clone()));
        assert!(same(&again[0].clone().inner(), &first[0]) && same(&again[1], &first[1]));
        assert!(!same(&pass(other)[0].clone().inner(), &first[0]), "computed again when the pass is over");

        let gradient = |attended: Option<Attended>| {
            let x = Tensor::from_inner(qkv.clone()).require_grad();
            let run = || attention_packed(x.clone(), heads, options);
            let y = match attended {
                Some(attended) => with_attended(attended, run),
                None => run(),
            };
            x.grad_remove(&mut pull_back(y, first[0].clone().inner())).expect("it is used").inner()
        };
        let kept = keep_attended(|| attention_packed(qkv.clone(), heads, options)).1;
        assert!(same(&gradient(Some(kept)), &gradient(None)));
    }

    #[test]
    fn another_pass_is_refused() {
        let [q, k, v] = [2, 1, 1].map(|heads| random([6, 2, heads, 4]));
        let attend =
            || attention_over_context(q.clone(), k.clone(), v.clone(), AttentionOptions::causal(4), None, None);
        let refused = |pass: &dyn Fn()| {
            let attended = keep_attended(attend).1;
            let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| with_attended(attended, pass)));
            panics.is_err()
        };
        assert!(refused(&|| {}));
        assert!(refused(&|| drop([attend(), attend()])));
        assert!(!refused(&|| drop(attend())), "a pass that panicked leaves nothing behind");
    }
}
