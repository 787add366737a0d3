//! Which numbers there are, and how many weights share a scale.

use super::e4m3::{LARGEST, e4m3, to_e4m3};

/// The numbers that a weight divided by its scale is rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid {
    /// `torch.float8_e4m3fn`.
    Fp8,
    /// The signed integers of this many bits.
    Int {
        /// 4 or 8.
        bits: usize,
    },
}

/// A grid, and the weights of a matrix row that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheme {
    /// The numbers.
    pub grid: Grid,
    /// So many neighbours have a scale; `None` is the whole matrix row, an output channel.
    pub group: Option<usize>,
}

impl Grid {
    /// What the largest weight is scaled to: half the distance of the ends of the grid, as `calculate_qparams` of
    /// compressed-tensors has it for symmetric quantisation.
    pub fn span(self) -> f64 {
        match self {
            Self::Fp8 => LARGEST,
            Self::Int { bits } => ((1u32 << bits) - 1) as f64 / 2.0,
        }
    }

    /// The code of the nearest number, of two the even one: the byte of an e4m3, or an integer in two's complement.
    pub fn encode(self, value: f64) -> u8 {
        match self {
            Self::Fp8 => to_e4m3(value),
            Self::Int { bits } => {
                let half = (1i32 << (bits - 1)) as f64;
                value.round_ties_even().clamp(-half, half - 1.0) as i8 as u8
            }
        }
    }

    /// The number of a code.
    pub fn decode(self, code: u8) -> f64 {
        match self {
            Self::Fp8 => f64::from(e4m3(code)),
            Self::Int { .. } => f64::from(code as i8),
        }
    }
}

impl Scheme {
    /// Weights with a scale of their own in a matrix row of this many.
    pub fn group_of(self, columns: usize) -> usize {
        self.group.unwrap_or(columns)
    }

    /// Scales of a matrix row of this many weights.
    pub fn groups(self, columns: usize) -> usize {
        columns.div_ceil(self.group_of(columns).max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_rounded_and_clamped_as_torch_does() {
        let four = Grid::Int { bits: 4 };
        let rounded = [0.5, 1.5, -0.5, -1.5, 7.5, 7.6, -7.5, -8.4, -20.0].map(|value| four.decode(four.encode(value)));
        assert_eq!(rounded, [0.0, 2.0, 0.0, -2.0, 7.0, 7.0, -8.0, -8.0, -8.0]);
        assert_eq!([four.span(), Grid::Int { bits: 8 }.span(), Grid::Fp8.span()], [7.5, 127.5, 448.0]);
    }
}
