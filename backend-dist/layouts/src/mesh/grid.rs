//! Ranks as points of a grid.

/// Four dimensions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Grid {
    pub sizes: [usize; 4],
    /// Its dimensions, the fastest first.
    pub order: [usize; 4],
}

impl Grid {
    pub fn position(&self, rank: usize) -> [usize; 4] {
        let (mut left, mut position) = (rank, [0; 4]);
        for dim in self.order {
            position[dim] = left % self.sizes[dim];
            left /= self.sizes[dim];
        }
        position
    }

    pub fn rank(&self, position: [usize; 4]) -> usize {
        self.order.iter().rev().fold(0, |rank, &dim| rank * self.sizes[dim] + position[dim])
    }

    /// The ranks that agree with `rank` in every dimension that does not vary.
    pub fn group(&self, rank: usize, varies: [bool; 4]) -> Vec<usize> {
        let mut sizes = [1; 4];
        let mut origin = self.position(rank);
        for dim in (0..4).filter(|&dim| varies[dim]) {
            sizes[dim] = self.sizes[dim];
            origin[dim] = 0;
        }
        let inner = Grid { sizes, order: self.order };
        let members = 0..sizes.iter().product();
        members
            .map(|member| {
                let offset = inner.position(member);
                self.rank(std::array::from_fn(|dim| origin[dim] + offset[dim]))
            })
            .collect()
    }
}
