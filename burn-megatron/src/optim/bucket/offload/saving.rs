//! States in host memory, into checkpoints and out of them.

use super::super::super::blocks::Blocks;
use super::super::super::gpu::Weights;
use super::super::super::layout::Part;
use super::super::super::slices::{cut_bytes, read_blocks, remainders, stored};
use super::super::Bucket;
use super::{Hosted, Offload};
use crate::checkpoint::{Kind, Slice};
use backend_dist::gpu::buffer::{self, Map};
use backend_dist::shard::{HostFloats, element, into_data};
use burn::tensor::{DType, Device, Tensor, TensorData};
use half::bf16;
use safetensors::Dtype;

impl Hosted {
    /// Adds the boxes of some parts of the bucket, with a copy of their states.
    pub fn read<'a>(
        &self,
        slices: &mut Vec<Slice>,
        bucket: &'a Bucket,
        offload: &Offload,
        parts: impl Iterator<Item = &'a Part> + Clone,
    ) {
        let unit = |part: &Part| &bucket.layout.units[part.unit];
        let all = offload.all();
        let blocks = self.blocks(offload, &(0..bucket.region.len()));
        let kinds = [Kind::FirstMoment, Kind::SecondMoment];
        for (blocks, kind) in blocks.iter().flatten().zip(kinds) {
            read_blocks(slices, kind, blocks, parts.clone().map(|part| (unit(part), part)));
        }
        let others = |kind: Kind| blocks.is_none() || matches!(kind, Kind::Master | Kind::Remainder);
        for (kind, array) in self.arrays.iter().filter(|(kind, _)| others(*kind)) {
            for part in parts.clone() {
                let bytes = &all[array.bytes(&(part.at..part.at + part.range.len()))];
                let (kind, dtype, bytes) = match (kind, array.dtype) {
                    (Kind::Master, DType::F32) if bucket.split => {
                        let masters = bytemuck::pod_collect_to_vec::<u8, f32>(bytes);
                        (Kind::Remainder, Dtype::I16, remainders(masters.into_iter()).into())
                    }
                    (kind, DType::I16) => (*kind, Dtype::I16, bytes.into()),
                    (kind, dtype) => (*kind, stored(dtype), std::borrow::Cow::from(bytes)),
                };
                cut_bytes(slices, kind, unit(part), &part.range, (dtype, dtype.bitsize() / 8), &bytes);
            }
        }
    }

    /// Replaces elements of a moment from `at` on.
    pub fn put_floats(&self, offload: &mut Offload, kind: Kind, at: usize, values: HostFloats) {
        let array = self.array(kind).expect("both moments are kept");
        offload.put(array, at, values.convert(element(array.dtype)).bytes());
    }

    /// Replaces both moments, in 8 bits, by values and what is known of their scales.
    pub fn put_moments(&self, offload: &mut Offload, moments: Vec<(HostFloats, HostFloats)>, device: &Device) {
        let mut blocks = [Map::Signed, Map::Unsigned].map(|map| Blocks::new(map, Vec::new(), Vec::new()));
        let any = !moments.is_empty();
        for (blocks, (values, scales)) in blocks.iter_mut().zip(moments) {
            blocks.set(values.into_f32(), &scales.into_f32(), device);
        }
        if any {
            self.keep_blocks(offload, 0, &blocks);
        }
    }

    /// Replaces the region's masters, and on a GPU its weights.
    pub fn put_masters(&self, offload: &mut Offload, masters: HostFloats, weights: Option<&Weights>, device: &Device) {
        if let Some(array) = self.array(Kind::Remainder) {
            let masters = masters.into_f32();
            offload.put(array, 0, &remainders(masters.iter().copied()));
            let narrow: Vec<bf16> = masters.iter().map(|master| bf16::from_bits(buffer::split(*master).0)).collect();
            let data = TensorData::new(narrow, [masters.len()]);
            weights
                .into_iter()
                .for_each(|weights| weights.replace(Tensor::from_data(data.clone(), (device, DType::BF16))));
        } else if let Some(array) = self.array(Kind::Master) {
            let data = into_data(masters.convert(element(array.dtype)));
            offload.put(array, 0, data.bytes());
            weights
                .into_iter()
                .for_each(|weights| weights.replace(Tensor::from_data(data.clone(), (device, array.dtype))));
        }
    }
}
