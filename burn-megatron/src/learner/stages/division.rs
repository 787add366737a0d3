//! Which rank of a pipeline holds which parts of a model. Decided before anything starts, the same on every rank.

use std::collections::{BTreeSet, HashMap};

use backend_dist::mesh::{Nearest, ParallelLayout};
use backend_dist::paths::PathVisitor;
use burn::module::{Param, ParamId};
use burn::tensor::Tensor;
use models::Recompute;
use models::recompute::Granularity;

use super::{Part, Stages, StagesError};
use crate::engine::segments::{Link, segments};
use crate::learner::zero::running_states;
use crate::schedule::stages::{Stage, StageLayout};
use crate::schedule::{Schedule, ScheduleKind, ScheduleSpec};

/// What a user wants of a pipeline.
#[derive(Clone, Debug, Default)]
pub(in crate::learner) struct Wanted {
    /// By itself none on one rank, 1F1B on several, interleaved with several chunks per rank.
    pub schedule: Option<ScheduleKind>,
    pub micro_batches: Option<usize>,
    pub recompute: Recompute,
}

/// Parts that run one after the other with one autodiff graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub links: Vec<Link>,
    /// Only the input is kept, and the backward pass runs the forward pass again.
    pub recompute: bool,
}

/// A model divided over the ranks of a pipeline.
#[derive(Clone, Debug)]
pub(in crate::learner) struct Division {
    spec: ScheduleSpec,
    stages: Vec<Stage>,
    recompute: Recompute,
    owners: HashMap<ParamId, Part>,
    paths: HashMap<String, Part>,
    /// The parameters that several parts use, in the order of the model.
    shared: Vec<ParamId>,
}

impl Division {
    /// Divides `model` over the pipeline of `layout`.
    pub fn of<M: Stages>(model: &M, layout: &ParallelLayout, wanted: &Wanted) -> Result<Self, StagesError> {
        let spec = spec(layout, wanted)?;
        let (blocks, placement) = (model.blocks(), spec.placement());
        if blocks < placement.stages() {
            let (ranks, chunks) = (placement.ranks(), placement.chunks());
            let nearest = Nearest::where_legal(ranks, ranks, |ranks| ranks * chunks <= blocks);
            return Err(StagesError::Blocks { ranks, chunks, blocks, nearest });
        }
        let (owners, paths, shared) = owners(model, blocks)?;
        match wanted.recompute.granularity {
            Granularity::Selective => return Err(StagesError::Selective),
            Granularity::Full if wanted.recompute.cpu_offload => return Err(StagesError::CpuOffload),
            Granularity::Full => {
                let states = running_states(model);
                let found = Parameters::default().walk(model).0.into_iter().find(|(_, id, _)| states.contains(id));
                if let Some((path, ..)) = found {
                    return Err(StagesError::RunningState { path });
                }
            }
            Granularity::None => {}
        }
        let stages = StageLayout::balanced(blocks, placement.stages()).stages().to_vec();
        Ok(Self { spec, stages, recompute: wanted.recompute.clone(), owners, paths, shared })
    }

    /// The schedule of so many micro-batches. The last step of an epoch may have fewer than the schedule can take; then
    /// all forward passes come before all backward passes.
    pub fn schedule(&self, micro_batches: usize) -> Schedule {
        let spec = ScheduleSpec { micro_batches, ..self.spec };
        Schedule::new(spec).unwrap_or_else(|_| Schedule::all_forward_all_backward(spec))
    }

    /// The chunks of a pipeline rank, each a list of pieces.
    pub(super) fn chunks(&self, rank: usize) -> Vec<Vec<Piece>> {
        let placement = self.spec.placement();
        (0..placement.chunks()).map(|chunk| self.pieces(&self.stages[placement.stage(rank, chunk)])).collect()
    }

    fn pieces(&self, stage: &Stage) -> Vec<Piece> {
        let part = models::Part { layers: stage.layers.clone(), embedding: stage.embedding, head: stage.loss };
        let mut pieces: Vec<Piece> = Vec::new();
        for segment in segments(&part, &self.recompute, false) {
            match pieces.last_mut() {
                Some(piece) if !piece.recompute && !segment.recompute => piece.links.push(segment.link),
                _ => pieces.push(Piece { links: vec![segment.link], recompute: segment.recompute }),
            }
        }
        pieces
    }

    /// Stages of the model.
    pub fn stages(&self) -> usize {
        self.stages.len()
    }

    /// The rank and its chunk that hold a stage.
    pub fn holder(&self, stage: usize) -> (usize, usize) {
        self.spec.placement().holder(stage)
    }

    /// The ranks that hold a part, the first of them first.
    fn ranks_of(&self, part: &Part) -> Vec<usize> {
        let mut ranks = Vec::new();
        for stage in self.stages_of(part) {
            let rank = self.holder(stage).0;
            if !ranks.contains(&rank) {
                ranks.push(rank);
            }
        }
        ranks
    }

