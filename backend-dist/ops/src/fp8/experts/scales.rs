//! The scales of experts' operands: the tokens and the ranks of an amax, and the experts of a history.

use std::ops::Range;

use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;

use super::super::sharing::{Sharing, largest};
use super::super::{
    delayed,
    groups::Fp8GroupKernels,
    kernels::{Scales, Scaling},
    layers::Operand,
};
use super::{ExpertRanks, ExpertSharding, Fp8Experts};
use ranks::comm::Group;

impl Fp8Experts {
    /// How the groups of `x` are scaled, as many for each expert; `sharing` says which data-parallel ranks share tokens.
    /// With `note` the amax is recorded in the histories.
    pub(super) fn scaling<B: Fp8GroupKernels>(
        &self,
        x: FloatTensor<B>,
        counts: &[usize],
        operand: Operand,
        sharing: &Sharing,
        note: bool,
    ) -> Scaling<B> {
        Scaling::of(&self.recipe, operand, || self.scales::<B>(x, counts, operand, sharing, note))
    }

    fn scales<B: Fp8GroupKernels>(
        &self,
        x: FloatTensor<B>,
        counts: &[usize],
        operand: Operand,
        sharing: &Sharing,
        note: bool,
    ) -> Scales<B> {
        let number = match operand {
            Operand::Input | Operand::Weight => self.recipe.forward(),
            Operand::Gradient => self.recipe.backward(),
        };
        let amax = self.over_shards::<B>(B::fp8_groups_amax(x, counts), operand);
        let amax = if operand == Operand::Weight { amax } else { self.over_blocks::<B>(amax, sharing) };
        let Some(slots) = &self.slots else { return B::fp8_scales(amax, number, self.recipe.margin) };
        let each = counts.len() / self.count();
        if note {
            let of_experts = B::fp8_tensor(amax.clone()).reshape([self.count(), each]).max_dim(1);
            delayed::note(slots, operand, self.among_all(of_experts.reshape([self.count()])));
        }
        let local = B::fp8_scales(amax, number, self.recipe.margin);
        let Some([scale, inverse]) = delayed::scales(slots, operand) else { return local };
        let of_groups = |known: Tensor<1>| {
            let known = known.narrow(0, self.ranks.local.start, self.count());
            known.reshape([self.count(), 1]).repeat_dim(1, each).reshape([counts.len()])
        };
        let (scale, inverse) = (of_groups(scale), of_groups(inverse));
        let is_known = scale.clone().greater_elem(0.0);
        let choose = |local, known| B::fp8_primitive(B::fp8_tensor(local).mask_where(is_known.clone(), known));
        Scales { scale: choose(local.scale, scale), inverse: choose(local.inverse, inverse) }
    }

    /// The amax of groups that several ranks shard.
    fn over_shards<B: Fp8GroupKernels>(&self, amax: FloatTensor<B>, operand: Operand) -> FloatTensor<B> {
        if let Some(tokens) = &self.ranks.tokens {
            return B::fp8_primitive(self.largest_of_experts::<B>(B::fp8_tensor(amax), tokens));
        }
        let is_whole = match self.sharding {
            ExpertSharding::Outputs => operand == Operand::Input,
            ExpertSharding::Inputs => operand == Operand::Gradient,
        };
        if is_whole { amax } else { largest::<B>(amax, &self.ranks.shards) }
    }

    /// The amax of the groups of data-parallel ranks that share sequences, repeated for each of these groups: over the
    /// groups of this rank, and over those of other ranks if they have tokens of the same sequences.
    fn over_blocks<B: Fp8GroupKernels>(&self, amax: FloatTensor<B>, sharing: &Sharing) -> FloatTensor<B> {
        let (dp_ranks, experts) = (&self.ranks.dp_ranks, self.count());
        let blocks = sharing.blocks_of(dp_ranks);
        if blocks.iter().all(|block| block.len() == 1) {
            return amax;
        }
        let amax = B::fp8_tensor(amax).reshape([experts, dp_ranks.len()]);
        let of_block = |block: &Range<usize>| {
            let here = block.start.max(dp_ranks.start)..block.end.min(dp_ranks.end);
            let top = amax.clone().narrow(1, here.start - dp_ranks.start, here.len()).max_dim(1);
            let top = match &sharing.ranks {
                Some(ranks) if here.len() < block.len() => self.largest_of_experts::<B>(top.reshape([experts]), ranks),
                _ => top.reshape([experts]),
            };
            top.reshape([experts, 1]).repeat_dim(1, here.len())
        };
        let all = Tensor::cat(blocks.iter().map(of_block).collect(), 1);
        B::fp8_primitive(all.reshape([experts * dp_ranks.len()]))
    }

    /// The maximum of `local`, the values of this rank's experts, over the ranks of `group`, which may hold other
    /// experts.
    fn largest_of_experts<B: Fp8GroupKernels>(&self, local: Tensor<1>, group: &Group) -> Tensor<1> {
        let all = largest::<B>(B::fp8_primitive(self.among_all(local)), group);
        B::fp8_tensor(all).narrow(0, self.ranks.local.start, self.count())
    }

    /// The values of this rank's experts as those of all experts, `[experts]`, zero elsewhere.
    fn among_all(&self, local: Tensor<1>) -> Tensor<1> {
        let ExpertRanks { experts, local: range, .. } = &self.ranks;
        let options = (&local.device(), local.dtype());
        let zeros = |count: usize| (count > 0).then(|| Tensor::zeros([count], options));
        let parts = [zeros(range.start), Some(local), zeros(experts - range.end)];
        Tensor::cat(parts.into_iter().flatten().collect(), 0)
    }
}
