//! The FP8 GEMMs of a linear layer between its collectives, forward and backward.

use burn::backend::{
    DType, TensorMetadata,
    autodiff::{NodeId, grads::Gradients},
    tensor::FloatTensor,
};
use burn::tensor::Shape;
use ranks::comm::Group;

use super::kernels::{Fp8Kernels, Matrix, Precision, Quantized, Scaling, Sides};
use super::known_amax::CastGradient;
use super::layers::Operand;
use super::linear::{Fp8Linear, ScaleScope};
use super::sharing::Sharing;
use crate::tensor_parallel::gemm::{InputCollective, LinearCollectives, OutputCollective};
use crate::{kernels::LocalKernels, main_grads::main_grad, plain, weight_grads::Deferral};

/// Saved for the backward pass of an FP8 GEMM.
#[derive(Clone, Debug)]
pub(crate) struct SavedFp8<B: LocalKernels> {
    /// The quantised input before its collective, unless it is recomputed or the weight needs no gradient.
    input: Option<Quantized<B>>,
    input_scaling: Scaling<B>,
    weight_scaling: Scaling<B>,
    dtype: DType,
    sharing: Sharing,
}

/// The purpose of a forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// No gradient is needed.
    Evaluate,
    /// There will be a backward pass.
    Train {
        /// Save the quantised input.
        keep: bool,
    },
}

/// As [`Gemms::gemm`](crate::tensor_parallel::gemm::Gemms::gemm); `None` if the sizes do not allow FP8.
pub(crate) fn forward<B: Fp8Kernels>(
    layer: &Fp8Linear,
    (x, w, bias): (FloatTensor<B>, FloatTensor<B>, Option<FloatTensor<B>>),
    collectives: &LinearCollectives,
    (purpose, sharing): (Purpose, &Sharing),
) -> Option<(FloatTensor<B>, SavedFp8<B>)> {
    let (training, keep) = (purpose != Purpose::Evaluate, purpose == Purpose::Train { keep: true });
    let (mut shape, [out, inner], dtype) = (x.shape().to_vec(), w.shape().dims::<2>(), x.dtype());
    let gathering = gathering(&collectives.entry);
    if let Some(group) = gathering {
        shape[0] *= group.size();
    }
    *shape.last_mut()? = out;
    let (rows, blockwise) = (shape[..shape.len() - 1].iter().product::<usize>(), layer.recipe.is_blockwise());
    // Blocks of tokens lie within the shards that ranks gather.
    let shards = match (blockwise, gathering.or(scattering(&collectives.exit))) {
        (true, Some(group)) => group.size(),
        _ => 1,
    };
    let multiple = layer.recipe.multiple();
    if ![rows, out, inner].into_iter().zip([multiple * shards, multiple, multiple]).all(|(n, of)| n > 0 && n % of == 0)
    {
        return None;
    }
    layer.expect_gradient();
    let number = layer.recipe.forward();
    let weight = layer.weight::<B>(w);
    let is_sharded = !matches!(collectives.entry, InputCollective::Copy(_));
    let scope = ScaleScope { is_sharded, sharing: sharing.clone() };
    let input_scaling = layer.scaling::<B>(x.clone(), Operand::Input, &scope, training);
    // Of a sequence shard with one scale the rows are gathered once more, and then transposed.
    let turned = gathering.is_none() || blockwise;
    let sides = Sides { by_rows: true, by_columns: keep && turned };
    let Quantized { by_rows, by_columns } = B::fp8_cast(x, &input_scaling, number, sides);
    let by_rows = by_rows.expect("rows were asked for");
    let input = keep.then(|| match turned {
        true => Quantized { by_rows: None, by_columns },
        false => Quantized { by_rows: Some(by_rows.clone()), by_columns: None },
    });
    let saved = SavedFp8 { input, input_scaling, weight_scaling: weight.scaling, dtype, sharing: scope.sharing };
    let x = gathering.map_or_else(|| by_rows.clone(), |group| B::fp8_gathered(by_rows.clone(), group));
    let w = weight.matrix.by_rows.expect("a weight is quantised by rows");
    let (inside, added_later) = if collectives.exit.is_whole() { (bias, None) } else { (None, bias) };
    let y = B::fp8_gemm(x, w, inside, (Shape::from(shape), dtype), Precision::Fast);
    let y = collectives.exit.forward::<B>(y);
    let y = added_later.into_iter().fold(y, |y, bias| plain::linear::add_bias::<B>(y, bias));
    Some((y, saved))
}

/// The group that gathers sequence shards.
fn gathering(entry: &InputCollective) -> Option<&Group> {
    match entry {
        InputCollective::AllGather(group) if group.size() > 1 => Some(group),
        _ => None,
    }
}

/// The group over which sequence shards of the output are scattered.
fn scattering(exit: &OutputCollective) -> Option<&Group> {
    match exit {
        OutputCollective::ReduceScatter(group) if group.size() > 1 => Some(group),
        _ => None,
    }
}

/// A weight that needs a gradient.
pub(crate) struct Fp8Weight<B: LocalKernels> {
    pub id: NodeId,
    /// As [`Weight::deferral`](crate::tensor_parallel::gemm::Weight::deferral).
    pub deferral: Deferral,
    /// The layer's input before its collective, if the forward pass did not save it quantised.
    pub input: Option<FloatTensor<B>>,
}

