//! The FP8 product of a linear layer between its exchanges, and its gradients.
//!
//! Hopper multiplies FP8 matrices only with the summed dimension contiguous in both, so each operand has two forms:
//! `y = x · wᵀ` takes both as they lie, `dx = dy · w` the transpose of the weight, `dw = dyᵀ · x` those of the output's
//! gradient and of the input. What is kept for the backward pass is the quantised input, a byte for each number.
//!
//! Scales are those of the whole tensor: where ranks hold parts of it, its largest magnitude is the largest of theirs,
//! over the tensor parallel ranks and then over those that share sequences. So a layer computes with the same numbers
//! in every layout. Parts of a sequence are exchanged quantised.

use std::fmt;
use std::sync::{Arc, Mutex};

use burn::backend::{
    DType, TensorMetadata,
    autodiff::{NodeId, grads::Gradients},
    tensor::FloatTensor,
};
use burn::tensor::Shape;

use super::delayed::{self, Operand, Slots};
use super::kernels::{Fp8Kernels, Matrix, Precision, Quantized, Scales, Sides};
use super::recipe::{Fp8Recipe, Number};
use super::sharing::{Sharing, largest};
use super::weights::{self, Cached};
use crate::comm::Group;
use crate::ops::kernels::LocalKernels;
use crate::ops::main_grads::place;
use crate::ops::plain;
use crate::ops::product::{Ends, Entry, Exit};
use crate::ops::weight_grads::run_or_defer;

/// What every side of an FP8 product must be a multiple of.
pub const MULTIPLE: usize = 16;

/// The FP8 side of one linear layer of a rank. Clones are the same layer.
#[derive(Clone)]
pub struct Fp8Linear {
    recipe: Fp8Recipe,
    group: Group,
    /// A [`QuantizedWeight`] of the backend.
    weight: Cached,
    /// Of delayed scaling.
    slots: Option<Arc<Mutex<Slots>>>,
}

#[derive(Clone)]
struct QuantizedWeight<B: LocalKernels> {
    scales: Scales<B>,
    matrix: Quantized<B>,
}

impl fmt::Debug for Fp8Linear {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Fp8Linear").field("recipe", &self.recipe).field("group", &self.group).finish_non_exhaustive()
    }
}

impl Fp8Linear {
    /// A layer whose weight is cut over the ranks of `group`, or not at all where that is one rank. Its histories of
    /// delayed scaling go by `name`, the same in every layout; [`DelayedScaling`](super::DelayedScaling) moves them on.
    pub fn new(name: &str, recipe: Fp8Recipe, group: Group) -> Self {
        Self { recipe, group, weight: Cached::default(), slots: delayed::slots(name, recipe, None) }
    }

    /// Scales for `x`, of which this rank has what `part` says. With `note` its magnitude goes into the history.
    fn scales<B: Fp8Kernels>(&self, x: FloatTensor<B>, operand: Operand, part: &Part, note: bool) -> Scales<B> {
        let number = match operand {
            Operand::Input | Operand::Weight => self.recipe.forward(),
            Operand::Gradient => self.recipe.backward(),
        };
        let known = self.slots.as_ref().and_then(|slots| delayed::scales(slots, operand));
        let noting = self.slots.as_ref().filter(|_| note && !part.of.is_nothing);
        let known =
            known.map(|[scale, inverse]| Scales { scale: B::fp8_primitive(scale), inverse: B::fp8_primitive(inverse) });
        if let (Some(known), None) = (&known, noting) {
            return known.clone();
        }
        let amax = B::fp8_amax(x);
        if let Some(slots) = noting {
            delayed::note(slots, operand, B::fp8_tensor(amax.clone()));
        }
        if let Some(known) = known {
            return known;
        }
        let amax = if part.is_cut { largest::<B>(amax, &self.group) } else { amax };
        B::fp8_scales(part.of.largest::<B>(amax), number, self.recipe.margin)
    }

    /// The weight with rows at least, with both forms if it is kept.
    fn weight<B: Fp8Kernels>(&self, w: FloatTensor<B>) -> QuantizedWeight<B> {
        if let Some(found) = self.weight.get() {
            return found;
        }
        let number = self.recipe.forward();
        let part = Part { is_cut: true, of: Sharing::default() };
        let scales = self.scales::<B>(w.clone(), Operand::Weight, &part, true);
        let sides = Sides { by_rows: true, by_columns: weights::are_kept() };
        let found = QuantizedWeight { matrix: B::fp8_cast(w, &scales, number, sides), scales };
        self.weight.set(&found);
        found
    }

