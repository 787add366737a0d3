//! A linear layer in FP8: its quantised weight and the scales of its operands.
//!
//! Hopper's FP8 GEMM needs a contiguous contraction dimension in both operands, so each operand has two forms: `y = x ·
//! wᵀ` takes both operands untransposed, `dx = dy · w` the transposed weight, `dw = dyᵀ · x` the transposes of output
//! gradient and input. The quantised input is saved for backward, at one byte an element.
//!
//! A scale is that of the whole tensor: ranks with shards all-reduce the amax, over the tensor-parallel ranks and then
//! over those that share sequences. So a layer computes the same values in every layout. Sequence shards are gathered
//! quantised. Scales of blocks follow from the block alone, which no rank shares.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use burn::backend::{TensorMetadata, tensor::FloatTensor};
use parking_lot::Mutex;

use super::kernels::{Fp8Kernels, Matrix, Quantized, Scales, Scaling, Sides};
use super::known_amax::{CastGradient, GradientNotes, KnownAmax};
use super::layers::{AmaxSlots, Fp8Layers, Operand};
use super::recipe::{Fp8Recipe, Number};
use super::sharing::{Sharing, largest};
use super::{delayed, weights::Cached};
use crate::kernels::LocalKernels;
use ranks::comm::Group;

/// The FP8 state of one linear layer of a rank. Clones share it.
#[derive(Clone)]
pub struct Fp8Linear {
    pub(super) recipe: Fp8Recipe,
    group: Group,
    /// A [`QuantizedWeight`] of the backend.
    weight: Cached,
    /// Whether `weight` stays as long as the layer.
    is_frozen: bool,
    /// Of delayed scaling.
    slots: Option<Arc<Mutex<AmaxSlots>>>,
    /// Of the input, if its writer may have found it.
    input_amax: Option<KnownAmax>,
    /// Of the gradient of the output.
    gradient: Option<GradientNotes>,
}

#[derive(Clone)]
pub(super) struct QuantizedWeight<B: LocalKernels> {
    pub scaling: Scaling<B>,
    pub matrix: Quantized<B>,
}

impl fmt::Debug for Fp8Linear {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Fp8Linear").field("recipe", &self.recipe).field("group", &self.group).finish_non_exhaustive()
    }
}

impl Fp8Linear {
    /// One of the `layers` of a model, whose weight is sharded over the ranks of `group`, or whole if that is one rank.
    /// Its delayed-scaling histories are named by `name`, the same in every layout;
    /// [`DelayedScaling`](super::DelayedScaling) updates them.
    pub fn new(layers: &Fp8Layers, name: &str, recipe: Fp8Recipe, group: Group) -> Self {
        let (weight, slots) = (Cached::new(&layers.trained), delayed::slots(layers, name, recipe, None));
        Self { recipe, group, weight, is_frozen: false, slots, input_amax: None, gradient: None }
    }

    /// The layer with an input whose writer may tell its amax.
    pub fn with_input_amax(self, amax: KnownAmax) -> Self {
        Self { input_amax: Some(amax), ..self }
    }

    /// The layer with an output whose gradient's writer may leave notes.
    pub(super) fn with_gradient_notes(self, notes: GradientNotes) -> Self {
        Self { gradient: Some(notes), ..self }
    }

    /// Whether the amax of its operands is of use: with scales of blocks it is not.
    pub fn reads_amax(&self) -> bool {
        !self.recipe.is_blockwise()
    }

    /// The output is computed in FP8, and what is known of its gradient will be read.
    pub(super) fn expect_gradient(&self) {
        self.gradient
            .iter()
            .filter(|_| self.reads_amax())
            .for_each(|notes| notes.is_read.store(true, Ordering::Relaxed));
    }

    /// The gradient of the output, if its writer has cast it.
    pub(super) fn cast_gradient<B: Fp8Kernels>(&self) -> Option<CastGradient<B>> {
        self.gradient.as_ref()?.cast.take()
    }

    /// The weight is frozen: while caching is on, it is quantised once and not in every step. With delayed scaling it is
    /// looked at in every step, for the history of its amax.
    pub fn with_frozen_weight(self, layers: &Fp8Layers) -> Self {
        match self.slots {
            None => Self { weight: Cached::new(&layers.frozen), is_frozen: true, ..self },
            Some(_) => self,
        }
    }

