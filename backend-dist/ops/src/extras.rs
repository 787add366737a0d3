//! Further tensors of an operation. Burn's extensions take tensors one by one, or an enum of them.

use burn::backend::{Backend, Dispatch, ExtensionType, tensor::FloatTensor};

/// None to three tensors.
#[derive(ExtensionType)]
pub(super) enum Extras<B: Backend> {
    None,
    One(FloatTensor<B>),
    Two(FloatTensor<B>, FloatTensor<B>),
    Three(FloatTensor<B>, FloatTensor<B>, FloatTensor<B>),
}

impl Extras<Dispatch> {
    /// # Panics
    ///
    /// If there are more than three.
    pub fn of(tensors: impl IntoIterator<Item = FloatTensor<Dispatch>>) -> Self {
        let mut tensors = tensors.into_iter();
        match [tensors.next(), tensors.next(), tensors.next(), tensors.next()] {
            [None, ..] => Self::None,
            [Some(a), None, ..] => Self::One(a),
            [Some(a), Some(b), None, _] => Self::Two(a, b),
            [Some(a), Some(b), Some(c), None] => Self::Three(a, b, c),
            _ => panic!("more than three further tensors"),
        }
    }
}

impl<B: Backend> From<Extras<B>> for Vec<FloatTensor<B>> {
    fn from(extras: Extras<B>) -> Self {
        match extras {
            Extras::None => Vec::new(),
            Extras::One(a) => vec![a],
            Extras::Two(a, b) => vec![a, b],
            Extras::Three(a, b, c) => vec![a, b, c],
        }
    }
}
