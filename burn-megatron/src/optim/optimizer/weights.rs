//! Where passes find the weights: taken over once, and under ZeRO 3 gathered before they are used and freed after.

use super::super::bucket::Bucket;
use super::super::gpu::Weights;
use super::super::weight_buffers::WeightBuffers;
use super::Optimizer;
use backend_dist::gpu::buffer::Buffer;
use burn::module::Module;
use burn::tensor::{DType, Device};

impl Optimizer {
    /// Takes the weights over, once before anything else: fp32 copies of bf16 or f16 weights; under ZeRO 3 this rank's
    /// shard, and the module's parameters are emptied. On GPUs the parameters become views of the bucket's weights, for
    /// good, and backward passes of this thread add to the main gradients themselves; under ZeRO 3 they are views of
    /// memory that holds the weights from [`gather`](Self::gather) until another bucket's are gathered there.
    pub fn shard<M: Module>(&mut self, bucket: usize, model: M) -> M {
        let bucket = &mut self.buckets[bucket];
        let model = bucket.shard(model, &self.device, self.offload.as_mut());
        if self.average.is_some() {
            bucket.begin_average(&model);
        }
        model
    }

    /// Lets passes compute with the moving average of the bucket's weights, until [`leave_average`](Self::leave_average).
    /// The caller keeps a copy of `model` to take its place then. All data-parallel ranks call it in the same order.
    pub fn enter_average<M: Module>(&mut self, bucket: usize, model: M) -> M {
        // A checkpoint may still be copied from the weights.
        self.host.protect();
        self.forget_gathered();
        self.buckets[bucket].enter_average(model)
    }

    /// Lets passes compute with the weights again. All data-parallel ranks call it in the same order.
    pub fn leave_average(&mut self, bucket: usize) {
        self.forget_gathered();
        self.buckets[bucket].leave_average();
    }

    /// Makes sure that what the thread issues from now on finds the weights of the last step. A forward pass asks for
    /// each bucket when it reaches it.
    pub fn ready(&self, bucket: usize) {
        if let Some(weights) = &self.buckets[bucket].weights {
            weights.wait();
        }
    }

    /// Under ZeRO 3 makes the parameters whole, from the shards of all ranks of its group; else nothing.
    pub fn gather<M: Module>(&self, bucket: usize, model: M) -> M {
        if let Some(buffers) = &self.weight_buffers
            && buffers.borrow_mut().enter(bucket)
        {
            self.weights(bucket).collective(&self.buckets[bucket].sharding.shards);
        }
        self.ready(bucket);
        let bucket = &self.buckets[bucket];
        if bucket.sharding.zero != 3 || self.weight_buffers.is_some() {
            return model;
        }
        let values = bucket.values.as_ref().expect("`shard` has taken the weights over");
        bucket.fill(model, &bucket.gather(values.part(0..values.len())))
    }

    /// Under ZeRO 3 on GPUs starts to gather the bucket's parameters, overlapped with what the thread issues next, which
    /// may read those of the buckets `used`; nothing if they are there already, or would overwrite those of `used`.
    /// [`gather`](Self::gather) waits for it. All data-parallel ranks call it in the same order.
    pub fn prefetch(&self, bucket: usize, used: &[usize]) {
        if let Some(buffers) = &self.weight_buffers
            && buffers.borrow_mut().enter_ahead(bucket, used)
        {
            self.weights(bucket).collective(&self.buckets[bucket].sharding.shards);
        }
    }

    /// Under ZeRO 3 frees the parameters: empties them, to shape `[0; D]`, or on GPUs lets others have their memory;
    /// else nothing.
    pub fn release<M: Module>(&self, bucket: usize, model: M) -> M {
        if self.buckets[bucket].sharding.zero == 3 && self.weight_buffers.is_none() {
            self.buckets[bucket].release(model)
        } else {
            model
        }
    }

    fn weights(&self, bucket: usize) -> &Weights {
        self.buckets[bucket].weights.as_ref().expect("buckets with weight buffers have weights")
    }

    /// What was gathered is out of date.
    pub(in super::super) fn forget_gathered(&self) {
        self.weight_buffers.iter().for_each(|buffers| buffers.borrow_mut().clear());
    }
}

/// Memory for the gathered weights of ZeRO 3 that buckets share in turn; `None` without ZeRO 3 and where the device has no
/// buffers.
pub(super) fn share_weights(buckets: &mut [Bucket], device: &Device, dtype: DType) -> Option<WeightBuffers> {
    let kind = |bucket: &Bucket| (bucket.sharding.zero == 3).then_some((bucket.layout.len, bucket.spec.at_once));
    let kinds: Vec<_> = buckets.iter().map(kind).collect();
    if kinds.iter().all(Option::is_none) {
        return None;
    }
    let buffers = WeightBuffers::new(&kinds);
    let memory: Option<Vec<_>> = buffers.sizes().iter().map(|&size| Buffer::zeros(size, device, dtype)).collect();
    let memory = memory?;
    for (index, bucket) in buckets.iter_mut().enumerate() {
        if let Some(slot) = buffers.of(index) {
            bucket.weights = Weights::in_slot(&memory[slot], &bucket.region, device, dtype, bucket.has_remainders());
        }
    }
    Some(buffers)
}
