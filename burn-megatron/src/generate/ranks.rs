//! The ranks that write texts together.

use backend_dist::collective::{OneShotSums, one_shot_sums};
use backend_dist::comm::Group;
use backend_dist::launch::Rank;
use backend_dist::mesh::Axis;
use burn::tensor::Tensor;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The ranks that a model is on, as far as generation must know.
pub(crate) struct ModelRanks {
    /// Those that share each layer.
    pub layers: Group,
    /// Those that have different layers, and which of them has the head.
    pub stages: Option<(Group, usize)>,
    /// Those that read tokens as often as this one, whether or not they have texts to write.
    pub together: Option<Group>,
    /// Nobody else in the process calls the driver while one of them records.
    pub may_record: bool,
    /// While it is there, small sums over `layers` are taken by one kernel.
    pub _sums: OneShotSums,
}

impl ModelRanks {
    /// Of a model whose layers are all here; a collective of those that share them.
    pub fn whole(rank: &Rank) -> Self {
        let (layers, may_record) = (rank.group(Axis::Tp), rank.is_alone_in_process());
        let _sums = one_shot_sums(&layers, &rank.device);
        Self { layers, stages: None, together: None, may_record, _sums }
    }

    /// Whether any of them has a text to write.
    pub fn any(&self, own: bool) -> bool {
        self.together.as_ref().map_or(own, |group| group.all_gather_host(own).contains(&true))
    }

    /// What `choose` finds, on all ranks: the first of those that have logits calls it.
    pub fn chosen<T, E>(
        &self,
        logits: Option<Tensor<2>>,
        choose: impl FnOnce(Tensor<2>) -> Result<T, E>,
    ) -> Result<T, E>
    where
        T: Clone + Send + Sync + Serialize + DeserializeOwned + 'static,
    {
        let own = match logits {
            Some(logits) => {
                let first = (self.layers.rank() == 0).then(|| choose(logits)).transpose()?;
                Some(self.layers.broadcast_host(first, 0))
            }
            None => None,
        };
        Ok(match &self.stages {
            Some((stages, head)) => stages.broadcast_host(own, *head),
            None => own.expect("a rank with all layers has logits"),
        })
    }
}
