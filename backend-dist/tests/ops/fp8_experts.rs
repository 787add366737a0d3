//! FP8 layers of experts: a scale for each group of tokens and each expert, and the activation in front of them.

use std::sync::Arc;

use crate::compare::{leaf, numbers, values};
use crate::fp8::{IN, OUT, amax, assert_close, gemm, quantised};
use crate::fp8_blocks::{in_blocks, turned, uneven};
use backend_dist::comm::Group;
use backend_dist::ops::fp8::{
    BLOCK, ExpertRanks, ExpertSharding, Fp8Experts, Fp8Format, Fp8Layers, Fp8Recipe, Fp8Scaling, Number,
    grouped_activated_linear, grouped_linear,
};
use backend_dist::ops::moe::ExpertActivation;
use backend_dist::ops::{pull_back, squared_relu, swiglu};
use burn::tensor::{DType, Tensor};

/// Two experts with two groups of tokens each, one of them empty, of very different scales.
const COUNTS: [usize; 4] = [16, 32, 0, 16];

fn experts(cut: ExpertSharding) -> Fp8Experts {
    let ranks = ExpertRanks { experts: 2, local: 0..2, shards: Group::single(), tokens: None, dp_ranks: 0..1 };
    Fp8Experts::new(&Fp8Layers::default(), "experts", Fp8Recipe::tensorwise(Fp8Format::Hybrid), cut, ranks)
}

/// `COUNTS` matrix rows of `columns` numbers.
fn rows(columns: usize, seed: usize) -> Vec<f64> {
    let sizes = COUNTS.iter().zip([1.0, 1e-4, 1.0, 1e3]).flat_map(|(count, size)| vec![size; count * columns]);
    numbers(64 * columns, seed).into_iter().zip(sizes).map(|(x, size)| x * size).collect()
}

/// Every group or expert of `values`, rounded to the nearest numbers with its own scale.
fn in_parts(values: &[f64], lens: &[usize], number: Number) -> Vec<Vec<f64>> {
    let mut rest = values;
    let parts = lens.iter().map(|len| rest.split_off(..*len).unwrap());
    parts.map(|part| quantised(part, number, amax(part))).collect()
}

#[test]
fn groups_of_experts_have_scales_of_their_own() {
    let (x, w, grad) = (rows(IN, 1), numbers(2 * OUT * IN, 2), rows(OUT, 3));
    let tensor = |values: &[f64], columns: usize| {
        leaf(values, DType::F64, true).reshape([values.len() / columns, columns]).detach().require_grad()
    };
    let (x_leaf, w_leaf) = (tensor(&x, IN), tensor(&w, IN));
    let counts: Arc<[usize]> = COUNTS.into();
    let y = grouped_linear(x_leaf.clone(), w_leaf.clone(), &counts, &experts(ExpertSharding::Outputs));
    let grads = pull_back(y.clone(), tensor(&grad, OUT).detach());
    let qx = in_parts(&x, &COUNTS.map(|count| count * IN), Number::E4m3);
    let qw = in_parts(&w, &[OUT * IN; 2], Number::E4m3);
    let qg = in_parts(&grad, &COUNTS.map(|count| count * OUT), Number::E5m2);
    let (mut out, mut dx, mut dw) = (vec![], vec![], vec![vec![0.0; OUT * IN]; 2]);
    for (group, count) in COUNTS.into_iter().enumerate() {
        let expert = group / 2;
        out.extend(gemm([count, OUT, IN], &qx[group], [IN, 1], &qw[expert], [IN, 1]));
        dx.extend(gemm([count, IN, OUT], &qg[group], [OUT, 1], &qw[expert], [1, IN]));
        let part = gemm([OUT, IN, count], &qg[group], [1, OUT], &qx[group], [1, IN]);
        dw[expert].iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
    }
    assert_close("output", &values(y), &out);
    assert_close("gradient of x", &values(x_leaf.grad(&grads).unwrap()), &dx);
    assert_close("gradient of w", &values(w_leaf.grad(&grads).unwrap()), &dw.concat());
}

