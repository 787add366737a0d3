//! Backward from given output gradients, and weight gradients deferred.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::compare::{leaf, numbers, values};
use backend_dist::ops::weight_grads::Deferral;
use backend_dist::ops::{LinearOptions, PassContext, Prologue, Tape, linear, linear_with, pull_back};
use burn::tensor::{DType, Gradients, Tensor};

fn matrix(seed: usize, dtype: DType) -> Tensor<2> {
    leaf(&numbers(16, seed), dtype, false).reshape([4, 4]).detach().require_grad()
}

/// A linear layer of a pass whose weight gradients can be deferred.
fn layer(x: Tensor<2>, w: Tensor<2>, deferral: &Deferral) -> Tensor<2> {
    let pass = PassContext { weight_grads: deferral.clone(), ..PassContext::default() };
    let options = LinearOptions { pass, ..LinearOptions::default() };
    linear_with(x.reshape([4, 1, 4]), Prologue::None, w, None, options).reshape([4, 4])
}

fn grad(x: &Tensor<2>, grads: &Gradients) -> Vec<f64> {
    values(x.grad(grads).expect("has a gradient"))
}

#[test]
fn pulling_back_equals_the_weighted_sum() {
    for dtype in [DType::F64, DType::F32] {
        let (x, w) = (matrix(1, dtype), matrix(2, dtype));
        let forward = || linear(linear(x.clone(), w.clone()).tanh(), w.clone());
        let upstream = matrix(3, dtype).detach();
        let sum = (forward() * upstream.clone()).sum().backward();
        // The gradient may be with or without autodiff.
        for upstream in [upstream.clone(), upstream.inner()] {
            let grads = pull_back(forward(), upstream.clone());
            assert_eq!([grad(&x, &grads), grad(&w, &grads)], [grad(&x, &sum), grad(&w, &sum)]);
            let (y, tape) = {
                let y = forward();
                (y.clone().inner(), Tape::of(y))
            };
            assert_eq!(y.dims(), [4, 4]);
            let grads = tape.pull_back(upstream);
            assert_eq!([grad(&x, &grads), grad(&w, &grads)], [grad(&x, &sum), grad(&w, &sum)]);
        }
    }
}

#[test]
fn pulling_back_from_a_leaf_gives_the_gradient() {
    let (x, upstream) = (matrix(1, DType::F32), matrix(2, DType::F32).inner());
    let grads = pull_back(x.clone(), upstream.clone());
    assert_eq!(grad(&x, &grads), values(upstream));
}

#[test]
#[should_panic(expected = "does not have the output's shape")]
fn a_gradient_of_another_shape_is_refused() {
    pull_back(matrix(1, DType::F32), Tensor::zeros([4, 3], &burn::tensor::Device::flex()));
}

#[test]
fn deferred_gradients_are_those_of_backward() {
    let (x, v, w) = (matrix(1, DType::F64), matrix(2, DType::F64), matrix(3, DType::F64));
    // `w` is used twice, and a function of `v` is a weight whose gradient other nodes wait for.
    let deferral = Deferral::possible();
    let forward = || {
        let y = layer(layer(x.clone(), w.clone(), &deferral).tanh(), w.clone(), &deferral);
        layer(y, v.clone().tanh(), &deferral)
    };
    let whole = forward().backward();
    let (grads, deferred) = deferral.deferred(|| forward().backward());
    assert_eq!(deferred.len(), 2);
    assert_eq!([grad(&x, &grads), grad(&v, &grads)], [grad(&x, &whole), grad(&v, &whole)]);
    assert!(w.grad(&grads).is_none());
    assert_eq!(grad(&w, &deferred.run()), grad(&w, &whole));
}

#[test]
fn the_queue_of_a_pass_is_clean_after_nesting_and_panics() {
    let (x, w) = (matrix(1, DType::F64), matrix(3, DType::F64));
    let deferral = Deferral::possible();
    let run = || layer(x.clone(), w.clone(), &deferral).backward();
    let (outer, deferred) = deferral.deferred(|| {
        let (_, inner) = deferral.deferred(run);
        assert_eq!(inner.len(), 1);
        let failed = catch_unwind(AssertUnwindSafe(|| {
            let _ = deferral.deferred(|| {
                run();
                panic!("within")
            });
        }));
        assert!(failed.is_err());
        run()
    });
    assert!(w.grad(&outer).is_none());
    assert_eq!(deferred.len(), 1);
    let failed = catch_unwind(AssertUnwindSafe(|| deferral.deferred(|| panic!("within"))));
    assert!(failed.is_err());
    assert!(w.grad(&run()).is_some());
    let other = Deferral::possible();
    assert!(w.grad(&other.deferred(run).0).is_some(), "a pass defers its own layers alone");
}
