//! What a step of the optimizer has left as it was.

use burn::backend::Flex;
use burn::tensor::kind::Autodiff;
use burn::tensor::{BackendPrimitive, Float, Tensor};

/// Whether a tensor has the values of one before. Mostly it is the same memory of the host, which is not read.
pub(super) fn is_same<const D: usize, K: Autodiff + OnFlex>(before: &Tensor<D, K>, after: &Tensor<D, K>) -> bool {
    let memory = |x: &Tensor<D, K>| {
        let x = x.clone().without_autodiff().try_into_primitive::<Flex>().ok()?;
        Some((x.bytes().as_ptr(), x.layout().clone()))
    };
    let [here, there] = [before, after].map(memory);
    here.zip(there).is_some_and(|(here, there)| here == there) || before.to_data() == after.to_data()
}

/// Kinds of tensors in host memory.
pub(super) trait OnFlex:
    BackendPrimitive<Flex, Primitive = <Float as BackendPrimitive<Flex>>::Primitive>
{
}

impl<K: BackendPrimitive<Flex, Primitive = <Float as BackendPrimitive<Flex>>::Primitive>> OnFlex for K {}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Int};

    use super::*;

    #[test]
    fn a_view_of_the_same_memory_is_another_value() {
        let x = Tensor::<2, Int>::from_data([[1, 2], [3, 4]], &Device::flex().autodiff());
        assert!(is_same(&x, &x.clone()) && is_same(&x, &(x.clone() + 0)));
        assert!(!is_same(&x, &x.clone().transpose()) && !is_same(&x, &(x.clone() + 1)));
    }
}
