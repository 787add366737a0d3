//! The shape of a cube, and reductions over it.
use cubecl::prelude::*;

/// Units of a cube of the kernels that have one shape on every device.
pub(crate) const UNITS: u32 = CubeShape::GPU.units;

/// Units of a cube and of a plane. A plane of one unit has no plane operations: CubeCL's cpu runtime, on which a unit
/// is a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CubeShape {
    /// Units of a cube.
    pub units: u32,
    /// Units of a plane.
    pub plane: u32,
}

impl CubeShape {
    /// The shape on GPUs.
    pub const GPU: Self = Self { units: 256, plane: 32 };
    /// The shape on the cpu runtime: enough units for races to show.
    pub const CPU: Self = Self { units: 2, plane: 1 };

    /// The shape for this client's device.
    pub fn of(client: &Client) -> Self {
        if client.properties().hardware.plane_size_max == 1 { Self::CPU } else { Self::GPU }
    }

    /// On GPUs as many units as a cube may have, for one that has a long row for itself.
    pub(crate) fn wide(self) -> Self {
        if self.plane > 1 { Self { units: 1024, ..self } } else { self }
    }

    /// Planes of a cube.
    pub fn planes(self) -> usize {
        (self.units / self.plane) as usize
    }

    /// Numbers of shared memory that [`cube_sums`] needs.
    pub(crate) fn scratch(self) -> usize {
        4 * self.planes()
    }

    pub(crate) fn dim(self) -> CubeDim {
        CubeDim::new_1d(self.units)
    }

    /// Cubes along x with a unit for each of `items`.
    pub(crate) fn line(self, items: usize) -> CubeCount {
        CubeCount::Static((items as u32).div_ceil(self.units), 1, 1)
    }

    /// This shape with no more units than distribute `items` evenly over as few cubes.
    pub(super) fn fitting(self, items: usize) -> Self {
        let cubes = items.div_ceil(self.units as usize).max(1);
        let units = items.div_ceil(cubes).next_multiple_of(self.plane as usize).max(1) as u32;
        Self { units, ..self }
    }

    /// Cubes along y with a unit for each of `items`, for each of `rows` along x.
    pub(super) fn rows(self, rows: usize, items: usize) -> CubeCount {
        CubeCount::Static(rows as u32, (items as u32).div_ceil(self.units), 1)
    }
}

/// The sums of `a` and of `b` over all units of the cube, the same in all of them. Consecutive calls alternate `parity`
/// between 0 and 1, so that a call needs only one barrier.
#[cube]
pub(crate) fn cube_sums(
    a: f32,
    b: f32,
    scratch: &mut Shared<[f32]>,
    parity: u32,
    #[comptime] cube: CubeShape,
) -> (f32, f32) {
    let planes = comptime![cube.planes()];
    let at = parity as usize * comptime![2 * planes];
    let (a, b) = (plane_total(a, cube), plane_total(b, cube));
    if UNIT_POS % comptime![cube.plane] == 0 {
        let plane = (UNIT_POS / comptime![cube.plane]) as usize;
        scratch[at + plane] = a;
        scratch[at + planes + plane] = b;
    }
    sync_cube();
    let mut a = 0.0f32;
    let mut b = 0.0f32;
    #[unroll]
    for i in 0..planes {
        a += scratch[at + i];
        b += scratch[at + planes + i];
    }
    (a, b)
}

/// The sum over the plane, in all its units.
#[cube]
pub(crate) fn plane_total(value: f32, #[comptime] cube: CubeShape) -> f32 {
    if comptime![cube.plane > 1] { plane_sum(value) } else { value }
}

/// The greatest number of the plane, in all its units.
#[cube]
pub(crate) fn plane_greatest(value: f32, #[comptime] cube: CubeShape) -> f32 {
    if comptime![cube.plane > 1] { plane_max(value) } else { value }
}

/// The greatest number of all units of the cube, in all of them.
#[cube]
pub(crate) fn cube_max(value: f32, scratch: &mut Shared<[f32]>, #[comptime] cube: CubeShape) -> f32 {
    let greatest = plane_greatest(value, cube);
    if UNIT_POS % comptime![cube.plane] == 0 {
        scratch[(UNIT_POS / comptime![cube.plane]) as usize] = greatest;
    }
    sync_cube();
    let mut top = scratch[0];
    #[unroll]
    for i in 1..comptime![cube.planes()] {
        top = max(top, scratch[i]);
    }
    top
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cubes_fit_short_rows() {
        for (items, units) in [(1, 32), (96, 96), (192, 192), (256, 256), (300, 160), (1000, 256), (1792, 256)] {
            assert_eq!(CubeShape::GPU.fitting(items).units, units, "{items}");
        }
        assert_eq!(CubeShape::CPU.fitting(1).units, 1);
    }
}
