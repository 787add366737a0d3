//! Tensors as they are stored: reading them, giving them names and values.

use super::super::inner::Inner;
use super::{Executor, Float, Generated};
use burn::backend::ExecutionError;
use burn::tensor::TensorData;
use burn_ir::{HandleKind, TensorId, TensorIr, TensorStatus};
use burn_std::future::DynFut;

impl<B: Inner> Executor<B> {
    /// A parameter has so many elements on this rank.
    pub fn note_parameter(&mut self, elements: usize) {
        self.lasting.insert(elements);
    }

    /// Runs `work`, whose outputs have so many elements. Parameters, their gradients and an optimizer's states are as
    /// large as they were a step before: with memory that is kept for that size, an allocation does not search what lies
    /// between others.
    pub(super) fn allocating<T: Send>(&self, elements: usize, work: impl FnOnce() -> T + Send) -> T {
        if self.lasting.contains(&elements) { B::keeping_memory(&self.device, work) } else { work() }
    }

    /// The tensor as it is stored, and whether that is half precision.
    pub fn stored(&mut self, x: &TensorIr) -> (HandleKind<B>, bool) {
        self.arrive();
        self.settle(x.id);
        let is_half = self.halves.contains(&x.id);
        if x.status == TensorStatus::ReadWrite {
            self.forget(x.id);
        }
        (self.inner.get_tensor(x), is_half)
    }

    pub fn register_stored(&mut self, id: TensorId, x: HandleKind<B>, is_half: bool) {
        self.inner.register_tensor_to_device(id, x);
        if is_half {
            self.halves.insert(id);
        }
    }

    pub fn register_data(&mut self, id: TensorId, data: TensorData) {
        self.inner.register_tensor_data_id(id, data);
    }

    /// Another name of a tensor.
    pub fn register_alias(&mut self, new: TensorId, id: TensorId) {
        self.settle(id);
        self.inner.register_alias(new, id);
        if self.halves.contains(&id) {
            self.halves.insert(new);
        }
        if self.half.is_some() {
            let shared = self.shared_copies.entry(id).or_default().clone();
            if let Some(copy) = self.copies.get(&id) {
                let _ = shared.set(copy.clone());
            }
            self.shared_copies.insert(new, shared);
        }
    }

    /// Lets nothing wait that computes a tensor which is read, here or on another rank. A number remains one, because what
    /// follows from it must be stored alike on all ranks.
    pub fn settle_for_read(&mut self, id: TensorId) -> Option<f64> {
        if let Some(Generated::Number(number)) = self.generated(id) {
            return Some(number);
        }
        self.arrive();
        self.settle(id);
        None
    }

    /// The values of a tensor, which stays stored as it is: another rank, which does not read it, keeps its share so.
    pub fn read(&mut self, x: TensorIr) -> DynFut<Result<TensorData, ExecutionError>> {
        if let Some(number) = self.settle_for_read(x.id) {
            if x.status == TensorStatus::ReadWrite {
                self.drop_tensor(x.id);
            }
            let data = TensorData::full(x.shape, number).convert_dtype(x.dtype);
            return Box::pin(async move { Ok(data) });
        }
        let is_half = self.halves.contains(&x.id);
        if x.status == TensorStatus::ReadWrite {
            self.forget(x.id);
        }
        if !is_half {
            return self.inner.read_tensor_async(x);
        }
        let wide = B::float_cast(float(self.inner.get_tensor(&x)), x.dtype.into());
        Box::pin(B::float_into_data(wide))
    }
}

pub(super) fn float<B: Inner>(x: HandleKind<B>) -> Float<B> {
    match x {
        HandleKind::Float(x) => x,
        _ => unreachable!("chains and GEMMs are of floats"),
    }
}
