//! A moment in 8 bits: a code for each element, and a scale for each block of 256 elements of the flat buffer. A parameter
//! and a shard begin with a block, so blocks do not depend on ZeRO or pipelines; of tensors whose rows on a tensor-parallel
//! rank are multiples of 256 elements they are those of the global tensor.

use super::flat::Flat;
use backend_dist::gpu::buffer::{self, BLOCK, Map};
use backend_dist::shard::Section;
use burn::tensor::{DType, Device, Tensor, TensorData};
use std::borrow::Cow;

pub(super) struct Blocks {
    map: Map,
    store: Store,
}

enum Store {
    Host { codes: Vec<u8>, scales: Vec<f32> },
    Gpu(Box<buffer::Blocks>),
}

impl Blocks {
    /// A moment in host memory.
    pub fn new(map: Map, codes: Vec<u8>, scales: Vec<f32>) -> Self {
        Self { map, store: Store::Host { codes, scales } }
    }

    /// The two moments of `len` elements, a multiple of [`BLOCK`].
    pub fn zeros(len: usize, device: &Device) -> [Self; 2] {
        let store = || {
            let host = || Store::Host { codes: vec![0; len], scales: vec![0.0; len / BLOCK] };
            buffer::Blocks::zeros(len, device).map_or_else(host, |blocks| Store::Gpu(Box::new(blocks)))
        };
        [Map::Signed, Map::Unsigned].map(|map| Self { map, store: store() })
    }

    pub fn bytes(&self) -> u64 {
        let (codes, scales) = match &self.store {
            Store::Host { codes, scales } => (codes.len(), scales.len() * 4),
            Store::Gpu(blocks) => (blocks.codes.bytes(), blocks.scales.bytes()),
        };
        (codes + scales) as u64
    }

    /// The GPU memory, if it is there.
    pub fn gpu(&self) -> Option<&buffer::Blocks> {
        if let Store::Gpu(blocks) = &self.store { Some(blocks.as_ref()) } else { None }
    }

    /// Codes and scales.
    pub fn data(&self) -> (Cow<'_, [u8]>, Cow<'_, [f32]>) {
        match &self.store {
            Store::Host { codes, scales } => (codes.into(), scales.into()),
            Store::Gpu(blocks) => {
                let [codes, scales] = [&blocks.codes, &blocks.scales].map(|buffer| buffer.tensor().into_data());
                (codes.bytes().to_vec().into(), scales.iter::<f32>().collect())
            }
        }
    }

    /// The values in fp32, for a step on the host.
    pub fn widen(&self, device: &Device) -> Flat {
        let (codes, scales) = self.data();
        let numbers = codes.iter().enumerate().map(|(i, code)| self.map.number(*code, scales[i / BLOCK]));
        let values: Vec<f32> = numbers.collect();
        Flat::new(Tensor::from_data(TensorData::new(values, [codes.len()]), (device, DType::F32)))
    }

    /// Takes the values of a step on the host over.
    pub fn keep(&mut self, values: &Flat) {
        let view = values.view();
        let values: &[f32] = view.read();
        let scales = values.chunks(BLOCK).map(Map::scale).collect();
        self.put(values, scales);
    }

    /// Takes values over that a checkpoint has, and the scales of their blocks: of each element, 0 where it is not known.
    /// Blocks as they were when they were saved have the same bits; others get a new scale.
    pub fn set(&mut self, values: Vec<f32>, known: &[f32], device: &Device) {
        let scale = |(values, known): (&[f32], &[f32])| {
            let mut found = known.iter().filter(|scale| **scale > 0.0);
            match found.next() {
                Some(first) if found.all(|scale| scale == first) => *first,
                _ => Map::scale(values),
            }
        };
        let scales: Vec<f32> = values.chunks(BLOCK).zip(known.chunks(BLOCK)).map(scale).collect();
        let Store::Gpu(blocks) = &self.store else { return self.put(&values, scales) };
        let tensor = |values: Vec<f32>| {
            let len = values.len();
            Tensor::from_data(TensorData::new(values, [len]), (device, DType::F32))
        };
        blocks.scales.put(0, tensor(scales));
        buffer::encode_blocks(tensor(values), blocks, self.map);
    }

    fn put(&mut self, values: &[f32], scales: Vec<f32>) {
        let codes = values.iter().enumerate().map(|(i, value)| self.map.code(*value, scales[i / BLOCK])).collect();
        self.store = Store::Host { codes, scales };
    }
}

/// The scales of a tensor as a tensor of their own, one for 256 elements of a row, if rows of the tensor and of a rank's
/// slice of it are whole blocks.
pub(super) fn scales_section(section: &Section) -> Option<Section> {
    let last = section.global_shape.len().checked_sub(1)?;
    let whole = |size: usize| size > 0 && size.is_multiple_of(BLOCK);
    let rows = section.local_shape()[last];
    let mut scales = section.clone();
    if !whole(scales.global_shape[last]) || !whole(rows) {
        return None;
    }
    scales.global_shape[last] /= BLOCK;
    if let Some(split) = scales.split.as_mut().filter(|split| split.dim == last) {
        if !whole(split.padded) {
            return None;
        }
        split.padded /= BLOCK;
    }
    Some(scales)
}

#[cfg(test)]
mod tests {
    use super::*;
    use backend_dist::shard::GroupPosition;

    #[test]
    fn scales_are_split_as_their_tensors() {
        let at = GroupPosition { rank: 1, size: 2 };
        let shape = |section: Section| {
            scales_section(&section).map(|scales| (scales.global_shape.clone(), scales.local_shape()))
        };
        assert_eq!(shape(Section::replicated("norm", &[512], at)), Some((vec![2], vec![2])));
        assert_eq!(shape(Section::split("rows", &[6, 512], 0, 2, at)), Some((vec![6, 2], vec![3, 2])));
        assert_eq!(shape(Section::split("columns", &[6, 512], 1, 2, at)), Some((vec![6, 2], vec![6, 1])));
        assert_eq!(shape(Section::split("columns", &[6, 256], 1, 2, at)), None, "a rank has half a block");
        assert_eq!(shape(Section::replicated("bias", &[255], at)), None);
    }
}
