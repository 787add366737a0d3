//! The FP8 state of one of the two layers of a rank's experts, and its GEMMs.
//!
//! A scale is that of one expert, as in Transformer Engine's `GroupedLinear`, and of the tokens of one micro-batch of
//! one data-parallel rank. If an expert receives tokens of several data-parallel ranks, each rank's tokens are a group
//! with its own scale; data-parallel ranks that share sequences have one scale. So a value does not depend on what else
//! a call computes, and every layout casts what one device would. Ranks with shards all-reduce the amax: ranks that
//! shard an expert's features, and, if tokens of a tensor-parallel group, or of ranks that share sequences, go to
//! several ranks that hold the same experts, all ranks of that group. Scales of blocks are those of 128 tokens or features,
//! which no ranks share.

mod scales;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::{
    DType, TensorMetadata,
    autodiff::{NodeId, grads::Gradients},
    tensor::FloatTensor,
};
use burn::tensor::Shape;
use parking_lot::Mutex;

use super::groups::{Fp8GroupKernels, Groups, QuantizedGroups, RowsOf};
use super::kernels::{Precision, Scaling, Sides};
use super::layers::{AmaxSlots, Fp8Layers, Operand};
use super::recipe::{Fp8Recipe, Number};
use super::{delayed, linear_gemms::Purpose, sharing::Sharing, weights::Cached};
use crate::{kernels::LocalKernels, main_grads::main_grad, pass::PassContext, weight_grads::Deferral};
use ranks::comm::Group;

/// How the features of an expert's layer are sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertSharding {
    /// By outputs: the first layer.
    Outputs,
    /// By inputs: the second layer.
    Inputs,
}

/// The ranks of a layer of experts.
#[derive(Clone, Debug)]
pub struct ExpertRanks {
    /// Number of experts of the layer.
    pub experts: usize,
    /// The experts that this rank holds, or holds shards of.
    pub local: Range<usize>,
    /// The ranks that shard each of them.
    pub shards: Group,
    /// The ranks that share the tokens of a micro-batch, if these go to several ranks that hold the same shards.
    pub tokens: Option<Group>,
    /// The data-parallel ranks of the pipeline stage whose tokens are sent here. If there are several, each has a group
    /// of an expert's tokens.
    pub dp_ranks: Range<usize>,
}

/// The FP8 state of a layer of a rank's experts. Clones share it.
#[derive(Clone)]
pub struct Fp8Experts {
    recipe: Fp8Recipe,
    sharding: ExpertSharding,
    ranks: ExpertRanks,
    /// A [`QuantizedExperts`] of the backend.
    weight: Cached,
    /// Of delayed scaling.
    slots: Option<Arc<Mutex<AmaxSlots>>>,
    /// The pass that it is used in.
    pub(super) pass: PassContext,
}

/// The weights of a rank's experts.
#[derive(Clone)]
pub(crate) struct QuantizedExperts<B: LocalKernels> {
    /// Of all experts.
    pub scaling: Scaling<B>,
    /// Of all experts, or of some.
    pub matrices: QuantizedGroups<B>,
}

impl fmt::Debug for Fp8Experts {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut shown = f.debug_struct("Fp8Experts");
        shown
            .field("recipe", &self.recipe)
            .field("sharding", &self.sharding)
            .field("ranks", &self.ranks)
            .finish_non_exhaustive()
    }
}

impl Fp8Experts {
    /// One of the `layers` of a model, whose delayed-scaling histories are named by `name` and the index of the expert;
    /// [`DelayedScaling`](super::DelayedScaling) updates them.
    pub fn new(
        layers: &Fp8Layers,
        name: &str,
        recipe: Fp8Recipe,
        sharding: ExpertSharding,
        ranks: ExpertRanks,
    ) -> Self {
        let slots = delayed::slots(layers, name, recipe, Some(ranks.experts));
        Self { recipe, sharding, ranks, weight: Cached::new(&layers.trained), slots, pass: PassContext::default() }
    }

    /// As [`Fp8Linear::with_frozen_weight`](super::Fp8Linear::with_frozen_weight).
    pub fn with_frozen_weights(self, layers: &Fp8Layers) -> Self {
        match self.slots {
            None => Self { weight: Cached::new(&layers.frozen), ..self },
            Some(_) => self,
        }
    }

