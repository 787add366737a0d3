//! In chunks and position by position the rule is the same, with the same gradients.

use backend_dist::ops::context::Documents;
use backend_dist::shard::Init;
use burn::tensor::activation::sigmoid;

use super::*;

const HEADS: usize = 3;
const KEYS: usize = 5;
const VALUES: usize = 4;

/// Noise that records gradients.
fn noise<const D: usize>(name: &str, shape: [usize; D]) -> Tensor<D> {
    let init = Init::Normal { std: 1.0 };
    let data: Vec<f64> = (0..shape.iter().product::<usize>()).map(|index| init.value(3, name, index as u64)).collect();
    Tensor::from_data(TensorData::new(data, shape), (&Device::flex().autodiff(), DType::F64)).require_grad()
}

/// Queries, keys, values, what decay and β are made of, and a first state.
struct Given {
    wide: [Tensor<4>; 3],
    narrow: [Tensor<3>; 2],
    first: Tensor<4>,
}

impl Given {
    fn new(samples: usize, seq: usize) -> Self {
        let of = |name, features| noise(name, [samples, HEADS, seq, features]);
        Self {
            wide: [of("q", KEYS), of("k", KEYS), of("v", VALUES)],
            narrow: ["decay", "beta"].map(|name| noise(name, [samples, HEADS, seq])),
            first: noise("first", [samples, HEADS, KEYS, VALUES]),
        }
    }

    /// Keys that are much alike, decays from a few percent to nearly all.
    fn inputs(&self) -> Inputs {
        let ([queries, keys, values], [decay, beta]) = (self.wide.clone(), self.narrow.clone());
        let keys = keys.add_scalar(2.0);
        let length = (keys.clone() * keys.clone()).sum_dim(3).sqrt();
        Inputs { queries, keys: keys / length, values, decay: decay.exp().neg(), beta: sigmoid(beta) }
    }
}

/// The definition.
fn by_position(inputs: Inputs, first: Option<Tensor<4>>) -> (Tensor<4>, Tensor<4>) {
    let [b, h, seq, dk] = inputs.keys.dims();
    let dv = inputs.values.dims()[3];
    let zeros = || Tensor::zeros([b, h, dk, dv], (&inputs.keys.device(), DType::F64));
    let mut state = first.unwrap_or_else(zeros);
    let mut answers = Vec::new();
    for at in 0..seq {
        let [q, k, v] = [&inputs.queries, &inputs.keys, &inputs.values].map(|x| x.clone().narrow(2, at, 1));
        let [decay, beta] = [&inputs.decay, &inputs.beta].map(|x| x.clone().narrow(2, at, 1).unsqueeze_dim::<4>(3));
        state = state * decay.exp();
        let wrong = v - k.clone().matmul(state.clone());
        state = state + k.swap_dims(2, 3).matmul(wrong * beta);
        answers.push(q.matmul(state.clone()));
    }
    (Tensor::cat(answers, 2), state)
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
                        let (answers, last) = gated_delta_rule(given.inputs(), first, None, true);
                        (answers, last.unwrap())
                    }
                    false => by_position(given.inputs(), first),
                };
                let (of_answers, of_last) = (noise("answers", answers.dims()), noise("last", last.dims()));
                let loss = (answers.clone() * of_answers.detach()).sum() + (last.clone() * of_last.detach()).sum();
                let gradients = loss.backward();
                let mut all = vec![("answers", host(answers)), ("last", host(last))];
                for (name, x) in ["q", "k", "v"].into_iter().zip(&given.wide) {
                    all.push((name, host(x.grad(&gradients).unwrap())));
                }
                for (name, x) in ["decay", "beta"].into_iter().zip(&given.narrow) {
                    all.push((name, host(x.grad(&gradients).unwrap())));
                }
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
    let (packed, last) = gated_delta_rule(given.inputs(), None, Some(&borders), true);
    for (sample, starts) in starts.iter().enumerate() {
        for (index, &start) in starts.iter().enumerate() {
            let end = starts.get(index + 1).copied().unwrap_or(SEQ);
            let of = |x: &Tensor<4>| x.clone().narrow(0, sample, 1).narrow(2, start, end - start);
            let inputs = given.inputs();
            let alone = Inputs {
                queries: of(&inputs.queries),
                keys: of(&inputs.keys),
                values: of(&inputs.values),
                decay: inputs.decay.narrow(0, sample, 1).narrow(2, start, end - start),
                beta: inputs.beta.narrow(0, sample, 1).narrow(2, start, end - start),
            };
            let (answers, state) = by_position(alone, None);
            assert_close(&format!("{sample}, {start}"), host(of(&packed)), host(answers), 1e-12);
            if end == SEQ {
                let found = last.clone().unwrap().narrow(0, sample, 1);
                assert_close(&format!("{sample}: state"), host(found), host(state), 1e-12);
            }
        }
    }
}
