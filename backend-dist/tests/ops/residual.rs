//! Norms and additions in the residual stream are the separate operations, bit for bit, whatever needs a gradient, is
//! recomputed, deferred or communicated.

use crate::compare::{leaf, numbers, values};
use backend_dist::launch::launch;
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use backend_dist::ops::tensor_parallel::{Partial, reduce_from_tensor_parallel};
use backend_dist::ops::weight_grads::Deferral;
use backend_dist::ops::{
    HandOvers, InputCollective, LinearOptions, OutputCollective, PassContext, Prologue, Residual, layer_norm,
    linear_with, pull_back, rms_norm,
};
use burn::tensor::{DType, Device, Tensor};

const SEQ: usize = 6;
const BATCH: usize = 2;
const HIDDEN: usize = 8;
const WIDE: usize = 5;
const EPS: f64 = 0.1;

/// The reader of the stream with a norm.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Reader {
    Linear,
    /// Two layers with the same norm.
    Twice,
    Norm,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    centred: bool,
    readers: [Reader; 2],
    recompute: bool,
    deferred: bool,
    dtype: DType,
}

/// The stream, and for each of the two norms its weight and bias and the weights up and down after it.
const LEAVES: usize = 9;

struct Inputs {
    x: Tensor<3>,
    sublayers: [Sublayer; 2],
}

struct Sublayer {
    norm: [Tensor<1>; 2],
    up: Tensor<2>,
    down: Tensor<2>,
}

impl Sublayer {
    fn prologue(&self, centred: bool) -> Prologue {
        let [weight, bias] = self.norm.clone();
        if centred {
            Prologue::LayerNorm { weight, bias, eps: EPS }
        } else {
            Prologue::RmsNorm { weight, rms: EPS.into() }
        }
    }

    /// `up` is the layer after the norm, `norm` the norm alone.
    fn made(
        &self,
        reader: Reader,
        options: &[LinearOptions; 2],
        up: impl Fn(LinearOptions) -> Tensor<3>,
        norm: impl Fn() -> Tensor<3>,
    ) -> Tensor<3> {
        let [column, row] = options.clone();
        let wide = match reader {
            Reader::Norm => return norm(),
            Reader::Linear => up(column),
            Reader::Twice => up(column.clone()) * up(column),
        };
        linear_with(wide, Prologue::None, self.down.clone(), None, row)
    }
}

fn apart(Inputs { x, sublayers }: Inputs, block: Block, options: &[LinearOptions; 2]) -> Tensor<3> {
    sublayers.iter().zip(block.readers).fold(x, |x, (sublayer, reader)| {
        let up = |options| linear_with(x.clone(), sublayer.prologue(block.centred), sublayer.up.clone(), None, options);
        let norm = || match sublayer.prologue(block.centred) {
            Prologue::LayerNorm { weight, bias, eps } => layer_norm(x.clone(), weight, bias, eps),
            _ => rms_norm(x.clone(), sublayer.norm[0].clone(), EPS),
        };
        let made = sublayer.made(reader, options, up, norm);
        x + made
    })
}

fn together(Inputs { x, sublayers }: Inputs, block: Block, options: &[LinearOptions; 2]) -> Tensor<3> {
    let made = |x: &Residual, i: usize| {
        let sublayer = &sublayers[i];
        let up = |options| x.clone().linear(sublayer.prologue(block.centred), sublayer.up.clone(), None, options);
        sublayer.made(block.readers[i], options, up, || x.clone().norm(sublayer.prologue(block.centred)))
    };
    let x = Residual::enter(x, &options[0].pass);
    let first = made(&x, 0);
    let x = x.plus(first, sublayers[1].prologue(block.centred));
    let second = made(&x, 1);
    x.leave(second)
}

type ValueAndGradients = (Vec<f64>, Vec<Option<Vec<f64>>>);

