//! One bucket of a rank: its gradients, moments and values, and how one step changes them.

mod offload;
mod states;
mod step;
mod update;

use super::blocks::Blocks;
use super::config::OptimizerConfig;
use super::flat::{Flat, own, wide};
use super::gpu::{Launches, Weights};
use super::grads::Grads;
use super::layout::{BucketSpec, Layout, Part, overlap};
use super::modules::{attach_places, map, visit};
use super::sharding::Sharding;
use super::states::weights_of;
use backend_dist::collective::all_gather;
use burn::module::Module;
use burn::tensor::{DType, Device, Tensor};
use std::ops::Range;

pub(super) use offload::{Hosted, Offload};
pub(super) use update::MatrixSteps;

pub(super) struct Bucket {
    pub spec: BucketSpec,
    pub layout: Layout,
    /// Ranks that hold the same parameters.
    pub sharding: Sharding,
    /// What this rank updates: everything under ZeRO 0, else its shard. All buffers but the gradients have its length
    /// and order.
    pub region: Range<usize>,
    pub parts: Vec<Part>,
    /// By unit, the rank of `sharding.shards` that orthogonalises it under Muon.
    pub owners: Vec<Option<usize>>,
    pub grads: Grads,
    /// Main (fp32 or fp64) values, where they are not in the module: of bf16 and f16 weights, and under ZeRO 3. On GPUs always.
    pub values: Option<Flat>,
    pub first: Option<Flat>,
    pub second: Option<Flat>,
    /// Both moments instead, where they are in 8 bits.
    pub blocks: Option<[Blocks; 2]>,
    /// Both moments and the masters instead, where they are in host memory.
    pub hosted: Option<Hosted>,
    /// The moving average of the values, if one is wanted.
    pub average: Option<Flat>,
    /// On GPUs the weights, while passes compute with the average.
    pub kept: Option<Flat>,
    /// Start of each part in `second`, which only has the parts that need it.
    pub second_at: Vec<Option<usize>>,
    /// By shard, the elements of the region that this rank counts in norms.
    pub counted: Vec<(usize, Vec<Range<usize>>)>,
    /// On GPUs.
    pub weights: Option<Weights>,
    /// On GPUs.
    pub launches: Option<Launches>,
    /// Type of the weights in the module.
    pub dtype: DType,
    /// Masters are weights and remainders; kept so on GPUs.
    pub split: bool,
}

impl Bucket {
    /// Without weights and states: [`allocate`](Self::allocate). `alignment` is that of parameters in the flat buffers.
    pub fn new(
        spec: BucketSpec,
        alignment: usize,
        config: &OptimizerConfig,
        sharding: Sharding,
        device: &Device,
        dtype: DType,
    ) -> Self {
        let split = config.states().splits(dtype);
        let layout = Layout::new(&spec, sharding.ranks(), alignment);
        let (zero, own, each) = (sharding.zero, sharding.shards.rank(), sharding.same_shard.size());
        let region = layout.region(own, sharding.shards.size());
        let parts = layout.parts(&region);
        let second_at = states::second_at(&layout, &parts, config);
        let grads = Grads::new(&layout, &region, zero, device, config.states().main_grads.with(dtype));
        let counted = counted(&layout, &region, own * each..(own + 1) * each);
        let launches = grads.buffer().map(|sum| Launches::new(sum, &counted, (&layout, &parts), &region, config));
        Self {
            spec,
            layout,
            sharding,
            region,
            parts,
            owners: Vec::new(),
            grads,
            values: None,
            first: None,
            second: None,
            blocks: None,
            hosted: None,
            average: None,
            kept: None,
            second_at,
            counted,
            weights: None,
            launches,
            dtype,
            split,
        }
    }

    /// Takes the weights over, once before anything else.
    pub fn shard<M: Module>(&mut self, model: M, device: &Device, offload: Option<&mut Offload>) -> M {
        if let Some(weights) = &self.weights {
            let model = weights.take(model, &self.layout, &self.region, self.sharding.zero);
            match offload.filter(|_| self.hosts_masters()) {
                Some(offload) => self.host_masters(&model, offload),
                None => self.values = weights.values(self.region.len(), device),
            }
            attach_places(&model, &self.layout, self.grads.places());
            return model;
        }
        match offload.filter(|_| self.hosts_masters()) {
            Some(offload) => self.host_masters(&model, offload),
            None if self.keeps_values() => self.values = Some(self.extract(&model)),
            None => {}
        }
        if self.sharding.zero == 3 { self.release(model) } else { model }
    }

    fn hosts_masters(&self) -> bool {
        self.hosted.as_ref().is_some_and(Hosted::has_masters)
    }

    /// Whether the values are kept here.
    fn keeps_values(&self) -> bool {
        self.sharding.zero == 3 || wide(self.dtype) != self.dtype
    }

    /// The region's values of a module, in fp32 or fp64; padding is zero.
    pub fn extract<M: Module>(&self, model: &M) -> Flat {
        let mut values: Option<Flat> = None;
        visit(model, &self.layout, |slot, param| {
            let at = self.layout.slots[slot].range.start;
            let range = overlap(&self.layout.slots[slot].range, &self.region);
            let values =
                values.get_or_insert_with(|| Flat::zeros(self.region.len(), &param.device(), wide(self.dtype)));
            if !range.is_empty() {
                values.put(range.start - self.region.start, param.slice([range.start - at..range.end - at]));
            }
        });
        values.expect("the module holds the bucket's parameters")
    }

    /// The whole bucket in the weights' type, from the values that each rank of `shards` has of its region.
    pub fn gather(&self, values: Tensor<1>) -> Tensor<1> {
        let values = self.narrow(values);
        if self.sharding.zero == 0 { values } else { all_gather(values, 0, &self.sharding.shards) }
    }

    /// Values in the weights' type.
    pub fn narrow(&self, values: Tensor<1>) -> Tensor<1> {
        if self.split { weights_of(values) } else { values.cast(self.dtype) }
    }

    /// Whole parameters into the module.
    pub fn fill<M: Module>(&self, model: M, all: &Tensor<1>) -> M {
        map(model, &self.layout, |slot, old| refill(old, all.clone().slice([self.layout.slots[slot].range.clone()])))
    }

    /// Empties the module's parameters.
    pub fn release<M: Module>(&self, model: M) -> M {
        map(model, &self.layout, |_, param| Tensor::empty([0], (&param.device(), param.dtype())))
    }
}

/// What `region` has of each of these shards and counts in norms.
fn counted(layout: &Layout, region: &Range<usize>, shards: Range<usize>) -> Vec<(usize, Vec<Range<usize>>)> {
    let here = |range: Range<usize>| range.start - region.start..range.end - region.start;
    let parts = |shard| {
        let owned = |part: &Part| layout.units[part.unit].section.is_owned();
        layout.parts(&layout.shard(shard)).into_iter().filter(owned).map(|part| here(part.range)).collect()
    };
    shards.map(|shard| (shard, parts(shard))).collect()
}

/// `new` in the storage of `old` where that is possible, else in new storage.
fn refill(old: Tensor<1>, new: Tensor<1>) -> Tensor<1> {
    let same = old.dtype() == new.dtype() && old.dims() == new.dims() && wide(new.dtype()) == new.dtype();
    if !same {
        return own(new);
    }
    let mut old = Flat::new(old);
    if old.is_on_host() {
        old.put(0, new);
        old.into_tensor()
    } else {
        new
    }
}
