//! In which type a tensor is stored, and its copies in half precision.

use super::{Executor, Float, float};
use crate::mesh_backend::inner::Inner;
use burn::tensor::DType;
use burn_ir::{HandleKind, TensorId, TensorIr, TensorStatus};

impl<B: Inner> Executor<B> {
    /// `x` in `dtype`, which is its own type or autocast's.
    pub(super) fn in_type(&mut self, x: &TensorIr, dtype: DType) -> Float<B> {
        let is_consumed = x.status == TensorStatus::ReadWrite;
        if dtype == x.dtype || self.halves.contains(&x.id) {
            self.widen_unless(x, dtype);
            let handle = float(self.inner.get_tensor(x));
            if is_consumed {
                self.forget(x.id);
            }
            return handle;
        }
        let copy = self.copy(x.id, x, dtype);
        if is_consumed {
            self.drop_tensor(x.id);
        }
        copy
    }

    /// Lets nothing wait that computes a tensor which is about to be read in `dtype`.
    pub(super) fn want(&mut self, id: TensorId, dtype: DType) {
        if Some(dtype) == self.half {
            self.chain.want_half(id);
            if self.chain.has(id) {
                self.flush(None);
            }
            if self.copies.contains_key(&id) && (self.deferred.contains_key(&id) || self.viewed.contains_key(&id)) {
                return;
            }
        }
        self.settle(id);
    }

    /// The copy of `id`, which is `x` or what it is a view of, in half precision.
    fn copy(&mut self, id: TensorId, x: &TensorIr, dtype: DType) -> Float<B> {
        let shared = self.shared_copies.get(&id).cloned();
        if let Some(copy) = self.copies.get(&id).or_else(|| shared.as_ref()?.get()) {
            return copy.clone();
        }
        let copy = match self.views.get(&id).cloned() {
            Some((root, views)) if self.inner.read_failure(&root).is_none() && !self.halves.contains(&root) => {
                let whole = self.copy(root, x, dtype);
                views.into_iter().fold(whole, |x, view| view.apply::<B>(x))
            }
            _ => {
                self.count("cast");
                let stored = TensorIr { id, status: TensorStatus::ReadOnly, ..x.clone() };
                B::float_cast(float(self.inner.get_tensor(&stored)), dtype.into())
            }
        };
        if let Some(shared) = shared {
            let _ = shared.set(copy.clone());
        }
        self.copies.insert(id, copy.clone());
        copy
    }

    /// Whether a tensor is, or will be, stored in half precision.
    pub fn is_half(&self, id: TensorId) -> bool {
        self.halves.contains(&id)
            || self.gemms.get(&id).is_some_and(|gemm| self.half == Some(gemm.dtype))
            || (self.half.is_some() && self.value_gradients.contains_key(&id))
            || self.deferred.get(&id).is_some_and(|launch| launch.outputs[0].is_half)
            || self.viewed.get(&id).is_some_and(|(launch, _)| launch.outputs[0].is_half)
            || (self.half.is_some() && self.chain.is_half(id))
    }

    /// The half precision type in which autocast would compute with `x`.
    pub fn half_of(&self, x: &TensorIr) -> Option<DType> {
        self.half.filter(|_| x.dtype == self.limits.dtype)
    }

    /// The tensor in half precision if autocast computes with that, else as it is stored; and whether it is half precision.
    pub fn halved(&mut self, x: &TensorIr) -> (HandleKind<B>, bool) {
        let Some(half) = self.half_of(x) else { return self.stored(x) };
        self.arrive();
        self.want(x.id, half);
        (HandleKind::Float(self.in_type(x, half)), true)
    }

    fn widen_unless(&mut self, x: &TensorIr, dtype: DType) {
        if Some(dtype) != self.half {
            self.widen(x);
        }
    }

    /// Stores `x` in its own type.
    pub(super) fn widen(&mut self, x: &TensorIr) {
        if self.halves.remove(&x.id) {
            self.count("cast");
            let stored = TensorIr { status: TensorStatus::ReadWrite, ..x.clone() };
            let wide = B::float_cast(float(self.inner.get_tensor(&stored)), x.dtype.into());
            self.inner.register_tensor_to_device(x.id, HandleKind::Float(wide));
        }
    }
}