fn run(
    block: Block,
    rank: usize,
    tracked: [bool; LEAVES],
    form: impl Fn(Inputs, Block, &[LinearOptions; 2]) -> Tensor<3>,
    ends: &(InputCollective, OutputCollective),
) -> ValueAndGradients {
    let flat = |n: usize, seed: usize| leaf(&numbers(n, seed), block.dtype, false);
    let wanted = |i: usize, w: Tensor<2>| if tracked[i] { w.require_grad() } else { w };
    let matrix = |[out, inner]: [usize; 2], seed, i| wanted(i, flat(out * inner, seed).reshape([out, inner]));
    let param = |seed: usize, i: usize| leaf(&numbers(HIDDEN, seed), block.dtype, tracked[i]);
    // A replicated input is the same on all ranks, and so are the norms.
    let seed = if matches!(ends.0, InputCollective::Copy(_)) { 0 } else { rank };
    let x = flat(SEQ * BATCH * HIDDEN, seed).reshape([SEQ, BATCH, HIDDEN]);
    let x = if tracked[0] { x.require_grad() } else { x };
    let sublayers = [0, 1].map(|sublayer| {
        let at = 1 + 4 * sublayer;
        Sublayer {
            norm: [param(10 + at, at), param(11 + at, at + 1)],
            up: matrix([WIDE, HIDDEN], 40 + at + 2 * rank, at + 2),
            down: matrix([HIDDEN, WIDE], 60 + at + 2 * rank, at + 3),
        }
    });
    let deferral = Deferral::possible();
    let hand_overs = HandOvers::counted();
    let pass = PassContext { weight_grads: deferral.clone(), hand_overs: hand_overs.clone(), ..PassContext::default() };
    let options = LinearOptions { recompute: block.recompute, overlap: true, pass, ..Default::default() };
    let both =
        [LinearOptions { entry: ends.0.clone(), ..options.clone() }, LinearOptions { exit: ends.1.clone(), ..options }];
    let norms = sublayers.each_ref().map(|sublayer| sublayer.norm.clone());
    let weights = sublayers.each_ref().map(|sublayer| [sublayer.up.clone(), sublayer.down.clone()]);
    let y = form(Inputs { x: x.clone(), sublayers }, block, &both);
    let out = values(y.clone());
    if !y.is_tracked() {
        return (out, vec![]);
    }
    let upstream = flat(out.len(), 50 + seed).reshape(y.dims());
    let mut late = None;
    let grads = match block.deferred {
        true => {
            let (grads, deferred) = deferral.deferred(|| pull_back(y, upstream));
            late = Some(deferred.run());
            grads
        }
        false => pull_back(y, upstream),
    };
    // The second reader of a norm computes it again.
    let again = usize::from(block.readers[1] == Reader::Twice);
    assert!(hand_overs.missed() <= again, "{block:?} {tracked:?}: {} hand-overs were missed", hand_overs.missed());
    let of_weight = |w: &Tensor<2>| w.grad(&grads).or_else(|| w.grad(late.as_ref()?)).map(values);
    let mut found = vec![x.grad(&grads).map(values)];
    for (norm, weights) in norms.iter().zip(&weights) {
        found.extend(norm.iter().map(|x| x.grad(&grads).map(values)));
        found.extend(weights.iter().map(of_weight));
    }
    (out, found)
}

/// Which of the leaves need a gradient: all, one of them, all but one.
fn choices() -> Vec<[bool; LEAVES]> {
    let mut choices = vec![[true; LEAVES], [false; LEAVES]];
    for one in 0..LEAVES {
        choices.extend([true, false].map(|wanted| std::array::from_fn(|i| (i == one) == wanted)));
    }
    choices
}

fn all_blocks(ends: &(InputCollective, OutputCollective), rank: usize) {
    use Reader::{Linear, Norm, Twice};
    for readers in [[Linear, Linear], [Twice, Norm], [Norm, Twice]] {
        for (centred, recompute, deferred) in
            [(false, false, false), (true, false, false), (false, true, false), (true, true, true)]
        {
            for dtype in [DType::F64, DType::F32, DType::BF16] {
                let block = Block { centred, readers, recompute, deferred, dtype };
                for tracked in choices() {
                    let expected = run(block, rank, tracked, apart, ends);
                    let found = run(block, rank, tracked, together, ends);
                    assert!(found == expected, "{block:?} {ends:?} {tracked:?}: {found:?} but {expected:?}");
                    assert_eq!(expected.1.first().is_some_and(Option::is_some), tracked[0]);
                }
            }
        }
    }
}

#[test]
fn on_one_rank() {
    all_blocks(&(InputCollective::None, OutputCollective::None), 0);
}

#[test]
fn over_two_ranks() {
    let mesh = Mesh::new(ParallelLayout { tp: 2, ..Default::default() }).unwrap();
    launch(&mesh, &[Device::flex()], |r| {
        let group = r.group(Axis::Tp);
        all_blocks(&(InputCollective::Copy(group.clone()), OutputCollective::AllReduce(group.clone())), r.rank);
        all_blocks(&(InputCollective::AllGather(group.clone()), OutputCollective::ReduceScatter(group)), r.rank);
        Ok(())
    })
    .unwrap();
}

