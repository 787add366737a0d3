//! The FP8 side of one of the layers of a mixture's experts, and its products.
//!
//! An operand's scale is that of one expert, as in Transformer Engine's `GroupedLinear`, and of the tokens of one
//! micro-batch of one replica: where tokens of several replicas meet at an expert, each replica's are a group of rows
//! with a scale of its own, but for replicas that share sequences, whose groups have one. So a number does not depend
//! on what else a call computes, and every layout casts what one device would. What is exchanged are the magnitudes of
//! parts: ranks that share an expert's features, and, where tokens of a tensor parallel group, or of ranks that share
//! sequences, go to several ranks that hold the same experts, all ranks of that group.

mod scales;

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use burn::backend::{
    DType, TensorMetadata,
    autodiff::{NodeId, grads::Gradients},
    tensor::FloatTensor,
};
use burn::tensor::Shape;

use super::delayed::{self, Operand, Slots};
use super::groups::{Fp8GroupKernels, Groups, QuantizedGroups};
use super::kernels::{Precision, Scales, Sides};
use super::linear::Purpose;
use super::recipe::{Fp8Recipe, Number};
use super::sharing::Sharing;
use super::weights::{self, Cached};
use crate::comm::Group;
use crate::ops::kernels::LocalKernels;
use crate::ops::main_grads::place;
use crate::ops::weight_grads::run_or_defer;

/// How the features of an expert's layer are cut over the ranks that share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertCut {
    /// The outputs: of the first layer.
    Outputs,
    /// The inputs: of the second layer.
    Inputs,
}

/// The ranks of a layer of experts.
#[derive(Clone, Debug)]
pub struct ExpertRanks {
    /// Experts of the layer.
    pub experts: usize,
    /// Those that this rank holds, or parts of them.
    pub own: Range<usize>,
    /// The ranks that share each of them.
    pub parts: Group,
    /// The ranks that have the tokens of a micro-batch between them, if these go to several ranks that hold the same
    /// parts.
    pub tokens: Option<Group>,
    /// The replicas of the pipeline stage whose tokens come here. Where there are several, each has a group of an
    /// expert's rows.
    pub replicas: Range<usize>,
}

/// The FP8 side of a layer of a rank's experts. Clones are the same layer.
#[derive(Clone)]
pub struct Fp8Experts {
    recipe: Fp8Recipe,
    cut: ExpertCut,
    ranks: ExpertRanks,
    /// A [`QuantizedExperts`] of the backend.
    weight: Cached,
    /// Of delayed scaling.
    slots: Option<Arc<Mutex<Slots>>>,
}

/// The matrices of a rank's experts.
#[derive(Clone)]
pub(in crate::ops) struct QuantizedExperts<B: LocalKernels> {
    /// Of all of them.
    pub scales: Scales<B>,
    /// Of all, or of some.
    pub matrices: QuantizedGroups<B>,
}

impl fmt::Debug for Fp8Experts {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut shown = f.debug_struct("Fp8Experts");
        shown.field("recipe", &self.recipe).field("cut", &self.cut).field("ranks", &self.ranks).finish_non_exhaustive()
    }
}

impl Fp8Experts {
    /// A layer whose histories of delayed scaling go by `name` and the number of the expert;
    /// [`DelayedScaling`](super::DelayedScaling) moves them on.
    pub fn new(name: &str, recipe: Fp8Recipe, cut: ExpertCut, ranks: ExpertRanks) -> Self {
        let slots = delayed::slots(name, recipe, Some(ranks.experts));
        Self { recipe, cut, ranks, weight: Cached::default(), slots }
    }

    /// Number of experts that this rank holds.
    pub fn count(&self) -> usize {
        self.ranks.own.len()
    }

    /// The layer of some of the rank's experts, with the same histories.
    pub(super) fn piece(&self, experts: &Range<usize>) -> Self {
        let first = self.ranks.own.start;
        let own = first + experts.start..first + experts.end;
        Self { ranks: ExpertRanks { own, ..self.ranks.clone() }, ..self.clone() }
    }

    /// The experts' matrices `w [experts · out, in]` with rows at least, with both forms if they are kept.
    pub(super) fn weight<B: Fp8GroupKernels>(&self, w: FloatTensor<B>) -> QuantizedExperts<B> {
        if let Some(found) = self.weight.get() {
            return found;
        }
        let counts = self.rows(&w.shape());
        let scales = self.scales::<B>(w.clone(), &counts, Operand::Weight, &Sharing::default(), true);
        let sides = Sides { by_rows: true, by_columns: weights::are_kept() };
        let matrices = B::fp8_groups_cast(w, &scales, self.recipe.forward(), &counts, sides);
        let found = QuantizedExperts { scales, matrices };
        self.weight.set(&found);
        found
    }

    /// The transposes of the experts' matrices, with the scales of the forward pass.
    pub(super) fn weight_columns<B: Fp8GroupKernels>(&self, w: FloatTensor<B>, scales: &Scales<B>) -> Groups<B> {
        let cached = self.weight.get::<QuantizedExperts<B>>().and_then(|kept| kept.matrices.by_columns);
        let counts = self.rows(&w.shape());
        cached.unwrap_or_else(|| cast_columns::<B>(w, scales, self.recipe.forward(), &counts))
    }

    /// Rows of each expert's matrix.
    fn rows(&self, w: &Shape) -> Arc<[usize]> {
        vec![w[0] / self.count(); self.count()].into()
    }
}

