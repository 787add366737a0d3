//! Linear layers whose collectives overlap with their GEMMs, against layers that run both one after the other.

use super::halves;
use crate::clock::on_rank;
use crate::ranks::{on_gpus, slowest, tensor_parallel};
use crate::report::Report;
use backend_dist::comm::Group;
use backend_dist::launch::Rank;
use backend_dist::mesh::Axis;
use backend_dist::ops::weight_grads::Deferral;
use backend_dist::ops::{
    InputCollective, LinearOptions, OutputCollective, PassContext, Prologue, linear_with, pull_back,
};
use burn::tensor::{DType, Distribution, Tensor};

/// Sequence, batch, input and output features of the rank's GEMM: two that are split into chunks, a sequence that
/// cannot be split further, a tiny one.
const SIZES: [[usize; 4]; 4] = [[8192, 1, 4096, 768], [4096, 2, 2048, 3584], [2040, 1, 4096, 4096], [16, 2, 64, 32]];

/// A layer of Llama-3-8B over the ranks: QKV, output projection, first and second layer of the MLP.
const LLAMA: [(&str, Kind, [usize; 2]); 4] = [
    ("QKV", Kind::Gathered, [4096, 6144]),
    ("output projection", Kind::Scattered, [4096, 4096]),
    ("MLP, first", Kind::Gathered, [4096, 28672]),
    ("MLP, second", Kind::Scattered, [14336, 4096]),
];

#[derive(Clone, Copy, Debug)]
enum Kind {
    Gathered,
    GatheredWithBias,
    Copied,
    Scattered,
    Reduced,
    /// Without collectives.
    Alone,
}

const KINDS: [Kind; 5] = [Kind::Gathered, Kind::GatheredWithBias, Kind::Copied, Kind::Scattered, Kind::Reduced];

impl Kind {
    fn options(self, group: &Group, overlap: bool) -> LinearOptions {
        let group = group.clone();
        let (entry, exit) = match self {
            Self::Gathered | Self::GatheredWithBias => (InputCollective::AllGather(group), OutputCollective::None),
            Self::Copied => (InputCollective::Copy(group), OutputCollective::None),
            Self::Scattered => (InputCollective::None, OutputCollective::ReduceScatter(group)),
            Self::Reduced => (InputCollective::None, OutputCollective::AllReduce(group)),
            Self::Alone => (InputCollective::None, OutputCollective::None),
        };
        LinearOptions { entry, exit, overlap, ..Default::default() }
    }

    /// Into how many shards the sequence is split in the input and in the output.
    fn parts(self, size: usize) -> [usize; 2] {
        match self {
            Self::Gathered | Self::GatheredWithBias => [size, 1],
            Self::Scattered => [1, size],
            Self::Copied | Self::Reduced | Self::Alone => [1, 1],
        }
    }
}

/// With NCCL's kernels and with DMA copy engines, over half of the GPUs and over all.
pub fn check(gpus: usize, report: &mut Report) {
    let mut layouts = vec![halves(gpus), tensor_parallel(gpus)];
    layouts.dedup();
    for layout in layouts {
        for (copies, method) in [(false, "NCCL"), (true, "copied")] {
            let found = on_gpus(&layout, |rank| {
                rank.use_copy_engines(copies);
                Ok(layers(rank))
            });
            let Some(found) = report.attempt("layers with overlapped collectives", found) else { continue };
            for (i, (name, _)) in found[0].iter().enumerate() {
                let wrong = found.iter().enumerate().find_map(|(rank, found)| Some((rank, found[i].1.clone()?)));
                let outcome = wrong.map_or(Ok(()), |(rank, why)| Err(format!("rank {rank}: {why}")));
                report.outcome(format!("TP{} {method}: {name}", layout.tp), outcome);
            }
        }
    }
}

/// Every layer's name, and the error if it is wrong.
fn layers(rank: &Rank) -> Vec<(String, Option<String>)> {
    let mut found = Vec::new();
    for dtype in [DType::BF16, DType::F32] {
        for sizes in SIZES {
            for kind in KINDS {
                found.push((format!("{kind:?} {sizes:?} {dtype:?}, overlapped"), compare(rank, kind, sizes, dtype)));
            }
        }
    }
    found
}

/// A layer of one rank: input, weight, bias, and the gradient of the output.
struct Layer {
    kind: Kind,
    x: Tensor<3>,
    w: Tensor<2>,
    bias: Option<Tensor<1>>,
    upstream: Tensor<3>,
}

