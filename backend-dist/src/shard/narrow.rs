//! Host values in another element type.

use burn::tensor::{DType, Element, ElementConversion, TensorData};
use bytemuck::Pod;
use half::{bf16, f16};
use rayon::prelude::*;

/// Elements that are worth another thread.
const CHUNK: usize = 1 << 16;

/// The bytes of `values` as `dtype`, rounded as [`TensorData::convert_dtype`](burn::tensor::TensorData::convert_dtype)
/// rounds.
///
/// # Panics
/// If `dtype` is not `f64`, `f32`, `bf16` or `f16`.
pub fn bytes_of(values: &[f64], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F64 => bytemuck::cast_slice(values).to_vec(),
        DType::F32 => narrow::<f32>(values),
        DType::BF16 => narrow::<bf16>(values),
        DType::F16 => narrow::<f16>(values),
        other => panic!("{other:?} is no type of a parameter"),
    }
}

/// The reverse: host data of elements of `dtype`, aligned as they need it.
///
/// # Panics
/// As [`bytes_of`].
pub fn data_of(bytes: &[u8], shape: Vec<usize>, dtype: DType) -> TensorData {
    fn typed<E: Element + Pod>(bytes: &[u8], shape: Vec<usize>) -> TensorData {
        TensorData::new(bytemuck::pod_collect_to_vec::<u8, E>(bytes), shape)
    }
    match dtype {
        DType::F64 => typed::<f64>(bytes, shape),
        DType::F32 => typed::<f32>(bytes, shape),
        DType::BF16 => typed::<bf16>(bytes, shape),
        DType::F16 => typed::<f16>(bytes, shape),
        other => panic!("{other:?} is no type of a parameter"),
    }
}

fn narrow<E: Element + Pod>(values: &[f64]) -> Vec<u8> {
    let size = size_of::<E>();
    let mut bytes = vec![0; values.len() * size];
    let fill = |(bytes, values): (&mut [u8], &[f64])| {
        for (bytes, value) in bytes.chunks_exact_mut(size).zip(values) {
            bytes.copy_from_slice(bytemuck::bytes_of(&value.elem::<E>()));
        }
    };
    match values.len() {
        ..=CHUNK => fill((&mut bytes, values)),
        _ => bytes.par_chunks_mut(CHUNK * size).zip(values.par_chunks(CHUNK)).for_each(fill),
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_round_as_burn_rounds_them() {
        // Halfway cases of every type, and what overflows it.
        let mut values: Vec<f64> = (0..200_000).map(|i| (i as f64 - 1e5) * 1.000_030_517_578_125).collect();
        values.extend([0.0, -0.0, 1e300, -1e39, 1e-310, f64::NAN, 1.0 + 2f64.powi(-9), 65_520.0]);
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let data = TensorData::new(values.clone(), [values.len()]).convert_dtype(dtype);
            let bytes = bytes_of(&values, dtype);
            assert!(data.as_bytes() == bytes, "{dtype:?}");
            assert_eq!(data_of(&bytes, vec![values.len()], dtype).as_bytes(), bytes);
        }
    }
}