    /// Tokens of a group, inputs and outputs must be multiples of this.
    pub fn multiple(&self) -> usize {
        self.recipe.multiple()
    }

    /// The layer in a pass.
    pub fn in_pass(&self, pass: PassContext) -> Self {
        Self { pass, ..self.clone() }
    }

    /// Number of experts that this rank holds.
    pub fn count(&self) -> usize {
        self.ranks.local.len()
    }

    /// The layer of some of the rank's experts, with the same histories.
    pub(super) fn chunk(&self, experts: &Range<usize>) -> Self {
        let first = self.ranks.local.start;
        let local = first + experts.start..first + experts.end;
        Self { ranks: ExpertRanks { local, ..self.ranks.clone() }, ..self.clone() }
    }

    /// The quantised weights of `w [experts · out, in]`: by rows, and also by columns if they are cached.
    pub(super) fn weight<B: Fp8GroupKernels>(&self, w: FloatTensor<B>) -> QuantizedExperts<B> {
        if let Some(found) = self.weight.get() {
            return found;
        }
        let counts = self.rows(&w.shape());
        let scaling = self.scaling::<B>(w.clone(), &counts, Operand::Weight, &Sharing::default(), true);
        let sides = Sides { by_rows: true, by_columns: self.weight.is_on() };
        let matrices = B::fp8_groups_cast(w, &scaling, self.recipe.forward(), &counts, (sides, RowsOf::Weights));
        let found = QuantizedExperts { scaling, matrices };
        self.weight.set(&found);
        found
    }

    /// The transposed weights, with the scales of the forward pass.
    pub(super) fn weight_columns<B: Fp8GroupKernels>(&self, w: FloatTensor<B>, scaling: &Scaling<B>) -> Groups<B> {
        let cached = self.weight.get::<QuantizedExperts<B>>().and_then(|saved| saved.matrices.by_columns);
        let counts = self.rows(&w.shape());
        cached.unwrap_or_else(|| cast_columns::<B>(w, scaling, self.recipe.forward(), &counts, RowsOf::Weights))
    }

    /// Rows of each expert's weight.
    fn rows(&self, w: &Shape) -> Arc<[usize]> {
        vec![w[0] / self.count(); self.count()].into()
    }
}

fn cast_columns<B: Fp8GroupKernels>(
    x: FloatTensor<B>,
    scaling: &Scaling<B>,
    number: Number,
    counts: &Arc<[usize]>,
    rows: RowsOf,
) -> Groups<B> {
    let sides = Sides { by_rows: false, by_columns: true };
    B::fp8_groups_cast(x, scaling, number, counts, (sides, rows)).by_columns.expect("columns were asked for")
}

/// Saved for the backward pass of the experts' GEMMs.
#[derive(Clone, Debug)]
pub(crate) struct SavedExperts<B: LocalKernels> {
    /// The transposes of the quantised input, unless it is recomputed or the weight needs no gradient.
    input: Option<Groups<B>>,
    input_scaling: Scaling<B>,
    pub(super) weight_scaling: Scaling<B>,
    sharing: Sharing,
}

/// `x_g · w_eᵀ` for the groups `counts` of the tokens `x [tokens, in]`, as many groups for each expert.
pub(super) fn forward<B: Fp8GroupKernels>(
    layer: &Fp8Experts,
    x: FloatTensor<B>,
    w: FloatTensor<B>,
    counts: &Arc<[usize]>,
    purpose: Purpose,
) -> (FloatTensor<B>, SavedExperts<B>) {
    gemm::<B>(layer, x, layer.weight::<B>(w), counts, purpose)
}

