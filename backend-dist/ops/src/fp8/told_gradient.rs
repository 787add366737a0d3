//! The gradient of the output of a layer in FP8, from the operation that writes it to the layer that reads it.

use std::sync::atomic::Ordering;

use burn::backend::tensor::FloatTensor;

use super::kernels::{Fp8Kernels, Matrix, Scales};
use super::known_amax::{CastGradient, GradientNotes, KnownAmax};
use super::layers::Operand;
use super::linear::{Fp8Linear, ScaleScope};
use super::recipe::Number;
use crate::pass::PassContext;

/// What the operation that writes the gradient of a layer's output may tell the layer, which needs its amax and a cast:
/// what it has found on the way. Clones are of the same gradient, which is written once.
#[derive(Clone, Debug)]
pub struct ToldGradient {
    layer: Fp8Linear,
    notes: GradientNotes,
    pass: PassContext,
}

impl ToldGradient {
    /// Of the output of `layer` in one pass; and the layer that is told. A cast is for a layer whose output no collective follows.
    pub fn of(layer: Fp8Linear, pass: &PassContext) -> (Fp8Linear, Self) {
        let notes = GradientNotes::new(&pass.hand_overs);
        let told = layer.with_gradient_notes(notes.clone());
        (told.clone(), Self { layer: told, notes, pass: pass.clone() })
    }

    /// Whether the layer was in FP8: its sizes may not allow it.
    pub(crate) fn is_read(&self) -> bool {
        self.notes.is_read.load(Ordering::Relaxed)
    }

    /// Leaves the amax.
    pub(crate) fn note_amax<B: Fp8Kernels>(&self, amax: FloatTensor<B>) {
        KnownAmax::note::<B>(&Some(self.notes.amax.clone()), Some(amax));
    }

    /// How the gradient `grad`, which has this amax, is cast.
    pub(crate) fn scales<B: Fp8Kernels>(&self, grad: FloatTensor<B>, amax: FloatTensor<B>) -> (Scales<B>, Number) {
        self.note_amax::<B>(amax);
        let scope = ScaleScope { is_sharded: true, sharing: self.pass.sharing.clone() };
        (self.layer.scales::<B>(grad, Operand::Gradient, &scope, true), self.layer.recipe.backward())
    }

    /// Leaves the gradient as it was cast with its scales.
    pub(crate) fn note_cast<B: Fp8Kernels>(&self, scales: Scales<B>, by_rows: Matrix<B>) {
        self.notes.cast.put(CastGradient::<B> { scales, by_rows });
    }
}
