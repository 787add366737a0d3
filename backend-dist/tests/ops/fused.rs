//! A linear layer with its prologue is the separate operations, bit for bit, with any choice of saving, recomputing or
//! deferring.

use crate::compare::{leaf, numbers, values};
use backend_dist::comm::Group;
use backend_dist::launch::launch;
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use backend_dist::ops::tensor_parallel::{
    Partial, copy_to_tensor_parallel, gather_from_sequence_parallel, reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
};
use backend_dist::ops::weight_grads::Deferral;
use backend_dist::ops::{
    AttentionOptions, GeluKind, InputCollective, LinearOptions, OutputCollective, PackedHeads, PassContext, Prologue,
    attention_packed, geglu, gelu, layer_norm, linear, linear_with, pull_back, rms_norm, squared_relu, swiglu,
};
use burn::tensor::{DType, Device, Tensor};

const SEQ: usize = 6;
const BATCH: usize = 2;
const HEADS: PackedHeads = PackedHeads { heads: 4, kv_heads: 2 };
const OPTIONS: AttentionOptions =
    AttentionOptions { scale: 0.7, causal: true, window: None, softcap: None, dropout: None, deterministic: false };
const OUT: usize = 5;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    None,
    Rms,
    Layer,
    SwiGlu,
    GeGlu,
    Gelu,
    SquaredRelu,
    Attention,
}

impl Kind {
    /// Elements of each position of the input, features that enter the GEMM.
    fn sizes(self) -> (usize, usize) {
        match self {
            Self::SwiGlu | Self::GeGlu => (14, 7),
            Self::Attention => (24, 12),
            _ => (8, 8),
        }
    }

    fn apart(self, x: Tensor<3>, [a, b]: [Tensor<1>; 2]) -> Tensor<3> {
        match self {
            Self::None => x,
            Self::Rms => rms_norm(x, a, 0.1),
            Self::Layer => layer_norm(x, a, b, 0.1),
            Self::SwiGlu => swiglu(x),
            Self::GeGlu => geglu(x, GeluKind::Tanh),
            Self::Gelu => gelu(x, GeluKind::Tanh),
            Self::SquaredRelu => squared_relu(x),
            Self::Attention => {
                let y = attention_packed(x.reshape([SEQ, BATCH, 8, 3]), HEADS, OPTIONS);
                y.reshape([SEQ, BATCH, 12])
            }
        }
    }

