//! The bytes that exist, shared by tensors that are views of others.

use super::kinds::is_in_place;
use super::{Counts, Meta};
use burn::tensor::DType;
use burn_ir::{OperationIr, TensorIr, TensorStatus};
use parking_lot::MutexGuard;

/// What the rank holds of a tensor, as several tensors may that are views.
#[derive(Clone, Copy)]
pub(super) struct Share {
    pub storage: u64,
    /// Whether its elements are in another order than its shape's.
    pub is_strided: bool,
    /// Whether it is stored in half precision.
    pub is_half: bool,
}

#[derive(Clone, Copy)]
pub(super) struct Storage {
    pub bytes: u64,
    pub users: usize,
}

/// Bytes of an element.
pub(super) fn size(dtype: DType, is_half: bool) -> u64 {
    if is_half { 2 } else { dtype.size() as u64 }
}

impl Meta {
    pub(super) fn count(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock()
    }

    pub(super) fn new_number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn allocate(&mut self, bytes: u64) -> u64 {
        let storage = self.new_number();
        self.storages.insert(storage, Storage { bytes, users: 1 });
        let mut counts = self.count();
        counts.live += bytes;
        counts.peak = counts.peak.max(counts.live);
        storage
    }

    pub(super) fn share(&mut self, share: Share) -> Share {
        self.storages.get_mut(&share.storage).expect("a share has a storage").users += 1;
        share
    }

    pub(super) fn release(&mut self, share: Share) {
        let storage = self.storages.get_mut(&share.storage).expect("a share has a storage");
        storage.users -= 1;
        let Storage { bytes, users } = *storage;
        if users == 0 {
            self.storages.remove(&share.storage);
            self.count().live -= bytes;
        }
    }

    /// The storage of a consumed input that the output may be written over.
    pub(super) fn in_place(&self, op: &OperationIr, inputs: &[TensorIr], bytes: u64) -> Option<Share> {
        let is_free = |x: &&TensorIr| x.status == TensorStatus::ReadWrite && is_in_place(op);
        let shares = inputs.iter().filter(is_free).map(|x| self.table[&x.id].share);
        let fits = |share: &Share| {
            let storage = self.storages[&share.storage];
            storage.users == 1 && storage.bytes == bytes
        };
        shares.into_iter().find(fits)
    }
}
