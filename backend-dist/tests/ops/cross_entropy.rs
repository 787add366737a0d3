//! Cross-entropy over one rank's vocabulary and over sharded ones, and dropout.

use crate::compare::{distance, leaf, numbers, run, same, values};
use backend_dist::comm::Group;
use backend_dist::launch::launch;
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use backend_dist::ops::{
    DropoutMask, Head, InputCollective, dropout, linear_cross_entropy, vocab_parallel_cross_entropy,
};
use burn::tensor::{DType, Device, Int, Tensor, TensorData, activation::log_softmax};

const S: usize = 5;
const B: usize = 3;

fn labels(vocab: usize) -> Tensor<2, Int> {
    let ids: Vec<i64> = (0..S * B).map(|i| (i * 7 % vocab) as i64).collect();
    Tensor::from_data(TensorData::new(ids, [B, S]), &Device::flex().autodiff()).transpose()
}

fn plain(logits: Tensor<3>, vocab: usize) -> Tensor<1> {
    let logp = log_softmax(logits.narrow(2, 0, vocab), 2);
    let ids: Tensor<3, Int> = labels(vocab).reshape([S, B, 1]);
    -logp.gather(2, ids).reshape([S * B])
}

#[test]
fn one_rank_with_and_without_padding() {
    for (columns, vocab) in [(1, 1), (7, 7), (8, 5), (100, 65), (129, 129)] {
        let view = |x: &[Tensor<1>]| -> Tensor<3> { x[0].clone().reshape([S, B, columns]) * 5.0 };
        let fused = |x: Vec<Tensor<1>>| {
            vocab_parallel_cross_entropy(view(&x), labels(vocab), 0, vocab, &Group::single()).reshape([S * B])
        };
        same(&format!("cross-entropy {vocab} of {columns}"), &[S * B * columns], fused, |x| plain(view(&x), vocab));
    }
}

#[test]
fn large_logits_do_not_overflow() {
    let device = Device::flex().autodiff();
    let logits = Tensor::<3>::from_data([[[1e4, 0.0]]], &device).require_grad();
    let label = Tensor::<2, Int>::from_data([[1]], &device);
    let loss = vocab_parallel_cross_entropy(logits.clone(), label, 0, 2, &Group::single());
    assert_eq!(values(loss.clone()), [1e4]);
    let grad = logits.grad(&loss.backward()).unwrap();
    assert!(distance(&values(grad), &[1.0, -1.0]) < 1e-6);
}

#[test]
fn split_vocabularies_agree_with_the_whole() {
    // The last rank of four holds two columns of padding in the first case, only padding in the second.
    for (columns, vocab) in [(16, 14), (16, 11)] {
        let all = numbers(S * B * columns, 0);
        let f = |x: Vec<Tensor<1>>| plain(x[0].clone().reshape([S, B, columns]), vocab);
        let (expected, expected_grad) = run(&f, std::slice::from_ref(&all), &[true], DType::F64);
        let expected_grad = expected_grad[0].clone().unwrap();
        for tp in [1, 2, 4] {
            let local = columns / tp;
            let mesh = Mesh::new(ParallelLayout { tp, ..Default::default() }).unwrap();
            let ranks = launch(&mesh, &[Device::flex()], |rank| {
                let first = rank.rank * local;
                let mine: Vec<f64> = all.chunks(columns).flat_map(|row| row[first..first + local].to_vec()).collect();
                let f = |x: Vec<Tensor<1>>| {
                    let logits = x[0].clone().reshape([S, B, local]);
                    let loss = vocab_parallel_cross_entropy(logits, labels(vocab), first, vocab, &rank.group(Axis::Tp));
                    loss.reshape([S * B])
                };
                Ok(run(&f, &[mine], &[true], DType::F64))
            })
            .unwrap();
            for (r, (loss, grads)) in ranks.into_iter().enumerate() {
                assert!(distance(&loss, &expected) < 1e-14, "loss of rank {r} of {tp}");
                let first = r * local;
                let slice = expected_grad.chunks(columns).flat_map(|row| row[first..first + local].to_vec());
                // Nothing but padding has nothing but zero gradients.
                let slice: Vec<f64> = slice.collect();
                let off = grads[0].as_ref().unwrap().iter().zip(&slice).fold(0.0f64, |m, (a, b)| m.max((a - b).abs()));
                assert!(off < 1e-14, "gradient of rank {r} of {tp} off by {off:e}");
            }
        }
    }
}

