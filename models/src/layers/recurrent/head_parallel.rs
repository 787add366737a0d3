//! Linear recurrences over ranks that share a sequence: an all-to-all gives each of them all positions of some heads,
//! and another one gives the answers back (Megatron-LM's `mamba_context_parallel.py`). The weights of heads are whole on
//! every rank, which uses its heads' part of them; their gradients are summed over the ranks like all others.

use backend_dist::ops::context::{ContextParallel, context_to_head_parallel, head_to_context_parallel};
use backend_dist::ops::split;
use burn::tensor::Tensor;

use crate::micro_batch::MicroBatch;

/// Features of heads, or of groups of heads: the number of heads, and how many features each has.
#[derive(Clone, Copy, Debug)]
pub(in crate::layers) struct Features {
    pub heads: usize,
    pub each: usize,
}

impl Features {
    fn all(self) -> usize {
        self.heads * self.each
    }
}

/// Which of a tensor-parallel rank's heads this rank computes.
#[derive(Clone, Copy, Debug)]
pub(in crate::layers) struct HeadParallel<'a>(Option<&'a ContextParallel>);

impl<'a> HeadParallel<'a> {
    /// All heads, unless ranks share the sequences.
    pub fn of(batch: &'a MicroBatch) -> Self {
        Self(batch.context.as_ref().filter(|context| context.group.size() > 1))
    }

    /// How many of `heads` heads or groups the rank computes. With fewer groups than ranks, neighbours compute the same.
    ///
    /// # Panics
    /// If neither divides the other.
    pub fn share(self, heads: usize) -> usize {
        let ranks = self.0.map_or(1, |context| context.group.size());
        let fits = heads.is_multiple_of(ranks) || ranks.is_multiple_of(heads);
        assert!(fits, "context parallel: {ranks} ranks cannot share {heads} heads or groups");
        (heads / ranks).max(1)
    }

    /// What is convolved and the step sizes, of the rank's positions, `[s, b, features]`, to those of the rank's heads,
    /// `[ranks s, b, features]`.
    pub fn enter<const M: usize, const N: usize>(
        self,
        [convolved, steps]: [Tensor<3>; 2],
        of_convolved: [Features; M],
        of_steps: [Features; N],
    ) -> [Tensor<3>; 2] {
        let Some(context) = self.0 else { return [convolved, steps] };
        let by_rank = [self.by_rank(convolved, of_convolved), self.by_rank(steps, of_steps)].concat();
        let own = context_to_head_parallel(Tensor::cat(by_rank, 3), &context.group).squeeze_dim::<3>(2);
        let width = |of: &[Features]| of.iter().map(|of| self.share(of.heads) * of.each).sum::<usize>();
        split(own, [width(&of_convolved), width(&of_steps)])
    }

    /// The answers of the rank's heads, `[ranks s, b, heads, features]`, to those of the rank's positions, `[s, b, ranks
    /// heads, features]`.
    pub fn leave(self, answers: Tensor<4>) -> Tensor<4> {
        match self.0 {
            Some(context) => head_to_context_parallel(answers, &context.group),
            None => answers,
        }
    }

    /// The part of a weight that the rank's heads use; its first dimension is made up of these features.
    pub fn own<const D: usize, const N: usize>(self, weight: Tensor<D>, of: [Features; N]) -> Tensor<D> {
        let Some(ContextParallel { group, .. }) = self.0 else { return weight };
        let mut first = 0;
        let parts = of.map(|of| {
            let head = first + group.rank() * of.heads / group.size() * of.each;
            first += of.all();
            weight.clone().narrow(0, head, self.share(of.heads) * of.each)
        });
        Tensor::cat(parts.into(), 0)
    }

    /// Each of the parts that make up `x [s, b, features]` as `[s, b, ranks, features]`, by the rank that gets them.
    fn by_rank<const N: usize>(self, x: Tensor<3>, of: [Features; N]) -> Vec<Tensor<4>> {
        let ([s, b, _], ranks) = (x.dims(), self.0.map_or(1, |context| context.group.size()));
        let by_rank = |(part, Features { heads, each }): (Tensor<3>, Features)| {
            let copies = (ranks / heads).max(1);
            let part = part.reshape([s, b, heads, 1, each]).expand([s, b, heads, copies, each]);
            part.reshape([s, b, ranks, heads * copies / ranks * each])
        };
        split(x, of.map(Features::all)).into_iter().zip(of).map(by_rank).collect()
    }
}
