//! The optimizer on small modules: alone, over ranks in every layout, and through checkpoints.

mod experts;
mod layouts;
mod offload;
mod saving;
mod single;
mod states;

use super::*;
use crate::checkpoint::{Kind, Slice};
use backend_dist::comm::Group;
use backend_dist::launch::{BoxError, Rank, launch};
use backend_dist::mesh::{Axis, GridKind, Mesh, ParallelLayout};
use backend_dist::shard::{GroupPosition, HostFloats, HostTensor, Init, ParamSpec, Registry, Section, stable_hash};
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Device, Tensor, TensorData};
use saving::Saved;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ops::Range;

/// An embedding with padded rows, and a layer with fused sections, a head that tensor parallel ranks share, a matrix
/// sharded along the other dimension, and a norm whose gradient is partial.
#[derive(Module, Debug)]
struct Net {
    embedding: Param<Tensor<2>>,
    qk: Param<Tensor<2>>,
    out: Param<Tensor<2>>,
    norm: Param<Tensor<1>>,
}

/// Rows are `width` times as long as they need to be.
fn specs(at: GroupPosition, width: usize) -> Vec<BucketSpec> {
    let embedding = vec![Section::split_padded("embedding", &[7, 3 * width], 0, at.size, 8, at)];
    let qk = vec![Section::split("q", &[8, 6 * width], 0, at.size, at), Section::split("k", &[3, 6 * width], 0, 1, at)];
    let out = vec![Section::split("out", &[5, 8 * width], 1, at.size, at)];
    let norm = vec![Section::replicated("norm", &[5], at)];
    let layer = vec![ParamSpec::new(qk, false), ParamSpec::new(out, false), ParamSpec::new(norm, true)];
    let bucket = |key, params| BucketSpec { key, params, hidden: key > 0, at_once: 1, scale: ParamScale::default() };
    vec![bucket(0, vec![ParamSpec::new(embedding, false)]), bucket(1, layer)]
}

/// A module of two buckets.
trait Buckets: Module + 'static {
    /// The buckets of a rank. Rows are `width` times as long as they need to be.
    fn specs(mesh: &Mesh, rank: usize, width: usize) -> Vec<BucketSpec>;

    /// The module with initial values; `params` are those of all buckets.
    fn new(params: &[&ParamSpec], dtype: DType) -> Self;
}

impl Buckets for Net {
    fn specs(mesh: &Mesh, rank: usize, width: usize) -> Vec<BucketSpec> {
        specs(GroupPosition { rank: mesh.coords(rank).tp, size: mesh.axis_size(Axis::Tp) }, width)
    }

    fn new(params: &[&ParamSpec], dtype: DType) -> Self {
        Net {
            embedding: param(params[0], dtype),
            qk: param(params[1], dtype),
            out: param(params[2], dtype),
            norm: param(params[3], dtype),
        }
    }
}

fn param<const D: usize>(spec: &ParamSpec, dtype: DType) -> Param<Tensor<D>> {
    let initial = |section: &Section| section.initial(Init::Normal { std: 1.0 }, 7);
    let values: Vec<f64> = spec.sections.iter().flat_map(initial).collect();
    let data = TensorData::new(values, spec.local_shape());
    let tensor = Tensor::from_data(data, (&Device::flex().autodiff(), dtype)).require_grad();
    Param::initialized(ParamId::from(spec.id), tensor)
}

/// The module with initial values.
fn net<N: Buckets>(specs: &[BucketSpec], dtype: DType) -> N {
    N::new(&specs.iter().flat_map(|bucket| &bucket.params).collect::<Vec<_>>(), dtype)
}

/// All values, in the order of the buckets.
fn values<M: Module>(net: &M) -> Vec<f64> {
    struct Values(Vec<f64>);

    impl ModuleVisitor for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.extend(param.val().into_data().iter::<f64>());
        }
    }
    let mut values = Values(Vec::new());
    net.visit(&mut values);
    values.0
}

/// A layout of ranks, the ZeRO stage, and the size of its groups.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Case {
    tp: usize,
    dp: usize,
    /// As `tp`, if it is not given.
    etp: Option<usize>,
    ep: usize,
    zero: u8,
    group: Option<usize>,
    /// Of the rows; 256 makes them whole blocks of moments in 8 bits.
    width: usize,
}

