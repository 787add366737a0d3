//! What the launches of attention read: scores, masks, and the gradient of their softmax.

use super::Float;
use super::chain::Launch;
use super::lazy::{Attention, Gemm, Mask, Source};
use super::softmax::{Formula, Role};
use crate::mesh_backend::inner::Inner;
use burn::backend::TensorMetadata;
use burn::tensor::Shape;
use burn_ir::TensorId;
use kernels_cubecl::fused::Draw;
use std::sync::Arc;

type Shared<B> = Arc<Gemm<B>>;

/// The inputs of a launch that reads nothing else.
pub(super) struct Reads<B: Inner> {
    /// Those that attention was computed from, if it was.
    pub scores: Shared<B>,
    pub gradient: Option<Shared<B>>,
    /// What says which scores are hidden: a tensor, and one where that is true, else zero.
    pub hidden: Option<(TensorId, Float<B>)>,
    pub draw: Option<Draw>,
    roles: Vec<Role>,
}

impl<B: Inner> Reads<B> {
    pub fn of(launch: &Launch<Source<B>>) -> Option<Self> {
        let (scores, gradient) = scores_and_gradient(&launch.inputs)?;
        let (mut hidden, mut roles) = (None, Vec::with_capacity(launch.inputs.len()));
        for (number, source) in launch.inputs.iter().enumerate() {
            roles.push(match source {
                Source::Gemm(gemm) if Arc::ptr_eq(gemm, &scores) => Role::Scores,
                Source::Gemm(_) => Role::Gradient,
                Source::Mask(mask, x) if launch.broadcasts(number, &x.shape(), &scores.shape) => match mask {
                    Mask::Tensor(id) if hidden.is_none() && is_mask_of(&x.shape(), &scores.shape) => {
                        hidden = Some((*id, x.clone()));
                        Role::Hidden
                    }
                    Mask::AllOfRows(_) => Role::AllHidden,
                    Mask::Tensor(_) => return None,
                },
                Source::Mask(..) | Source::Stored(_) | Source::Output(..) => return None,
            });
        }
        let mask = hidden.as_ref().map(|(id, _)| *id);
        let is_of_mask = |source: &Source<B>| match source {
            Source::Mask(Mask::AllOfRows(id), _) => mask == Some(*id),
            _ => true,
        };
        let fits = launch.inputs.iter().all(is_of_mask) && launch.draws.len() < 2;
        fits.then(|| Self { scores, gradient, hidden, draw: launch.draws.first().copied(), roles })
    }

    /// What the launch computes, to be compared.
    pub fn formula<'a>(&'a self, launch: &'a Launch<Source<B>>) -> Formula<'a> {
        Formula { program: &launch.program, scalars: &launch.scalars, draws: &launch.draws, roles: &self.roles }
    }
}

impl<B: Inner> Attention<B> {
    /// Whether a launch reads the masks of the attention.
    pub fn has_masks_of(&self, reads: &Reads<B>) -> bool {
        let hidden = reads.hidden.as_ref().map(|(id, _)| *id);
        self.hidden == hidden && self.masks.kept.map(|kept| kept.draw) == reads.draw
    }
}

/// The scores, and the gradient of their softmax if there is one: that of which no attention was computed.
fn scores_and_gradient<B: Inner>(inputs: &[Source<B>]) -> Option<(Shared<B>, Option<Shared<B>>)> {
    let gemm = |source: &Source<B>| match source {
        Source::Gemm(gemm) => Some(gemm.clone()),
        _ => None,
    };
    let mut gemms = inputs.iter().filter_map(gemm);
    match (gemms.next()?, gemms.next(), gemms.next()) {
        (scores, None, _) => Some((scores, None)),
        (a, Some(b), None) => match (a.attention.get(), b.attention.get()) {
            (Some(_), None) => Some((a, Some(b))),
            (None, Some(_)) => Some((b, Some(a))),
            _ => None,
        },
        _ => None,
    }
}

/// Whether a mask has all keys, and each of the other dimensions whole or once for all.
fn is_mask_of(mask: &Shape, scores: &Shape) -> bool {
    let lead = scores.num_dims() - 1;
    let is_part = |(own, whole): (&usize, &usize)| own == whole || *own == 1;
    mask.num_dims() == lead + 1 && mask[lead] == scores[lead] && mask[..lead].iter().zip(&scores[..lead]).all(is_part)
}
