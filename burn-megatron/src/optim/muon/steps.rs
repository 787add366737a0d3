//! Muon's steps of the matrices of one bucket.

use super::super::bucket::{Bucket, MatrixSteps};
use super::super::flat::{Flat, wide};
use super::super::layout::Part;
use super::super::step_info::StepInfo;
use super::MuonConfig;
use super::orthogonal::{gather, local, newton_schulz};
use backend_dist::buffer::{Buffer, muon_mix};
use backend_dist::collective::all_gather;
use backend_dist::comm::Group;
use backend_dist::mesh::GridKind;
use burn::tensor::{DType, Tensor};
use std::collections::BTreeMap;

/// Updates the momentum of the bucket's matrices and computes their steps. The momentum is gathered over the ranks
/// that shard it, and each orthogonalises the matrices that its region touches, whole: gathered over the tensor
/// parallel ranks, so that all layouts agree. `neighbours` are blocks of tensor parallel ranks by grid and size.
pub(in super::super) fn matrix_steps(
    bucket: &mut Bucket,
    muon: &MuonConfig,
    info: &StepInfo,
    neighbours: &BTreeMap<(GridKind, usize), Group>,
) -> MatrixSteps {
    let Bucket { spec, layout, parts, grads, first, region, sharding, dtype, .. } = bucket;
    if !layout.units.iter().any(|unit| unit.matrix) {
        return MatrixSteps::default();
    }
    let sum = grads.sum();
    let of_matrix = |part: &Part| layout.units[part.unit].matrix;
    let mixed = match first {
        None => Tensor::zeros([region.len()], (&sum.device(), sum.dtype())),
        Some(momentum) => mix_at_once(parts.iter().filter(|part| of_matrix(part)), muon, info, (sum, momentum))
            .unwrap_or_else(|| mix(parts, of_matrix, muon, info, (sum, momentum), region.len())),
    };
    let mixed = if sharding.zero == 0 { mixed } else { all_gather(mixed, 0, &sharding.shards) };

    let single = Group::single();
    // Narrow weights need no more than bf16, which a GPU multiplies ten times faster than fp32.
    let dtype = if wide(*dtype) == *dtype { *dtype } else { DType::BF16 };
    let step = |part: &Part| {
        let unit = &layout.units[part.unit];
        let section = &unit.section;
        let (&[rows, columns], true) = (&section.local_shape()[..], unit.matrix) else { return None };
        let mine = mixed.clone().slice([unit.range.clone()]).reshape([rows, columns]);
        let ranks = section.split.map_or(&single, |split| &neighbours[&(spec.grid(), split.parts * section.copies)]);
        let step = local(newton_schulz(gather(mine, section, ranks), muon.ns_steps, dtype), section);
        let factor = info.lr * muon.step_factor(section.global_shape[0], section.global_shape[1]);
        let inside = part.range.start - unit.range.start..part.range.end - unit.range.start;
        Some((step.flatten::<1>(0, 1).slice([inside]), factor))
    };
    MatrixSteps { steps: parts.iter().map(step).collect(), keep: 1.0 - info.lr * muon.weight_decay }
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