impl Case {
    const SINGLE: Self = Self { tp: 1, dp: 1, etp: None, ep: 1, zero: 0, group: None, width: 1 };

    fn mesh(self) -> Mesh {
        let Self { tp, dp, etp, ep, zero, group: zero_group, .. } = self;
        Mesh::new(ParallelLayout { tp, dp, etp, ep, zero, zero_group, ..ParallelLayout::default() }).unwrap()
    }

    fn run<T: Send>(self, f: impl Fn(Rank) -> Result<T, BoxError> + Sync) -> Vec<T> {
        launch(&self.mesh(), &[Device::flex()], f).unwrap()
    }
}

/// One rank: module and optimizer.
struct Worker<N = Net> {
    rank: Rank,
    specs: Vec<BucketSpec>,
    net: N,
    optimizer: Optimizer,
}

/// The ranks that hold the dense parameters once.
fn holders(rank: &Rank) -> [(GridKind, Group); 1] {
    [(GridKind::Dense, rank.group(Axis::TpPp))]
}

/// Samples of a step; every number of data-parallel ranks divides them.
const SAMPLES: usize = 12;

/// What a sample adds to the gradient of an element of a global tensor, by step, sample, name and index.
type Gradient = fn(usize, usize, u64, usize) -> f64;

/// Sixteenths: all sums of them are exact, so that layouts cannot hide behind rounding.
fn exact(step: usize, sample: usize, name: u64, place: usize) -> f64 {
    (rough(step, sample, name, place) * 16.0).round() / 16.0
}

/// Anything.
fn rough(step: usize, sample: usize, name: u64, place: usize) -> f64 {
    ((name % 101) as f64 + (1 + step * 7 + sample) as f64 * 1.3 + place as f64 * 0.7).sin()
}

impl<N: Buckets> Worker<N> {
    fn new(rank: Rank, case: Case, config: &OptimizerConfig, dtype: DType) -> Self {
        let specs = N::specs(&rank.mesh, rank.rank, case.width);
        // Parameters one after the other, and with gaps between them as on GPUs.
        let alignment = if case.tp == 1 && case.ep == 1 { 1 } else { 4 };
        let mut optimizer = Optimizer::aligned(
            alignment,
            config,
            specs.clone(),
            |grid| Sharding::of(&rank, grid),
            |grid: GridKind, size| rank.subgroup(grid.tensor_parallel(), size),
            (&Device::flex(), dtype),
            usize::MAX,
        );
        let net: N = net(&specs, dtype);
        optimizer.check(&net, &[0, 1], &[]).unwrap();
        let net = (0..2).fold(net, |net, bucket| optimizer.shard(bucket, net));
        Self { rank, specs, net, optimizer }
    }

    /// One step whose micro-batches are so many samples each; its norm. Every sample's gradient of an expert comes to one
    /// of the ranks that hold it, wherever the sample is: the data-parallel ranks of either grid have disjoint shares of
    /// the samples.
    fn step(&mut self, index: usize, micro_batch: usize, gradient: Gradient) -> f64 {
        for (bucket, spec) in self.specs.iter().enumerate() {
            let dp_ranks = self.rank.group(spec.grid().dp_ranks());
            let each = SAMPLES / dp_ranks.size();
            let mine: Vec<usize> = (dp_ranks.rank() * each..(dp_ranks.rank() + 1) * each).collect();
            for samples in mine.chunks(micro_batch) {
                for (param, sample) in spec.params.iter().flat_map(|param| samples.iter().map(move |s| (param, *s))) {
                    let grad = local_gradient(param, |name, place| gradient(index, sample, name, place));
                    self.optimizer.add(bucket, param.id, grad);
                }
                self.optimizer.complete(bucket);
            }
        }
        let has = |grid: &GridKind| self.specs.iter().any(|spec| spec.grid() == *grid);
        let grids = [GridKind::Dense, GridKind::Expert].into_iter().filter(has);
        let holders: Vec<_> = grids.map(|grid| (grid, self.rank.group(grid.model_parallel()))).collect();
        finish_step(&mut self.optimizer, &mut self.net, index, &holders)
    }

    /// Whole local weights, also under ZeRO 3.
    fn weights(&mut self) -> Vec<f64> {
        let net = (0..2).fold(self.net.clone(), |net, bucket| self.optimizer.gather(bucket, net));
        values(&net)
    }

