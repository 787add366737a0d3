//! How the gradient of a table is split among cubes.
use super::TableShape;
use crate::pointwise::CubeShape;
use cubecl::prelude::*;

/// Most tokens of a launch: on a GPU, whose shared memory holds three entries for each, and on the cpu runtime.
const MAX_TOKENS: [usize; 2] = [1 << 14, 1 << 10];

/// How the gradient is split among cubes. [`Plan::of`] is the best one known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    /// Units of a cube, a power of two.
    pub units: u32,
    /// Neighbouring units, of four columns each; a power of two. Units with the same columns share a bucket's tokens.
    pub side: u32,
    /// Buckets of ids, a power of two.
    pub buckets: u32,
    /// Loads of a unit in flight.
    pub in_flight: u32,
    /// Most tokens of a launch, a power of two.
    pub max_tokens: u32,
    /// Loads in flight of a unit whose next rows all have the same id.
    pub run: u32,
}

impl Plan {
    /// The plan on this client's device.
    pub fn of(client: &Client, shape: TableShape) -> Self {
        Self::on(CubeShape::of(client), shape)
    }

    pub(super) fn on(cube: CubeShape, shape: TableShape) -> Self {
        let is_gpu = cube.plane > 1;
        // Cubes of 512 scan the ids half as often as those of 256.
        let (units, side, buckets) = if is_gpu { (2 * cube.units, 128, 128) } else { (cube.units, 1, 4) };
        let most = MAX_TOKENS[usize::from(!is_gpu)];
        let max_tokens = shape.ids.next_power_of_two().clamp(units as usize, most) as u32;
        Self { units, side, buckets, in_flight: 4, max_tokens, run: 8 }
    }

    /// Bits of an entry for the token.
    pub(super) fn token_bits(self) -> u32 {
        self.max_tokens.ilog2()
    }

    /// The greatest value of an entry's id bits.
    pub(super) fn greatest(self) -> u32 {
        u32::MAX >> self.token_bits()
    }

    /// Ids below this are distinguished.
    pub(super) fn most_ids(self) -> usize {
        self.buckets as usize * self.greatest() as usize
    }

    /// Units with the same columns.
    pub(super) fn groups(self) -> u32 {
        self.units / self.side
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_hold_tokens_and_ids() {
        for ids in [1, 3, 512, 8191, 8192, 10_000, 1 << 20] {
            let shape = TableShape { rows: 128_256, hidden: 4096, first_row: 0, ids };
            for cube in [CubeShape::GPU, CubeShape::CPU] {
                let plan = Plan::on(cube, shape);
                assert!(plan.max_tokens.is_power_of_two() && plan.max_tokens >= plan.units, "{plan:?}");
                assert!(
                    plan.max_tokens as usize >= ids || MAX_TOKENS.contains(&(plan.max_tokens as usize)),
                    "{plan:?}"
                );
                assert!(plan.most_ids() > 1 << 23, "{plan:?}");
                assert!(plan.side.is_power_of_two() && plan.units.is_multiple_of(plan.side), "{plan:?}");
            }
        }
    }
}