/// [`forward`] with quantised weights.
pub(super) fn gemm<B: Fp8GroupKernels>(
    layer: &Fp8Experts,
    x: FloatTensor<B>,
    weight: QuantizedExperts<B>,
    counts: &Arc<[usize]>,
    purpose: Purpose,
) -> (FloatTensor<B>, SavedExperts<B>) {
    let (training, keep) = (purpose != Purpose::Evaluate, purpose == Purpose::Train { keep: true });
    let dtype = x.dtype();
    let sharing = layer.pass.sharing.clone();
    let input_scaling = layer.scaling::<B>(x.clone(), counts, Operand::Input, &sharing, training);
    let sides = Sides { by_rows: true, by_columns: keep };
    let QuantizedGroups { by_rows, by_columns } =
        B::fp8_groups_cast(x, &input_scaling, layer.recipe.forward(), counts, (sides, RowsOf::Tokens));
    let (x, w) =
        (by_rows.expect("rows were asked for"), weight.matrices.by_rows.expect("a weight is quantised by rows"));
    let y = B::fp8_groups_gemm(&x, &w, dtype, Precision::Fast);
    (y, SavedExperts { input: by_columns, input_scaling, weight_scaling: weight.scaling, sharing })
}

/// Experts' weights that need a gradient.
pub(super) struct Weight<B: LocalKernels> {
    pub id: NodeId,
    /// As [`Weight::deferral`](crate::tensor_parallel::gemm::Weight::deferral).
    pub deferral: Deferral,
    /// The layer's input, if the forward pass did not save it quantised.
    pub input: Option<FloatTensor<B>>,
}

/// Delivers the gradient of `weight`, now or deferred, and returns the gradient of the input if the weights `w` are
/// given.
pub(super) fn backward<B: Fp8GroupKernels>(
    layer: &Fp8Experts,
    saved: SavedExperts<B>,
    grad: FloatTensor<B>,
    w: Option<FloatTensor<B>>,
    weight: Option<Weight<B>>,
    counts: &Arc<[usize]>,
    grads: &mut Gradients,
) -> Option<FloatTensor<B>> {
    let (dtype, experts, weight_scaling) = (grad.dtype(), layer.count(), saved.weight_scaling.clone());
    let sides = Sides { by_rows: w.is_some(), by_columns: weight.is_some() };
    let (node, input) = weight.map(|Weight { id, deferral, input }| ((id, deferral), input)).unzip();
    let recompute = || input.flatten().expect("the input is saved or recomputed");
    let (by_rows, pair) = gradient::<B>(layer, saved, grad, recompute, counts, sides);
    if let (Some((id, deferral)), Some([grad, x])) = (node, pair) {
        deferral.run(grads, move |grads| deliver::<B>(grads, id, &grad, &x, experts, dtype));
    }
    let w = layer.weight_columns::<B>(w?, &weight_scaling);
    Some(B::fp8_groups_gemm(&by_rows.expect("rows were asked for"), &w, dtype, Precision::Full))
}

/// The quantised output gradient for the input gradient, and with the input for the weight gradient; `recompute`
/// computes an input that was not saved.
pub(super) fn gradient<B: Fp8GroupKernels>(
    layer: &Fp8Experts,
    saved: SavedExperts<B>,
    grad: FloatTensor<B>,
    recompute: impl FnOnce() -> FloatTensor<B>,
    counts: &Arc<[usize]>,
    sides: Sides,
) -> (Option<Groups<B>>, Option<[Groups<B>; 2]>) {
    let SavedExperts { input, input_scaling, sharing, .. } = saved;
    let scaling = layer.scaling::<B>(grad.clone(), counts, Operand::Gradient, &sharing, true);
    let QuantizedGroups { by_rows, by_columns } =
        B::fp8_groups_cast(grad, &scaling, layer.recipe.backward(), counts, (sides, RowsOf::Tokens));
    let made = || cast_columns::<B>(recompute(), &input_scaling, layer.recipe.forward(), counts, RowsOf::Tokens);
    (by_rows, by_columns.map(|grad| [grad, input.unwrap_or_else(made)]))
}

/// Delivers the gradients of all experts' weights to the leaf or inner node `id`.
fn deliver<B: Fp8GroupKernels>(
    grads: &mut Gradients,
    id: NodeId,
    grad: &Groups<B>,
    x: &Groups<B>,
    experts: usize,
    dtype: DType,
) {
    match main_grad::<B>(id) {
        Some((sum, add)) => B::fp8_groups_accumulate(grad, x, experts, &sum, add),
        None => grads.register::<B>(id, B::fp8_groups_weight_grad(grad, x, experts, dtype)),
    }
}
