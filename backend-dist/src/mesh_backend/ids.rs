//! Maps by tensor ids, which are numbers in sequence: a map is read a dozen times for an operation of microseconds.

use burn_ir::TensorId;
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

/// A map from tensors.
pub(super) type ById<T> = HashMap<TensorId, T, BuildHasherDefault<IdHasher>>;
/// A set of tensors.
pub(super) type Ids = HashSet<TensorId, BuildHasherDefault<IdHasher>>;

/// Multiplies a number by an odd constant (Knuth, The Art of Computer Programming 3, 6.4).
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}