/// A partial sum is reduced, added and normalised in one step, with the gradients of one step after the other.
#[test]
fn a_partial_sum_is_added_as_its_sum() {
    let mesh = Mesh::new(ParallelLayout { tp: 2, ..Default::default() }).unwrap();
    launch(&mesh, &[Device::flex()], |r| {
        let (group, shape) = (r.group(Axis::Tp), [SEQ, BATCH, HIDDEN]);
        for centred in [false, true] {
            let run = |together: bool| {
                let (x, partial) = (tracked(shape, 1), tracked(shape, 2 + r.rank));
                let [weight, bias] = [5, 6].map(|seed| leaf(&numbers(HIDDEN, seed), DType::F64, true));
                let next: Tensor<2> = Tensor::ones([WIDE, HIDDEN], (&x.device(), DType::F64));
                let norm = Sublayer { norm: [weight.clone(), bias], up: next.clone(), down: next.clone() };
                let stream = Residual::enter(x.clone(), &PassContext::default());
                let of = Partial::new(partial.clone());
                let stream = match together {
                    true => stream.plus_sum(of, &group, norm.prologue(centred), Some(next)),
                    false => stream.plus(reduce_from_tensor_parallel(of, &group), norm.prologue(centred)),
                };
                let y = stream.clone().leave(stream.norm(norm.prologue(centred)));
                let grads = pull_back(y.clone(), tracked(shape, 7).detach());
                let of = [&x, &partial].map(|x| values(x.grad(&grads).unwrap()));
                (values(y), of, values(weight.grad(&grads).unwrap()))
            };
            assert_eq!(run(true), run(false), "centred: {centred}");
        }
        Ok(())
    })
    .unwrap();
}

fn tracked(shape: [usize; 3], seed: usize) -> Tensor<3> {
    let n = shape.iter().product();
    leaf(&numbers(n, seed), DType::F64, false).reshape(shape).require_grad()
}

/// The stream without a norm after it, or with a norm whose output does not contribute to the loss.
#[test]
fn a_path_that_is_not_used_takes_no_gradient_away() {
    let shape = [SEQ, BATCH, HIDDEN];
    let weight = leaf(&numbers(HIDDEN, 3), DType::F64, true);
    let norm = || Prologue::RmsNorm { weight: weight.clone(), rms: EPS.into() };
    let upstream = leaf(&numbers(SEQ * BATCH * HIDDEN, 4), DType::F64, false).reshape(shape);
    let gradients = |form: &dyn Fn(Tensor<3>, Tensor<3>) -> Tensor<3>| {
        let (x, other) = (tracked(shape, 1), tracked(shape, 2));
        let grads = pull_back(form(x.clone(), other.clone()), upstream.clone());
        [x, other].map(|x| values(x.grad(&grads).unwrap()))
    };
    let only_past = gradients(&|x, other| {
        let x = Residual::enter(x, &PassContext::default()).plus(other, norm());
        let unused = x.clone().norm(norm());
        x.leave(unused.detach())
    });
    assert_eq!(only_past, gradients(&|x, other| x + other));
    let only_through = gradients(&|x, other| {
        let x = Residual::enter(x, &PassContext::default()).plus(other, norm());
        let made = x.clone().norm(norm());
        x.leave(made.clone());
        made
    });
    assert_eq!(only_through, gradients(&|x, other| rms_norm(x + other, weight.clone(), EPS)));
}

#[test]
#[should_panic(expected = "residual: the stream is [6, 2, 8], what is added [6, 2, 4]")]
fn an_addend_of_another_shape_is_refused() {
    Residual::enter(tracked([SEQ, BATCH, 8], 1), &PassContext::default()).leave(tracked([SEQ, BATCH, 4], 2));
}

#[test]
#[should_panic(expected = "residual: SwiGlu is no norm")]
fn what_is_no_norm_is_refused() {
    let x = || tracked([SEQ, BATCH, 8], 1);
    Residual::enter(x(), &PassContext::default()).plus(x(), Prologue::SwiGlu);
}

#[test]
fn a_second_reader_of_a_norm_is_a_missed_hand_over() {
    let hand_overs = HandOvers::counted();
    let pass = PassContext { hand_overs: hand_overs.clone(), ..PassContext::default() };
    let x = || leaf(&numbers(SEQ * BATCH * HIDDEN, 1), DType::F64, false).reshape([SEQ, BATCH, HIDDEN]);
    let norm = || Prologue::RmsNorm { weight: leaf(&numbers(HIDDEN, 2), DType::F64, false), rms: EPS.into() };
    let stream = Residual::enter(x(), &pass).plus(x(), norm());
    let first = values(stream.clone().norm(norm()));
    assert_eq!(hand_overs.missed(), 0);
    assert_eq!(values(stream.norm(norm())), first);
    assert_eq!(hand_overs.missed(), 1);
}