    /// How `x` is scaled, whose other shards are described by `scope`. With `note` its amax is recorded in the history.
    pub(super) fn scaling<B: Fp8Kernels>(
        &self,
        x: FloatTensor<B>,
        operand: Operand,
        scope: &ScaleScope,
        note: bool,
    ) -> Scaling<B> {
        Scaling::of(&self.recipe, operand, || self.scales::<B>(x, operand, scope, note))
    }

    /// Scales for `x`, whose other shards are described by `scope`. With `note` the amax is recorded in the history.
    pub(super) fn scales<B: Fp8Kernels>(
        &self,
        x: FloatTensor<B>,
        operand: Operand,
        scope: &ScaleScope,
        note: bool,
    ) -> Scales<B> {
        let (number, told) = match operand {
            Operand::Input => (self.recipe.forward(), self.input_amax.as_ref()),
            Operand::Weight => (self.recipe.forward(), None),
            Operand::Gradient => (self.recipe.backward(), self.gradient.as_ref().map(|notes| &notes.amax)),
        };
        let known = self.slots.as_ref().and_then(|slots| delayed::scales(slots, operand));
        let noting = self.slots.as_ref().filter(|_| note && !scope.sharing.is_dummy);
        let known =
            known.map(|[scale, inverse]| Scales { scale: B::fp8_primitive(scale), inverse: B::fp8_primitive(inverse) });
        if let (Some(known), None) = (&known, noting) {
            return known.clone();
        }
        let amax = told.and_then(KnownAmax::take::<B>).unwrap_or_else(|| B::fp8_amax(x));
        if let Some(slots) = noting {
            delayed::note(slots, operand, B::fp8_tensor(amax.clone()));
        }
        if let Some(known) = known {
            return known;
        }
        let amax = if scope.is_sharded { largest::<B>(amax, &self.group) } else { amax };
        B::fp8_scales(scope.sharing.largest::<B>(amax), number, self.recipe.margin)
    }

    /// The quantised weight: by rows, and also by columns if it is cached.
    pub(super) fn weight<B: Fp8Kernels>(&self, w: FloatTensor<B>) -> QuantizedWeight<B> {
        if let Some(found) = self.weight.get() {
            return found;
        }
        let device = w.device();
        let found = match self.is_frozen && self.weight.is_on() {
            // Among activations it would hold their pages.
            true => B::memory_persistent_allocations(&device, w, |w| self.quantized(w)),
            false => self.quantized(w),
        };
        self.weight.set(&found);
        found
    }

    fn quantized<B: Fp8Kernels>(&self, w: FloatTensor<B>) -> QuantizedWeight<B> {
        let number = self.recipe.forward();
        let scope = ScaleScope { is_sharded: true, sharing: Sharing::default() };
        let scaling = self.scaling::<B>(w.clone(), Operand::Weight, &scope, true);
        let sides = Sides { by_rows: true, by_columns: self.weight.is_on() };
        QuantizedWeight { matrix: B::fp8_cast(w, &scaling, number, sides), scaling }
    }

    /// The transposed weight, with the scales of the forward pass.
    pub(super) fn weight_columns<B: Fp8Kernels>(&self, w: FloatTensor<B>, scaling: &Scaling<B>) -> Matrix<B> {
        let cached = self.weight.get::<QuantizedWeight<B>>().and_then(|saved| saved.matrix.by_columns);
        cached.unwrap_or_else(|| cast_columns::<B>(w, scaling, self.recipe.forward()))
    }
}

/// The ranks that hold other elements of a tensor.
pub(super) struct ScaleScope {
    /// The tensor-parallel ranks do.
    pub is_sharded: bool,
    /// The ranks that share sequences do.
    pub sharing: Sharing,
}

fn cast_columns<B: Fp8Kernels>(x: FloatTensor<B>, scaling: &Scaling<B>, number: Number) -> Matrix<B> {
    let sides = Sides { by_rows: false, by_columns: true };
    B::fp8_cast(x, scaling, number, sides).by_columns.expect("columns were asked for")
}
