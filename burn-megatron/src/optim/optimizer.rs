//! The optimizer of one rank: gradients in, sums over ranks, one step, new parameters out.

use super::bucket::Bucket;
use super::config::OptimizerConfig;
use super::flat::Flat;
use super::gpu::Weights;
use super::layout::BucketSpec;
use super::modules::{attach_places, visit_gradients};
use super::muon::matrix_steps;
use super::slots::Slots;
use backend_dist::buffer::{self, Buffer, ChunkTable};
use backend_dist::collective::{all_gather, all_reduce};
use backend_dist::comm::{Group, ReduceOp};
use backend_dist::mesh::GridKind;
use backend_dist::ops::main_grads;
use burn::module::Module;
use burn::tensor::{DType, Device, Gradients, Tensor};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

/// What is the same for all parameters of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepInfo {
    /// The learning rate.
    pub lr: f64,
    /// Multiplies the gradient sums: division by tokens and loss scale, and clipping, in one factor.
    pub grad_scale: f64,
}

/// Bytes that an optimizer holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Main gradients now.
    pub grads: u64,
    /// The most that main gradients have taken since the start.
    pub grads_peak: u64,
    /// Moments.
    pub states: u64,
    /// Weights: wide copies of narrow ones, and shards of ZeRO 3.
    pub values: u64,
}

/// The optimizer of one rank, over all its model chunks. Parameters come in buckets, each given by its index in the list
/// that [`Optimizer::new`] got. All ranks that share a bucket call the same methods in the same order.
///
/// A step is: for every micro-batch [`accumulate`](Self::accumulate) and [`complete`](Self::complete), then
/// [`reduce`](Self::reduce), [`sum_partial`](Self::sum_partial), sums of tied weights, [`norm`](Self::norm), and either
/// [`begin_step`](Self::begin_step) and [`step`](Self::step) for every bucket, or [`skip`](Self::skip). That is the order
/// of Megatron's `finalize_model_grads.py`.
///
/// Under ZeRO (Rajbhandari et al.: <https://arxiv.org/abs/1910.02054>) of stage 1 a replica holds moments for its shard of
/// a bucket and updates that, from 2 on it also keeps only its shard of the gradients, under 3 only that of the weights.
///
/// Routed experts are held by other ranks than the rest of the model (`GridKind::Expert`): their buckets have replicas and
/// neighbours of their own.
pub struct Optimizer {
    pub(super) config: OptimizerConfig,
    pub(super) buckets: Vec<Bucket>,
    /// Blocks of neighbouring tensor parallel ranks, by grid and size.
    neighbours: BTreeMap<(GridKind, usize), Group>,
    pub(super) device: Device,
    updates: u64,
    grads_peak: u64,
    /// By grid, the bucket whose gradients were summed over the replicas last.
    summed: BTreeMap<GridKind, usize>,
    /// Buckets whose gradients backward passes may write to until [`Optimizer::close`].
    opened: Vec<usize>,
    /// Under ZeRO 3 on GPUs.
    slots: Option<RefCell<Slots>>,
}

impl Optimizer {
    /// Zeroed moments for weights of type `dtype`. By grid, `replicas` hold the same weights and see other tokens, and
    /// `neighbours` gives the rank's block of so many ranks of its tensor parallel group, for sums of gradients that are
    /// partial there and for matrices that Muon needs whole. `device` is without autodiff. Over one replica every ZeRO stage
    /// is 0.
    pub fn new(
        config: &OptimizerConfig,
        zero: u8,
        buckets: Vec<BucketSpec>,
        replicas: impl Fn(GridKind) -> Group,
        neighbours: impl Fn(GridKind, usize) -> Group,
        device: &Device,
        dtype: DType,
    ) -> Self {
        // Views of GPU memory begin at multiples.
        let alignment = if Buffer::fits(device, dtype) { buffer::ALIGNMENT } else { 1 };
        Self::aligned(alignment, config, zero, buckets, replicas, neighbours, (device, dtype))
    }

