//! In chunks and position by position the recurrence is the same, with the same gradients.

use backend_dist::ops::context::Documents;
use backend_dist::shard::Init;
use burn::tensor::{DType, Device, TensorData};

use super::*;

const HEADS: usize = 6;
const GROUPS: usize = 2;
const FEATURES: usize = 3;
const STATE: usize = 5;

/// Noise that records gradients.
fn noise<const D: usize>(name: &str, shape: [usize; D]) -> Tensor<D> {
    let init = Init::Normal { std: 1.0 };
    let data: Vec<f64> = (0..shape.iter().product::<usize>()).map(|index| init.value(3, name, index as u64)).collect();
    Tensor::from_data(TensorData::new(data, shape), (&Device::flex().autodiff(), DType::F64)).require_grad()
}

struct Given {
    x: Tensor<4>,
    dt: Tensor<3>,
    a: Tensor<1>,
    grouped: [Tensor<4>; 2],
    first: Tensor<4>,
}

impl Given {
    fn new(samples: usize, seq: usize) -> Self {
        Self {
            x: noise("x", [samples, HEADS, seq, FEATURES]),
            dt: noise("dt", [samples, HEADS, seq]),
            a: noise("a", [HEADS]),
            grouped: ["b", "c"].map(|name| noise(name, [samples, GROUPS, seq, STATE])),
            first: noise("first", [samples, GROUPS, STATE, HEADS / GROUPS * FEATURES]),
        }
    }

    /// Step sizes from a few hundredths to ten: some chunks keep nothing of the state, and sums of logarithms are large.
    fn inputs(&self) -> Inputs {
        let [b, c] = self.grouped.clone();
        Inputs { x: self.x.clone(), dt: self.dt.clone().exp(), a: self.a.clone().exp().neg(), b, c }
    }
}

/// The definition.
fn by_position(inputs: Inputs, first: Option<Tensor<4>>) -> (Tensor<4>, Tensor<4>) {
    let Inputs { x, dt, a, b, c } = inputs;
    let [samples, heads, seq, p] = x.dims();
    let serves = HEADS / GROUPS;
    // `[b, g, n, h/g p]` as `[b, h, n, p]`, and back.
    let apart = |state: Tensor<4>| {
        let state = state.reshape([samples, GROUPS, STATE, serves, p]).permute([0, 1, 3, 2, 4]);
        state.reshape([samples, heads, STATE, p])
    };
    let mut state = match first {
        Some(first) => apart(first),
        None => Tensor::zeros([samples, heads, STATE, p], (&x.device(), DType::F64)),
    };
    let mut answers = Vec::new();
    for at in 0..seq {
        let [b, c] = [&b, &c].map(|of_groups| {
            let of = of_groups.clone().narrow(2, at, 1).reshape([samples, GROUPS, 1, STATE]);
            of.expand([samples, GROUPS, serves, STATE]).reshape([samples, heads, 1, STATE])
        });
        let dt = dt.clone().narrow(2, at, 1).unsqueeze_dim::<4>(3);
        let value = x.clone().narrow(2, at, 1) * dt.clone();
        state = state * (dt * a.clone().reshape([1, heads, 1, 1])).exp() + b.swap_dims(2, 3).matmul(value);
        answers.push(c.matmul(state.clone()));
    }
    let state = state.reshape([samples, GROUPS, serves, STATE, p]).permute([0, 1, 3, 2, 4]);
    (Tensor::cat(answers, 2), state.reshape([samples, GROUPS, STATE, serves * p]))
}

fn host<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().try_to_vec::<f64>().unwrap()
}

fn assert_close(what: &str, found: Vec<f64>, expected: Vec<f64>, limit: f64) {
    let largest = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    let gap = found.iter().zip(&expected).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs()));
    assert!(found.len() == expected.len() && gap <= limit * largest, "{what}: {gap:e} of {largest:e}");
}

/// One position, less than a chunk, whole chunks, and numbers of chunks that are odd and no power of two.
#[test]
fn chunks_are_the_recurrence() {
    for seq in [1, 2, 40, 64, 128, 200, 450] {
        for with_first in [false, true] {
            let run = |in_chunks: bool| {
                let given = Given::new(2, seq);
                let first = with_first.then(|| given.first.clone());
                let (answers, last) = match in_chunks {
                    true => {
                        let (answers, last) = ssd(given.inputs(), first, None, true);
                        (answers, last.unwrap())
                    }
                    false => by_position(given.inputs(), first),
                };
                let (of_answers, of_last) = (noise("answers", answers.dims()), noise("last", last.dims()));
                let loss = (answers.clone() * of_answers.detach()).sum() + (last.clone() * of_last.detach()).sum();
                let gradients = loss.backward();
                let [b, c] = &given.grouped;
                let mut all = vec![
                    ("answers", host(answers)),
                    ("last", host(last)),
                    ("x", host(given.x.grad(&gradients).unwrap())),
                    ("dt", host(given.dt.grad(&gradients).unwrap())),
                    ("a", host(given.a.grad(&gradients).unwrap())),
                    ("b", host(b.grad(&gradients).unwrap())),
                    ("c", host(c.grad(&gradients).unwrap())),
                ];
                if with_first {
                    all.push(("first", host(given.first.grad(&gradients).unwrap())));
                }
                all
            };
            for ((name, found), (_, expected)) in run(true).into_iter().zip(run(false)) {
                assert_close(&format!("{name} of {seq}, first state {with_first}"), found, expected, 1e-12);
            }
        }
    }
}

/// Borders at and next to those of chunks, and documents longer than one.
#[test]
fn packed_documents_are_each_document_alone() {
    const SEQ: usize = 210;
    let starts = vec![vec![0, 3, 64, 65, 130, 209], vec![0, 63, 191]];
    let given = Given::new(2, SEQ);
    let borders = Borders::new(&Documents::new(starts.clone()), SEQ);
    let (packed, last) = ssd(given.inputs(), None, Some(&borders), true);
    for (sample, starts) in starts.iter().enumerate() {
        for (index, &start) in starts.iter().enumerate() {
            let end = starts.get(index + 1).copied().unwrap_or(SEQ);
            let of = |x: &Tensor<4>| x.clone().narrow(0, sample, 1).narrow(2, start, end - start);
            let Inputs { x, dt, a, b, c } = given.inputs();
            let dt = dt.narrow(0, sample, 1).narrow(2, start, end - start);
            let (answers, state) = by_position(Inputs { x: of(&x), dt, a, b: of(&b), c: of(&c) }, None);
            assert_close(&format!("{sample}, {start}"), host(of(&packed)), host(answers), 1e-12);
            if end == SEQ {
                let found = last.clone().unwrap().narrow(0, sample, 1);
                assert_close(&format!("{sample}: state"), host(found), host(state), 1e-12);
            }
        }
    }
}
