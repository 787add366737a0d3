//! The optimizer on small modules: alone, over ranks in every layout, and through checkpoints.

mod experts;
mod layouts;
mod offload;
mod saving;
mod single;
mod states;

use super::*;
use backend_dist::comm::Group;
use backend_dist::launch::{BoxError, Rank, launch};
use backend_dist::mesh::{Axis, GridKind, Mesh, ParallelLayout};
use backend_dist::shard::{GroupPosition, HostTensor, Init, ParamSpec, Registry, Section, stable_hash};
use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Device, Tensor, TensorData};
use std::collections::BTreeMap;

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
    vec![
        BucketSpec {
            key: 0,
            params: vec![ParamSpec::new(embedding, false)],
            hidden: false,
            at_once: 1,
            scale: ParamScale::default(),
        },
        BucketSpec { key: 1, params: layer, hidden: true, at_once: 1, scale: ParamScale::default() },
    ]
}

fn net(specs: &[BucketSpec], dtype: DType) -> Net {
    fn param<const D: usize>(spec: &ParamSpec, dtype: DType) -> Param<Tensor<D>> {
        let initial = |section: &Section| section.initial(Init::Normal { std: 1.0 }, 7);
        let values: Vec<f64> = spec.sections.iter().flat_map(initial).collect();
        let data = TensorData::new(values, spec.local_shape());
        let tensor = Tensor::from_data(data, (&Device::flex().autodiff(), dtype)).require_grad();
        Param::initialized(ParamId::from(spec.id), tensor)
    }
    let layer = &specs[1].params;
    Net {
        embedding: param(&specs[0].params[0], dtype),
        qk: param(&layer[0], dtype),
        out: param(&layer[1], dtype),
        norm: param(&layer[2], dtype),
    }
}

/// All values, in the order of the buckets.
fn values(net: &Net) -> Vec<f64> {
    let of = |data: TensorData| data.iter::<f64>().collect::<Vec<_>>();
    let matrices = [&net.embedding, &net.qk, &net.out].map(|param| of(param.val().into_data()));
    [matrices.concat(), of(net.norm.val().into_data())].concat()
}

/// A layout of ranks, the ZeRO stage, and the size of its groups.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Case {
    tp: usize,
    dp: usize,
    zero: u8,
    group: Option<usize>,
    /// Of the rows; 256 makes them whole blocks of moments in 8 bits.
    width: usize,
}

impl Case {
    const SINGLE: Self = Self { tp: 1, dp: 1, zero: 0, group: None, width: 1 };

    fn run<T: Send>(self, f: impl Fn(Rank) -> Result<T, BoxError> + Sync) -> Vec<T> {
        let Self { tp, dp, zero, group: zero_group, .. } = self;
        let layout = ParallelLayout { tp, dp, zero, zero_group, ..ParallelLayout::default() };
        launch(&Mesh::new(layout).unwrap(), &[Device::flex()], f).unwrap()
    }
}

/// One rank: module and optimizer.
struct Worker {
    rank: Rank,
    specs: Vec<BucketSpec>,
    net: Net,
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

impl Worker {
    fn new(rank: Rank, case: Case, config: &OptimizerConfig, dtype: DType) -> Self {
        let tp = rank.group(Axis::Tp);
        let specs = specs(GroupPosition { rank: tp.rank(), size: tp.size() }, case.width);
        let neighbours = |grid: GridKind, size| rank.subgroup(grid.tensor_parallel(), size);
        let device = Device::flex();
        let buckets = specs.clone();
        // Parameters one after the other, and with gaps between them as on GPUs.
        let alignment = if case.tp == 1 { 1 } else { 4 };
        let sharding = |grid: GridKind| Sharding::of(&rank, grid);
        let mut optimizer =
            Optimizer::aligned(alignment, config, buckets, sharding, neighbours, (&device, dtype), usize::MAX);
        let net = net(&specs, dtype);
        optimizer.check(&net, &[0, 1], &[]).unwrap();
        let net = (0..2).fold(net, |net, bucket| optimizer.shard(bucket, net));
        Self { rank, specs, net, optimizer }
    }

    /// One step whose micro-batches are so many samples each; its norm.
    fn step(&mut self, index: usize, micro_batch: usize, gradient: Gradient) -> f64 {
        let dp_ranks = self.rank.group(Axis::DpCp);
        let each = SAMPLES / dp_ranks.size();
        let mine: Vec<usize> = (dp_ranks.rank() * each..(dp_ranks.rank() + 1) * each).collect();
        for samples in mine.chunks(micro_batch) {
            for (bucket, spec) in self.specs.iter().enumerate() {
                for param in &spec.params {
                    for sample in samples {
                        let grad = local_gradient(param, |name, place| gradient(index, *sample, name, place));
                        self.optimizer.add(bucket, param.id, grad);
                    }
                }
                self.optimizer.complete(bucket);
            }
        }
        finish_step(&mut self.optimizer, &mut self.net, index, &holders(&self.rank))
    }

    /// Whole local weights, also under ZeRO 3.
    fn weights(&mut self) -> Vec<f64> {
        let net = (0..2).fold(self.net.clone(), |net, bucket| self.optimizer.gather(bucket, net));
        values(&net)
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

/// Global tensors from every rank's local values.
fn assemble(case: Case, locals: &[Vec<f64>]) -> BTreeMap<String, HostTensor> {
    let mut slices = Vec::new();
    for (rank, local) in locals.iter().enumerate() {
        let mut start = 0;
        let at = GroupPosition { rank: rank % case.tp, size: case.tp };
        for spec in specs(at, case.width).into_iter().flat_map(|bucket| bucket.params) {
            let local = local[start..start + spec.local_len()].to_vec();
            start += local.len();
            for (section, elements) in spec.sections.iter().zip(spec.elements()) {
                if rank < case.tp {
                    slices.push((section.clone(), local[elements].to_vec()));
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