/// As [`Gemms::gemm_grads`](crate::tensor_parallel::gemm::Gemms::gemm_grads).
pub(crate) fn backward<B: Fp8Kernels>(
    layer: &Fp8Linear,
    saved: SavedFp8<B>,
    grad: FloatTensor<B>,
    w: Option<FloatTensor<B>>,
    weight: Option<Fp8Weight<B>>,
    collectives: &LinearCollectives,
    grads: &mut Gradients,
) -> Option<FloatTensor<B>> {
    let dtype = grad.dtype();
    let mut shape = grad.shape().to_vec();
    let scattered = scattering(&collectives.exit);
    if let Some(group) = scattered {
        shape[0] *= group.size();
    }
    let sides = Sides { by_rows: w.is_some(), by_columns: weight.is_some() };
    let is_sharded = scattered.is_some() || !matches!(collectives.entry, InputCollective::None);
    let scope = ScaleScope { is_sharded, sharing: saved.sharing };
    let mut grad = quantized_gradient::<B>(layer, grad, &scope, scattered, sides);
    if let Some(Fp8Weight { id, deferral, input }) = weight {
        let (grad, entry) = (grad.by_columns.take().expect("columns were asked for"), collectives.entry.clone());
        let (scaling, number, blockwise) = (saved.input_scaling, layer.recipe.forward(), layer.recipe.is_blockwise());
        let x = match (saved.input, input) {
            (Some(saved), _) => saved,
            (None, Some(input)) => {
                let parts = gathering(&entry).is_some() && !blockwise;
                B::fp8_cast(input, &scaling, number, Sides { by_rows: parts, by_columns: !parts })
            }
            (None, None) => panic!("the input of an FP8 layer was neither saved nor recomputed"),
        };
        deferral.run(grads, move |grads| {
            let x = input_columns::<B>(x, &entry);
            deliver::<B>(grads, id, grad, x, saved.dtype);
        });
    }
    let w = w?;
    *shape.last_mut().expect("an output has features") = w.shape()[1];
    let w = layer.weight_columns::<B>(w, &saved.weight_scaling);
    let grad = grad.by_rows.expect("rows were asked for");
    let grad = B::fp8_gemm(grad, w, None, (Shape::from(shape), dtype), Precision::Full);
    Some(collectives.entry.backward::<B>(grad))
}

/// The whole output gradient, quantised.
fn quantized_gradient<B: Fp8Kernels>(
    layer: &Fp8Linear,
    grad: FloatTensor<B>,
    scope: &ScaleScope,
    scattered: Option<&Group>,
    sides: Sides,
) -> Quantized<B> {
    let number = layer.recipe.backward();
    if let Some(CastGradient { scales, by_rows }) = layer.cast_gradient::<B>() {
        let (scaling, turned) = (Scaling::Tensor(scales), Sides { by_rows: false, by_columns: true });
        let by_columns = || B::fp8_cast(grad, &scaling, number, turned).by_columns;
        let by_columns = sides.by_columns.then(by_columns).flatten();
        return Quantized { by_rows: Some(by_rows), by_columns };
    }
    let scaling = layer.scaling::<B>(grad.clone(), Operand::Gradient, scope, true);
    let Some(group) = scattered else { return B::fp8_cast(grad, &scaling, number, sides) };
    if layer.recipe.is_blockwise() {
        let Quantized { by_rows, by_columns } = B::fp8_cast(grad, &scaling, number, sides);
        return Quantized {
            by_rows: by_rows.map(|rows| B::fp8_gathered(rows, group)),
            by_columns: by_columns.map(|columns| B::fp8_gathered_inner(columns, group)),
        };
    }
    let rows = B::fp8_cast(grad, &scaling, number, Sides { by_rows: true, by_columns: false });
    let whole = B::fp8_gathered(rows.by_rows.expect("rows were asked for"), group);
    let by_columns = sides.by_columns.then(|| B::fp8_transposed(whole.clone()));
    Quantized { by_rows: sides.by_rows.then_some(whole), by_columns }
}

/// The transpose of the layer's whole input.
fn input_columns<B: Fp8Kernels>(x: Quantized<B>, entry: &InputCollective) -> Matrix<B> {
    match (x.by_columns, x.by_rows) {
        (Some(columns), _) => match gathering(entry) {
            Some(group) => B::fp8_gathered_inner(columns, group),
            None => columns,
        },
        (None, Some(rows)) => {
            let rows = match gathering(entry) {
                Some(group) => B::fp8_gathered(rows, group),
                None => rows,
            };
            B::fp8_transposed(rows)
        }
        (None, None) => panic!("a quantised input has rows or columns"),
    }
}

/// Delivers `grad · xᵀ`, both with contiguous tokens, to the leaf or inner node `id`.
fn deliver<B: Fp8Kernels>(grads: &mut Gradients, id: NodeId, grad: Matrix<B>, x: Matrix<B>, dtype: DType) {
    match main_grad::<B>(id) {
        Some((sum, add)) => B::fp8_accumulate(grad, x, &sum, add),
        None => {
            let shape = Shape::from([grad.rows, x.rows]);
            grads.register::<B>(id, B::fp8_gemm(grad, x, None, (shape, dtype), Precision::Full));
        }
    }
}
