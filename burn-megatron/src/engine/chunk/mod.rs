//! A stage of the model on this rank, as a chain of segments.

mod extend;
mod pass;
mod passes;
mod saved;

use super::segments::{Segment, segments};
use crate::engine::ParamGroups;
use crate::optim::BucketSpec;
use crate::schedule::Pass as Kind;
use backend_dist::gpu::host_copy::ActivationMemory;
use backend_dist::ops::weight_grads::Deferred;
use backend_dist::shard::{ParamSpec, Unit};
use burn::module::{ModuleVisitor, Param};
use burn::tensor::{DType, Gradients, Tensor};
use models::lora::without_adapters;
use models::{CausalLm, Recompute};
pub(super) use pass::{HeldOut, Output, Pass, Seen};
use saved::SavedSegment;
use std::collections::{BTreeMap, HashMap};

/// A stage's model and what its passes have left for later ones.
pub(super) struct Chunk<M> {
    /// Always there between calls; the optimizer takes it apart and puts it together again.
    model: Option<M>,
    steps: Vec<Step>,
    /// Of this stage, in the order of the model: unit and index of its bucket in the optimizer.
    pub buckets: Vec<(Unit, usize)>,
    /// ZeRO stage: from 2 on gradients are reduced after every micro-batch, with 3 parameters are gathered for each use.
    zero: u8,
    /// Parameters leave the model between the passes.
    leaves: bool,
    /// By micro-batch, one entry per segment.
    live: HashMap<usize, Vec<SavedSegment>>,
    /// Inputs of recomputed layers wait in host memory.
    offloads: bool,
    host: ActivationMemory,
    /// By micro-batch: deferred weight gradients.
    late: HashMap<usize, Vec<DeferredGrads<M>>>,
    /// That gradients belong to this stage was checked once; it does not change from step to step.
    checked: bool,
    /// What stands in for the model in forward passes without gradients.
    stand_in: Option<StandIn<M>>,
}

/// A model in place of a stage's own.
pub(super) enum StandIn<M> {
    /// Another one, whose weights are whole.
    Other(M),
    /// The stage's own, its adapters switched off.
    WithoutAdapters,
}

/// A segment and its parameters.
struct Step {
    segment: Segment,
    /// Buckets with its parameters.
    uses: Vec<usize>,
    /// A backward pass has nothing to compute: nothing is trained here and in what comes before.
    is_constant: bool,
    /// The input has a gradient.
    needs_input_grad: bool,
    /// Those that no earlier segment uses: after the backward pass their gradients are complete.
    completes: Vec<usize>,
}

struct DeferredGrads<M> {
    step: usize,
    rest: Gradients,
    deferred: Deferred,
    /// With the parameters of these gradients, where they have left the stage's model by then.
    model: Option<M>,
}

/// Position of a unit's parameters of one of so many groups in a model, the same in every layout.
fn key(unit: Unit, group: usize, groups: usize) -> usize {
    let unit = match unit {
        Unit::Tied => 0,
        Unit::Embedding => 1,
        Unit::Layer(layer) => 2 + 2 * layer,
        Unit::Experts(layer) => 3 + 2 * layer,
        Unit::Head => return usize::MAX - (groups - 1 - group),
    };
    unit * groups + group
}

/// What a [`key`] of one of so many groups stands for: `embedding`, `layers.N` or `head`.
pub(super) fn name_of(key: usize, groups: usize) -> String {
    match key / groups {
        _ if key > usize::MAX - groups => "head".into(),
        0 | 1 => "embedding".into(),
        unit => format!("layers.{}", unit / 2 - 1),
    }
}