    /// The stages that use a part, in their order.
    fn stages_of(&self, part: &Part) -> BTreeSet<usize> {
        let last = self.stages() - 1;
        match part {
            Part::First => [0].into(),
            Part::Last => [last].into(),
            Part::Tied => [0, last].into(),
            Part::Block(index) => {
                self.stages.iter().position(|stage| stage.layers.contains(index)).into_iter().collect()
            }
            Part::Shared(parts) => parts.iter().flat_map(|part| self.stages_of(part)).collect(),
        }
    }

    /// Whether a pipeline rank holds the parameter with this path.
    pub fn is_path_on(&self, path: &str, rank: usize) -> bool {
        self.paths.get(path).is_some_and(|part| self.ranks_of(part).contains(&rank))
    }

    /// Whether a pipeline rank holds a parameter.
    pub fn is_on(&self, id: ParamId, rank: usize) -> bool {
        self.owners.get(&id).is_some_and(|part| self.ranks_of(part).contains(&rank))
    }

    /// The chunk of a pipeline rank that alone uses a parameter.
    pub(super) fn chunk_of(&self, id: ParamId, rank: usize) -> Option<usize> {
        let part = self.owners.get(&id).filter(|part| !is_shared(part))?;
        let (holder, chunk) = self.holder(*self.stages_of(part).first()?);
        (holder == rank).then_some(chunk)
    }

    /// The pipeline rank whose value and optimizer state of a parameter are saved.
    pub fn saver(&self, id: ParamId) -> usize {
        self.owners.get(&id).map_or(0, |part| self.ranks_of(part)[0])
    }

    /// The part that uses the parameter with this path.
    pub fn part(&self, path: &str) -> Option<Part> {
        self.paths.get(path).cloned()
    }

    /// Which of `ranks` data-parallel ranks owns a parameter that several parts use, the same in each of their stages.
    pub fn shared_owner(&self, id: ParamId, ranks: usize) -> Option<usize> {
        self.shared.iter().position(|shared| *shared == id).map(|at| at % ranks)
    }

    /// The ranks that hold this parameter together, the first of them first, if they are several.
    pub fn sharers(&self, id: ParamId) -> Option<Vec<usize>> {
        let part = self.owners.get(&id).filter(|part| is_shared(part))?;
        Some(self.ranks_of(part)).filter(|ranks| ranks.len() > 1)
    }
}

/// The schedule of a layout.
fn spec(layout: &ParallelLayout, wanted: &Wanted) -> Result<ScheduleSpec, StagesError> {
    let by_size = if layout.pp > 1 { ScheduleKind::OneFOneB } else { ScheduleKind::NoPipeline };
    let kind = wanted.schedule.unwrap_or(by_size);
    if kind.splits_backward() {
        let nearest = if kind == ScheduleKind::ZbV { ScheduleKind::Interleaved } else { ScheduleKind::OneFOneB };
        return Err(StagesError::SplitBackward { kind, nearest });
    }
    let mut spec = ScheduleSpec::new(kind, layout.pp, wanted.micro_batches.unwrap_or(1));
    if layout.vpp > 1 {
        spec = spec.with_virtual_pipeline(layout.vpp);
    }
    spec.check()?;
    Ok(spec)
}

type Owned = (HashMap<ParamId, Part>, HashMap<String, Part>, Vec<ParamId>);

/// The part of every parameter, by id and by path, and the parameters that several parts use.
fn owners<M: Stages>(model: &M, blocks: usize) -> Result<Owned, StagesError> {
    let (mut owners, mut paths, mut shared): Owned = Default::default();
    let mut names: HashMap<ParamId, (String, bool)> = HashMap::new();
    let mut nearest = Part::First;
    for (path, id, is_trained) in Parameters::default().walk(model).0 {
        let Some(part) = model.owner(&path) else { return Err(StagesError::NoOwner { path, nearest }) };
        if !part.is_of(blocks) {
            return Err(StagesError::NoBlock { path, part, blocks });
        }
        // Burn's optimizers step the first of two trained fields alone, so that from then on stages use two parameters.
        let differs = |other: &&(String, bool)| paths[&other.0] != part || is_shared(&part) && is_trained && other.1;
        if let Some((other, _)) = names.get(&id).filter(differs) {
            let (other, other_part) = (other.clone(), paths[other].clone());
            return Err(StagesError::TwoOwners { path, part, other, other_part });
        }
        nearest = part.clone();
        if is_trained || !names.contains_key(&id) {
            names.insert(id, (path.clone(), is_trained));
        }
        if owners.insert(id, part.clone()).is_none() && is_shared(&part) {
            shared.push(id);
        }
        paths.insert(path, part);
    }
    Ok((owners, paths, shared))
}

/// Whether several parts use what belongs to this one.
fn is_shared(part: &Part) -> bool {
    matches!(part, Part::Tied | Part::Shared(_))
}

/// The paths and ids of a module's float parameters and running states, in its order, and whether they are trained.
#[derive(Default)]
pub(super) struct Parameters(pub(super) Vec<(String, ParamId, bool)>);

impl PathVisitor for Parameters {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        // Nothing is made to ask: what is not there yet is to be trained.
        let is_trained = !param.is_initialized() || param.is_require_grad();
        self.0.push((path.to_string(), param.id, is_trained));
    }
}