    fn together(self, x: Tensor<3>, [a, b]: [Tensor<1>; 2], w: Tensor<2>, options: LinearOptions) -> Tensor<3> {
        let prologue = match self {
            Self::None => Prologue::None,
            Self::Rms => Prologue::RmsNorm { weight: a, rms: 0.1.into() },
            Self::Layer => Prologue::LayerNorm { weight: a, bias: b, eps: 0.1 },
            Self::SwiGlu => Prologue::SwiGlu,
            Self::GeGlu => Prologue::GeGlu(GeluKind::Tanh),
            Self::Gelu => Prologue::Gelu(GeluKind::Tanh),
            Self::SquaredRelu => Prologue::SquaredRelu,
            Self::Attention => {
                let x: Tensor<4> = x.reshape([SEQ, BATCH, 8, 3]);
                return linear_with(x, Prologue::Attention(HEADS, OPTIONS), w, None, options);
            }
        };
        linear_with(x, prologue, w, None, options)
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Method {
    Separate,
    Fused,
    Recomputed,
    RecomputedDeferred,
}

type ValueAndGradients = (Vec<f64>, Vec<Option<Vec<f64>>>);

/// Output and the gradients of x, both parameters and the weight.
fn run(
    kind: Kind,
    method: Method,
    (entry, exit): &(InputCollective, OutputCollective),
    tracked: [bool; 4],
    rank: usize,
    dtype: DType,
) -> ValueAndGradients {
    let (per_position, inner) = kind.sizes();
    let width = if matches!(kind, Kind::Rms | Kind::Layer) { inner } else { 1 };
    // A replicated input is the same on all ranks, and so are the parameters.
    let seed = if matches!(entry, InputCollective::Copy(_)) { 0 } else { rank };
    let leaf = |n: usize, seed: usize, i: usize| leaf(&numbers(n, seed), dtype, tracked[i]);
    let leaves = [
        leaf(SEQ * BATCH * per_position, seed, 0),
        leaf(width, 20, 1),
        leaf(width, 30, 2),
        leaf(OUT * inner, 40 + rank, 3),
    ];
    let [x, a, b, w] = leaves.clone();
    let (x, w) = (x.reshape([SEQ, BATCH, per_position]), w.reshape([OUT, inner]));
    // The weight must be a leaf to be deferred, but here is a view of one.
    let w = if method == Method::RecomputedDeferred { leaf_matrix(&w, tracked[3]) } else { w };
    let (matrix, deferral) = (w.clone(), Deferral::possible());
    let y = match method {
        Method::Separate => {
            let x = kind.apart(x, [a, b]);
            let x = match entry {
                InputCollective::None => x,
                InputCollective::Copy(group) => copy_to_tensor_parallel(x, group),
                InputCollective::AllGather(group) => gather_from_sequence_parallel(x, group),
            };
            let y = linear(x, w);
            match exit {
                OutputCollective::None => y,
                OutputCollective::AllReduce(group) => reduce_from_tensor_parallel(Partial::new(y), group),
                OutputCollective::ReduceScatter(group) => reduce_scatter_to_sequence_parallel(Partial::new(y), group),
            }
        }
        _ => {
            let recompute = method != Method::Fused;
            kind.together(
                x,
                [a, b],
                w,
                LinearOptions {
                    entry: entry.clone(),
                    exit: exit.clone(),
                    recompute,
                    overlap: true,
                    pass: PassContext { weight_grads: deferral.clone(), ..PassContext::default() },
                    ..Default::default()
                },
            )
        }
    };
    let out = values(y.clone());
    if !y.is_tracked() {
        return (out, vec![None; 4]);
    }
    let shape = y.dims();
    let upstream = leaf_free(&numbers(out.len(), 50 + rank), dtype).reshape(shape);
    if method == Method::RecomputedDeferred {
        let (grads, deferred) = deferral.deferred(|| pull_back(y, upstream));
        assert_eq!(deferred.len(), usize::from(tracked[3]), "{kind:?} {tracked:?}");
        assert!(matrix.grad(&grads).is_none());
        let late = deferred.run();
        let mut found: Vec<_> = leaves[..3].iter().map(|x| x.grad(&grads).map(values)).collect();
        found.push(matrix.grad(&late).map(values));
        return (out, found);
    }
    let grads = pull_back(y, upstream);
    (out, leaves.iter().map(|x| x.grad(&grads).map(values)).collect())
}

fn leaf_matrix(w: &Tensor<2>, tracked: bool) -> Tensor<2> {
    let w = w.clone().detach();
    if tracked { w.require_grad() } else { w }
}

fn leaf_free(values: &[f64], dtype: DType) -> Tensor<1> {
    leaf(values, dtype, false)
}

fn all_kinds(entry: InputCollective, exit: OutputCollective, rank: usize) {
    let ends = (entry, exit);
    let gates = [Kind::SwiGlu, Kind::GeGlu, Kind::Gelu, Kind::SquaredRelu];
    for kind in [Kind::None, Kind::Rms, Kind::Layer, Kind::Attention].into_iter().chain(gates) {
        for choice in 0..16 {
            let tracked: [bool; 4] = std::array::from_fn(|i| choice >> i & 1 == 1);
            for dtype in [DType::F64, DType::F32, DType::BF16] {
                let apart = run(kind, Method::Separate, &ends, tracked, rank, dtype);
                for method in [Method::Fused, Method::Recomputed, Method::RecomputedDeferred] {
                    let found = run(kind, method, &ends, tracked, rank, dtype);
                    assert!(
                        found == apart,
                        "{kind:?} {method:?} {ends:?} {tracked:?} {dtype:?}: {found:?} but {apart:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn on_one_rank() {
    all_kinds(InputCollective::None, OutputCollective::None, 0);
    all_kinds(InputCollective::Copy(Group::single()), OutputCollective::AllReduce(Group::single()), 0);
    all_kinds(InputCollective::AllGather(Group::single()), OutputCollective::ReduceScatter(Group::single()), 0);
}

#[test]
fn over_two_ranks() {
    let mesh = Mesh::new(ParallelLayout { tp: 2, ..Default::default() }).unwrap();
    launch(&mesh, &[Device::flex()], |r| {
        let group = r.group(Axis::Tp);
        all_kinds(InputCollective::Copy(group.clone()), OutputCollective::None, r.rank);
        all_kinds(InputCollective::AllGather(group.clone()), OutputCollective::None, r.rank);
        all_kinds(InputCollective::None, OutputCollective::AllReduce(group.clone()), r.rank);
        all_kinds(InputCollective::None, OutputCollective::ReduceScatter(group), r.rank);
        Ok(())
    })
    .unwrap();
}

#[test]
#[should_panic(expected = "linear: input has 4 features, weight [5, 8] takes 8")]
fn a_weight_that_does_not_fit_is_refused() {
    let x = leaf_free(&numbers(64, 0), DType::F32).reshape([4, 2, 8]);
    let w = leaf_free(&numbers(40, 1), DType::F32).reshape([5, 8]);
    linear_with(x, Prologue::SwiGlu, w, None, LinearOptions::default());
}
