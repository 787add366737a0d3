//! How tensors end.

use super::Executor;
use crate::mesh_backend::inner::Inner;
use burn::tensor::{DType, Shape};
use burn_ir::{OperationIr, TensorId, TensorIr, TensorStatus};

impl<B: Inner> Executor<B> {
    /// Nobody reads the tensor any more.
    pub fn drop_tensor(&mut self, id: TensorId) {
        self.run_step(id);
        let waits = self.gemms.remove(&id).is_some()
            || self.drop_sum(id)
            || self.value_gradients.remove(&id).is_some()
            || self.deferred.remove(&id).is_some()
            || self.viewed.remove(&id).is_some()
            || self.chain.forget(id)
            || self.generated.remove(&id).is_some();
        if !waits {
            self.drop_stored(id);
        }
        self.forget(id);
    }

    fn drop_stored(&mut self, id: TensorId) {
        let shape = Shape::from(Vec::<usize>::new());
        let tensor = TensorIr { id, shape, status: TensorStatus::ReadWrite, dtype: DType::F32 };
        self.inner.register_op(OperationIr::Drop(tensor));
    }

    pub(super) fn forget(&mut self, id: TensorId) {
        self.halves.remove(&id);
        self.copies.remove(&id);
        self.shared_copies.remove(&id);
        self.views.remove(&id);
        self.logsumexps.remove(&id);
        self.names.remove(&id);
        self.of_masks.remove(&id);
    }
}
