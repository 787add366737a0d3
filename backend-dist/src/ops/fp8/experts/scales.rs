//! The scales of experts' operands: of which numbers the largest magnitude is taken, on which ranks these are, and
//! which number a history knows.

use std::ops::Range;

use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;

use super::super::delayed::{self, Operand};
use super::super::groups::Fp8GroupKernels;
use super::super::kernels::Scales;
use super::super::sharing::{Sharing, largest};
use super::{ExpertCut, ExpertRanks, Fp8Experts};
use crate::comm::Group;

impl Fp8Experts {
    /// Scales for the groups of `x`, as many for each expert, of replicas that share tokens as `sharing` says. With
    /// `note` their magnitudes go into the histories.
    pub(super) fn scales<B: Fp8GroupKernels>(
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
        let amax = self.over_ranks::<B>(B::fp8_groups_amax(x, counts), operand);
        let amax = if operand == Operand::Weight { amax } else { self.over_blocks::<B>(amax, sharing) };
        let Some(slots) = &self.slots else { return B::fp8_scales(amax, number, self.recipe.margin) };
        let each = counts.len() / self.count();
        if note {
            let of_experts = B::fp8_tensor(amax.clone()).reshape([self.count(), each]).max_dim(1);
            delayed::note(slots, operand, self.among_all(of_experts.reshape([self.count()])));
        }
        let own = B::fp8_scales(amax, number, self.recipe.margin);
        let Some([scale, inverse]) = delayed::scales(slots, operand) else { return own };
        let of_groups = |known: Tensor<1>| {
            let known = known.narrow(0, self.ranks.own.start, self.count());
            known.reshape([self.count(), 1]).repeat_dim(1, each).reshape([counts.len()])
        };
        let (scale, inverse) = (of_groups(scale), of_groups(inverse));
        let is_known = scale.clone().greater_elem(0.0);
        let choose = |own, known| B::fp8_primitive(B::fp8_tensor(own).mask_where(is_known.clone(), known));
        Scales { scale: choose(own.scale, scale), inverse: choose(own.inverse, inverse) }
    }

    /// The largest magnitudes of groups of which several ranks have parts.
    fn over_ranks<B: Fp8GroupKernels>(&self, amax: FloatTensor<B>, operand: Operand) -> FloatTensor<B> {
        if let Some(tokens) = &self.ranks.tokens {
            return B::fp8_primitive(self.largest_of_experts::<B>(B::fp8_tensor(amax), tokens));
        }
        let is_whole = match self.cut {
            ExpertCut::Outputs => operand == Operand::Input,
            ExpertCut::Inputs => operand == Operand::Gradient,
        };
        if is_whole { amax } else { largest::<B>(amax, &self.ranks.parts) }
    }

    /// The largest magnitudes of the groups of replicas that share sequences, for each of these groups: of those that
    /// are here, and of those of other ranks if such have tokens of the same sequences.
    fn over_blocks<B: Fp8GroupKernels>(&self, amax: FloatTensor<B>, sharing: &Sharing) -> FloatTensor<B> {
        let (replicas, experts) = (&self.ranks.replicas, self.count());
        let blocks = sharing.blocks_of(replicas);
        if blocks.iter().all(|block| block.len() == 1) {
            return amax;
        }
        let amax = B::fp8_tensor(amax).reshape([experts, replicas.len()]);
        let of_block = |block: &Range<usize>| {
            let here = block.start.max(replicas.start)..block.end.min(replicas.end);
            let top = amax.clone().narrow(1, here.start - replicas.start, here.len()).max_dim(1);
            let top = match &sharing.ranks {
                Some(ranks) if here.len() < block.len() => self.largest_of_experts::<B>(top.reshape([experts]), ranks),
                _ => top.reshape([experts]),
            };
            top.reshape([experts, 1]).repeat_dim(1, here.len())
        };
        let all = Tensor::cat(blocks.iter().map(of_block).collect(), 1);
        B::fp8_primitive(all.reshape([experts * replicas.len()]))
    }

    /// The largest of the numbers of this rank's experts, `[own]`, over the ranks of `group`, which may hold others.
    fn largest_of_experts<B: Fp8GroupKernels>(&self, own: Tensor<1>, group: &Group) -> Tensor<1> {
        let all = largest::<B>(B::fp8_primitive(self.among_all(own)), group);
        B::fp8_tensor(all).narrow(0, self.ranks.own.start, self.count())
    }

    /// Numbers of this rank's experts among those of all, `[experts]`, zero elsewhere.
    fn among_all(&self, own: Tensor<1>) -> Tensor<1> {
        let ExpertRanks { experts, own: range, .. } = &self.ranks;
        let options = (&own.device(), own.dtype());
        let zeros = |count: usize| (count > 0).then(|| Tensor::zeros([count], options));
        let parts = [zeros(range.start), Some(own), zeros(experts - range.end)];
        Tensor::cat(parts.into_iter().flatten().collect(), 0)
    }
}
