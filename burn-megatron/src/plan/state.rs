//! What a rank keeps between steps: weights, gradients, a wide copy of narrow weights, the optimizer's states; and how
//! ZeRO cuts it over the replicas (arXiv 1910.02054 section 5).

use super::Job;
use super::decoder::Share;
use super::operations::{Op, Unit};
use crate::schedule::stages::Stage;

/// How many values per parameter an optimizer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moments {
    /// For the matrices of the layers.
    pub matrices: u64,
    /// For embeddings, output layer, norms and biases.
    pub others: u64,
}

impl Moments {
    /// AdamW.
    pub const ADAMW: Self = Self { matrices: 2, others: 2 };
    /// Lion, and SGD with momentum.
    pub const ONE: Self = Self { matrices: 1, others: 1 };
    /// SGD without momentum.
    pub const NONE: Self = Self { matrices: 0, others: 0 };
    /// Muon, with AdamW for what is no matrix of a layer.
    pub const MUON: Self = Self { matrices: 1, others: 2 };
}

/// Parameters that are reduced, cut and gathered together, in one flat buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Parameters.
    pub elements: u64,
    /// How many of them are in matrices of layers.
    pub matrices: u64,
    /// Ranks that hold the same ones.
    pub replicas: u64,
}

impl Bucket {
    /// The ZeRO stage; with nobody to share with there is none.
    pub fn zero(&self, job: &Job) -> u8 {
        if self.replicas == 1 { 0 } else { job.layout.zero }
    }

    /// Bytes of all its values, with padding.
    pub fn bytes(&self, element: u64) -> u64 {
        self.elements.next_multiple_of(self.replicas) * element
    }
}

/// Bytes that are there all the time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct States {
    /// Weights.
    pub weights: u64,
    /// Weights quantised to FP8.
    pub quantised: u64,
    /// Main gradients, in fp32 unless weights are wider.
    pub gradients: u64,
    /// The fp32 copy of weights that are narrower.
    pub master: u64,
    /// The optimizer's moments.
    pub moments: u64,
}

impl States {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights + self.quantised + self.gradients + self.master + self.moments
    }

    /// What a bucket takes, without quantised weights.
    pub fn of(bucket: &Bucket, job: &Job) -> Self {
        let (zero, replicas) = (bucket.zero(job), bucket.replicas);
        let whole = bucket.elements.next_multiple_of(replicas);
        let shard = whole / replicas;
        let from = |stage: u8, element: u64| element * if zero >= stage { shard } else { whole };
        let (wide, narrow) = (job.wide(), job.element < job.wide());
        let kept = job.moments.matrices * bucket.matrices + job.moments.others * (bucket.elements - bucket.matrices);
        let kept = kept + job.moments.others * (whole - bucket.elements);
        Self {
            weights: match (zero, narrow) {
                // The wide shard is what narrow weights are gathered from; GPUs keep it in both types.
                (3, true) if !job.gpu => 0,
                (3, _) => shard * job.element,
                _ => bucket.elements * job.element,
            },
            quantised: 0,
            gradients: from(2, wide),
            master: if narrow { from(1, wide) } else { 0 },
            moments: wide * if zero >= 1 { kept.div_ceil(replicas) } else { kept },
        }
    }
}

impl std::ops::AddAssign for States {
    fn add_assign(&mut self, other: Self) {
        self.weights += other.weights;
        self.quantised += other.quantised;
        self.gradients += other.gradients;
        self.master += other.master;
        self.moments += other.moments;
    }
}

/// The buckets of each unit of a stage: one per layer and one for its experts, one each for embedding and head; a tied
/// embedding is one of its own, of which a stage that has only the head holds a copy.
pub fn buckets(job: &Job, share: &Share, stage: &Stage, units: &[Unit]) -> Vec<Vec<Bucket>> {
    let decoder = &job.decoder;
    let table = share.vocab * share.hidden;
    let of = |elements: u64| Bucket { elements, matrices: 0, replicas: job.replicas() };
    let layer = |ops: &[Op]| -> Vec<Bucket> {
        let bucket = |expert: bool, replicas: u64| {
            let mine = || ops.iter().filter(move |op| op.expert == expert);
            let (elements, matrices) = (mine().map(|op| op.weight).sum(), mine().map(|op| op.matrix).sum());
            Bucket { elements, matrices, replicas }
        };
        let buckets = [bucket(false, job.replicas()), bucket(true, job.expert_replicas())];
        buckets.into_iter().filter(|bucket| bucket.elements > 0).collect()
    };
    let unit = |unit: &Unit| -> Vec<Bucket> {
        let inside = |at: &usize| unit.layers.iter().any(|ops| ops.contains(at));
        let weight: u64 = (0..unit.ops.len()).filter(|at| !inside(at)).map(|at| unit.ops[at].weight).sum();
        let ends = match (unit.head, decoder.tied) {
            _ if weight == 0 => vec![],
            (false, true) if weight > table => vec![of(table), of(weight - table)],
            (false, _) => vec![of(weight)],
            (true, true) if stage.embedding => vec![of(weight - table)],
            (true, true) => vec![of(weight - table), of(table)],
            (true, false) if decoder.shares_table() && !stage.embedding => vec![of(weight), of(table)],
            (true, false) => vec![of(weight)],
        };
        let layers = unit.layers.iter().flat_map(|ops| layer(&unit.ops[ops.clone()]));
        ends.into_iter().chain(layers).collect()
    };
    units.iter().map(unit).collect()
}
