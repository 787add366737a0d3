//! Memory of models that are not trained, and of completions that are drawn before a step.

use super::RankMemory;
use super::stage::StageMemory;
use super::unit::UnitMemory;
use crate::Job;
use crate::operations::Unit;
use crate::state::States;
use host::schedule::Placement;
use layouts::sizes::gemm_workspace;

/// A teacher or a reference model, on a pipeline rank.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FrozenModels {
    /// Bytes that are there all the time.
    pub bytes: u64,
    /// Bytes that the teacher's forward pass needs.
    pub teaching: u64,
}

impl FrozenModels {
    pub fn of(job: &Job, chunks: &[&StageMemory], (placement, rank): (Placement, usize)) -> Self {
        let has_reference = job.post_training.completions.is_some_and(|completions| completions.reference);
        let reference = if has_reference { chunks.iter().map(|stage| stage.whole).sum() } else { 0 };
        let Some(teacher) = job.teacher() else { return Self { bytes: reference, teaching: 0 } };
        let (units, local) = (teacher.teacher_units(rank, placement), teacher.local());
        // A stage of a short teacher may have nothing.
        let first = units.first().is_some_and(|unit| !unit.head && unit.layers.is_empty());
        let last = units.iter().any(|unit| unit.head);
        let elements = units.iter().flat_map(|unit| &unit.ops).map(|op| op.weight).sum::<u64>();
        let twice = if teacher.decoder.tied && first && last { local.vocab * local.hidden } else { 0 };
        let stream = local.stream_tokens * local.hidden * job.element;
        // In a pipeline the last stage has the activations of all micro-batches before the passes.
        let heard = if job.layout.pp > 1 && last { job.schedule.micro_batches as u64 * stream } else { 0 };
        let teaching = units.iter().map(|unit| forward(&teacher, unit)).max().unwrap_or(0);
        Self { bytes: (elements - twice) * job.element + heard + reference, teaching }
    }
}

/// Peak of a forward pass of which nothing is kept; of the head, of its logits, which are made of activations that are kept.
fn forward(job: &Job, unit: &Unit) -> u64 {
    if !unit.head {
        return UnitMemory::new(unit, job).forward;
    }
    let local = job.local();
    let shards = if job.layout.tp > 1 { local.vocab } else { 0 };
    (2 * local.stream_tokens * local.hidden + local.tokens * (job.decoder.vocab as u64 + shards)) * job.element
}

/// While completions are drawn, if they are: states, the keys and values of all positions, and what reading all prompts or
/// one token of each needs. As if no two prompts began with the same tokens: how long they are is not known here.
pub(super) fn drawing(job: &Job, chunks: &[&StageMemory], (placement, rank): (Placement, usize)) -> Option<RankMemory> {
    let completions = job.post_training.completions?;
    let mut states = States::default();
    chunks.iter().for_each(|stage| states += stage.states);
    let (prompts, local, stages) = (job.reading_prompts(&completions), job.local(), job.stages.stages());
    let own = || (0..placement.chunks()).map(|chunk| &stages[placement.stage(rank, chunk)]);
    let sequences = job.drawn_sequences() as u64;
    let features = job.decoder.cached_features(job.layout.tp) as u64;
    let of_layer = sequences * (job.seq.next_multiple_of(BLOCK) as u64) * features * job.element;
    let layers = own().flat_map(|stage| stage.layers.clone()).filter(|layer| job.decoder.has_keys(*layer)).count();
    let read = own().flat_map(|stage| prompts.units(stage)).filter(|unit| !unit.head);
    let read = read.map(|unit| UnitMemory::new(&unit, &prompts).forward).max().unwrap_or(0);
    // Without a kernel what is cached of each sequence is gathered, and the keys transposed, for scores and their softmax.
    // Latents are keys, and but for the rotated key values too, whose copy is apart.
    let positions = sequences * job.seq as u64;
    let scores = 3 * local.heads * job.element.max(4);
    let (heads, copies) = match job.decoder.latent {
        Some(_) => (1, 2 * of_layer),
        None => (local.keys / job.decoder.head_dim.max(1) as u64, of_layer / 2),
    };
    let has_kernel = job.gpu && job.decoder.latent.is_none();
    let decode = if has_kernel { 0 } else { of_layer + copies + positions * (scores + heads * ID) };
    let logits = sequences * job.decoder.vocab as u64 * job.element.max(4);
    let workspace = if job.gpu { 0 } else { gemm_workspace() };
    Some(RankMemory {
        states,
        working: read.max(decode).max(logits) + workspace,
        cache: layers as u64 * of_layer,
        ..RankMemory::default()
    })
}

/// Bytes of a place in the cache.
const ID: u64 = 8;
/// Positions of a block of the cache (generate/texts.rs).
const BLOCK: usize = 64;
