//! Collectives and messages of tensors in host memory.

use super::reduce::{concat, reduce};
use super::{Group, ReduceOp, codec};
use crate::memory::{self, without_rank};
use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::DType;
use std::sync::Arc;

impl Group {
    pub(crate) fn all_reduce(&self, x: FlexTensor, op: ReduceOp) -> FlexTensor {
        let name = format!("all-reduce({})", op.name());
        self.own(Arc::unwrap_or_clone(
            self.run_collective(name, self.describe_given(&x), x, codec::TENSOR, |inputs| reduce(inputs, op)),
        ))
    }

    pub(crate) fn all_gather(&self, x: FlexTensor, dim: usize) -> FlexTensor {
        let concat = |inputs: Vec<FlexTensor>| concat(&inputs, dim);
        let name = format!("all-gather(dim {dim})");
        self.own(Arc::unwrap_or_clone(self.run_collective(name, self.describe_given(&x), x, codec::TENSOR, concat)))
    }

    pub(crate) fn reduce_scatter(&self, x: FlexTensor, dim: usize) -> FlexTensor {
        let length = x.layout().shape()[dim];
        let size = self.size();
        assert!(
            length.is_multiple_of(size),
            "reduce-scatter on {self:?}: dimension {dim} has {length} elements, not a multiple of {size}"
        );
        let lent = self.lend(&x);
        let name = format!("reduce-scatter(dim {dim})");
        let inputs = self.run_collective(name, self.describe_given(&x), lent, codec::TENSOR, |inputs| inputs);
        let part = length / size;
        let parts = inputs.iter().map(|x| x.narrow(dim, self.member * part, part)).collect();
        self.own(without_rank(|| reduce(parts, ReduceOp::Sum)))
    }

    /// Rows `send[j]` of dimension 0 go to member `j`; the result holds the rows of member 0, 1, … for this one.
    pub(crate) fn all_to_all(&self, x: FlexTensor, send: &[usize], receive: &[usize]) -> FlexTensor {
        let rows = x.layout().shape()[0];
        assert!(
            send.len() == self.size() && send.iter().sum::<usize>() == rows,
            "all-to-all on {self:?}: send splits {send:?} do not divide {rows} rows among {} members",
            self.size()
        );
        let mut tail = x.layout().shape().to_vec();
        tail[0] = 0;
        self.count_given(&x);
        let payload = format!("{:?} rows of {tail:?}", x.dtype());
        let lent = (self.lend(&x), send.to_vec());
        let inputs = self.run_collective("all-to-all".into(), payload, lent, codec::ROWS, |inputs| inputs);
        let parts: Vec<FlexTensor> = inputs
            .iter()
            .enumerate()
            .map(|(from, (x, splits))| {
                let sent = splits.get(self.member).copied().unwrap_or(0);
                assert!(
                    receive.get(from) == Some(&sent),
                    "all-to-all on {self:?}: member {from} sends {sent} rows, receive splits are {receive:?}"
                );
                x.narrow(0, splits[..self.member].iter().sum(), sent)
            })
            .collect();
        self.own(without_rank(|| concat(&parts, 0)))
    }

    pub(crate) fn broadcast(&self, x: FlexTensor, root: usize) -> FlexTensor {
        let payload = self.describe_given(&x);
        // What the others hold need not be sent.
        let x = Some(x).filter(|_| self.member == root);
        let pick = |mut inputs: Vec<Option<FlexTensor>>| inputs.swap_remove(root);
        let name = format!("broadcast from member {root}");
        let x = Arc::unwrap_or_clone(self.run_collective(name, payload, x, codec::OPTIONAL_TENSOR, pick));
        self.own(x.unwrap_or_else(|| panic!("member {root} of {self:?} broadcasts but has no tensor")))
    }

    /// The sum over all members, on member `root`; the others get `x` back.
    pub(crate) fn reduce(&self, x: FlexTensor, root: usize) -> FlexTensor {
        let name = format!("reduce to member {root}");
        let lent = self.lend(&x);
        let inputs = self.run_collective(name, self.describe_given(&x), lent, codec::TENSOR, |inputs| inputs);
        if self.member != root {
            return x;
        }
        self.own(without_rank(|| reduce(Arc::unwrap_or_clone(inputs), ReduceOp::Sum)))
    }

    /// Sends a tensor to another member of this CPU group.
    ///
    /// # Panics
    /// If the group has one member.
    pub fn send(&self, x: FlexTensor, to: usize) {
        let (world, id) = self.world.as_ref().unwrap_or_else(|| panic!("send to member {to} of {self:?}"));
        world.send_message(*id, (self.member, to), describe_tensor(&x), x, codec::TENSOR);
    }

    /// The tensor that member `from` has sent here, as `payload` [describes](describe) it.
    ///
    /// # Panics
    /// If the group has one member.
    pub fn receive(&self, payload: String, from: usize) -> FlexTensor {
        let (world, id) = self.world.as_ref().unwrap_or_else(|| panic!("receive from member {from} of {self:?}"));
        self.own(world.receive_message(*id, (from, self.member), payload, codec::TENSOR))
    }

    /// The output of a collective: while memory is counted, a copy for this rank instead of a shared one.
    fn own(&self, x: FlexTensor) -> FlexTensor {
        if self.world.is_some() && memory::is_counting() { copy(&x) } else { x }
    }

    /// The input to a collective whose members read each other's tensors: while memory is counted, a copy that counts
    /// for no rank, so that what the rank holds does not depend on when its peers are done reading.
    fn lend(&self, x: &FlexTensor) -> FlexTensor {
        if self.world.is_some() && memory::is_counting() { without_rank(|| copy(x)) } else { x.clone() }
    }
}

fn copy(x: &FlexTensor) -> FlexTensor {
    let (x, width) = (x.to_contiguous(), x.dtype().size());
    let start = x.layout().start_offset() * width;
    let bytes = &x.bytes()[start..start + x.layout().num_elements() * width];
    FlexTensor::new(codec::aligned(bytes, x.dtype()), Layout::contiguous(x.layout().shape().clone()), x.dtype())
}

/// Element type and shape, as both ends of a collective must agree on them.
pub fn describe(dtype: DType, shape: &[usize]) -> String {
    format!("{dtype:?} {shape:?}")
}

pub(super) fn describe_tensor(x: &FlexTensor) -> String {
    describe(x.dtype(), &x.layout().shape().to_vec())
}