    /// The weight's transpose, with the scales of the forward pass.
    fn weight_columns<B: Fp8Kernels>(&self, w: FloatTensor<B>, scales: &Scales<B>) -> Matrix<B> {
        let cached = self.weight.get::<QuantizedWeight<B>>().and_then(|kept| kept.matrix.by_columns);
        cached.unwrap_or_else(|| cast_columns::<B>(w, scales, self.recipe.forward()))
    }
}

/// What a rank has of a tensor.
struct Part {
    /// The tensor parallel ranks have others.
    is_cut: bool,
    /// The ranks that share sequences have other tokens.
    of: Sharing,
}

/// What an FP8 product keeps for its backward pass.
#[derive(Clone, Debug)]
pub(in crate::ops) struct Fp8Kept<B: LocalKernels> {
    /// The quantised input in front of its entry, unless it is made again or the weight wants no gradient.
    input: Option<Quantized<B>>,
    input_scales: Scales<B>,
    weight_scales: Scales<B>,
    dtype: DType,
    sharing: Sharing,
}

/// What will become of a forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ops) enum Purpose {
    /// No gradient is asked for.
    Evaluate,
    /// There will be a backward pass, for which the quantised input is kept or not.
    Train {
        /// Whether it is.
        keep: bool,
    },
}

/// As [`Products::product`](crate::ops::product::Products::product); `None` if sizes rule FP8 out.
pub(in crate::ops) fn forward<B: Fp8Kernels>(
    layer: &Fp8Linear,
    x: FloatTensor<B>,
    w: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    ends: &Ends,
    purpose: Purpose,
) -> Option<(FloatTensor<B>, Fp8Kept<B>)> {
    let (training, keep) = (purpose != Purpose::Evaluate, purpose == Purpose::Train { keep: true });
    let (mut shape, [out, inner], dtype) = (x.shape().to_vec(), w.shape().dims::<2>(), x.dtype());
    if let Some(group) = gathering(&ends.entry) {
        shape[0] *= group.size();
    }
    *shape.last_mut()? = out;
    let rows = shape[..shape.len() - 1].iter().product();
    if ![rows, out, inner].iter().all(|&n: &usize| n > 0 && n.is_multiple_of(MULTIPLE)) {
        return None;
    }
    let number = layer.recipe.forward();
    let weight = layer.weight::<B>(w);
    let part = Part { is_cut: !matches!(ends.entry, Entry::Copied(_)), of: Sharing::current() };
    let input_scales = layer.scales::<B>(x.clone(), Operand::Input, &part, training);
    let gathering = gathering(&ends.entry);
    let sides = Sides { by_rows: true, by_columns: keep && gathering.is_none() };
    let Quantized { by_rows, by_columns } = B::fp8_cast(x, &input_scales, number, sides);
    let by_rows = by_rows.expect("rows were asked for");
    let input = keep.then(|| match gathering {
        // The transpose of a part is of no use.
        Some(_) => Quantized { by_rows: Some(by_rows.clone()), by_columns: None },
        None => Quantized { by_rows: None, by_columns },
    });
    let kept = Fp8Kept { input, input_scales, weight_scales: weight.scales, dtype, sharing: part.of };
    let x = gathering.map_or_else(|| by_rows.clone(), |group| B::fp8_gathered(by_rows.clone(), group));
    let w = weight.matrix.by_rows.expect("a weight is kept in rows");
    let (inside, behind) = if ends.exit.is_whole() { (bias, None) } else { (None, bias) };
    let y = B::fp8_product(x, w, inside, (Shape::from(shape), dtype), Precision::Fast);
    let y = ends.exit.forward::<B>(y);
    let y = behind.into_iter().fold(y, |y, bias| plain::linear::add_bias::<B>(y, bias));
    Some((y, kept))
}

/// The group whose members have parts of the sequence that must be joined.
fn gathering(entry: &Entry) -> Option<&Group> {
    match entry {
        Entry::Gathered(group) if group.size() > 1 => Some(group),
        _ => None,
    }
}

/// A weight that wants a gradient.
pub(in crate::ops) struct Fp8Weight<B: LocalKernels> {
    pub id: NodeId,
    /// As [`Weight::is_leaf`](crate::ops::product::Weight::is_leaf).
    pub is_leaf: bool,
    /// The layer's input in front of its entry, where the forward pass did not keep it quantised.
    pub input: Option<FloatTensor<B>>,
}

