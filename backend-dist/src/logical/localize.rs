//! Operations in the shapes that one rank holds.

use super::Placement;
use super::by_tensor::ByTensor;
use burn::tensor::Slice;
use burn_ir::{BaseOperationIr, IrVisitorMut, ModuleOperationIr, OperationIr, TensorId, TensorIr};

/// The dimension of channels.
const CHANNELS: usize = 1;

/// Divides the sharded dimensions of all tensors of `op` by `ranks`, and makes ranges along them the whole of what is
/// left or its parts, groups of a convolution along its channels a rank's own. The placements must divide the shapes.
pub(crate) fn localize(op: &mut OperationIr, placements: &ByTensor<Placement>, ranks: usize) {
    let ranges = match op {
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => match op {
            BaseOperationIr::Slice(op) => Some((op.tensor.id, &mut op.ranges)),
            BaseOperationIr::SliceAssign(op) => Some((op.tensor.id, &mut op.ranges)),
            _ => None,
        },
        _ => None,
    };
    if let Some((id, ranges)) = ranges
        && let Some(dim) = placements.get(id).and_then(|at| at.dim())
        && let Some(range) = ranges.get_mut(dim)
    {
        // The rule has let only whole parts pass.
        let share = |end: isize| end / ranks as isize;
        *range = match placements[id].is_in_parts() {
            true => Slice::new(share(range.start), range.end.map(share), 1),
            false => Slice::full(),
        };
    }
    // The rule shards channels of several groups by groups alone.
    if let Some((x, groups)) = groups_of(op)
        && *groups > 1
        && placements.get(x).and_then(|at| at.dim()) == Some(CHANNELS)
    {
        *groups /= ranks;
    }
    op.visit_mut(&mut Shapes { placements, ranks });
}

/// What a convolution reads, and its groups.
fn groups_of(op: &mut OperationIr) -> Option<(TensorId, &mut usize)> {
    use ModuleOperationIr as Op;
    let OperationIr::Module(op) = op else { return None };
    macro_rules! any {
        ($($name:ident),+) => {
            match op {
                $(Op::$name(op) => Some((op.x.id, &mut op.options.groups)),)+
                _ => None,
            }
        };
    }
    any!(
        Conv1d,
        Conv2d,
        Conv3d,
        Conv1dXBackward,
        Conv2dXBackward,
        Conv3dXBackward,
        Conv1dWeightBackward,
        Conv2dWeightBackward,
        Conv3dWeightBackward,
        ConvTranspose1d,
        ConvTranspose2d,
        ConvTranspose3d,
        ConvTranspose1dWeightBackward,
        ConvTranspose2dWeightBackward,
        ConvTranspose3dWeightBackward
    )
}

struct Shapes<'a> {
    placements: &'a ByTensor<Placement>,
    ranks: usize,
}

impl IrVisitorMut for Shapes<'_> {
    fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
        if let Some(dim) = self.placements.get(tensor.id).and_then(|at| at.dim()) {
            tensor.shape[dim] /= self.ranks;
        }
    }
}
