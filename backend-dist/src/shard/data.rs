//! Floats on the host, and Burn's types of them.

use burn::tensor::{self, FloatDType, TensorData};
use layouts::element::Element;
use layouts::shard::HostFloats;

/// What the elements of a tensor of this type are in host memory.
pub fn element(dtype: impl Into<FloatDType>) -> Element {
    match dtype.into() {
        FloatDType::F64 => Element::F64,
        FloatDType::F32 | FloatDType::Flex32 => Element::F32,
        FloatDType::BF16 => Element::Bf16,
        FloatDType::F16 => Element::F16,
    }
}

/// As the data of a one-dimensional tensor, without a copy.
pub fn into_data(values: HostFloats) -> TensorData {
    fn data<E: tensor::Element>(values: Vec<E>) -> TensorData {
        let len = values.len();
        TensorData::new(values, [len])
    }
    match values {
        HostFloats::F64(values) => data(values),
        HostFloats::F32(values) => data(values),
        HostFloats::Bf16(values) => data(values),
        HostFloats::F16(values) => data(values),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_has_the_values_and_their_type() {
        let values = [1.5, -0.25, 0.0];
        for dtype in [FloatDType::F64, FloatDType::F32, FloatDType::BF16, FloatDType::F16] {
            let floats = HostFloats::from(values.to_vec()).convert(element(dtype));
            let data = into_data(floats);
            assert_eq!(data.dtype(), dtype.into());
            assert!(data.iter::<f64>().eq(values), "{dtype:?}");
        }
    }
}