impl<M: CausalLm> Chunk<M> {
    /// A stage whose buckets are appended to `buckets`; `layers` are those of the whole model.
    ///
    /// Graphs hold the weights of a segment. Under ZeRO 3 these are freed between the passes, so that all segments are
    /// recomputed, unless `in_place` says that they are gathered into the memory that the graph refers to. Fails if a
    /// parameter belongs to several of the groups.
    pub fn new(
        model: M,
        layers: usize,
        (recompute, zero, in_place): (&Recompute, u8, bool),
        groups: &ParamGroups,
        buckets: &mut Vec<BucketSpec>,
    ) -> Result<Self, String> {
        // A bucket is updated as one.
        let scales = groups.scales();
        let mut units: BTreeMap<(Unit, usize), Vec<_>> = BTreeMap::new();
        for spec in model.registry().iter().filter(|spec| spec.trained) {
            let scale = groups.scale(spec)?;
            let group = scales.iter().position(|other| *other == scale).expect("these are all that there are");
            units.entry((spec.unit, group)).or_default().push(spec.clone());
        }
        let first = buckets.len();
        let buckets_of_units: Vec<_> = units.keys().map(|(unit, _)| *unit).zip(first..).collect();
        buckets.extend(units.into_iter().map(|((unit, group), params)| {
            let (hidden, key) = (unit.layer().is_some(), key(unit, group, scales.len()));
            BucketSpec { key, params, hidden, at_once: 1, scale: scales[group] }
        }));
        let mut seen: Vec<usize> = Vec::new();
        let step = |segment: Segment| {
            let uses: Vec<usize> = buckets_of_units
                .iter()
                .filter(|(unit, _)| segment.link.uses(*unit, layers))
                .map(|(_, bucket)| *bucket)
                .collect();
            let completes: Vec<usize> = uses.iter().filter(|bucket| !seen.contains(bucket)).copied().collect();
            seen.extend(&completes);
            Step { segment, uses, completes, is_constant: false, needs_input_grad: true }
        };
        let again = zero == 3 && !in_place;
        let mut steps: Vec<Step> = segments(model.part(), recompute, again).into_iter().map(step).collect();
        let mut is_constant = model.part().embedding;
        for step in &mut steps {
            step.needs_input_grad = !is_constant;
            is_constant = is_constant && step.uses.is_empty();
            step.is_constant = is_constant;
        }
        for Step { uses, .. } in &steps {
            for bucket in uses {
                let len = |bucket: usize| buckets[bucket].params.iter().map(ParamSpec::local_len).sum::<usize>();
                let same =
                    |other: &&usize| buckets[**other].grid() == buckets[*bucket].grid() && len(**other) == len(*bucket);
                buckets[*bucket].at_once = uses.iter().filter(same).count();
            }
        }
        Ok(Self {
            model: Some(model),
            steps,
            buckets: buckets_of_units,
            zero,
            leaves: again,
            live: HashMap::new(),
            offloads: recompute.cpu_offload,
            host: ActivationMemory::default(),
            late: HashMap::new(),
            checked: false,
            stand_in: None,
        })
    }

    /// The model; under ZeRO 3 its weights are released (on GPUs: undefined).
    pub fn model(&self) -> &M {
        self.model.as_ref().expect("the model is in place between calls")
    }

    /// Lets another model stand in for the stage's own in forward passes without gradients; `None` ends that.
    pub fn stand_in(&mut self, other: Option<StandIn<M>>) {
        self.stand_in = other;
    }

    /// Without autodiff, what runs in forward passes without gradients; its weights are gathered.
    fn valid(&self) -> M {
        match &self.stand_in {
            None => self.model().valid(),
            Some(StandIn::Other(other)) => other.valid(),
            Some(StandIn::WithoutAdapters) => without_adapters(self.model().valid()),
        }
    }

    /// Whether all weights are there between the passes.
    pub fn has_whole_weights(&self) -> bool {
        self.zero < 3
    }

    /// Replaces the model.
    pub fn change(&mut self, change: impl FnOnce(M) -> M) {
        let model = self.model.take().expect("the model is in place between calls");
        self.model = Some(change(model));
    }

    /// Hands the model to `change` for each of its buckets.
    pub fn for_buckets(&mut self, mut change: impl FnMut(usize, M) -> M) {
        for (_, bucket) in &self.buckets {
            let model = self.model.take().expect("the model is in place between calls");
            self.model = Some(change(*bucket, model));
        }
    }

    /// Buckets that a pass uses first; a pass for weight gradients none.
    pub fn first_used(&self, pass: Kind) -> &[usize] {
        let step = match pass {
            Kind::Forward => self.steps.first(),
            Kind::Backward | Kind::BackwardInput => self.steps.last(),
            Kind::BackwardWeight => None,
        };
        step.map_or(&[], |step| &step.uses)
    }

    /// Why some inputs stay on the device although they were to wait in host memory, once.
    pub fn take_host_trouble(&mut self) -> Option<String> {
        self.host.take_trouble()
    }

    /// Drops what passes have left for later ones.
    pub fn forget(&mut self) {
        self.live.clear();
        self.late.clear();
    }

    /// Micro-batches in flight, whose activations are saved.
    pub fn in_flight(&self) -> usize {
        self.live.len() + self.late.len()
    }
}

/// Element type of a model's parameters; `None` if it has none.
pub(super) fn dtype_of<M: CausalLm>(model: &M) -> Option<DType> {
    struct First(Option<DType>);

    impl ModuleVisitor for First {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.get_or_insert_with(|| param.val().dtype());
        }
    }
    let mut first = First(None);
    model.visit(&mut first);
    first.0
}
