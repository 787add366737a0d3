//! How a program is split among cubes.
use super::program::{self, Program, row_fits};
use crate::pointwise::CubeShape;
use cubecl::prelude::*;

/// Units of a cube, as far as a row does not need more.
const UNITS: usize = 256;
/// Most cubes of a program that sums rows, each of which takes several: two for each SM of an H200, and always as many, so that
/// sums have the same bits.
const SUMMING: u32 = 264;
/// Most numbers, for 32-bit positions.
pub const MOST: usize = i32::MAX as usize;

/// How rows are distributed over units and cubes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    /// Numbers of a vector.
    pub vector: usize,
    /// Units of a row: whole planes, or a part of one that is a power of two.
    pub units: u32,
    /// Units of a plane.
    pub plane: u32,
    /// Vectors of a row that a unit has.
    pub vectors: usize,
    /// Rows that a cube takes at once.
    pub side: u32,
    /// Cubes that a row takes, if nothing is summed over it.
    pub parts: u32,
    /// Vectors of a row.
    pub(super) width: usize,
}

impl Plan {
    /// The plan for `rows × columns` numbers, unless a row over which something is summed is too long to be held in registers.
    pub fn of(client: &Client, program: &Program, rows: usize, columns: usize) -> Option<Self> {
        Self::on(CubeShape::of(client), program, rows, columns)
    }

    fn on(cube: CubeShape, program: &Program, rows: usize, columns: usize) -> Option<Self> {
        if rows * columns == 0 || rows * columns > MOST {
            return None;
        }
        let plane = cube.plane as usize;
        let most = if plane == 1 { cube.units as usize } else { UNITS };
        if !program.has_rows() {
            // Rows mean nothing: every unit has one vector.
            let vector = program::vector(rows * columns);
            let (units, plane) = (most as u32, cube.plane);
            return Some(Self { vector, units, plane, vectors: 1, side: 1, parts: 1, width: most });
        }
        // A program that sums rows holds the next row too: of the gradient of a norm, registers have no room for eight numbers.
        let is_full = program.sums() > 0 && program.reductions() > 0;
        let vector = program::vector(columns).min(if is_full { 4 } else { 8 });
        let width = columns / vector;
        if program.reductions() == 0 && !row_fits(columns) {
            let (units, parts) = (most as u32, width.div_ceil(most) as u32);
            return Some(Self { vector, units, plane: cube.plane, vectors: 1, side: 1, parts, width });
        }
        let (units, side) = if plane == 1 {
            (cube.units as usize, 1)
        } else {
            // One vector a unit for short rows, of which several share a plane; for longer ones as few as fill the row.
            let vectors = width.div_ceil(program::MOST[0]).max(if width > UNITS && !is_full { 2 } else { 1 });
            let units = width.div_ceil(vectors);
            let units = if units < plane { units.next_power_of_two() } else { units.next_multiple_of(plane) };
            (units, (UNITS / units).max(1))
        };
        let vectors = width.div_ceil(units);
        let plan = Self { vector, units: units as u32, plane: cube.plane, vectors, side: side as u32, parts: 1, width };
        (row_fits(columns) || plane == 1).then_some(plan)
    }

    /// Cubes for rows that have `total` vectors.
    pub(super) fn cubes(self, program: &Program, total: usize) -> u32 {
        let groups = total.div_ceil(self.width).div_ceil(self.side as usize) as u32;
        if program.sums() == 0 { groups * self.parts } else { groups.min(SUMMING) }
    }

    /// Numbers of shared memory that a row's reductions need.
    pub(super) fn scratch(self, program: &Program) -> usize {
        let planes = (self.units / self.plane) as usize;
        program.reductions() * planes * self.side as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fused::{Element, Extent, Output, Reduce, Step, rows_can_be_summed};

    /// Of GPUs, which no test without one runs.
    #[test]
    fn units_have_every_vector_of_a_row_once() {
        let sum = |extent| Output { register: 0, extent, element: Element::F32 };
        for columns in 1..=16_400 {
            for (reduces, sums) in [(true, false), (false, true), (true, true)] {
                let outputs = vec![sum(if sums { Extent::PerColumn } else { Extent::PerRow })];
                let steps = if reduces { vec![Step::Scalar(0), Step::Reduce(Reduce::Sum, 0)] } else { Vec::new() };
                let program = Program { steps, outputs, ..Program::default() };
                let fits = if sums { rows_can_be_summed(columns) } else { row_fits(columns) };
                if !fits {
                    continue;
                }
                let plan = Plan::on(CubeShape::GPU, &program, 1000, columns).expect("a row that fits has a plan");
                let Plan { vector, units, plane, vectors, side, width, .. } = plan;
                let [units, plane, side] = [units, plane, side].map(|x| x as usize);
                let has_all =
                    width * vector == columns && (units * (vectors - 1)..units * vectors).contains(&(width - 1));
                let is_of_planes = units.is_multiple_of(plane) || (units < plane && units.is_power_of_two());
                assert!(has_all && is_of_planes && (units * side).is_multiple_of(plane), "{plan:?}");
                assert!(vectors * vector <= 32 && units * side <= 512, "registers of {plan:?}");
                let lines = plan.cubes(&program, 1000 * width) as usize * side;
                assert!(lines >= 1000 || (sums && lines == SUMMING as usize * side), "{plan:?}");
            }
        }
    }
}
