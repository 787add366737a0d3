//! Generation by the model that is trained, in its own layout: stages hand activations on, and under ZeRO 3 weights are gathered
//! segment by segment.

use super::RankEngine;
use backend_dist::collective::{send, start_recv};
use backend_dist::comm::Group;
use backend_dist::mesh::Axis;
use burn::tensor::Tensor;
use models::layers::paged::Step;
use models::{CausalLm, PagedKvCache};

impl<M: CausalLm> RankEngine<M> {
    /// The model, if this rank has all layers with all of their weights.
    pub fn whole(&self) -> Option<&M> {
        let all = self.stages.size() == 1 && self.chunks.iter().all(|chunk| chunk.has_whole_weights());
        self.stages().next().filter(|_| all)
    }

    /// [`CausalLm::shares_prefixes`] of the model.
    pub fn shares_prefixes(&self) -> bool {
        self.stages().all(M::shares_prefixes)
    }

    /// The pipeline rank that has the head.
    pub fn head_rank(&self) -> usize {
        let placement = self.pipeline.placement();
        placement.holder(placement.stages() - 1).0
    }

    /// The ranks that must call [`extend`](Self::extend) as often as this one, besides those of its pipeline: experts and
    /// shards of weights are everywhere.
    pub fn extends_together(&self) -> Option<Group> {
        let layout = self.rank.mesh.layout();
        let whole = self.chunks.iter().all(|chunk| chunk.has_whole_weights());
        // Tensor-parallel ranks read the same tokens anyway.
        let alone = whole && layout.has_experts_within(layout.tp);
        (!alone).then(|| self.rank.group(Axis::World))
    }

    /// [`CausalLm::extend`] of the whole model; only the ranks of its last stage get the logits. All ranks of a pipeline call
    /// it together, and those of [`extends_together`](Self::extends_together).
    pub fn extend(&mut self, step: &Step, cache: &mut PagedKvCache) -> Option<Tensor<2>> {
        cache.begin(step);
        let (own, placement) = (self.stages.rank(), self.pipeline.placement());
        let (mut here, mut logits) = (None, None);
        for stage in 0..placement.stages() {
            let (rank, chunk) = placement.holder(stage);
            if rank != own {
                continue;
            }
            let before = stage.checked_sub(1).map(|before| placement.holder(before).0);
            let input = before.map(|from| match from == own {
                true => here.take().expect("the stage before ran here"),
                false => {
                    start_recv(self.extended_shape(step), self.dtype, &self.rank.device, from, &self.stages).wait()
                }
            });
            let output = self.chunks[chunk].extend(input, step, cache, &self.optimizer);
            if stage + 1 == placement.stages() {
                logits = Some(self.chunks[chunk].extend_head(output, step, &self.optimizer));
                continue;
            }
            match placement.holder(stage + 1).0 {
                next if next == own => here = Some(output),
                next => send(output, next, &self.stages),
            }
        }
        logits
    }

    /// Of the activations of a step's tokens on this rank.
    fn extended_shape(&self, step: &Step) -> [usize; 3] {
        let layout = self.rank.mesh.layout();
        let parts = if layout.sequence_parallel() { layout.tp } else { 1 };
        [step.tokens().len().div_ceil(parts), 1, self.hidden]
    }
}