/// All positions at once, chunks of two, the last of one, and single ones: the GEMM and its cross-entropy.
#[test]
fn a_head_in_chunks() {
    let (hidden, columns, vocab) = (6, 11, 9);
    let inputs = |x: &[Tensor<1>]| (x[0].clone().reshape([S, B, hidden]), x[1].clone().reshape([columns, hidden]));
    let whole = |x: Vec<Tensor<1>>| {
        let (x, w): (Tensor<3>, Tensor<2>) = inputs(&x);
        plain(x.matmul(w.transpose().unsqueeze()), vocab)
    };
    for positions in [S, 2, 1] {
        let chunks = |x: Vec<Tensor<1>>| {
            let (x, w) = inputs(&x);
            let (entry, group) = (InputCollective::None, Group::single());
            let head = Head { entry, group, first_row: 0, vocab_size: vocab, softcap: None, positions };
            linear_cross_entropy(x, w, labels(vocab), head).reshape([S * B])
        };
        same(&format!("head, {positions} positions at once"), &[S * B * hidden, columns * hidden], chunks, whole);
    }
}

/// In bf16 the weight's gradient is accumulated in f32: chunks are as close to f64 as the whole is.
#[test]
fn a_head_in_chunks_sums_in_f32() {
    let (hidden, vocab) = (8, 16);
    let half = |n, seed| -> Vec<f64> { numbers(n, seed).iter().map(|x| f64::from(half::bf16::from_f64(*x))).collect() };
    let values = [half(S * B * hidden, 0), half(vocab * hidden, 1)];
    let head = |x: Vec<Tensor<1>>, positions: usize, dtype| {
        let (entry, group) = (InputCollective::None, Group::single());
        let head = Head { entry, group, first_row: 0, vocab_size: vocab, softcap: None, positions };
        let (x, w) = (x[0].clone().reshape([S, B, hidden]), x[1].clone().reshape([vocab, hidden]));
        linear_cross_entropy(x, w, labels(vocab), head).reshape([S * B]).cast(dtype)
    };
    let gradient =
        |positions, dtype| run(&|x| head(x, positions, dtype), &values, &[true, true], dtype).1[1].clone().unwrap();
    let exact = gradient(S, DType::F64);
    let [whole, chunks] = [S, 1].map(|positions| distance(&gradient(positions, DType::BF16), &exact));
    assert!(chunks < 1.5 * whole.max(0.004), "chunks are off by {chunks:e}, the whole by {whole:e}");
}

#[test]
fn dropout_masks_do_not_depend_on_the_split() {
    let n = 6 * 4 * 10;
    let x: Tensor<3> = leaf(&vec![1.0; n], DType::F64, false).reshape([6, 4, 10]);
    let whole = dropout(x.clone(), 0.3, DropoutMask::new(5));
    let share = values(whole.clone()).iter().filter(|&&v| v == 0.0).count() as f64 / n as f64;
    assert!((0.15..0.45).contains(&share), "{share} dropped");
    assert!(values(whole.clone()).iter().all(|&v| v == 0.0 || v == 1.0 / 0.7));
    // A sequence-parallel and a tensor-parallel slice.
    for (offset, local) in [([2, 0, 0], [2, 4, 10]), ([0, 0, 5], [6, 4, 5]), ([3, 1, 2], [1, 2, 7])] {
        let ranges = [0, 1, 2].map(|d| offset[d]..offset[d] + local[d]);
        let part = dropout(x.clone().slice(ranges.clone()), 0.3, DropoutMask::of_shard(5, &offset, &[6, 4, 10]));
        assert_eq!(values(part), values(whole.clone().slice(ranges)));
    }
    assert_eq!(values(dropout(x.clone(), 0.0, DropoutMask::new(5))), vec![1.0; n]);
}

#[test]
fn dropout_gradients_use_the_mask_of_the_forward_pass() {
    let n = 1000;
    let mask = dropout(leaf(&vec![1.0; n], DType::F64, false), 0.25, DropoutMask::new(3));
    same("dropout", &[n], |x| dropout(x[0].clone(), 0.25, DropoutMask::new(3)), |x| x[0].clone() * mask.clone());
}