/// As [`Products::product_grads`](crate::ops::product::Products::product_grads).
pub(in crate::ops) fn backward<B: Fp8Kernels>(
    layer: &Fp8Linear,
    kept: Fp8Kept<B>,
    grad: FloatTensor<B>,
    w: Option<FloatTensor<B>>,
    weight: Option<Fp8Weight<B>>,
    ends: &Ends,
    grads: &mut Gradients,
) -> Option<FloatTensor<B>> {
    let dtype = grad.dtype();
    let mut shape = grad.shape().to_vec();
    let scattered = match &ends.exit {
        Exit::Scattered(group) if group.size() > 1 => Some(group),
        _ => None,
    };
    if let Some(group) = scattered {
        shape[0] *= group.size();
    }
    let sides = Sides { by_rows: w.is_some(), by_columns: weight.is_some() };
    let is_cut = scattered.is_some() || !matches!(ends.entry, Entry::Own);
    let part = Part { is_cut, of: kept.sharing };
    let mut grad = quantized_gradient::<B>(layer, grad, &part, scattered, sides);
    if let Some(Fp8Weight { id, is_leaf, input }) = weight {
        let (grad, entry) = (grad.by_columns.take().expect("columns were asked for"), ends.entry.clone());
        let (scales, number) = (kept.input_scales, layer.recipe.forward());
        let x = match (kept.input, input) {
            (Some(kept), _) => kept,
            (None, Some(input)) => {
                let parts = gathering(&entry).is_some();
                B::fp8_cast(input, &scales, number, Sides { by_rows: parts, by_columns: !parts })
            }
            (None, None) => panic!("the input of an FP8 layer was neither kept nor made again"),
        };
        let job = move |grads: &mut Gradients| {
            let x = input_columns::<B>(x, &entry);
            deliver::<B>(grads, id, grad, x, kept.dtype);
        };
        if is_leaf { run_or_defer(grads, job) } else { job(grads) }
    }
    let w = w?;
    *shape.last_mut().expect("an output has features") = w.shape()[1];
    let w = layer.weight_columns::<B>(w, &kept.weight_scales);
    let grad = grad.by_rows.expect("rows were asked for");
    let grad = B::fp8_product(grad, w, None, (Shape::from(shape), dtype), Precision::Full);
    Some(ends.entry.backward::<B>(grad))
}

/// The whole gradient of the product, quantised.
fn quantized_gradient<B: Fp8Kernels>(
    layer: &Fp8Linear,
    grad: FloatTensor<B>,
    part: &Part,
    scattered: Option<&Group>,
    sides: Sides,
) -> Quantized<B> {
    let number = layer.recipe.backward();
    let scales = layer.scales::<B>(grad.clone(), Operand::Gradient, part, true);
    let Some(group) = scattered else { return B::fp8_cast(grad, &scales, number, sides) };
    let rows = B::fp8_cast(grad, &scales, number, Sides { by_rows: true, by_columns: false });
    let whole = B::fp8_gathered(rows.by_rows.expect("rows were asked for"), group);
    let by_columns = sides.by_columns.then(|| B::fp8_transposed(whole.clone()));
    Quantized { by_rows: sides.by_rows.then_some(whole), by_columns }
}

/// The transpose of the layer's whole input.
fn input_columns<B: Fp8Kernels>(x: Quantized<B>, entry: &Entry) -> Matrix<B> {
    match (x.by_columns, x.by_rows) {
        (Some(columns), _) => columns,
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

fn cast_columns<B: Fp8Kernels>(x: FloatTensor<B>, scales: &Scales<B>, number: Number) -> Matrix<B> {
    let sides = Sides { by_rows: false, by_columns: true };
    B::fp8_cast(x, scales, number, sides).by_columns.expect("columns were asked for")
}

/// Brings `grad · xᵀ`, both with the summed tokens contiguous, to the place of the leaf or inner node `id`.
fn deliver<B: Fp8Kernels>(grads: &mut Gradients, id: NodeId, grad: Matrix<B>, x: Matrix<B>, dtype: DType) {
    match place::<B>(id) {
        Some((sum, add)) => B::fp8_accumulate(grad, x, &sum, add),
        None => {
            let shape = Shape::from([grad.rows, x.rows]);
            grads.register::<B>(id, B::fp8_product(grad, x, None, (shape, dtype), Precision::Full));
        }
    }
}
