//! How rows are distributed over units and cubes.
use super::NormShape;
use crate::pointwise::CubeShape;
use cubecl::prelude::*;

/// Most units of a cube, as far as whole rows allow: forward, backward. With 512 ptxas stays within 128 registers per
/// unit, which the backward pass needs and an SM has; with 256 it takes more, and half of the units fit. The forward
/// pass needs fewer registers and is faster with small cubes.
const UNITS: [u32; 2] = [256, 512];
/// Units of a cube for the gradients of short rows: a unit has few of a row's numbers, and 64 registers hold them.
const SHORT_UNITS: u32 = 1024;
/// Most units of a row.
const MOST_UNITS: usize = 512;
/// SMs of a device that does not report them.
const DEFAULT_SMS: u32 = 2;

/// How a norm is split among cubes. [`Plan::of`] is the best one known; any other gives the same numbers but for the
/// rounding of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    /// Units of a row: whole planes, or a power of two of the units of one.
    pub units: u32,
    /// Units of a plane.
    pub plane: u32,
    /// Vectors of eight numbers that a unit has of a row.
    pub vectors: usize,
    /// Rows that a cube processes at the same time, at most 15 if a row has more units than a plane.
    pub side: u32,
    /// Rows that are loaded in advance: before each iteration of the loop, or, in cubes that are not persistent,
    /// together with the first.
    pub in_flight: usize,
    /// Whether the units' vectors exactly cover the row.
    pub whole: bool,
    /// Number of persistent cubes. `None`: cubes of the forward pass take only the rows that they read at once.
    pub cubes: Option<u32>,
}

impl Plan {
    /// The plan for rows of `columns` numbers on this client's device.
    pub fn of(client: &Client, columns: usize, backward: bool) -> Self {
        let sms = client.properties().hardware.num_streaming_multiprocessors.unwrap_or(DEFAULT_SMS);
        Self::on(CubeShape::of(client), sms, columns / 8, backward)
    }

    fn on(cube: CubeShape, sms: u32, width: usize, backward: bool) -> Self {
        let plane = cube.plane as usize;
        let (vectors, units) = if cube.plane == 1 {
            (width.div_ceil(cube.units as usize), cube.units as usize)
        } else if width < plane {
            (1, width.next_power_of_two())
        } else {
            let fits = |v: usize| width.is_multiple_of(v * plane) && width <= v * MOST_UNITS;
            let least = 2 * width.div_ceil(2 * MOST_UNITS);
            let vectors = [2, 1, 3, 4].into_iter().find(|v| fits(*v)).unwrap_or(least);
            (vectors, width.div_ceil(vectors).next_multiple_of(plane))
        };
        let whole = width == vectors * units;
        let units = units as u32;
        let together = if backward && units <= cube.plane { SHORT_UNITS } else { UNITS[usize::from(backward)] };
        let side = if cube.plane == 1 { 1 } else { (together / units).max(1) };
        let (in_flight, cubes) = if backward {
            // Persistent cubes: one per SM, as their partial sums have to be added up.
            (usize::from(vectors <= 2), Some(sms * (512 / (units * side)).max(1)))
        } else {
            // A cube for each row, so that none waits for a slow SM at the end.
            (0, None)
        };
        Self { units, plane: cube.plane, vectors, side, in_flight, whole, cubes }
    }

    /// Whether cubes are persistent.
    pub(super) fn is_persistent(self) -> bool {
        self.cubes.is_some()
    }

    /// Rows of a cube that is not persistent.
    pub(super) fn rows_per_cube(self) -> u32 {
        self.side * (self.in_flight as u32 + 1)
    }

    /// The units of a row, as the shape of a cube.
    pub(super) fn shape(self) -> CubeShape {
        CubeShape { units: self.units, plane: self.plane }
    }

    pub(super) fn dim(self) -> CubeDim {
        CubeDim::new_1d(self.units * self.side)
    }

    /// Cubes for these rows, if one takes `each` at a time.
    pub(super) fn count(self, shape: NormShape, each: u32) -> u32 {
        (shape.rows as u32).div_ceil(each).min(self.cubes.unwrap_or(u32::MAX))
    }

    /// Vectors of the rows that are processed at the same time.
    pub(super) fn row_vectors(self) -> usize {
        self.vectors * (self.units * self.side) as usize
    }

    /// Rows that are held at a time, in vectors of a unit.
    pub(super) fn held(self) -> usize {
        (self.in_flight + 1) * self.vectors
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_vector_of_a_row_has_a_unit() {
        for width in 1..=2048 {
            for (cube, backward) in [(CubeShape::GPU, false), (CubeShape::GPU, true), (CubeShape::CPU, true)] {
                let plan = Plan::on(cube, 132, width, backward);
                let row_vectors = plan.vectors * plan.units as usize;
                assert!(row_vectors >= width && plan.whole == (row_vectors == width), "{width}: {plan:?}");
                assert!(plan.units.is_multiple_of(plan.plane) || plan.units.is_power_of_two(), "{width}: {plan:?}");
                assert!(plan.cubes != Some(0) && plan.is_persistent() == backward, "{width}: {plan:?}");
                assert!(plan.side < 16 || plan.units <= plan.plane, "{width}: {plan:?}");
                if cube == CubeShape::GPU {
                    assert!(plan.vectors <= 4 && plan.units * plan.side <= SHORT_UNITS, "{width}: {plan:?}");
                }
            }
        }
    }

    #[test]
    fn usual_rows_are_whole() {
        for columns in [768, 1024, 2048, 3072, 3584, 4096, 5120, 6144, 8192, 12288, 16384] {
            assert!(Plan::on(CubeShape::GPU, 132, columns / 8, true).whole, "{columns}");
        }
        let plan = Plan::on(CubeShape::GPU, 132, 512, true);
        assert_eq!((plan.units, plan.vectors, plan.side, plan.cubes), (256, 2, 2, Some(132)));
        let heads = Plan::on(CubeShape::GPU, 132, 16, false);
        assert_eq!((heads.units, heads.vectors, heads.side, heads.whole), (16, 1, 16, true));
    }
}
