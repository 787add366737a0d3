//! Which rank has the value of which parameter.

use ranks::comm::Group;

/// A parameter whose value is on its owner.
#[derive(Debug)]
pub(super) struct Gathered {
    pub unit: usize,
    /// Whether it has more than one dimension: then GEMMs read it.
    pub is_matrix: bool,
    pub length: usize,
    pub owner: usize,
}

/// The parameters of a module that are sharded over a group.
pub(super) struct Owned {
    pub params: Vec<Gathered>,
    pub group: Group,
}

impl Owned {
    pub fn is_owner(&self, index: usize) -> bool {
        self.owner(index) == self.group.rank()
    }

    pub fn owner(&self, index: usize) -> usize {
        self.params[index].owner
    }

    pub fn unit(&self, index: usize) -> usize {
        self.params[index].unit
    }
}