impl Layer {
    fn new(rank: &Rank, kind: Kind, [seq, batch, inputs, outputs]: [usize; 4], dtype: DType) -> Self {
        let device = rank.device.clone().autodiff();
        let [entered, left] = kind.parts(rank.group(Axis::Tp).size());
        let random = Distribution::Normal(0.0, 1.0);
        let x = Tensor::<3>::random([seq / entered, batch, inputs], random, (&device, dtype));
        let w = Tensor::<2>::random([outputs, inputs], random, (&device, dtype)) * 0.02;
        let bias = matches!(kind, Kind::GatheredWithBias);
        let bias = bias.then(|| Tensor::<1>::random([outputs], random, (&device, dtype)).detach().require_grad());
        let upstream = Tensor::<3>::random([seq / left, batch, outputs], random, (&rank.device, dtype));
        Self { kind, x: x.detach().require_grad(), w: w.detach().require_grad(), bias, upstream }
    }

    /// Output, gradients of input, weight and bias. With `late` the weight's gradient is deferred until after the
    /// others.
    fn run(&self, group: &Group, overlap: bool, late: bool) -> Vec<Tensor<1>> {
        let deferral = Deferral::possible();
        let pass = PassContext { weight_grads: deferral.clone(), ..PassContext::default() };
        let options = LinearOptions { pass, ..self.kind.options(group, overlap) };
        let y = linear_with(self.x.clone(), Prologue::None, self.w.clone(), self.bias.clone(), options);
        let mut found = vec![y.clone().inner().flatten(0, 2)];
        let back = || pull_back(y, self.upstream.clone());
        let (grads, of_weight) = if late {
            let (grads, jobs) = deferral.deferred(back);
            let late = jobs.run();
            let of_weight = self.w.grad(&late);
            (grads, of_weight)
        } else {
            let grads = back();
            let of_weight = self.w.grad(&grads);
            (grads, of_weight)
        };
        found.push(self.x.grad(&grads).expect("the input has a gradient").flatten(0, 2));
        found.push(of_weight.expect("the weight has a gradient").flatten(0, 1));
        found.extend(self.bias.as_ref().map(|bias| bias.grad(&grads).expect("the bias has a gradient")));
        found
    }
}

fn compare(rank: &Rank, kind: Kind, sizes: [usize; 4], dtype: DType) -> Option<String> {
    let (group, layer) = (rank.group(Axis::Tp), Layer::new(rank, kind, sizes, dtype));
    let expected = layer.run(&group, false, false);
    // Several times without a wait of the host: buffers are freed and reused while collectives run.
    let mut found: Vec<_> = (0..3).map(|_| layer.run(&group, true, false)).collect();
    found.push(layer.run(&group, true, true));
    for (round, found) in found.into_iter().enumerate() {
        for ((what, found), expected) in ["output", "input", "weight", "bias"].iter().zip(found).zip(&expected) {
            let scale = expected.clone().cast(DType::F32).abs().max().into_scalar::<f32>();
            let difference = (found.cast(DType::F32) - expected.clone().cast(DType::F32)).abs().max();
            let difference = difference.into_scalar::<f32>() / scale;
            // A GEMM may round differently with another number of rows; a sum over ranks adds their rounding errors.
            let bound = if dtype == DType::BF16 { 0.02 } else { 1e-4 };
            if difference.is_nan() || difference > bound {
                return Some(format!("round {round}, {what}: off by {difference:.1e} of the largest, {scale:.3}"));
            }
        }
    }
    None
}

/// Prints the times of Llama-3-8B's layers over all of these GPUs, two sequences at a time: collectives after the
/// GEMMs, overlapped with them by NCCL's kernels, overlapped by DMA copy engines, and without collectives.
pub fn speed(gpus: usize, report: &mut Report) {
    let mut columns = Vec::new();
    for (overlap, copies) in [(false, false), (true, false), (true, true)] {
        let times = on_gpus(&tensor_parallel(gpus), |rank| {
            rank.use_copy_engines(copies);
            let size = rank.group(Axis::Tp).size();
            Ok(LLAMA.map(|(_, kind, [inputs, outputs])| {
                let sizes = match kind {
                    Kind::Scattered => [8192, 2, inputs / size, outputs],
                    _ => [8192, 2, inputs, outputs / size],
                };
                [seconds(rank, kind, sizes, overlap), seconds(rank, Kind::Alone, sizes, overlap)]
            }))
        });
        let Some(times) = report.attempt("times of layers", times) else { return };
        columns.push(times);
    }
    for (i, (name, ..)) in LLAMA.into_iter().enumerate() {
        let ms = |method: usize, what: usize| slowest(&columns[method], |times| times[i][what]) * 1e3;
        let [after, nccl, copied, none] = [ms(0, 0), ms(1, 0), ms(2, 0), ms(0, 1)];
        println!(
            "{name}: forward and backward {after:.3} ms, overlapped by NCCL {nccl:.3}, by copies {copied:.3}, without collectives {none:.3}"
        );
    }
}

fn seconds(rank: &Rank, kind: Kind, sizes: [usize; 4], overlap: bool) -> f64 {
    let (group, layer) = (rank.group(Axis::Tp), Layer::new(rank, kind, sizes, DType::BF16));
    on_rank(rank, &group, 5, || drop(layer.run(&group, overlap, false))).done
}