/// Two groups of one expert, one of the other.
#[test]
fn groups_of_experts_have_blocks_of_their_own() {
    let (counts, [inner, out]): ([usize; 4], _) = ([BLOCK, 2 * BLOCK, 0, BLOCK], [2 * BLOCK, BLOCK]);
    let rows = counts.iter().sum();
    let (x, w, grad) = (uneven(rows, inner, 1), uneven(2 * out, inner, 2), uneven(rows, out, 3));
    let tensor = |values: &[f64], columns: usize| {
        leaf(values, DType::F64, true).reshape([values.len() / columns, columns]).detach().require_grad()
    };
    let (x_leaf, w_leaf) = (tensor(&x, inner), tensor(&w, inner));
    let recipe = Fp8Recipe { scaling: Fp8Scaling::Blockwise, ..Fp8Recipe::tensorwise(Fp8Format::Hybrid) };
    let ranks = ExpertRanks { experts: 2, local: 0..2, shards: Group::single(), tokens: None, dp_ranks: 0..1 };
    let layer = Fp8Experts::new(&Fp8Layers::default(), "experts", recipe, ExpertSharding::Outputs, ranks);
    let y = grouped_linear(x_leaf.clone(), w_leaf.clone(), &Arc::from(counts), &layer);
    let grads = pull_back(y.clone(), tensor(&grad, out).detach());
    let square = in_blocks(&w, inner, BLOCK, Number::E4m3);
    let (qx, qg) = (in_blocks(&x, inner, 1, Number::E4m3), in_blocks(&grad, out, 1, Number::E5m2));
    let (mut y_, mut dx, mut dw, mut first) = (vec![], vec![], vec![vec![0.0; out * inner]; 2], 0);
    for (group, count) in counts.into_iter().enumerate() {
        let of = |values: &[f64], columns: usize| values[first * columns..(first + count) * columns].to_vec();
        let w = &square[group / 2 * out * inner..][..out * inner];
        y_.extend(gemm([count, out, inner], &of(&qx, inner), [inner, 1], w, [inner, 1]));
        dx.extend(gemm([count, inner, out], &of(&qg, out), [out, 1], w, [1, inner]));
        // Along the group's tokens.
        let by_tokens = |values: &[f64], columns: usize, number| {
            in_blocks(&turned(&of(values, columns), columns), count, 1, number)
        };
        if count > 0 {
            let (dy, x) = (by_tokens(&grad, out, Number::E5m2), by_tokens(&x, inner, Number::E4m3));
            let part = gemm([out, inner, count], &dy, [count, 1], &x, [count, 1]);
            dw[group / 2].iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
        first += count;
    }
    assert_close("output", &values(y), &y_);
    assert_close("gradient of x", &values(x_leaf.grad(&grads).unwrap()), &dx);
    assert_close("gradient of w", &values(w_leaf.grad(&grads).unwrap()), &dw.concat());
}

#[test]
fn the_activation_in_front_of_experts_is_kept_quantised_or_made_again() {
    kept_or_made_again(ExpertActivation::SwiGlu, swiglu);
    kept_or_made_again(ExpertActivation::SquaredRelu, squared_relu);
}

fn kept_or_made_again(act: ExpertActivation, plain: fn(Tensor<2>) -> Tensor<2>) {
    let features = act.inputs() * IN;
    let (x, p, w, grad) = (rows(features, 1), numbers(64, 4), numbers(2 * OUT * IN, 2), rows(OUT, 3));
    let counts: Arc<[usize]> = COUNTS.into();
    let run = |fused: Option<bool>| {
        let leaves = [leaf(&x, DType::F64, true), leaf(&p, DType::F64, true), leaf(&w, DType::F64, true)];
        let [x, p, w] = leaves.clone();
        let (x, w) = (x.reshape([64, features]), w.reshape([2 * OUT, IN]));
        let layer = experts(ExpertSharding::Inputs);
        let y = match fused {
            Some(recompute) => grouped_activated_linear(x, p, w, act, &counts, recompute, &layer),
            None => grouped_linear(plain(x) * p.reshape([64, 1]), w, &counts, &layer),
        };
        let grads = pull_back(y.clone(), leaf(&grad, DType::F64, false).reshape([64, OUT]));
        let of_leaves = leaves.map(|leaf| values(leaf.grad(&grads).unwrap()));
        [vec![values(y)], of_leaves.to_vec()].concat()
    };
    let (kept, again, apart) = (run(Some(false)), run(Some(true)), run(None));
    assert_eq!(kept, again);
    kept.iter().zip(&apart).for_each(|(kept, apart)| assert_close("fused", kept, apart));
}
