//! Operations with several outputs. A node of Burn's graph has one output, so the others are secondary nodes: they take
//! their values from a shared slot and store their gradients in it. Nodes run from the last to the first, so the
//! primary node finds all gradients there.

use burn::backend::{Backend, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::{
    operation::{apply, operation},
    stash::Stash,
};

/// The secondary outputs of an operation: forward their values, backward their gradients. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct SecondaryOutputs(Vec<Stash>);

impl SecondaryOutputs {
    /// So many, without values.
    pub fn new(count: usize) -> Self {
        Self(std::iter::repeat_with(Stash::default).take(count).collect())
    }

    /// Stores the values.
    pub fn put<B: Backend>(&self, values: impl IntoIterator<Item = FloatTensor<B>>) {
        self.0.iter().zip(values).for_each(|(stash, value)| stash.put(value));
    }

    /// Takes the gradients.
    ///
    /// # Panics
    ///
    /// If an output has no gradient.
    pub fn gradients<B: Backend>(&self) -> Vec<FloatTensor<B>> {
        (0..self.0.len()).map(|index| self.take::<B>(index)).collect()
    }

    fn take<B: Backend>(&self, index: usize) -> FloatTensor<B> {
        let found = self.0[index].take();
        found.unwrap_or_else(|| panic!("output {} of an operation has no value, or no gradient", index + 1))
    }
}

/// Secondary output `index` of the operation whose primary output is `first`. Each must be taken once, and used.
pub(super) fn secondary_output<const D: usize, const E: usize>(
    first: &Tensor<D>,
    secondary: &SecondaryOutputs,
    index: usize,
) -> Tensor<E> {
    apply(Secondary { secondary: secondary.clone(), index }, [first.clone().into_dispatch()])
}

operation! {
    /// The input, the primary output, only selects the backend and the node. No gradient flows to it from here.
    Secondary { secondary: SecondaryOutputs, index: usize }, 1, (SecondaryOutputs, usize),
    |[_first], _, _| {
        let value = secondary.take::<B>(index);
        (value, Some((secondary, index)))
    },
    |(secondary, index), grad, _parents| secondary.0[index].put(grad),
}
