//! Random initial values of a slice, sampled where they are needed: on the device if that is a GPU, else on the host's
//! cores. The bits are the same.

use std::ops::Range;

use burn::tensor::{DType, Device, Tensor, TensorData};
use half::{bf16, f16};

use crate::shard::{Init, Section};

/// Elements `range` of the slice, sampled on the host and rounded to `dtype`, a float type; to 16 bits by way of f32.
///
/// # Panics
/// If the slice has no such elements, or for another type.
pub fn on_host(section: &Section, init: Init, seed: u64, range: Range<usize>, dtype: DType) -> TensorData {
    let len = [range.len()];
    match dtype {
        DType::F64 => TensorData::new(section.initial_part(init, seed, range, |value| value), len),
        DType::F32 | DType::Flex32 => {
            TensorData::new(section.initial_part(init, seed, range, |value| value as f32), len)
        }
        DType::F16 => {
            TensorData::new(section.initial_part(init, seed, range, |value| f16::from_f32(value as f32)), len)
        }
        DType::BF16 => {
            TensorData::new(section.initial_part(init, seed, range, |value| bf16::from_f32(value as f32)), len)
        }
        other => panic!("{}: weights of type {other:?} cannot be sampled", section.name),
    }
}

/// The whole slice, sampled on the GPU `device`, which this does not wait for; `None` where there is nothing to sample
/// or the device is no GPU.
///
/// # Panics
/// If the GPU has failed.
#[cfg(feature = "cuda")]
pub fn on_device(section: &Section, init: Init, seed: u64, device: &Device, dtype: DType) -> Option<Tensor<1>> {
    use burn::backend::Cube;
    use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
    use kernels_cubecl::pointwise::flat::FloatType;
    use kernels_cubecl::random::{Normal, ShardPosition, normal};

    let Init::Normal { std } = init else { return None };
    let float = match dtype {
        DType::F64 => None,
        DType::F32 => Some(FloatType::F32),
        DType::BF16 => Some(FloatType::Bf16),
        DType::F16 => Some(FloatType::F16),
        _ => return None,
    };
    let (len, slice) = (section.local_len(), section.strided());
    // Elements of a GPU's array are counted in 32 bits.
    if len == 0 || len > i32::MAX as usize {
        return None;
    }
    let anchor = Tensor::<1>::empty([1], (device, DType::F32)).try_into_primitive::<Cube>().ok()?;
    if !matches!(anchor.device, cubecl::Device::Cuda(_)) {
        return None;
    }
    let client = anchor.client.clone();
    let out = empty_device_contiguous_dtype(client.clone(), anchor.device.clone(), [len].into(), dtype);
    let position =
        ShardPosition { first: slice.first as u64, stride: slice.stride as u64, width: slice.width, used: slice.used };
    let draw = Normal { seed, stream: crate::shard::stable_hash(&section.name), std };
    normal(&client, &out.handle, float, len, position, draw)
        .unwrap_or_else(|error| panic!("sampling {}: {error}", section.name));
    Some(Tensor::from_primitive::<Cube>(out))
}

/// The whole slice, sampled on the device: not without the feature `cuda`.
#[cfg(not(feature = "cuda"))]
pub fn on_device(_: &Section, _: Init, _: u64, _: &Device, _: DType) -> Option<Tensor<1>> {
    None
}
