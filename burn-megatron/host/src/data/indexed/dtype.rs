//! The eight element types of Megatron's `.bin` files.

use std::fmt;
use std::str::FromStr;

/// Element type of a `.bin` file, with Megatron's code as discriminant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Dtype {
    /// `uint8`
    U8 = 1,
    /// `int8`
    I8 = 2,
    /// `int16`
    I16 = 3,
    /// `int32`
    I32 = 4,
    /// `int64`
    I64 = 5,
    /// `float64`
    F64 = 6,
    /// `float32`
    F32 = 7,
    /// `uint16`
    U16 = 8,
}

/// Runs `$body` with `$t` bound to the Rust type of a [`Dtype`].
macro_rules! with_type {
    ($dtype:expr, $t:ident => $body:expr) => {
        with_type!($dtype, $t => $body; U8 u8, I8 i8, I16 i16, I32 i32, I64 i64, F64 f64, F32 f32, U16 u16)
    };
    ($dtype:expr, $t:ident => $body:expr; $($case:ident $rust:ty),*) => {
        match $dtype {
            $(Dtype::$case => {
                type $t = $rust;
                $body
            })*
        }
    };
}

impl Dtype {
    /// All element types, in the order of their codes.
    pub const ALL: [Dtype; 8] =
        [Dtype::U8, Dtype::I8, Dtype::I16, Dtype::I32, Dtype::I64, Dtype::F64, Dtype::F32, Dtype::U16];

    /// The code byte that stands for this type in an `.idx` file.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The type with this code byte, if there is one.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.code() == code)
    }

    /// Megatron's choice for a vocabulary: `uint16` below 65,500 entries, else `int32`.
    pub fn for_vocabulary(size: usize) -> Self {
        if size < 65_500 { Dtype::U16 } else { Dtype::I32 }
    }

    /// Bytes per element.
    pub fn size(self) -> usize {
        with_type!(self, T => size_of::<T>())
    }

    /// numpy's name of the type.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::U8 => "uint8",
            Dtype::I8 => "int8",
            Dtype::I16 => "int16",
            Dtype::I32 => "int32",
            Dtype::I64 => "int64",
            Dtype::F64 => "float64",
            Dtype::F32 => "float32",
            Dtype::U16 => "uint16",
        }
    }

    /// Whether the value is stored without loss.
    #[allow(clippy::unnecessary_cast, reason = "of one of the eight types")]
    pub fn holds(self, value: i64) -> bool {
        with_type!(self, T => (value as T) as i64 == value)
    }

    /// Appends the little-endian bytes of one value.
    pub fn encode(self, value: i64, out: &mut Vec<u8>) {
        with_type!(self, T => out.extend_from_slice(&(value as T).to_le_bytes()))
    }

    /// Appends the values stored in `bytes`; fractions of float types are cut off, as numpy's `astype(int64)` does.
    #[allow(clippy::unnecessary_cast, reason = "of one of the eight types")]
    pub fn decode(self, bytes: &[u8], out: &mut Vec<i64>) {
        with_type!(self, T => {
            let (chunks, _) = bytes.as_chunks::<{ size_of::<T>() }>();
            out.extend(chunks.iter().map(|chunk| T::from_le_bytes(*chunk) as i64));
        })
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Dtype {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let names = || Self::ALL.map(Self::name).join(", ");
        Self::ALL
            .into_iter()
            .find(|dtype| dtype.name() == name)
            .ok_or_else(|| format!("unknown element type '{name}'; known are {}", names()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_sizes_and_names_are_megatrons() {
        let table: Vec<_> = Dtype::ALL.iter().map(|d| (d.code(), d.size(), d.name())).collect();
        assert_eq!(
            table,
            [
                (1, 1, "uint8"),
                (2, 1, "int8"),
                (3, 2, "int16"),
                (4, 4, "int32"),
                (5, 8, "int64"),
                (6, 8, "float64"),
                (7, 4, "float32"),
                (8, 2, "uint16")
            ]
        );
        assert_eq!(Dtype::from_code(0), None);
        assert_eq!(Dtype::from_code(9), None);
    }

    #[test]
    fn vocabulary_decides_between_uint16_and_int32() {
        assert_eq!(Dtype::for_vocabulary(65_499), Dtype::U16);
        assert_eq!(Dtype::for_vocabulary(65_500), Dtype::I32);
    }

    #[test]
    fn values_out_of_range_are_noticed() {
        assert!(Dtype::U16.holds(65_535) && !Dtype::U16.holds(65_536) && !Dtype::U16.holds(-1));
        assert!(Dtype::F32.holds(1 << 24) && !Dtype::F32.holds((1 << 24) + 1));
    }
}
