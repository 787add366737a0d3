//! The optimizers, and what writes and reads their flat buffers.

use half::{bf16, f16};
use kernels_cubecl::pointwise::{flat::FloatType, momentum::MomentumRule};

use crate::checks::{optimizer, rows};
use crate::client;

#[test]
fn accumulate() {
    both!(rows::accumulate, 1000, 0);
    both!(rows::accumulate, 37, 3);
}

#[test]
fn sums_of_slices() {
    both!(rows::slices, 1000, 3, 0);
    both!(rows::slices, 37, 1, 5);
}

#[test]
fn flat_runs_and_squares() {
    assert_eq!(rows::runs(&client()) + rows::squares(&client()) + rows::copies(&client()), 0);
}

#[test]
fn adamw() {
    let client = client();
    let failures = optimizer::adamw::<f32>(&client, FloatType::F32)
        + optimizer::adamw::<bf16>(&client, FloatType::Bf16)
        + optimizer::adamw::<f16>(&client, FloatType::F16)
        + optimizer::adamw_in_16_bits(&client)
        + optimizer::adamw_in_8_bits(&client);
    assert_eq!(failures, 0);
}

#[test]
fn sgd_and_lion() {
    let client = client();
    let rules = [MomentumRule::Plain, MomentumRule::Sum, MomentumRule::Nesterov, MomentumRule::Lion];
    let failures: usize = rules
        .map(|rule| {
            optimizer::momentum::<f32>(&client, rule, FloatType::F32)
                + optimizer::momentum::<bf16>(&client, rule, FloatType::Bf16)
        })
        .into_iter()
        .sum();
    assert_eq!(failures, 0);
}

#[test]
fn muon() {
    let client = client();
    assert_eq!(optimizer::muon(&client, 1000, 0, true) + optimizer::muon(&client, 37, 3, false), 0);
}