    /// [`Optimizer::new`] with parameters at multiples of `alignment` in the flat buffers.
    pub(super) fn aligned(
        alignment: usize,
        config: &OptimizerConfig,
        zero: u8,
        buckets: Vec<BucketSpec>,
        replicas: impl Fn(GridKind) -> Group,
        neighbours: impl Fn(GridKind, usize) -> Group,
        (device, dtype): (&Device, DType),
    ) -> Self {
        let bucket = |spec: BucketSpec| {
            let replicas = replicas(spec.grid());
            let zero = if replicas.size() == 1 { 0 } else { zero };
            Bucket::new(spec, alignment, config, zero, replicas, device, dtype)
        };
        let mut buckets: Vec<Bucket> = buckets.into_iter().map(bucket).collect();
        let slots = share_weights(&mut buckets, device, dtype);
        let muon = config.muon().is_some();
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
            grads_peak: 0,
            summed: BTreeMap::new(),
            opened: Vec::new(),
            slots: slots.map(RefCell::new),
        }
    }

    /// Takes the weights over, once before anything else: wide copies of narrow weights; under ZeRO 3 this rank's shard,
    /// and the module's parameters are emptied. On GPUs the parameters become views of the bucket's weights, for good, and
    /// backward passes of this thread add to the main gradients themselves; under ZeRO 3 they are views of memory that holds
    /// the weights from [`gather`](Self::gather) until another bucket's are gathered there.
    pub fn shard<M: Module>(&mut self, bucket: usize, model: M) -> M {
        self.buckets[bucket].shard(model, &self.device)
    }

    /// Makes sure that what the thread issues from now on finds the weights of the last step. A forward pass asks for each
    /// bucket when it comes to it.
    pub fn ready(&self, bucket: usize) {
        if let Some(weights) = &self.buckets[bucket].weights {
            weights.wait();
        }
    }

    /// Under ZeRO 3 makes the parameters whole, from all replicas' shards; else nothing.
    pub fn gather<M: Module>(&self, bucket: usize, model: M) -> M {
        if let Some(slots) = &self.slots
            && slots.borrow_mut().enter(bucket)
        {
            self.weights(bucket).exchange(&self.buckets[bucket].replicas);
        }
        self.ready(bucket);
        let bucket = &self.buckets[bucket];
        if bucket.zero != 3 || self.slots.is_some() {
            return model;
        }
        let values = bucket.values.as_ref().expect("`shard` has taken the weights over");
        bucket.fill(model, &bucket.gather(values.part(0..values.len())))
    }

    /// Under ZeRO 3 on GPUs starts to gather the bucket's parameters beside what the thread issues from now on, which may read
    /// those of the buckets `used`; nothing if they are there, or would come where `used` are. [`gather`](Self::gather) waits
    /// for it. All replicas call it in the same order.
    pub fn prefetch(&self, bucket: usize, used: &[usize]) {
        if let Some(slots) = &self.slots
            && slots.borrow_mut().enter_ahead(bucket, used)
        {
            self.weights(bucket).exchange(&self.buckets[bucket].replicas);
        }
    }

    /// Under ZeRO 3 frees the parameters: empties them, to shape `[0; D]`, or on GPUs lets others have their memory; else
    /// nothing.
    pub fn release<M: Module>(&self, bucket: usize, model: M) -> M {
        if self.buckets[bucket].zero == 3 && self.slots.is_none() { self.buckets[bucket].release(model) } else { model }
    }

    fn weights(&self, bucket: usize) -> &Weights {
        self.buckets[bucket].weights.as_ref().expect("buckets with slots have weights")
    }

    /// Takes the gradients of the bucket's parameters out of `grads` and adds them to the main gradients, any number of
    /// times. The first of a parameter after [`step`](Self::step) or [`skip`](Self::skip) replaces what was there; no
    /// gradient is zero.
    pub fn accumulate<M: Module>(&mut self, bucket: usize, model: &M, grads: &mut Gradients) {
        let Bucket { layout, grads: sums, .. } = &mut self.buckets[bucket];
        visit_gradients(model, layout, grads, |slot, grad| sums.add(layout, slot, grad));
        self.note_memory();
    }

    /// [`accumulate`](Self::accumulate) for one flat gradient from elsewhere, by Burn's parameter id.
    ///
    /// # Panics
    /// If the bucket has no such parameter.
    pub fn add(&mut self, bucket: usize, param: u64, grad: Tensor<1>) {
        let Bucket { layout, grads, .. } = &mut self.buckets[bucket];
        let slot = layout.slot(param).unwrap_or_else(|| panic!("no parameter {param:#x} in bucket {bucket}"));
        grads.add(layout, slot, grad);
        self.note_memory();
    }

    /// Under ZeRO 2 and 3 on GPUs, lets the backward pass that comes add to the bucket's main gradients itself, until
    /// [`close`](Self::close). Under ZeRO 0 and 1 every backward pass does.
    pub fn open<M: Module>(&mut self, bucket: usize, model: &M) {
        if self.buckets[bucket].zero >= 2 {
            let Bucket { layout, grads, .. } = &mut self.buckets[bucket];
            grads.open(layout);
            attach_places(model, layout, grads.places());
            self.opened.push(bucket);
        }
    }

    /// Ends what [`open`](Self::open) has begun: the gradients' memory can be freed.
    pub fn close(&mut self) {
        for bucket in self.opened.drain(..) {
            main_grads::detach(self.buckets[bucket].grads.places());
        }
    }

    /// Ends the bucket's contributions of one micro-batch. ZeRO 2 and 3 sum them over the replicas, keep their shard and
    /// free the rest.
    pub fn complete(&mut self, bucket: usize) {
        // The sum of one bucket runs beside the backward pass of the next; more of them would keep their buckets' memory.
        if self.buckets[bucket].zero >= 2
            && let Some(before) = self.summed.insert(self.buckets[bucket].spec.grid(), bucket)
        {
            self.buckets[before].grads.wait();
        }
        let Bucket { layout, region, grads, replicas, .. } = &mut self.buckets[bucket];
        grads.complete(layout, region, replicas);
    }

    /// Ends the bucket's micro-batches of one step. ZeRO 0 and 1 sum over the replicas.
    pub fn reduce(&mut self, bucket: usize) {
        let Bucket { layout, grads, replicas, .. } = &mut self.buckets[bucket];
        grads.reduce(layout, replicas);
        self.note_memory();
    }

    /// Sums what is partial over tensor parallel neighbours (norms under sequence parallelism, key/value heads that
    /// several ranks share): one collective for all buckets and each size of a block.
    pub fn sum_partial(&mut self) {
        for (&(grid, size), group) in &self.neighbours {
            if self.sum_partial_at_once(grid, size, group) {
                continue;
            }
            let mut places = Vec::new();
            let buckets = self.buckets.iter().enumerate();
            for (index, bucket) in buckets.filter(|(_, bucket)| bucket.spec.grid() == grid) {
                let partial = bucket.parts.iter().filter(|part| bucket.layout.units[part.unit].partial == Some(size));
                places.extend(partial.map(|part| (index, part.at..part.at + part.range.len())));
            }
            if places.is_empty() || group.size() == 1 {
                continue;
            }
            let part = |(bucket, range): &(usize, _)| self.buckets[*bucket].grads.sum().part(Clone::clone(range));
            let summed = all_reduce(Tensor::cat(places.iter().map(part).collect(), 0), ReduceOp::Sum, group);
            let mut start = 0;
            for (bucket, range) in places {
                let part = summed.clone().slice([start..start + range.len()]);
                self.buckets[bucket].grads.sum_mut().put(range.start, part);
                start += range.len();
            }
        }
    }

    /// [`sum_partial`](Self::sum_partial) on GPUs, over blocks of one size: two launches a bucket. False elsewhere.
    fn sum_partial_at_once(&self, grid: GridKind, size: usize, group: &Group) -> bool {
        let mut pieces = Vec::new();
        for bucket in self.buckets.iter().filter(|bucket| bucket.spec.grid() == grid) {
            let (Some(launches), Some(sum)) = (&bucket.launches, bucket.grads.sum().buffer()) else { return false };
            pieces.extend(launches.partial.get(&size).map(|table| (table, sum)));
        }
        let len: usize = pieces.iter().map(|(table, _)| table.len()).sum();
        if len == 0 || group.size() == 1 {
            return true;
        }
        let Some(packed) = Buffer::zeros(len, &self.device, DType::F32) else { return false };
        let mut start = 0;
        for (table, sum) in &pieces {
            table.collect(sum, &packed.part(start..len));
            start += table.len();
        }
        packed.all_reduce(group).wait();
        start = 0;
        for (table, sum) in &pieces {
            table.distribute(&packed.part(start..len), sum);
            start += table.len();
        }
        true
    }

    /// Sums the bucket's gradients over the ranks that hold copies of its weights: first and last stage of a tied
    /// embedding. After [`reduce`](Self::reduce).
    pub fn sum_tied(&mut self, bucket: usize, group: &Group) {
        self.buckets[bucket].grads.sum_mut().all_reduce(group);
    }

    /// [`sum_tied`](Self::sum_tied) for two buckets of this rank with the same parameters.
    pub fn sum_tied_here(&mut self, a: usize, b: usize) {
        let len = self.buckets[b].grads.sum().len();
        let other = self.buckets[b].grads.sum().part(0..len);
        self.buckets[a].grads.sum_mut().add(0, other);
        let sum = self.buckets[a].grads.sum().part(0..len);
        self.buckets[b].grads.sum_mut().put(0, sum);
    }

    /// Norm of the gradients of the whole model times `scale`, every element counted once; the same bits on all ranks,
    /// and NaN or infinite on all if it is on one. `model_parallel` are, for each grid on which any rank has parameters, the
    /// ranks that together hold these once.
    ///
    /// Squares are summed by bucket, shard and rank, and these sums in the order of [`BucketSpec::key`], so that neither
    /// the pipeline nor ZeRO changes a bit of it.
    pub fn norm(&self, scale: f64, model_parallel: &[(GridKind, Group)]) -> f64 {
        let sums = self.squares();
        let mut all = Vec::new();
        for (grid, holders) in model_parallel {
            let of_grid = || self.buckets.iter().zip(&sums).filter(|(bucket, _)| bucket.spec.grid() == *grid);
            let mut squares = Vec::new();
            for (Bucket { spec, counted, .. }, sums) in of_grid() {
                let mut sums = sums.iter();
                for (shard, ranges) in counted {
                    squares.push((spec.key, *shard, sums.by_ref().take(ranges.len()).sum::<f64>()));
                }
            }
            // All ranks that hold the same buckets have some, or none.
            if let Some((Bucket { replicas, .. }, _)) = of_grid().find(|(bucket, _)| bucket.zero > 0) {
                squares = replicas.all_gather_host(squares).concat();
            }
            let ranks = holders.all_gather_host(squares).into_iter().enumerate();
            let placed = |(rank, of): (usize, Vec<_>)| {
                of.into_iter().map(move |(key, shard, sum): (usize, usize, f64)| ((key, shard, rank), sum))
            };
            all.extend(ranks.flat_map(placed));
        }
        // Under one key and shard of a rank there may be a tied copy's zero; in any order that adds nothing.
        all.sort_by_key(|(place, _)| *place);
        all.into_iter().map(|(_, sum)| sum).sum::<f64>().sqrt() * scale
    }

    /// By bucket, the sum of squares of each range that the rank counts.
    fn squares(&self) -> Vec<Vec<f64>> {
        fn on_gpu(bucket: &Bucket) -> Option<(&Buffer, &ChunkTable)> {
            Some((bucket.grads.buffer()?, &bucket.launches.as_ref()?.counted))
        }
        // One wait of the host for all of them; the GPU waits for each sum over the replicas where it comes to it, so that
        // the squares of the others run beside the last ones.
        if let Some(buffers) = self.buckets.iter().map(on_gpu).collect::<Option<Vec<_>>>() {
            return buffer::squares(&buffers, |bucket| self.buckets[bucket].grads.wait());
        }
        let by_bucket = |Bucket { grads, counted, .. }: &Bucket| {
            let ranges: Vec<_> = counted.iter().flat_map(|(_, ranges)| ranges.clone()).collect();
            grads.sum().squares(&ranges)
        };
        self.buckets.iter().map(by_bucket).collect()
    }

    /// The rank's gradients of a bucket times `scale`, flat in the order of its parameters, from all replicas where they
    /// are sharded. The sums of the last step stay until the next [`accumulate`](Self::accumulate).
    pub fn gradients(&self, bucket: usize, scale: f64) -> Vec<f64> {
        let Bucket { layout, grads, replicas, zero, .. } = &self.buckets[bucket];
        let all = if *zero == 0 {
            grads.sum().values(0..layout.len)
        } else {
            let part = grads.sum().part(0..grads.sum().len());
            Flat::new(all_gather(part, 0, replicas)).values(0..layout.len)
        };
        layout.slots.iter().flat_map(|slot| all[slot.range.clone()].iter().map(|g| g * scale)).collect()
    }

    /// Starts update number [`updates`](Self::updates)` + 1`.
    pub fn begin_step(&mut self) {
        self.updates += 1;
        self.forget_gathered();
    }

    /// What was gathered is out of date.
    pub(super) fn forget_gathered(&self) {
        self.slots.iter().for_each(|slots| slots.borrow_mut().clear());
    }

    /// Updates the bucket's parameters; each bucket once after [`begin_step`](Self::begin_step). On CPU ranks under ZeRO 0
    /// parameters are changed in place unless somebody else holds their storage. Under ZeRO 3 the module is left as it is.
    pub fn step<M: Module>(&mut self, index: usize, model: M, info: &StepInfo) -> M {
        let rule = self.config.rule(info.lr, self.updates, info.grad_scale);
        let bucket = &mut self.buckets[index];
        let steps = |muon| matrix_steps(bucket, muon, info, &self.neighbours);
        let matrices = self.config.muon().map(steps).unwrap_or_default();
        let model = bucket.step(model, &rule, &matrices);
        // The first buckets of the next forward pass arrive while the others are updated.
        if self.slots.as_ref().is_some_and(|slots| slots.borrow().is_free(index)) {
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

    /// Goes on counting updates from here.
    pub fn set_updates(&mut self, updates: u64) {
        self.updates = updates;
    }

    /// What a bucket was made from.
    pub fn spec(&self, bucket: usize) -> &BucketSpec {
        &self.buckets[bucket].spec
    }

    /// The kind of optimizer and its constants.
    pub fn config(&self) -> &OptimizerConfig {
        &self.config
    }

    /// Bytes of all buffers.
    pub fn memory(&self) -> Memory {
        let mut memory = Memory { grads_peak: self.grads_peak, ..Memory::default() };
        for bucket in &self.buckets {
            let bytes = |flat: &Option<Flat>| flat.as_ref().map_or(0, Flat::bytes);
            memory.grads += bucket.grads.bytes();
            memory.states += bytes(&bucket.first) + bytes(&bucket.second);
            memory.values += bytes(&bucket.values);
        }
        memory
    }

    fn note_memory(&mut self) {
        let grads = self.buckets.iter().map(|bucket| bucket.grads.bytes()).sum();
        self.grads_peak = self.grads_peak.max(grads);
    }
}

/// Memory for the whole weights of ZeRO 3 that buckets take turns in; `None` without ZeRO 3 and where the device has no
/// buffers.
fn share_weights(buckets: &mut [Bucket], device: &Device, dtype: DType) -> Option<Slots> {
    let kind = |bucket: &Bucket| (bucket.zero == 3).then_some((bucket.layout.len, bucket.spec.at_once));
    let kinds: Vec<_> = buckets.iter().map(kind).collect();
    if kinds.iter().all(Option::is_none) {
        return None;
    }
    let slots = Slots::new(&kinds);
    let memory: Option<Vec<_>> = slots.sizes().iter().map(|&size| Buffer::zeros(size, device, dtype)).collect();
    let memory = memory?;
    for (index, bucket) in buckets.iter_mut().enumerate() {
        if let Some(slot) = slots.of(index) {
            bucket.weights = Weights::in_slot(&memory[slot], &bucket.region, device, dtype);
        }
    }
    Some(slots)
}

impl Drop for Optimizer {
    fn drop(&mut self) {
        // Places keep the gradients' memory.
        if self.buckets.iter().any(|bucket| !bucket.grads.places().is_empty()) {
            main_grads::detach_all();
        }
    }
}
