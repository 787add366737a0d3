//! The states of a rank between steps: weights, gradients, master weights and optimizer states, and how ZeRO shards
//! them over the data-parallel ranks (arXiv 1910.02054 section 5).

use super::Job;
use super::decoder::LocalSizes;
use super::operations::{Op, Unit};
use super::post_training::TABLE;
use host::schedule::stages::Stage;
use layouts::mesh::GridKind;

/// Elements whose moments have one scale.
pub(super) const BLOCK: u64 = kernels_cubecl::narrow::dynamic::BLOCK as u64;

/// Number of values per parameter that an optimizer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moments {
    /// For matrices of layers.
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
    /// Muon, with AdamW for all other parameters than matrices of layers.
    pub const MUON: Self = Self { matrices: 1, others: 2 };
}

/// Bytes of the optimizer's states, next to weights that are not fp64: of 256 elements of the moments, which may have a
/// scale, and of one element of all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateBytes {
    /// Of the first moment.
    pub exp_avg: u64,
    /// Of the second moment.
    pub exp_avg_sq: u64,
    /// Of a main gradient.
    pub main_grads: u64,
    /// Of a master weight, where weights are narrower than fp32.
    pub main_params: u64,
    /// Of a moving average of the weights; 0 without one.
    pub ema: u64,
}

impl StateBytes {
    /// All in fp32.
    pub const F32: Self = Self { exp_avg: 1024, exp_avg_sq: 1024, main_grads: 4, main_params: 4, ema: 0 };
    /// Moments in bf16, master weights as remainders of bf16 weights, main gradients in fp32.
    pub const BF16: Self = Self { exp_avg: 512, exp_avg_sq: 512, main_grads: 4, main_params: 2, ema: 0 };
    /// The same with moments in 8 bits.
    pub const BITS8: Self = Self { exp_avg: 260, exp_avg_sq: 260, ..Self::BF16 };

    /// Bytes of 256 elements of `count` moments, given those of an element of fp64 weights.
    pub(super) fn moments(self, count: u64, wide: u64) -> u64 {
        let each = if wide > 4 { [BLOCK * wide; 2] } else { [self.exp_avg, self.exp_avg_sq] };
        each.into_iter().take(count as usize).sum()
    }
}

/// Parameters that are reduced, sharded and gathered together, in one flat buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Parameters.
    pub elements: u64,
    /// Number of parameters in matrices of layers.
    pub matrices: u64,
    /// Number of ranks that hold the same parameters.
    pub dp_ranks: u64,
    /// Number of those over which ZeRO shards them.
    pub shards: u64,
}

impl Bucket {
    /// Some elements of a job, held by the ranks of a grid.
    pub fn new(job: &Job, grid: GridKind, elements: u64, matrices: u64) -> Self {
        let dp_ranks = match grid {
            GridKind::Dense => job.dp_ranks(),
            GridKind::Expert => job.expert_dp_ranks(),
        };
        Self { elements, matrices, dp_ranks, shards: job.layout.zero_shards(grid) as u64 }
    }

    /// The ZeRO stage; 0 where one rank has nothing to shard with others.
    pub fn zero(&self, job: &Job) -> u8 {
        if self.shards == 1 { 0 } else { job.layout.zero }
    }

    /// Number of ZeRO's groups: of ranks that hold the same shard.
    pub fn groups(&self) -> u64 {
        self.dp_ranks / self.shards
    }

    /// Bytes of the whole bucket, with padding.
    pub fn bytes(&self, element: u64) -> u64 {
        self.elements.next_multiple_of(self.dp_ranks) * element
    }
}

/// Bytes of states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct States {
    /// Weights.
    pub weights: u64,
    /// FP8 copies of weights.
    pub quantised: u64,
    /// Main gradients, in fp32 or bf16 unless weights are wider.
    pub gradients: u64,
    /// Master weights, in fp32 or as remainders, if the weights are narrower.
    pub master: u64,
    /// The optimizer's states.
    pub moments: u64,
    /// Master weights and optimizer states in host memory instead.
    pub host: u64,
}