    fn save(&self) -> Vec<Slice> {
        (0..2).flat_map(|bucket| self.optimizer.snapshot(bucket, &self.net, None)).collect()
    }

    /// Restores both buckets, up to the first error.
    fn restore<E>(
        &mut self,
        read: &mut impl FnMut(Kind, &Section, &[Range<usize>]) -> Result<HostFloats, E>,
    ) -> Result<(), E> {
        for bucket in 0..2 {
            let (net, result) = self.optimizer.restore(bucket, self.net.clone(), true, &mut *read);
            self.net = net;
            result?;
        }
        Ok(())
    }

    /// Continues from what was saved after so many updates.
    fn resume(&mut self, saved: &Saved, updates: u64, dtype: DType) {
        let best = if dtype == DType::BF16 { Kind::Master } else { Kind::Weight };
        let mut read = |kind: Kind, section: &Section, ranges: &[Range<usize>]| {
            let kind = if kind == Kind::Weight { best } else { kind };
            Ok::<_, Infallible>(saved[&(kind, section.name.clone())].read_box(ranges).into())
        };
        self.restore(&mut read).unwrap();
        self.optimizer.set_updates(updates);
    }
}

/// What follows the last micro-batch of step `index`, for two buckets: sums and the update. The norm.
fn finish_step<M: Module>(optimizer: &mut Optimizer, net: &mut M, index: usize, holders: &[(GridKind, Group)]) -> f64 {
    (0..2).for_each(|bucket| optimizer.reduce(bucket));
    optimizer.sum_partial();
    let norm = optimizer.norm(0.5, holders);
    optimizer.begin_step();
    let info = StepInfo { lr: 0.1 / (index + 1) as f64, grad_scale: 0.5 };
    for bucket in 0..2 {
        *net = optimizer.step(bucket, net.clone(), &info);
    }
    norm
}

/// A rank's part of a global gradient. Of a partial one each copy has an equal share.
fn local_gradient(param: &ParamSpec, at: impl Fn(u64, usize) -> f64) -> Tensor<1> {
    let sums = param.gradient_sums();
    let mut values = Vec::new();
    for (section, elements) in param.sections.iter().zip(param.elements()) {
        let share = sums.iter().find(|sum| sum.elements == elements).map_or(1, |sum| sum.ranks) as f64;
        let len = section.global_shape.iter().product::<usize>();
        let global: Vec<f64> = (0..len).map(|place| at(stable_hash(&section.name), place) / share).collect();
        values.extend(section.slice(&global));
    }
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), (&Device::flex(), DType::F64))
}

/// Global tensors of each grid from the ranks that hold it once; all other ranks hold the same.
fn assemble<N: Buckets>(case: Case, locals: &[Vec<f64>]) -> BTreeMap<String, HostTensor> {
    let mesh = case.mesh();
    let mut slices = Vec::new();
    for (rank, local) in locals.iter().enumerate() {
        let mut rest = local.as_slice();
        for bucket in N::specs(&mesh, rank, case.width) {
            for param in &bucket.params {
                let start = local.len() - rest.len();
                let (own, tail) = rest.split_at(param.local_len());
                let first = mesh.group_of(bucket.grid().dp_ranks(), rank)[0];
                assert_eq!(own, &locals[first][start..start + own.len()], "copies are the same: {case:?}");
                rest = tail;
                if first == rank {
                    slices.extend(param.sections_of(own).map(|(section, values)| (section.clone(), values.to_vec())));
                }
            }
        }
    }
    Registry::assemble(slices.iter().map(|(section, local)| (section, local.as_slice()))).unwrap()
}

fn kinds() -> [OptimizerConfig; 4] {
    [
        AdamWConfig { beta2: 0.95, weight_decay: 0.1, ..AdamWConfig::default() }.into(),
        OptimizerConfig::Sgd(SgdConfig { nesterov: true, weight_decay: 0.1, ..SgdConfig::default() }),
        OptimizerConfig::Lion(LionConfig { weight_decay: 0.1, ..LionConfig::default() }),
        OptimizerConfig::Muon(MuonConfig { weight_decay: 0.1, extra_scale: 0.2, ..MuonConfig::default() }),
    ]
}
