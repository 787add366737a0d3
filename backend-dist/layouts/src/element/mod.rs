//! Types of weights in files: elements as bytes, little-endian; and floats of these types in host memory.

mod floats;

use std::fmt;
use std::str::FromStr;

pub use floats::{HostFloats, copy_bytes};
use rayon::prelude::*;
use safetensors::Dtype;

use floats::CHUNK;

/// The element types that weights may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Element {
    /// Double precision.
    F64,
    /// Single precision.
    F32,
    /// Half precision with eight bits of exponent.
    Bf16,
    /// Half precision with five bits of exponent.
    F16,
}

impl Element {
    /// The type of a safetensors file, if it is one of ours.
    pub fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F64 => Some(Self::F64),
            Dtype::F32 => Some(Self::F32),
            Dtype::BF16 => Some(Self::Bf16),
            Dtype::F16 => Some(Self::F16),
            _ => None,
        }
    }

    /// The type in a safetensors file.
    pub fn dtype(self) -> Dtype {
        match self {
            Self::F64 => Dtype::F64,
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::BF16,
            Self::F16 => Dtype::F16,
        }
    }

    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Hugging Face's word, as in the key `dtype` of `config.json`.
    pub fn torch_name(self) -> &'static str {
        match self {
            Self::F64 => "float64",
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
        }
    }

    /// So many zeros, to be filled with what files hold.
    pub fn zeros(self, len: usize) -> HostFloats {
        HostFloats::zeros(self, len)
    }

    /// The elements of some bytes.
    pub fn decode(self, bytes: &[u8]) -> Vec<f64> {
        let mut values = self.zeros(bytes.len() / self.size());
        values.bytes_mut().copy_from_slice(bytes);
        values.into_f64()
    }

    /// Appends the bytes of values, each rounded once.
    pub fn encode(self, values: &[f64], bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(HostFloats::of(values, self).bytes());
    }

    /// As [`encode`](Self::encode).
    ///
    /// # Errors
    /// Names a finite value that this type has infinity for.
    pub fn encode_finite(self, values: &[f64], bytes: &mut Vec<u8>) -> Result<(), String> {
        let most = match self {
            Self::F64 => f64::MAX,
            Self::F32 => f32::MAX.into(),
            Self::Bf16 => half::bf16::MAX.into(),
            Self::F16 => half::f16::MAX.into(),
        };
        let is_above = |value: &&f64| value.is_finite() && value.abs() > most;
        let above = values.par_chunks(CHUNK).find_map_first(|values| values.iter().find(is_above));
        if let Some(value) = above {
            return Err(format!("it has {value:.4e}, and {self} has nothing above {most:.4e}; take a wider type"));
        }
        self.encode(values, bytes);
        Ok(())
    }
}

/// Files hold the bytes that this machine computes with.
const _: () = assert!(cfg!(target_endian = "little"), "weights are read as they are stored: little-endian");

/// As on the command line.
impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        })
    }
}

impl FromStr for Element {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::F64, Self::F32, Self::Bf16, Self::F16];
        let found = all.into_iter().find(|element| text == element.to_string() || text == element.torch_name());
        found.ok_or_else(|| format!("{text} is no element type of weights; legal: f64, f32, bf16, f16"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_go_out_and_in() {
        for element in [Element::F64, Element::F32, Element::Bf16, Element::F16] {
            let mut bytes = Vec::new();
            element.encode(&[1.5, -0.25, 0.0], &mut bytes);
            assert_eq!(bytes.len(), 3 * element.size());
            assert_eq!(element.decode(&bytes), [1.5, -0.25, 0.0]);
            assert_eq!((element.to_string().parse(), Element::of(element.dtype())), (Ok(element), Some(element)));
        }
        let refused = Element::F16.encode_finite(&[1.0, -65_505.0], &mut Vec::new()).unwrap_err();
        assert_eq!(refused, "it has -6.5505e4, and f16 has nothing above 6.5504e4; take a wider type");
        Element::Bf16.encode_finite(&[f64::INFINITY, 65_505.0], &mut Vec::new()).unwrap();
        assert!("int8".parse::<Element>().unwrap_err().contains("legal: f64, f32, bf16, f16"));
    }
}
