//! Inputs of collectives that span processes, as bytes.

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bytes, DType, Shape};
use bytemuck::allocation::pod_collect_to_vec;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Both directions for one type. Floats keep their bits.
pub(crate) struct Codec<T> {
    pub encode: fn(&T) -> Vec<u8>,
    pub decode: fn(&[u8]) -> Result<T, String>,
}

impl<T> Clone for Codec<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Codec<T> {}

/// Any plain value, as MessagePack.
pub(crate) fn host<T: Serialize + DeserializeOwned>() -> Codec<T> {
    Codec { encode: to_bytes, decode: from_bytes }
}

/// A value that only some members have. Not left to MessagePack, where `Some(None)` and `None` are one.
pub(crate) fn optional<T: Serialize + DeserializeOwned>() -> Codec<Option<T>> {
    Codec {
        encode: |value| value.as_ref().map(to_bytes).unwrap_or_default(),
        decode: |bytes| if bytes.is_empty() { Ok(None) } else { from_bytes(bytes).map(Some) },
    }
}

/// A host tensor: element type and shape, then the elements.
pub(crate) const TENSOR: Codec<FlexTensor> = Codec { encode: tensor_to_bytes, decode: tensor_from_bytes };

/// A host tensor that only some members have.
pub(crate) const OPTIONAL_TENSOR: Codec<Option<FlexTensor>> = Codec {
    encode: |x| x.as_ref().map(tensor_to_bytes).unwrap_or_default(),
    decode: |bytes| if bytes.is_empty() { Ok(None) } else { tensor_from_bytes(bytes).map(Some) },
};

/// A tensor and how many of its rows (dimension 0) go to each member.
pub(crate) const ROWS: Codec<(FlexTensor, Vec<usize>)> = Codec {
    encode: |(x, splits)| join(&to_bytes(splits), tensor_to_bytes(x)),
    decode: |bytes| {
        let (splits, x) = split(bytes)?;
        let (splits, x): (Vec<usize>, _) = (from_bytes(splits)?, tensor_from_bytes(x)?);
        let rows = x.layout().shape().to_vec().first().copied();
        match splits.iter().try_fold(0usize, |sum, rows| sum.checked_add(*rows)) == rows {
            true => Ok((x, splits)),
            false => Err(format!("{} splits that are not those of {rows:?} rows", splits.len())),
        }
    },
};

/// As MessagePack.
///
/// # Panics
/// If the value cannot be written, for example a sequence of unknown length: a type that no rank can send.
pub(crate) fn to_bytes<T: Serialize>(value: &T) -> Vec<u8> {
    rmp_serde::to_vec(value).unwrap_or_else(|error| panic!("{}: {error}", std::any::type_name::<T>()))
}

pub(crate) fn from_bytes<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    rmp_serde::from_slice(bytes).map_err(|error| format!("{}: {error}", std::any::type_name::<T>()))
}

fn tensor_to_bytes(x: &FlexTensor) -> Vec<u8> {
    let (x, width) = (x.to_contiguous(), x.dtype().size());
    let start = x.layout().start_offset() * width;
    let elements = &x.bytes()[start..start + x.layout().num_elements() * width];
    join(&to_bytes(&(x.dtype(), x.layout().shape().to_vec())), elements.to_vec())
}

fn tensor_from_bytes(bytes: &[u8]) -> Result<FlexTensor, String> {
    let (head, elements) = split(bytes)?;
    let (dtype, shape): (DType, Vec<usize>) = from_bytes(head)?;
    let size = shape.iter().try_fold(dtype.size(), |size, dim| size.checked_mul(*dim));
    if size != Some(elements.len()) || matches!(dtype, DType::QFloat(_)) {
        return Err(format!("a {dtype:?} tensor of shape {shape:?} with {} bytes", elements.len()));
    }
    Ok(FlexTensor::new(aligned(elements, dtype), Layout::contiguous(Shape::from(shape)), dtype))
}

/// A copy of some elements where elements of this type may lie.
pub(crate) fn aligned(elements: &[u8], dtype: DType) -> Bytes {
    // `from_bytes_vec` would copy once more, to align what is aligned.
    match dtype.size() {
        8 => Bytes::from_elems(pod_collect_to_vec::<u8, u64>(elements)),
        4 => Bytes::from_elems(pod_collect_to_vec::<u8, u32>(elements)),
        2 => Bytes::from_elems(pod_collect_to_vec::<u8, u16>(elements)),
        _ => Bytes::from_elems(elements.to_vec()),
    }
}

/// `head` with its length before it and `tail` after it.
fn join(head: &[u8], tail: Vec<u8>) -> Vec<u8> {
    [&(head.len() as u64).to_le_bytes()[..], head, &tail].concat()
}

fn split(bytes: &[u8]) -> Result<(&[u8], &[u8]), String> {
    let short = || format!("{} bytes are no message", bytes.len());
    let (length, rest) = bytes.split_at_checked(8).ok_or_else(short)?;
    let length = u64::from_le_bytes(length.try_into().expect("eight bytes"));
    rest.split_at_checked(length as usize).ok_or_else(short)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::TensorData;

    #[test]
    fn values_keep_their_bits() {
        let floats =
            vec![0.1f64, -0.0, f64::NAN, f64::INFINITY, f64::MIN_POSITIVE / 2.0, f64::from_bits(0x7ff8_dead_beef_0001)];
        let back: Vec<f64> = from_bytes(&to_bytes(&floats)).unwrap();
        assert_eq!(
            back.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
            floats.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        );
        let both = optional::<Option<u8>>();
        for value in [None, Some(None), Some(Some(3))] {
            assert_eq!((both.decode)(&(both.encode)(&value)), Ok(value));
        }
    }

    #[test]
    fn tensors_keep_type_shape_and_bits_whatever_their_strides() {
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::I64] {
            let values: Vec<f64> = (0..6).map(|i| f64::from(i) * 1.1).collect();
            let x = FlexTensor::from_data(TensorData::new(values, [2, 3]).convert_dtype(dtype)).transpose(0, 1);
            let back = tensor_from_bytes(&tensor_to_bytes(&x)).unwrap();
            assert_eq!(back.into_data(), x.into_data());
        }
        let empty = FlexTensor::from_data(TensorData::new(Vec::<f32>::new(), [0, 3]));
        let (back, splits) = (ROWS.decode)(&(ROWS.encode)(&(empty, vec![0, 0]))).unwrap();
        assert_eq!((back.layout().shape().to_vec(), splits), (vec![0, 3], vec![0, 0]));
        assert!(tensor_from_bytes(&[1, 2]).is_err());
    }

    #[test]
    fn shapes_whose_bytes_cannot_be_counted_are_refused() {
        let tensor = |shape: &[usize]| join(&to_bytes(&(DType::F32, shape)), vec![0; 8]);
        assert!(tensor_from_bytes(&tensor(&[2])).is_ok());
        for shape in [&[3][..], &[1 << 62], &[1 << 32, 1 << 32], &[usize::MAX, 2]] {
            assert!(tensor_from_bytes(&tensor(shape)).is_err(), "{shape:?}");
        }
        let rows = |splits: &[usize]| join(&to_bytes(&splits), tensor(&[2]));
        assert!((ROWS.decode)(&rows(&[1, 1])).is_ok());
        for splits in [&[1][..], &[], &[1, 2], &[usize::MAX, 3]] {
            assert!((ROWS.decode)(&rows(splits)).is_err(), "{splits:?}");
        }
    }
}
