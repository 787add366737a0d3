//! Muon's steps of the matrices of one bucket.

use super::super::bucket::{Bucket, MatrixSteps};
use super::super::flat::{Flat, wide};
use super::super::layout::Part;
use super::super::step_info::StepInfo;
use super::MuonConfig;
use super::orthogonal::{gather, local, newton_schulz};
use super::pieces::{Piece, pieces, send_pieces};
use backend_dist::comm::Group;
use backend_dist::gpu::buffer::{Buffer, muon_mix};
use backend_dist::mesh::GridKind;
use burn::tensor::{DType, Tensor};
use std::collections::BTreeMap;

/// Updates the momentum of the bucket's matrices and computes their steps. Each matrix is orthogonalised by one of the
/// ranks that shard it, whole: gathered over the tensor parallel ranks too, so that all layouts agree. `neighbours` are
/// blocks of tensor parallel ranks by grid and size.
pub(in super::super) fn matrix_steps(
    bucket: &mut Bucket,
    muon: &MuonConfig,
    info: &StepInfo,
    neighbours: &BTreeMap<(GridKind, usize), Group>,
) -> MatrixSteps {
    let Bucket { spec, layout, parts, grads, first, region, sharding, dtype, owners, .. } = bucket;
    if owners.iter().all(Option::is_none) {
        return MatrixSteps::default();
    }
    let sum = grads.sum();
    let of_matrix = |part: &Part| layout.units[part.unit].matrix;
    let mixed = match first {
        None => Tensor::zeros([region.len()], (&sum.device(), sum.dtype())),
        Some(momentum) => mix_at_once(parts.iter().filter(|part| of_matrix(part)), muon, info, (sum, momentum))
            .unwrap_or_else(|| mix(parts, of_matrix, muon, info, (sum, momentum), region.len())),
    };
    let (me, ranks) = (sharding.shards.rank(), sharding.shards.size());
    let pieces = pieces(layout, owners, ranks);
    let none = Tensor::empty([0], (&mixed.device(), mixed.dtype()));
    let held = |piece: &Piece| mixed.clone().slice([piece.range.start - region.start..piece.range.end - region.start]);
    let to_owner = |piece: &Piece| [piece.holder, piece.owner];
    let arrived = send_pieces(&pieces, to_owner, held, none.clone(), &sharding.shards);

    let single = Group::single();
    // Narrow weights need no more than bf16, which a GPU multiplies ten times faster than fp32.
    let dtype = if wide(*dtype) == *dtype { *dtype } else { DType::BF16 };
    let orthogonal = |of: &[Piece]| {
        let section = &layout.units[of[0].unit].section;
        let local_shape: [usize; 2] = section.local_shape().try_into().expect("a matrix");
        let here = |piece: &Piece| arrived.get(&(piece.unit, piece.holder)).cloned().unwrap_or_else(|| held(piece));
        let mine = match of {
            [whole] => here(whole),
            _ => Tensor::cat(of.iter().map(here).collect(), 0),
        };
        let mine = mine.reshape(local_shape);
        let ranks = section.split.map_or(&single, |split| &neighbours[&(spec.grid(), split.parts * section.copies)]);
        local(newton_schulz(gather(mine, section, ranks), muon.ns_steps, dtype), section).flatten::<1>(0, 1)
    };
    let of_units = pieces.chunk_by(|a, b| a.unit == b.unit).filter(|of| of[0].owner == me);
    let own: BTreeMap<usize, Tensor<1>> = of_units.map(|of| (of[0].unit, orthogonal(of))).collect();
    drop(arrived);
    let step = |piece: &Piece| {
        let start = layout.units[piece.unit].range.start;
        own[&piece.unit].clone().slice([piece.range.start - start..piece.range.end - start])
    };
    let to_holder = |piece: &Piece| [piece.owner, piece.holder];
    let arrived = send_pieces(&pieces, to_holder, step, none, &sharding.shards);

    let held_here = |part: &Part| pieces.iter().find(|piece| (piece.unit, piece.holder) == (part.unit, me));
    let of_part = |part: &Part| {
        let piece = held_here(part)?;
        let shape = &layout.units[part.unit].section.global_shape;
        let there = arrived.get(&(piece.unit, me)).cloned();
        Some((there.unwrap_or_else(|| step(piece)), info.lr * muon.step_factor(shape[0], shape[1])))
    };
    MatrixSteps { steps: parts.iter().map(of_part).collect(), keep: 1.0 - info.lr * muon.weight_decay }
}

/// Updates the matrices' momentum on a GPU and gives what is orthogonalised, zeros elsewhere; one launch for each
/// matrix.
fn mix_at_once<'a>(
    matrices: impl Iterator<Item = &'a Part>,
    muon: &MuonConfig,
    info: &StepInfo,
    (sum, momentum): (&Flat, &Flat),
) -> Option<Tensor<1>> {
    let (grad, momentum) = (sum.buffer()?, momentum.buffer()?);
    let out = Buffer::zeros(sum.len(), &sum.device(), sum.dtype())?;
    for part in matrices {
        let [grad, momentum, out] = [grad, momentum, &out].map(|of| of.part(part.at..part.at + part.range.len()));
        muon_mix(&grad, &momentum, &out, muon.momentum, info.grad_scale, muon.nesterov);
    }
    Some(out.tensor())
}

/// The same by tensor operations, for a region of `len` elements.
fn mix(
    parts: &[Part],
    of_matrix: impl Fn(&Part) -> bool,
    muon: &MuonConfig,
    info: &StepInfo,
    (sum, momentum): (&Flat, &mut Flat),
    len: usize,
) -> Tensor<1> {
    let mut mixed = Vec::new();
    let zeros = |len| Tensor::zeros([len], (&sum.device(), sum.dtype()));
    let mut end = 0;
    for part in parts {
        if part.at > end {
            mixed.push(zeros(part.at - end));
        }
        end = part.at + part.range.len();
        let range = part.at..end;
        let grad = sum.part(range.clone());
        if of_matrix(part) {
            let grad = grad.mul_scalar(info.grad_scale * (1.0 - muon.momentum));
            let mean = momentum.part(range).mul_scalar(muon.momentum) + grad.clone();
            momentum.put(part.at, mean.clone());
            mixed.push(if muon.nesterov { mean.mul_scalar(muon.momentum) + grad } else { mean });
        } else {
            mixed.push(grad.zeros_like());
        }
    }
    if len > end {
        mixed.push(zeros(len - end));
    }
    Tensor::cat(mixed, 0)
}
