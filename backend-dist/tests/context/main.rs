//! Attention over a context-parallel group and within documents, against one rank that has all positions.

mod case;

use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use backend_dist::ops::PackedHeads;
use backend_dist::ops::context::{ContextParallel, CpCommType, context_to_head_parallel, head_to_context_parallel};
use burn::tensor::{DType, Device, Tensor, TensorData};
use case::{BATCH, Case, alone, formula, same, together};

/// Causal, window, documents, and both; each sample has its own documents, one with boundaries between and inside
/// chunks, one with documents of a single token.
fn masks(positions: usize, heads: PackedHeads, lengths: [usize; 2]) -> Vec<Case> {
    let starts = vec![vec![0, positions / 4, positions / 2 - 1], vec![0, 1, 2, positions - 3]];
    assert_eq!(starts.len(), BATCH);
    let (softcap, sinks, dropout) = (None, false, None);
    let plain =
        Case { positions, heads, lengths, causal: true, window: None, documents: None, softcap, sinks, dropout };
    let documents = Some(starts);
    vec![
        plain.clone(),
        Case { window: Some(5), ..plain.clone() },
        Case { documents: documents.clone(), ..plain.clone() },
        Case { window: Some(3), documents: documents.clone(), ..plain.clone() },
        Case { softcap: Some(0.5), ..plain.clone() },
        Case { sinks: true, ..plain.clone() },
        Case { sinks: true, window: Some(3), documents: documents.clone(), ..plain.clone() },
        Case { causal: false, ..plain.clone() },
        Case { causal: false, window: Some(4), documents, ..plain },
    ]
}

fn heads(heads: usize, kv_heads: usize) -> PackedHeads {
    PackedHeads { heads, kv_heads }
}

fn check(sizes: &[usize], comm: impl Fn(usize) -> Vec<CpCommType>, of_heads: &[(PackedHeads, [usize; 2])]) {
    for &size in sizes {
        for &(heads, lengths) in of_heads {
            for case in masks(size * 8, heads, lengths) {
                let expected = formula(&case);
                for comm in comm(size) {
                    let packed = lengths[0] == lengths[1];
                    let found = together(&case, size, comm, packed);
                    same(&format!("{comm:?} over {size} ranks, {case:?}"), &found, &expected);
                }
            }
        }
    }
}

#[test]
fn documents_on_one_rank() {
    for case in masks(24, heads(4, 2), [3, 3]).into_iter().chain(masks(160, heads(2, 1), [3, 5])) {
        same(&format!("one rank, {case:?}"), &alone(&case), &formula(&case));
    }
}

#[test]
fn ring() {
    check(&[2, 3, 4], |_| vec![CpCommType::P2p], &[(heads(4, 2), [3, 3]), (heads(3, 1), [4, 2])]);
}

#[test]
fn all_gather() {
    check(&[2, 3, 4], |_| vec![CpCommType::AllGather], &[(heads(4, 2), [3, 3]), (heads(3, 1), [4, 2])]);
}

/// Key/value heads that the ranks divide, fewer heads than ranks, and neither.
#[test]
fn all_to_all() {
    let a2a = |_| vec![CpCommType::A2a];
    check(&[2], a2a, &[(heads(4, 2), [3, 3]), (heads(2, 1), [2, 4]), (heads(6, 3), [2, 2])]);
    check(&[3], a2a, &[(heads(6, 2), [2, 2]), (heads(3, 3), [2, 3])]);
    check(&[4], a2a, &[(heads(8, 2), [2, 2]), (heads(4, 1), [2, 3]), (heads(12, 6), [2, 2])]);
}

#[test]
fn all_to_all_inside_a_ring() {
    let blocks = |_| [1, 2, 4].map(|inner| CpCommType::A2aP2p { inner }).to_vec();
    check(&[4], blocks, &[(heads(4, 2), [3, 3]), (heads(4, 1), [2, 4])]);
}

/// A rank gets all positions of its heads in order, and gives back what it got; gradients take the same way.
#[test]
fn positions_for_heads() {
    for ranks in [1, 2, 3] {
        let mesh = Mesh::new(ParallelLayout { cp: ranks, ..Default::default() }).unwrap();
        let (seq, heads) = (4 * ranks, 2 * ranks);
        let value = |position: usize, head: usize| (position * heads + head) as f64;
        launch(&mesh, &[Device::flex()], |rank: Rank| {
            let group = rank.group(Axis::Cp);
            let like = (&Device::flex().autodiff(), DType::F64);
            let context = ContextParallel { group: group.clone(), comm: CpCommType::P2p };
            let own: Vec<f64> = context
                .positions(4)
                .into_iter()
                .flatten()
                .flat_map(|at| (0..heads).map(move |head| value(at, head)))
                .collect();
            let x = Tensor::<4>::from_data(TensorData::new(own, [4, 1, heads, 1]), like).require_grad();
            let of_heads = context_to_head_parallel(x.clone(), &group);
            let first = 2 * group.rank();
            let all: Vec<f64> = (0..seq).flat_map(|at| [first, first + 1].map(|head| value(at, head))).collect();
            of_heads.to_data().assert_eq(&TensorData::new(all, [seq, 1, 2, 1]), true);
            let back = head_to_context_parallel(of_heads.clone(), &group);
            back.to_data().assert_eq(&x.to_data(), true);
            // The gradients of both are what was sent: that of x is 2 x + 2 x.
            let loss = (back.clone() * back).sum() + (of_heads.clone() * of_heads).sum();
            let grad = x.grad(&loss.backward()).expect("it takes part");
            grad.to_data().assert_eq(&(x.clone().inner() * 4.0).to_data(), true);
            Ok(())
        })
        .unwrap();
    }
}

/// The dropout mask is that of one rank.
#[test]
fn dropout_does_not_depend_on_the_ranks() {
    for case in masks(32, heads(4, 2), [3, 3]) {
        let case = Case { dropout: Some(0.3), ..case };
        let expected = alone(&case);
        assert_ne!(expected, alone(&Case { dropout: None, ..case.clone() }), "something is dropped");
        let ways = [CpCommType::P2p, CpCommType::AllGather, CpCommType::A2a, CpCommType::A2aP2p { inner: 2 }];
        for comm in ways {
            let name = format!("{comm:?} with dropout, {case:?}");
            same(&name, &together(&case, 4, comm, true), &expected);
        }
    }
}

/// Longer than a block of queries of the kernels.
#[test]
fn long_chunks() {
    for case in masks(4 * 150, heads(2, 1), [3, 2]) {
        let expected = formula(&case);
        for comm in [CpCommType::P2p, CpCommType::AllGather] {
            same(&format!("{comm:?}, {case:?}"), &together(&case, 2, comm, false), &expected);
        }
    }
}