fn cast_columns<B: Fp8GroupKernels>(
    x: FloatTensor<B>,
    scales: &Scales<B>,
    number: Number,
    counts: &Arc<[usize]>,
) -> Groups<B> {
    let sides = Sides { by_rows: false, by_columns: true };
    B::fp8_groups_cast(x, scales, number, counts, sides).by_columns.expect("columns were asked for")
}

/// What the products of experts keep for their backward pass.
#[derive(Clone, Debug)]
pub(in crate::ops) struct Kept<B: LocalKernels> {
    /// The quantised input's transposes, unless it is made again or the weight wants no gradient.
    input: Option<Groups<B>>,
    input_scales: Scales<B>,
    pub(super) weight_scales: Scales<B>,
    sharing: Sharing,
}

/// `x_g · w_eᵀ` for the groups `counts` of the rows of `x [rows, in]`, as many for each expert.
pub(super) fn forward<B: Fp8GroupKernels>(
    layer: &Fp8Experts,
    x: FloatTensor<B>,
    w: FloatTensor<B>,
    counts: &Arc<[usize]>,
    purpose: Purpose,
) -> (FloatTensor<B>, Kept<B>) {
    product::<B>(layer, x, layer.weight::<B>(w), counts, purpose)
}

/// [`forward`] with matrices that are quantised.
pub(super) fn product<B: Fp8GroupKernels>(
    layer: &Fp8Experts,
    x: FloatTensor<B>,
    weight: QuantizedExperts<B>,
    counts: &Arc<[usize]>,
    purpose: Purpose,
) -> (FloatTensor<B>, Kept<B>) {
    let (training, keep) = (purpose != Purpose::Evaluate, purpose == Purpose::Train { keep: true });
    let dtype = x.dtype();
    let sharing = Sharing::current();
    let input_scales = layer.scales::<B>(x.clone(), counts, Operand::Input, &sharing, training);
    let sides = Sides { by_rows: true, by_columns: keep };
    let QuantizedGroups { by_rows, by_columns } =
        B::fp8_groups_cast(x, &input_scales, layer.recipe.forward(), counts, sides);
    let (x, w) = (by_rows.expect("rows were asked for"), weight.matrices.by_rows.expect("a weight is kept in rows"));
    let y = B::fp8_groups_product(&x, &w, dtype, Precision::Fast);
    (y, Kept { input: by_columns, input_scales, weight_scales: weight.scales, sharing })
}

/// Experts' matrices that want a gradient.
pub(super) struct Weight<B: LocalKernels> {
    pub id: NodeId,
    /// Nothing waits for the gradient: a zero-bubble schedule may put it off.
    pub is_leaf: bool,
    /// The layer's input, where the forward pass did not keep it quantised.
    pub input: Option<FloatTensor<B>>,
}

/// Brings the gradient of `weight` to its place, now or later, and gives the gradient of the input if the matrices `w`
/// are given.
pub(super) fn backward<B: Fp8GroupKernels>(
    layer: &Fp8Experts,
    kept: Kept<B>,
    grad: FloatTensor<B>,
    w: Option<FloatTensor<B>>,
    weight: Option<Weight<B>>,
    counts: &Arc<[usize]>,
    grads: &mut Gradients,
) -> Option<FloatTensor<B>> {
    let (dtype, experts, weight_scales) = (grad.dtype(), layer.count(), kept.weight_scales.clone());
    let sides = Sides { by_rows: w.is_some(), by_columns: weight.is_some() };
    let (node, input) = weight.map(|Weight { id, is_leaf, input }| ((id, is_leaf), input)).unzip();
    let again = || input.flatten().expect("the input is kept or made again");
    let (by_rows, pair) = gradient::<B>(layer, kept, grad, again, counts, sides);
    if let (Some((id, is_leaf)), Some([grad, x])) = (node, pair) {
        let job = move |grads: &mut Gradients| deliver::<B>(grads, id, &grad, &x, experts, dtype);
        if is_leaf { run_or_defer(grads, job) } else { job(grads) }
    }
    let w = layer.weight_columns::<B>(w?, &weight_scales);
    Some(B::fp8_groups_product(&by_rows.expect("rows were asked for"), &w, dtype, Precision::Full))
}

/// The gradient of a product's results as the gradient of its input needs it, and with the input as that of the
/// matrices does; `again` makes an input that was not kept.
pub(super) fn gradient<B: Fp8GroupKernels>(
    layer: &Fp8Experts,
    kept: Kept<B>,
    grad: FloatTensor<B>,
    again: impl FnOnce() -> FloatTensor<B>,
    counts: &Arc<[usize]>,
    sides: Sides,
) -> (Option<Groups<B>>, Option<[Groups<B>; 2]>) {
    let Kept { input, input_scales, sharing, .. } = kept;
    let scales = layer.scales::<B>(grad.clone(), counts, Operand::Gradient, &sharing, true);
    let QuantizedGroups { by_rows, by_columns } =
        B::fp8_groups_cast(grad, &scales, layer.recipe.backward(), counts, sides);
    let made = || cast_columns::<B>(again(), &input_scales, layer.recipe.forward(), counts);
    (by_rows, by_columns.map(|grad| [grad, input.unwrap_or_else(made)]))
}

/// Brings the gradients of all experts' matrices to the place of the leaf or inner node `id`.
fn deliver<B: Fp8GroupKernels>(
    grads: &mut Gradients,
    id: NodeId,
    grad: &Groups<B>,
    x: &Groups<B>,
    experts: usize,
    dtype: DType,
) {
    match place::<B>(id) {
        Some((sum, add)) => B::fp8_groups_accumulate(grad, x, experts, &sum, add),
        None => grads.register::<B>(id, B::fp8_groups_weight_grad(grad, x, experts, dtype)),
    }
}
