//! Ranks as points of a grid.

/// Four dimensions, the first one fastest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Grid {
    pub sizes: [usize; 4],
}

impl Grid {
    pub fn position(&self, rank: usize) -> [usize; 4] {
        let mut left = rank;
        self.sizes.map(|size| {
            let index = left % size;
            left /= size;
            index
        })
    }

    pub fn rank(&self, position: [usize; 4]) -> usize {
        position.iter().zip(self.sizes).rev().fold(0, |rank, (index, size)| rank * size + index)
    }

    /// The ranks that agree with `rank` in every dimension that does not vary.
    pub fn group(&self, rank: usize, varies: [bool; 4]) -> Vec<usize> {
        let mut sizes = [1; 4];
        let mut origin = self.position(rank);
        for dim in (0..4).filter(|&dim| varies[dim]) {
            sizes[dim] = self.sizes[dim];
            origin[dim] = 0;
        }
        let inner = Grid { sizes };
        let members = 0..sizes.iter().product();
        members
            .map(|member| {
                let offset = inner.position(member);
                self.rank(std::array::from_fn(|dim| origin[dim] + offset[dim]))
            })
            .collect()
    }
}
