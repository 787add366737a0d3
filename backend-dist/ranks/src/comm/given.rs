//! How many bytes a rank gives to collectives on CPUs.

use super::{Group, tensors::describe_tensor};
use burn::backend::flex::FlexTensor;

impl Group {
    /// Bytes of the tensors that this rank has given to the group's collectives on CPUs so far; 0 for a group of one.
    pub fn given_bytes(&self) -> u64 {
        self.world.as_ref().map_or(0, |(world, id)| world.given_bytes(*id, self.member))
    }

    /// Counts the bytes of a tensor that this rank gives to a collective.
    pub(super) fn count_given(&self, x: &FlexTensor) {
        if let Some((world, id)) = &self.world {
            world.count_given(*id, self.member, x.layout().num_elements() * x.dtype().size());
        }
    }

    /// The same, and what all members must give alike.
    pub(super) fn describe_given(&self, x: &FlexTensor) -> String {
        self.count_given(x);
        describe_tensor(x)
    }
}
