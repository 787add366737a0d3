//! What the engine does with the counts of the routers after a step.

use super::RankEngine;
use crate::engine::ExpertLoad;
use backend_dist::mesh::Axis;
use models::CausalLm;
use models::layers::moe::stats::{self, Counts};

impl<M: CausalLm> RankEngine<M> {
    /// Whether the model has routed experts, on whatever rank.
    pub fn has_experts(&self) -> bool {
        self.model_parallel.len() > 1
    }

    /// How the experts were used in the last step, by layer of the whole model; the same on all ranks.
    pub fn expert_loads(&self) -> &[ExpertLoad] {
        &self.loads
    }

    /// Adds the counts of all ranks up, and with `update` moves the biases that balance experts. All ranks call it
    /// together.
    pub(super) fn end_routing_step(&mut self, update: bool) {
        // The model has experts or not on all ranks alike.
        if !self.has_experts() {
            return;
        }
        // Each rank of a stage has counted its own tokens.
        let ranks = self.rank.group(Axis::TpDpCp).all_gather_host(stats::take());
        let layer = |own: &Counts| {
            let of_layer = |rank: &'_ [Counts]| rank.iter().position(|counts| counts.layer == own.layer);
            let all: Vec<&Counts> = ranks.iter().filter_map(|rank| Some(&rank[of_layer(rank)?])).collect();
            (ExpertLoad::sum(&all), own.bias)
        };
        let own: Vec<_> = ranks[0].iter().map(layer).collect();
        for (load, bias) in &own {
            if let (true, Some((param, rate))) = (update, bias) {
                self.add_to_untrained(*param, &load.bias_steps(*rate));
            }
        }
        let own: Vec<ExpertLoad> = own.into_iter().map(|(load, _)| load).collect();
        self.loads = self.stages.all_gather_host(own).concat();
        self.loads.sort_by_key(|load| load.layer);
    }
}
