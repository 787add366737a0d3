//! A bias is Burn's broadcast addition, bit for bit, whether the linear layer adds it or a separate operation.

use crate::compare::{leaf, numbers, run, values};
use backend_dist::launch::launch;
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use backend_dist::ops::weight_grads::Deferral;
use backend_dist::ops::{
    InputCollective, LinearOptions, OutputCollective, PassContext, Prologue, add_bias, linear_with, pull_back,
};
use burn::tensor::{DType, Device, Tensor};

const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];
const SEQ: usize = 6;
const BATCH: usize = 2;
const IN: usize = 8;
const OUT: usize = 5;

fn prologue(params: usize, a: &Tensor<1>, b: &Tensor<1>) -> Prologue {
    match params {
        0 => Prologue::None,
        1 => Prologue::RmsNorm { weight: a.clone(), rms: 0.1.into() },
        _ => Prologue::LayerNorm { weight: a.clone(), bias: b.clone(), eps: 0.1 },
    }
}

/// Output and gradients of a linear layer after a norm of `params` parameters, for every choice of tracked inputs.
fn linear_layers(params: usize, options: &LinearOptions, together: bool, dtype: DType) -> Vec<Vec<Vec<f64>>> {
    let sizes = [SEQ * BATCH * IN, IN, IN, OUT * IN, OUT];
    let inputs: Vec<Vec<f64>> = sizes.iter().enumerate().map(|(i, &n)| numbers(n, i)).collect();
    let layer = |x: Vec<Tensor<1>>| -> Tensor<1> {
        let (input, w) = (x[0].clone().reshape([SEQ, BATCH, IN]), x[3].clone().reshape([OUT, IN]));
        let (prologue, bias, options) = (prologue(params, &x[1], &x[2]), x[4].clone(), options.clone());
        let y = match together {
            true => linear_with(input, prologue, w, Some(bias), options),
            false => linear_with(input, prologue, w, None, options) + bias.unsqueeze(),
        };
        y.flatten(0, 2)
    };
    let mut found = Vec::new();
    for choice in 0..1 << sizes.len() {
        let tracked: Vec<bool> = (0..sizes.len()).map(|i| choice >> i & 1 == 1).collect();
        // Parameters that the prologue does not have get no gradient.
        if (params < 2 && tracked[2]) || (params < 1 && tracked[1]) {
            continue;
        }
        let (out, grads) = run(&layer, &inputs, &tracked, dtype);
        assert_eq!(grads.iter().map(Option::is_some).collect::<Vec<_>>(), tracked);
        found.push(grads.into_iter().flatten().chain([out]).collect());
    }
    found
}

#[test]
fn a_linear_layer_adds_its_bias() {
    let mesh = Mesh::new(ParallelLayout { tp: 2, ..Default::default() }).unwrap();
    launch(&mesh, &[Device::flex()], |r| {
        let group = r.group(Axis::Tp);
        let entered = |entry| LinearOptions { entry, recompute: true, ..Default::default() };
        let left = |exit| LinearOptions { exit, recompute: true, ..Default::default() };
        let all = [
            entered(InputCollective::None),
            entered(InputCollective::Copy(group.clone())),
            entered(InputCollective::AllGather(group.clone())),
            left(OutputCollective::AllReduce(group.clone())),
            left(OutputCollective::ReduceScatter(group)),
        ];
        for options in all {
            for (params, dtype) in (0..3).flat_map(|params| DTYPES.map(|dtype| (params, dtype))) {
                let [together, apart] = [true, false].map(|way| linear_layers(params, &options, way, dtype));
                assert!(together == apart, "{params} parameters, {options:?}, {dtype:?}: {together:?} but {apart:?}");
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn an_addition_of_its_own() {
    for [s, b] in [[6, 2], [7, 1], [1, 3], [1, 1]] {
        let n = s * b * OUT;
        let ours = |x: Vec<Tensor<1>>| -> Tensor<1> {
            let y: Tensor<3> = x[0].clone().reshape([s, b, OUT]);
            add_bias(y, x[1].clone()).flatten(0, 2)
        };
        let burns = |x: Vec<Tensor<1>>| -> Tensor<1> {
            let y: Tensor<3> = x[0].clone().reshape([s, b, OUT]);
            (y + x[1].clone().unsqueeze()).flatten(0, 2)
        };
        for dtype in DTYPES {
            for tracked in [[true, true], [true, false], [false, true], [false, false]] {
                let inputs = [numbers(n, 1), numbers(OUT, 2)];
                let (ours, burns) = (run(&ours, &inputs, &tracked, dtype), run(&burns, &inputs, &tracked, dtype));
                assert_eq!(ours, burns, "[{s}, {b}] {dtype:?} {tracked:?}");
            }
        }
    }
}

#[test]
fn a_bias_is_not_deferred_with_its_weight() {
    let [x, bias] = [SEQ * BATCH * IN, OUT].map(|n| leaf(&numbers(n, n), DType::F32, true));
    let w: Tensor<2> = leaf(&numbers(OUT * IN, 3), DType::F32, false).reshape([OUT, IN]).detach().require_grad();
    let input = x.clone().reshape([SEQ, BATCH, IN]);
    let deferral = Deferral::possible();
    let pass = PassContext { weight_grads: deferral.clone(), ..PassContext::default() };
    let options = LinearOptions { pass, ..LinearOptions::default() };
    let y = linear_with(input, Prologue::None, w.clone(), Some(bias.clone()), options);
    let upstream = Tensor::ones(y.dims(), (&y.device(), y.dtype()));
    let (grads, late) = deferral.deferred(|| pull_back(y, upstream));
    assert_eq!(late.len(), 1);
    assert_eq!(values(bias.grad(&grads).unwrap()), [(SEQ * BATCH) as f64; OUT]);
    assert!(x.grad(&grads).is_some() && w.grad(&grads).is_none());
    assert!(w.grad(&late.run()).is_some());
}

#[test]
#[should_panic(expected = "linear: the bias does not fit the weight [5, 8]")]
fn a_bias_that_does_not_fit_is_refused() {
    let x: Tensor<3> = leaf(&numbers(SEQ * BATCH * IN, 0), DType::F32, false).reshape([SEQ, BATCH, IN]);
    let w = leaf(&numbers(OUT * IN, 1), DType::F32, false).reshape([OUT, IN]);
    linear_with(x, Prologue::None, w, Some(leaf(&numbers(IN, 2), DType::F32, false)), LinearOptions::default());
}
