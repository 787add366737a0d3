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
        for word in bytes.chunks(8) {
            let mut padded = [0; 8];
            padded[..word.len()].copy_from_slice(word);
            self.write_u64(u64::from_le_bytes(padded));
        }
    }

    fn write_u8(&mut self, number: u8) {
        self.write_u64(number.into());
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}
