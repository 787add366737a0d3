//! The optimizer of one rank: gradients in, sums over ranks, one step, new parameters out.
//!
//! `weights` says where passes find the parameters, `gradients` takes what they give, `sums` adds it up over ranks,
//! `norm` measures it; the step is here.

mod gradients;
mod norm;
mod sums;
mod weights;

use super::blocks::Blocks;
use super::bucket::{Bucket, Offload};
use super::config::OptimizerConfig;
use super::flat::Flat;
use super::gpu::Weights;
use super::host::HostReserve;
use super::layout::BucketSpec;
use super::muon::{assign_owners, matrix_steps};
use super::sharding::Sharding;
use super::step_info::StepInfo;
use super::weight_buffers::WeightBuffers;
use backend_dist::comm::Group;
use backend_dist::gpu::buffer::{self, BLOCK, Buffer};
use backend_dist::mesh::GridKind;
use backend_dist::ops::main_grads;
use burn::module::Module;
use burn::tensor::{DType, Device};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use weights::share_weights;

/// Bytes that an optimizer holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Main gradients now.
    pub grads: u64,
    /// The most that main gradients have taken since the start.
    pub grads_peak: u64,
    /// Moments.
    pub states: u64,
    /// Main weights: fp32 copies of bf16 or f16 weights or their remainders, and shards of ZeRO 3.
    pub values: u64,
    /// Moments and main weights in host memory instead.
    pub host: u64,
}

/// The optimizer of one rank, over all its model chunks. Parameters come in buckets, each given by its index in the
/// list that [`Optimizer::new`] got. All ranks that share a bucket call the same methods in the same order.
///
/// A step is: for every micro-batch [`accumulate`](Self::accumulate) and [`complete`](Self::complete), then
/// [`reduce`](Self::reduce), [`sum_partial`](Self::sum_partial), sums of tied weights, [`norm`](Self::norm), and either
/// [`begin_step`](Self::begin_step) and [`step`](Self::step) for every bucket, or [`skip`](Self::skip). That is the
/// order of Megatron's `finalize_model_grads.py`.
///
/// Under ZeRO (Rajbhandari et al.: <https://arxiv.org/abs/1910.02054>) of stage 1 a data-parallel rank holds moments for its shard
/// of a bucket and updates that, from 2 on it also keeps only its shard of the gradients, under 3 only that of the
/// weights.
///
/// With hybrid sharding the data-parallel ranks are several groups that do so, each for itself: [`Sharding`].
///
/// Routed experts are held by other ranks than the rest of the model (`GridKind::Expert`): their buckets have data-parallel ranks
/// and neighbours of their own.
pub struct Optimizer {
    pub(super) config: OptimizerConfig,
    pub(super) buckets: Vec<Bucket>,
    /// Blocks of neighbouring tensor parallel ranks, by grid and size.
    neighbours: BTreeMap<(GridKind, usize), Group>,
    pub(super) device: Device,
    updates: u64,
    /// Decay of the moving average of the weights, if one is wanted.
    pub(super) average: Option<f64>,
    grads_peak: u64,
    /// By grid, the bucket whose gradients were reduce-scattered last.
    scattered: BTreeMap<GridKind, usize>,
    /// Buckets whose gradients backward passes may write to until [`Optimizer::close`].
    opened: Vec<usize>,
    /// Under ZeRO 3 on GPUs.
    weight_buffers: Option<RefCell<WeightBuffers>>,
    /// On GPUs, for checkpoints that are written while training continues.
    pub(super) host: HostReserve,
    /// Where some states are in host memory.
    pub(super) offload: Option<Offload>,
    /// Why fewer of them are there than should be.
    offload_trouble: Option<String>,
}

impl Optimizer {
    /// Zeroed moments for weights of type `dtype`. By grid, the ranks of `sharding` hold the same weights and see other tokens, and
    /// `neighbours` gives the rank's block of so many ranks of its tensor parallel group, for sums of gradients that
    /// are partial there and for matrices that Muon needs whole. `device` is without autodiff. States in
    /// host memory take at most `host_bytes` there.
    pub fn new(
        config: &OptimizerConfig,
        buckets: Vec<BucketSpec>,
        sharding: impl Fn(GridKind) -> Sharding,
        neighbours: impl Fn(GridKind, usize) -> Group,
        (device, dtype): (&Device, DType),
        host_bytes: usize,
    ) -> Self {
        // Views of GPU memory begin at multiples.
        let alignment = if Buffer::fits(device, dtype) { buffer::ALIGNMENT } else { 1 };
        Self::aligned(alignment, config, buckets, sharding, neighbours, (device, dtype), host_bytes)
    }

