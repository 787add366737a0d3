//! The exponential moving average (EMA) of the weights of a bucket: sharded as the moments are, and in place of the weights
//! where passes are to compute with it.

use super::bucket::Bucket;
use super::flat::Flat;
use super::gpu::Weights;
use burn::module::Module;

impl Bucket {
    /// Begins the average at the weights.
    pub fn begin_average<M: Module>(&mut self, model: &M) {
        self.average = Some(self.with_masters(model, Flat::copy));
    }

    /// After a step: `average = decay · average + (1 − decay) · weights`, in fp32 or fp64.
    pub fn follow<M: Module>(&mut self, model: &M, decay: f64) {
        let Some(mut average) = self.average.take() else { return };
        self.with_masters(model, |masters| average.approach(masters, decay));
        self.average = Some(average);
    }

    /// Puts the average where passes find the weights. Whoever calls it keeps a copy of `model`.
    pub fn enter_average<M: Module>(&mut self, model: M) -> M {
        let Some(average) = &self.average else { return model };
        if let Some(weights) = &self.weights {
            weights.wait();
            let mut kept = Flat::zeros(self.region.len(), &average.device(), self.dtype);
            kept.put(0, weights.own().tensor());
            weights.own().put(0, average.part(0..average.len()));
            self.kept = Some(kept);
            self.share();
            return model;
        }
        if self.sharding.zero == 3 {
            std::mem::swap(&mut self.values, &mut self.average);
            return model;
        }
        self.fill(model, &self.gather(average.part(0..average.len())))
    }

    /// Puts the weights back, but for those of a module on CPU ranks, of which the caller has a copy.
    pub fn leave_average(&mut self) {
        match (&self.weights, self.kept.take()) {
            (Some(weights), Some(kept)) => {
                weights.wait();
                weights.own().put(0, kept.part(0..kept.len()));
                self.share();
            }
            (None, _) if self.sharding.zero == 3 => std::mem::swap(&mut self.values, &mut self.average),
            _ => {}
        }
    }

    /// The ranks that shard the bucket gather each other's regions, as after a step.
    fn share(&self) {
        if let Some(weights) = self.weights.as_ref().filter(|_| matches!(self.sharding.zero, 1 | 2)) {
            weights.collective(&self.sharding.shards);
        }
    }

    /// The region's values as the optimizer has them.
    fn with_masters<M: Module, T>(&self, model: &M, with: impl FnOnce(&Flat) -> T) -> T {
        match (self.weights.as_ref().and_then(Weights::masters), &self.values) {
            (Some(joined), _) => with(&joined),
            (None, Some(values)) => with(values),
            (None, None) => with(&self.extract(model)),
        }
    }
}
