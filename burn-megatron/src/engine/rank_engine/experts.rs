//! What the engine does with the records of the routers after a step.

use super::RankEngine;
use crate::engine::ExpertLoad;
use backend_dist::mesh::Axis;
use models::CausalLm;
use models::layers::moe::stats::{Counts, RouterStats};
use models::layers::moe::{BiasCounts, ExpertTokens, RouterRecords, RoutingReplay};

/// The records of an engine; statistics are for reports alone.
pub(super) fn records(statistics: bool) -> RouterRecords {
    let stats = statistics.then(RouterStats::default);
    RouterRecords { bias: Some(BiasCounts::default()), stats, replay: None }
}

impl<M: CausalLm> RankEngine<M> {
    /// Whether the model has routed experts, on whatever rank.
    pub fn has_experts(&self) -> bool {
        self.is_moe
    }

    /// How the experts were used in the last step, by layer of the whole model; the same on all ranks. Empty without
    /// [`EngineConfig::router_statistics`](crate::engine::EngineConfig::router_statistics).
    pub fn expert_loads(&self) -> &[ExpertLoad] {
        &self.loads
    }

    /// With routers that record their choices, or use those of another run.
    pub fn with_routing(mut self, replay: RoutingReplay) -> Self {
        self.routers.replay = Some(replay);
        self
    }

    /// Drops what the routers of a step that failed have left.
    pub(super) fn forget_routing(&self) {
        self.routers.bias.iter().for_each(|counts| drop(counts.take()));
        self.routers.stats.iter().for_each(|stats| drop(stats.take()));
    }

    /// With `update` moves the biases that balance experts by the tokens of all ranks, but for frozen ones, of which
    /// routers count no tokens, and adds their statistics up. All ranks call it together.
    pub(super) fn end_routing_step(&mut self, update: bool) {
        // The model has experts or not on all ranks alike.
        if !self.has_experts() {
            return;
        }
        let tokens = self.routers.bias.as_ref().map(BiasCounts::take).unwrap_or_default();
        let stats = self.routers.stats.as_ref().map(RouterStats::take);
        // Each rank of a stage has counted its own tokens.
        let ranks = self.rank.group(Axis::TpDpCp).all_gather_host((tokens, stats));
        let (tokens, stats): (Vec<Vec<ExpertTokens>>, Vec<Option<Vec<Counts>>>) = ranks.into_iter().unzip();
        for layer in tokens[0].iter().filter(|_| update) {
            let others = tokens[1..].iter().flatten().filter(|other| other.layer == layer.layer);
            let all = others.fold(layer.clone(), |mut all, other| {
                all.add(other);
                all
            });
            self.add_to_untrained(all.param, &all.steps());
        }
        let Some(stats) = stats.into_iter().collect::<Option<Vec<_>>>() else { return };
        let load = |own: &Counts| {
            let of_layer = stats.iter().flatten().filter(|counts| counts.layer == own.layer);
            ExpertLoad::sum(&of_layer.collect::<Vec<_>>())
        };
        self.loads = self.stages.all_gather_host(stats[0].iter().map(load).collect::<Vec<_>>()).concat();
        self.loads.sort_by_key(|load| load.layer);
    }
}
