//! Floats on the host in the type in which they are stored. Bulk work is done on all cores.

use std::ops::Range;

use bytemuck::{Zeroable, zeroed_vec};
use half::{bf16, f16};
use rayon::prelude::*;

use super::Element;
use crate::shard::Section;

/// Elements that are worth another thread.
pub(super) const CHUNK: usize = 1 << 18;
/// Bytes whose copy is worth another thread.
const COPY: usize = 4 << 20;

/// A one-dimensional array of floats in host memory.
#[derive(Clone, Debug, PartialEq)]
pub enum HostFloats {
    /// Double precision.
    F64(Vec<f64>),
    /// Single precision.
    F32(Vec<f32>),
    /// Half precision with eight bits of exponent.
    Bf16(Vec<bf16>),
    /// Half precision with five bits of exponent.
    F16(Vec<f16>),
}

/// Runs an expression with `$values` as the vector.
macro_rules! with_values {
    ($floats:expr, $values:ident => $body:expr) => {
        match $floats {
            HostFloats::F64($values) => $body,
            HostFloats::F32($values) => $body,
            HostFloats::Bf16($values) => $body,
            HostFloats::F16($values) => $body,
        }
    };
}

impl HostFloats {
    /// `len` zeros. The memory is not touched, so that the threads that fill it do that.
    pub fn zeros(element: Element, len: usize) -> Self {
        match element {
            Element::F64 => Self::F64(zeroed_vec(len)),
            Element::F32 => Self::F32(zeroed_vec(len)),
            Element::Bf16 => Self::Bf16(zeroed_vec(len)),
            Element::F16 => Self::F16(zeroed_vec(len)),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        with_values!(self, values => values.len())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Type of the elements.
    pub fn element(&self) -> Element {
        match self {
            Self::F64(_) => Element::F64,
            Self::F32(_) => Element::F32,
            Self::Bf16(_) => Element::Bf16,
            Self::F16(_) => Element::F16,
        }
    }

    /// The elements' bytes in the order of this machine.
    pub fn bytes(&self) -> &[u8] {
        with_values!(self, values => bytemuck::cast_slice(values))
    }

    /// The same to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        with_values!(self, values => bytemuck::cast_slice_mut(values))
    }

    /// A copy of some elements.
    ///
    /// # Panics
    /// If there are no such elements.
    pub fn part(&self, range: Range<usize>) -> Self {
        let mut part = Self::zeros(self.element(), range.len());
        part.put(0, self, range);
        part
    }

    /// Replaces elements from `at` on by some of `values`. Large copies are made on all cores.
    ///
    /// # Panics
    /// If `values` are of another type or has no such elements, or they end after this array.
    pub fn put(&mut self, at: usize, values: &Self, range: Range<usize>) {
        assert_eq!(self.element(), values.element(), "values of another type");
        let width = self.element().size();
        let from = &values.bytes()[range.start * width..range.end * width];
        copy_bytes(from, &mut self.bytes_mut()[at * width..][..from.len()]);
    }

    /// In another type, each value rounded once, to the nearest and ties to even.
    pub fn convert(self, element: Element) -> Self {
        match (self, element) {
            (same, element) if same.element() == element => same,
            (Self::F64(values), element) => Self::of(&values, element),
            (Self::F32(values), element) => from_f32(&values, |value| *value, element),
            (Self::Bf16(values), element) => from_f32(&values, |value| value.to_f32(), element),
            (Self::F16(values), element) => from_f32(&values, |value| value.to_f32(), element),
        }
    }

    /// Values in a type, each rounded once, to the nearest and ties to even.
    pub fn of(values: &[f64], element: Element) -> Self {
        match element {
            Element::F64 => Self::F64(map(values, |value| *value)),
            Element::F32 => Self::F32(map(values, |value| *value as f32)),
            Element::Bf16 => Self::Bf16(map(values, |value| bf16::from_f32(to_odd(*value)))),
            Element::F16 => Self::F16(map(values, |value| f16::from_f32(to_odd(*value)))),
        }
    }

    /// The values, as wide as they can be.
    pub fn into_f64(self) -> Vec<f64> {
        match self.convert(Element::F64) {
            Self::F64(values) => values,
            _ => unreachable!("they were converted"),
        }
    }

    /// The values in single precision.
    pub fn into_f32(self) -> Vec<f32> {
        match self.convert(Element::F32) {
            Self::F32(values) => values,
            _ => unreachable!("they were converted"),
        }
    }

    /// Values of the box [`Section::ranges`] as the local array of a section, with its zero padding.
    ///
    /// # Panics
    /// If there are more or fewer values than the box has elements.
    pub fn pad(self, section: &Section) -> Self {
        let covered: usize = section.ranges().iter().map(ExactSizeIterator::len).product();
        if covered == section.local_len() {
            assert_eq!(self.len(), covered, "{}: values of the slice {:?}", section.name, section.ranges());
            return self;
        }
        match self {
            Self::F64(values) => Self::F64(section.pad(&values)),
            Self::F32(values) => Self::F32(section.pad(&values)),
            Self::Bf16(values) => Self::Bf16(section.pad(&values)),
            Self::F16(values) => Self::F16(section.pad(&values)),
        }
    }
}

impl From<Vec<f64>> for HostFloats {
    fn from(values: Vec<f64>) -> Self {
        Self::F64(values)
    }
}

/// The elements of values that fp32 holds exactly.
fn from_f32<A: Sync>(values: &[A], exact: impl Fn(&A) -> f32 + Sync, element: Element) -> HostFloats {
    match element {
        Element::F64 => HostFloats::F64(map(values, |value| f64::from(exact(value)))),
        Element::F32 => HostFloats::F32(map(values, exact)),
        Element::Bf16 => HostFloats::Bf16(map(values, |value| bf16::from_f32(exact(value)))),
        Element::F16 => HostFloats::F16(map(values, |value| f16::from_f32(exact(value)))),
    }
}

fn map<A: Sync, B: Zeroable + Send>(values: &[A], each: impl Fn(&A) -> B + Sync) -> Vec<B> {
    if values.len() <= CHUNK {
        return values.iter().map(each).collect();
    }
    let mut mapped: Vec<B> = zeroed_vec(values.len());
    let fill = |(to, from): (&mut [B], &[A])| to.iter_mut().zip(from).for_each(|(to, from)| *to = each(from));
    mapped.par_chunks_mut(CHUNK).zip(values.par_chunks(CHUNK)).for_each(fill);
    mapped
}

/// Copies bytes, on all cores where there are many.
///
/// # Panics
/// If there is not room for all of them and no more.
pub fn copy_bytes(from: &[u8], to: &mut [u8]) {
    if from.len() <= COPY {
        return to.copy_from_slice(from);
    }
    to.par_chunks_mut(COPY).zip(from.par_chunks(COPY)).for_each(|(to, from)| to.copy_from_slice(from));
}

/// The value in fp32, rounded so that rounding it again gives what rounding once would: to the neighbour whose last bit
/// is odd. (`half`'s conversions from `f64` ignore its lower 32 bits.)
fn to_odd(value: f64) -> f32 {
    let near = value as f32;
    let exact = f64::from(near) == value || !near.is_finite() || near.to_bits() % 2 == 1;
    match exact {
        true => near,
        false if f64::from(near) > value => near.next_down(),
        false => near.next_up(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::GroupPosition;

    const ALL: [Element; 4] = [Element::F64, Element::F32, Element::Bf16, Element::F16];

    /// More values than one thread takes, exact in all types.
    #[test]
    fn every_type_becomes_every_other() {
        let values: Vec<f64> = (0..CHUNK + 7).map(|i| (i % 257) as f64 / 64.0 - 1.5).collect();
        for from in ALL {
            let stored = HostFloats::from(values.clone()).convert(from);
            assert_eq!((stored.element(), stored.len()), (from, values.len()));
            for to in ALL {
                let converted = stored.clone().convert(to);
                assert_eq!(converted.element(), to);
                assert!(converted.into_f64() == values, "{from:?} to {to:?}");
            }
        }
    }

    /// Rounded to fp32 first, the values next to the midpoint of two numbers would fall on it, and then to the even
    /// one.
    #[test]
    fn values_are_rounded_once() {
        let (middle, little) = (1.0 + 2f64.powi(-8), 2f64.powi(-40));
        let values = vec![middle + little, middle, middle - little, -middle - little, f64::INFINITY];
        let above = 1.0 + 2f64.powi(-7);
        let rounded = HostFloats::from(values).convert(Element::Bf16).into_f64();
        assert_eq!(rounded, [above, 1.0, 1.0, -above, f64::INFINITY]);
        let near = HostFloats::F32(vec![middle as f32, (middle as f32).next_up()]).convert(Element::Bf16);
        assert_eq!(near.into_f64(), [1.0, above]);
    }

    #[test]
    fn bytes_are_those_of_the_values_and_padding_is_zero() {
        let mut floats = HostFloats::zeros(Element::Bf16, 3);
        floats.bytes_mut().copy_from_slice(&[0x80, 0x3f, 0, 0x40, 0x40, 0x40]);
        assert_eq!(floats.clone().into_f64(), [1.0, 2.0, 3.0]);
        assert_eq!(floats.bytes()[..2], [0x80, 0x3f]);
        let last = GroupPosition { rank: 1, size: 2 };
        let section = Section::split_padded("w", &[7], 0, 2, 8, last);
        assert_eq!(floats.pad(&section).into_f64(), [1.0, 2.0, 3.0, 0.0]);
    }

    #[test]
    fn parts_are_copied_from_and_to_anywhere() {
        let len = 3 * COPY / 8;
        let values = HostFloats::F64((0..len).map(|i| i as f64).collect());
        assert_eq!(values.part(2..4).into_f64(), [2.0, 3.0]);
        let mut other = HostFloats::zeros(Element::F64, len + 1);
        other.put(1, &values, 0..len);
        assert!(other.into_f64().iter().enumerate().all(|(i, value)| *value == i.saturating_sub(1) as f64));
    }
}
