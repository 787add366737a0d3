//! Attention outputs that outlive their graph, so that a pass is recomputed without its attention.

use super::stash::Stash;

/// The attention outputs and log-sum-exps of a pass, in order. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct SavedAttention(Stash);

/// What the attention of a pass does.
#[derive(Clone, Debug, Default)]
pub enum CoreAttention {
    /// It is computed.
    #[default]
    Compute,
    /// It is computed, and its outputs are saved.
    Save(SavedAttention),
    /// It has the outputs that another pass has saved: neither attention nor the collectives in it are computed.
    /// Gradients are those of the first pass, bit for bit.
    Replay(SavedAttention),
}

impl SavedAttention {
    /// Ends a pass that replays.
    ///
    /// # Panics
    /// If it had fewer attentions than the pass that saved.
    pub fn finish(&self) {
        let left = self.0.len();
        assert_eq!(left, 0, "{left} saved attention outputs were not used by the recomputed pass");
    }
}

impl CoreAttention {
    /// The outputs of an attention, saved or computed.
    ///
    /// # Panics
    /// If a recomputed pass has other attentions than the first one.
    pub(super) fn run<T: Clone + Send + 'static>(&self, compute: impl FnOnce() -> T) -> T {
        match self {
            Self::Compute => compute(),
            Self::Save(saved) => {
                let computed = compute();
                saved.0.put(computed.clone());
                computed
            }
            Self::Replay(saved) => {
                let output = saved.0.take();
                output.expect("the recomputed pass runs the attentions of the forward pass in its order, and no other")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::{attention_in_context, attention_over_context};
    use crate::{AttentionOptions, PackedHeads, PassContext, pull_back};
    use burn::tensor::{Device, Distribution, Tensor};

    fn random(shape: [usize; 4]) -> Tensor<4> {
        Tensor::random(shape, Distribution::Default, &Device::flex())
    }

    fn that(attention: CoreAttention) -> PassContext {
        PassContext { attention, ..PassContext::default() }
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
        let run = |qkv: Tensor<4>, pass: &PassContext| {
            let packed = attention_in_context(qkv, heads, options, None, None, pass);
            let [q, k, v] = [q.clone(), k.clone(), v.clone()];
            [packed, attention_over_context(q, k, v, options, None, None, pass)]
        };
        let saved = SavedAttention::default();
        let first = run(qkv.clone(), &that(CoreAttention::Save(saved.clone())));
        assert_eq!(format!("{saved:?}"), "SavedAttention(Stash(2))");
        // With other queries, so a recomputed attention would have another output.
        let other = Tensor::from_inner(random([6, 2, heads.total(), 4])).require_grad();
        let again = run(other.clone(), &that(CoreAttention::Replay(saved.clone())));
        saved.finish();
        assert!(same(&again[0].clone().inner(), &first[0]) && same(&again[1], &first[1]));
        assert!(!same(&run(other, &PassContext::default())[0].clone().inner(), &first[0]), "another pass computes");

        let gradient = |attention: CoreAttention| {
            let x = Tensor::from_inner(qkv.clone()).require_grad();
            let y = attention_in_context(x.clone(), heads, options, None, None, &that(attention));
            x.grad_remove(&mut pull_back(y, first[0].clone().inner())).expect("it is used").inner()
        };
        let alone = SavedAttention::default();
        attention_in_context(qkv.clone(), heads, options, None, None, &that(CoreAttention::Save(alone.clone())));
        assert!(same(&gradient(CoreAttention::Replay(alone)), &gradient(CoreAttention::Compute)));
    }

    #[test]
    fn another_pass_is_refused() {
        let [q, k, v] = [2, 1, 1].map(|heads| random([6, 2, heads, 4]));
        let attend = |pass: &PassContext| {
            let [q, k, v] = [q.clone(), k.clone(), v.clone()];
            attention_over_context(q, k, v, AttentionOptions::causal(4), None, None, pass)
        };
        let refused = |run: &dyn Fn(&PassContext)| {
            let saved = SavedAttention::default();
            attend(&that(CoreAttention::Save(saved.clone())));
            let replay = || {
                run(&that(CoreAttention::Replay(saved.clone())));
                saved.finish();
            };
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(replay)).is_err()
        };
        assert!(refused(&|_| {}));
        assert!(refused(&|pass| drop([attend(pass), attend(pass)])));
        assert!(!refused(&|pass| drop(attend(pass))));
    }
}
