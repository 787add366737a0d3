//! The FP8 side of the layers that are built.

use std::ops::Range;

use backend_dist::mesh::Nearest;
use backend_dist::ops::fp8::{ExpertRanks, ExpertSharding, Fp8Experts, Fp8Linear, Fp8Recipe};
use backend_dist::shard::Unit;

use super::{BuildError, ParamBuilder, Result};
use crate::fp8::Fp8Config;

/// Which layers multiply in FP8.
pub(super) struct Fp8Selection {
    recipe: Fp8Recipe,
    layers: Range<usize>,
    /// With their routed experts.
    experts: bool,
}

impl ParamBuilder<'_> {
    /// Linear layers of the blocks multiply in FP8, in a model of `layers` blocks.
    pub fn with_fp8(mut self, fp8: &Fp8Config, layers: usize) -> Self {
        let of = |recipe| Fp8Selection { recipe, layers: fp8.layers(layers), experts: fp8.experts };
        self.fp8 = fp8.recipe().map(of);
        self
    }

    /// The FP8 side of the linear layer `name` of what [`ParamBuilder::begin`] began.
    pub fn fp8_linear(&self, name: &str) -> Option<Fp8Linear> {
        let layer = Fp8Linear::new(&self.fp8_layers, name, self.fp8_recipe()?, self.parallel.group.clone());
        Some(if self.is_frozen(&format!("{name}.weight")) { layer.with_frozen_weight(&self.fp8_layers) } else { layer })
    }

    /// The FP8 side of the layer `name` of `experts` experts of what [`ParamBuilder::begin`] began, if experts have
    /// one and `sizes`, features of a rank, are multiples of what it takes.
    ///
    /// # Errors
    /// If ranks that share sequences hold some of the experts together with ranks that do not.
    pub fn fp8_experts(
        &self,
        name: &str,
        experts: usize,
        sizes: [usize; 2],
        sharding: ExpertSharding,
    ) -> Result<Option<Fp8Experts>> {
        let has_experts = self.fp8.as_ref().is_some_and(|fp8| fp8.experts);
        let fits = |recipe: &Fp8Recipe| has_experts && sizes.iter().all(|size| size.is_multiple_of(recipe.multiple()));
        let Some(recipe) = self.fp8_recipe().filter(fits) else { return Ok(None) };
        let (cp, dp_ranks) = (self.context_parallel, self.expert_senders().len());
        let legal = |cp: usize| cp.is_multiple_of(dp_ranks) || dp_ranks.is_multiple_of(cp);
        if !legal(cp) {
            return Err(BuildError::Fp8Experts(format!(
                "context-parallel {cp} and the {dp_ranks} data-parallel ranks that divide a layer's experts (expert-parallel · \
                 expert-tensor-parallel / tensor-parallel) must divide one the other; nearest legal context-parallel: {}",
                Nearest::where_legal(cp, cp * dp_ranks, legal)
            )));
        }
        let tokens = (self.parallel.size() > self.experts.group.size()).then(|| self.parallel.group.clone());
        let (own, parts) = (self.experts.local(experts), self.experts.parts.clone());
        let ranks = ExpertRanks { experts, local: own, shards: parts, tokens, dp_ranks: self.expert_senders() };
        let layer = Fp8Experts::new(&self.fp8_layers, name, recipe, sharding, ranks);
        Ok(Some(if self.has_adapters() { layer.with_frozen_weights(&self.fp8_layers) } else { layer }))
    }

    /// The data-parallel ranks of the stage whose tokens are dispatched to this rank's experts.
    fn expert_senders(&self) -> Range<usize> {
        let (tp, group) = (self.parallel.size(), &self.experts.group);
        let first = group.ranks()[0];
        let before = self.stage.ranks().iter().take_while(|rank| **rank != first).count();
        before / tp..(before + group.size()).div_ceil(tp)
    }

    /// The recipe of the layer that [`ParamBuilder::begin`] began, if it has one.
    fn fp8_recipe(&self) -> Option<Fp8Recipe> {
        let Fp8Selection { recipe, layers, .. } = self.fp8.as_ref()?;
        matches!(self.unit, Unit::Layer(layer) if layers.contains(&layer)).then_some(*recipe)
    }
}