    /// [`Optimizer::new`] with parameters at multiples of `alignment` in the flat buffers.
    pub(super) fn aligned(
        alignment: usize,
        config: &OptimizerConfig,
        buckets: Vec<BucketSpec>,
        sharding: impl Fn(GridKind) -> Sharding,
        neighbours: impl Fn(GridKind, usize) -> Group,
        (device, dtype): (&Device, DType),
        host_bytes: usize,
    ) -> Self {
        // A shard begins with a block of moments.
        let in_blocks = config.states().in_blocks(dtype);
        let alignment = if in_blocks { alignment.next_multiple_of(BLOCK) } else { alignment };
        let bucket = |spec: BucketSpec| {
            let sharding = sharding(spec.grid());
            Bucket::new(spec, alignment, config, sharding, device, dtype)
        };
        let mut buckets: Vec<Bucket> = buckets.into_iter().map(bucket).collect();
        let (offload, offload_trouble) = Offload::new(&mut buckets, config, host_bytes);
        buckets.iter_mut().for_each(|bucket| bucket.allocate(config, device));
        let weight_buffers = share_weights(&mut buckets, device, dtype);
        let muon = config.muon().is_some();
        if muon {
            assign_owners(&mut buckets);
        }
        let units = buckets.iter().flat_map(|bucket| bucket.layout.units.iter().map(|unit| (bucket.spec.grid(), unit)));
        let sizes = units.flat_map(|(grid, unit)| {
            let cut = unit.section.split.filter(|_| muon && unit.matrix);
            let sizes = [unit.partial, cut.map(|split| split.parts * unit.section.copies)];
            sizes.map(|size| size.map(|size| (grid, size)))
        });
        let sizes: BTreeSet<_> = sizes.flatten().collect();
        let neighbours = sizes.into_iter().map(|(grid, size)| ((grid, size), neighbours(grid, size))).collect();
        Self {
            config: *config,
            buckets,
            neighbours,
            device: device.clone(),
            updates: 0,
            average: None,
            grads_peak: 0,
            scattered: BTreeMap::new(),
            opened: Vec::new(),
            weight_buffers: weight_buffers.map(RefCell::new),
            host: HostReserve::default(),
            offload,
            offload_trouble,
        }
    }

    /// With an exponential moving average of the weights, in fp32 or fp64, sharded as the moments are. To be asked for
    /// before [`shard`](Self::shard).
    pub fn with_average(mut self, decay: Option<f64>) -> Self {
        self.average = decay;
        self
    }

    /// The share that the next steps remove of a decayed parameter, times the learning rate.
    pub fn set_weight_decay(&mut self, share: f64) {
        self.config = self.config.with_weight_decay(share);
    }

    /// Starts update number [`updates`](Self::updates)` + 1`.
    pub fn begin_step(&mut self) {
        self.updates += 1;
        self.host.protect();
        self.offload.iter().for_each(Offload::begin);
        self.forget_gathered();
    }

    /// Updates the bucket's parameters; each bucket once after [`begin_step`](Self::begin_step). On CPU ranks under
    /// ZeRO 0 parameters are changed in place unless somebody else holds their storage. Under ZeRO 3 the module is left
    /// as it is.
    pub fn step<M: Module>(&mut self, index: usize, model: M, info: &StepInfo) -> M {
        let bucket = &mut self.buckets[index];
        let scale = bucket.spec.scale;
        let info = StepInfo { lr: info.lr * scale.lr, ..*info };
        let config = self.config.with_weight_decay(self.config.weight_decay() * scale.weight_decay);
        let rule = config.rule(info.lr, self.updates, info.grad_scale);
        let steps = |muon| matrix_steps(bucket, muon, &info, &self.neighbours);
        let matrices = config.muon().map(steps).unwrap_or_default();
        let model = bucket.step(model, &rule, &matrices, self.offload.as_mut());
        self.average.into_iter().for_each(|decay| bucket.follow(&model, decay));
        // The first buckets of the next forward pass arrive while the others are updated.
        if self.weight_buffers.as_ref().is_some_and(|buffers| buffers.borrow().is_free(index)) {
            self.prefetch(index, &[]);
        }
        model
    }

    /// Ends a step that is not done: the main gradients are forgotten.
    pub fn skip(&mut self) {
        self.buckets.iter_mut().for_each(|bucket| bucket.grads.forget());
    }

    /// Updates done so far.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Continues to count updates from here.
    pub fn set_updates(&mut self, updates: u64) {
        self.updates = updates;
    }

    /// What a bucket was made from.
    pub fn spec(&self, bucket: usize) -> &BucketSpec {
        &self.buckets[bucket].spec
    }

    /// Why less of the states is in host memory than should be, once.
    pub fn take_offload_trouble(&mut self) -> Option<String> {
        self.offload_trouble.take()
    }

    /// Bytes of all buffers.
    pub fn memory(&self) -> Memory {
        let host = self.offload.as_ref().map_or(0, Offload::bytes);
        let mut memory = Memory { grads_peak: self.grads_peak, host, ..Memory::default() };
        for bucket in &self.buckets {
            let bytes = |flat: &Option<Flat>| flat.as_ref().map_or(0, Flat::bytes);
            memory.grads += bucket.grads.bytes();
            memory.states += bytes(&bucket.first) + bytes(&bucket.second) + bytes(&bucket.average);
            memory.states += bucket.blocks.iter().flatten().map(Blocks::bytes).sum::<u64>();
            memory.values += bytes(&bucket.values) + bucket.weights.as_ref().map_or(0, Weights::remainder_bytes);
        }
        memory
    }

    fn note_memory(&mut self) {
        let grads = self.buckets.iter().map(|bucket| bucket.grads.bytes()).sum();
        self.grads_peak = self.grads_peak.max(grads);
    }
}

impl Drop for Optimizer {
    fn drop(&mut self) {
        // Places keep the gradients' memory.
        if self.buckets.iter().any(|bucket| !bucket.grads.places().is_empty()) {
            main_grads::detach_all();
        }
    }
}
