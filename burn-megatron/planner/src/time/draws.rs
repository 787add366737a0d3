//! Time of what GRPO does before a step: prompts are read, completions drawn token by token, and log-probabilities computed.

use super::CostModel;
use crate::Job;
use crate::gpus::Hardware;
use crate::operations::Unit;
use crate::state::buckets;
use crate::traffic::Replication;
use layouts::mesh::GridKind;

/// Seconds of the parts, at least: kernels of one token are too short for the host to hide itself behind them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DrawTime {
    /// Reading all prompts.
    pub prompts: f64,
    /// A token of each completion, when half of the longest is written: weights, and keys and values, are read once.
    pub token: f64,
    /// Tokens of the longest completion after its first, which follows from reading the prompt.
    pub tokens: usize,
    /// Completions that a rank draws together.
    pub sequences: usize,
    /// Forward passes for the log-probabilities under the reference model, and the policy's own if several steps learn from
    /// a draw.
    pub scores: f64,
    /// Steps that learn from a draw.
    pub steps: usize,
}

impl DrawTime {
    /// The sum.
    pub fn total(&self) -> f64 {
        self.prompts + self.token * self.tokens as f64 + self.scores
    }
}

/// Of a run that draws completions.
pub fn draw_time(job: &Job, hardware: &Hardware) -> Option<DrawTime> {
    let completions = job.post_training.completions?;
    let (sequences, tokens) = (job.drawn_sequences(), completions.longest.saturating_sub(1));
    let prompts = job.reading_prompts(&completions);
    let one_token = Job { seq: 1, ..prompts.clone() };
    // Stages take turns: a token is read behind the one before it.
    let forward = |job: &Job| -> f64 {
        let cost = CostModel { job, hardware };
        let of = |unit: &Unit| cost.unit(unit)[0].total();
        job.stages.stages().iter().flat_map(|stage| job.units(stage)).map(|unit| of(&unit)).sum()
    };
    let cost = CostModel { job, hardware };
    let gathered = match job.layout.zero_stage(GridKind::Dense) {
        3 => {
            let local = job.local();
            let of = |stage| {
                let all = buckets(job, &local, stage, &job.units(stage));
                all.iter().flatten().map(|bucket| Replication::of(bucket, job).forward).sum::<u64>()
            };
            job.stages.stages().iter().map(|stage| cost.dp_ranks(of(stage))).sum()
        }
        _ => 0.0,
    };
    let features = job.decoder.cached_features(job.layout.tp) as u64 * job.element;
    let layers = (0..job.decoder.layers).filter(|layer| job.decoder.has_keys(*layer)).count() as u64;
    let positions = (prompts.seq + completions.longest / 2) as u64;
    let cached = (sequences as u64 * positions * features * layers) as f64 / hardware.bandwidth;
    let passes = (job.schedule.micro_batches + job.layout.pp - 1) as f64 / job.layout.pp as f64;
    let again = usize::from(completions.scored) + usize::from(completions.iterations > 1);
    Some(DrawTime {
        prompts: forward(&prompts) + gathered,
        token: forward(&one_token) + gathered + cached,
        tokens,
        sequences,
        scores: again as f64 * passes * forward(job),
        steps: completions.iterations.max(1),
    })
}