impl States {
    /// The sum, without host memory.
    pub fn total(&self) -> u64 {
        self.weights + self.quantised + self.gradients + self.master + self.moments
    }

    /// The states of a bucket, without FP8 copies.
    pub fn of(bucket: &Bucket, job: &Job) -> Self {
        let zero = bucket.zero(job);
        let whole = bucket.elements.next_multiple_of(bucket.dp_ranks);
        let shard = whole / bucket.shards;
        let from = |stage: u8, element: u64| element * if zero >= stage { shard } else { whole };
        let (wide, narrow) = (job.wide(), job.element < job.wide());
        let [matrix, other] =
            [job.moments.matrices, job.moments.others].map(|count| job.state_bytes.moments(count, wide));
        let average = if job.state_bytes.ema > 0 { job.state_bytes.ema.max(wide) } else { 0 };
        let moments = (matrix * bucket.matrices + other * (whole - bucket.matrices)).div_ceil(BLOCK);
        // CPU ranks keep masters in fp32 in any case.
        let master = if job.gpu { job.state_bytes.main_params } else { wide };
        let master = if narrow { from(1, master) } else { 0 };
        let moments = (moments + average * whole).div_ceil(bucket.shards);
        // CPU ranks have them in the same memory.
        let offload = if job.gpu { job.offload } else { 0.0 };
        let [master_on_host, moments_on_host] = [master, moments].map(|bytes| (offload * bytes as f64) as u64);
        Self {
            weights: match (zero, narrow) {
                // Narrow weights are gathered from the master shard; GPUs keep a narrow shard too.
                (3, true) if !job.gpu => 0,
                (3, _) => shard * job.element,
                _ => bucket.elements * job.element,
            },
            quantised: 0,
            gradients: from(2, job.main_grad()),
            master: master - master_on_host,
            moments: moments - moments_on_host,
            host: master_on_host + moments_on_host,
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
        self.host += other.host;
    }
}

/// The buckets of each unit of a stage: one per layer and one for its experts, one each for embedding and head. A
/// tied embedding has a bucket of its own, and a stage with only the head holds a copy.
pub fn buckets(job: &Job, local: &LocalSizes, stage: &Stage, units: &[Unit]) -> Vec<Vec<Bucket>> {
    let tied = job.decoder.tied && !job.is_frozen(TABLE);
    let table = local.vocab * local.hidden;
    let of = |elements: u64| Bucket::new(job, GridKind::Dense, elements, 0);
    let layer = |ops: &[Op]| -> Vec<Bucket> {
        let bucket = |grid: GridKind| {
            let mine = || ops.iter().filter(move |op| op.expert == (grid == GridKind::Expert));
            let (elements, matrices) = (mine().map(|op| op.weight).sum(), mine().map(|op| op.matrix).sum());
            Bucket::new(job, grid, elements, matrices)
        };
        let buckets = [GridKind::Dense, GridKind::Expert].map(bucket);
        buckets.into_iter().filter(|bucket| bucket.elements > 0).collect()
    };
    let unit = |unit: &Unit| -> Vec<Bucket> {
        let inside = |at: &usize| unit.layers.iter().any(|ops| ops.contains(at));
        let weight: u64 = (0..unit.ops.len()).filter(|at| !inside(at)).map(|at| unit.ops[at].weight).sum();
        let ends = match (unit.head, tied) {
            _ if weight == 0 => vec![],
            (false, true) if weight > table => vec![of(table), of(weight - table)],
            (false, _) => vec![of(weight)],
            (true, true) if stage.embedding => vec![of(weight - table)],
            (true, true) => vec![of(weight - table), of(table)],
            (true, false) if job.shares_table() && !stage.embedding => vec![of(weight), of(table)],
            (true, false) => vec![of(weight)],
        };
        let layers = unit.layers.iter().flat_map(|ops| layer(&unit.ops[ops.clone()]));
        ends.into_iter().chain(layers).collect()
    };
    units.iter().map(unit).collect()
}
