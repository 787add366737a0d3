//! From the gradients of backward passes to the main gradients of a bucket, and reading these.

use super::super::bucket::Bucket;
use super::super::flat::Flat;
use super::super::modules::{attach_places, visit_gradients};
use super::Optimizer;
use backend_dist::collective::all_gather;
use backend_dist::ops::main_grads;
use burn::module::Module;
use burn::tensor::{Gradients, Tensor};

impl Optimizer {
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

    /// Under ZeRO 2 and 3 on GPUs, lets the next backward pass add to the bucket's main gradients itself, until
    /// [`close`](Self::close). Under ZeRO 0 and 1 every backward pass does.
    pub fn open<M: Module>(&mut self, bucket: usize, model: &M) {
        if self.buckets[bucket].sharding.zero >= 2 {
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

    /// The rank's gradients of a bucket times `scale`, flat in the order of its parameters, from all ranks that shard
    /// them. The sums of the last step stay until the next [`accumulate`](Self::accumulate).
    pub fn gradients(&self, bucket: usize, scale: f64) -> Vec<f64> {
        let Bucket { layout, grads, sharding, .. } = &self.buckets[bucket];
        let all = if sharding.zero == 0 {
            grads.sum().values(0..layout.len)
        } else {
            let part = grads.sum().part(0..grads.sum().len());
            Flat::new(all_gather(part, 0, &sharding.shards)).values(0..layout.len)
        };
        layout.slots.iter().flat_map(|slot| all[slot.range.clone()].iter().map(|g| g * scale)).collect()
    }
}
