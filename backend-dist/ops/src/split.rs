//! Splits a projection along its features, as one autograd node: the gradients of separate slices would be as wide as
//! the projection and mostly zeros.

use burn::backend::{Backend, Flex, Slice, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::{
    operation::{apply, operation},
    secondary_outputs::{SecondaryOutputs, secondary_output},
};

/// Splits the features of `x [s, b, n]` into chunks of these sizes. All results must be used.
///
/// # Panics
///
/// If the sizes do not add up to `n`, or one is 0.
pub fn split<const N: usize>(x: Tensor<3>, sizes: [usize; N]) -> [Tensor<3>; N] {
    let features = x.dims()[2];
    let fits = sizes.iter().sum::<usize>() == features && !sizes.contains(&0);
    assert!(fits, "split: parts of {sizes:?} features do not make up {features}");
    let secondary = SecondaryOutputs::new(sizes.len() - 1);
    let first = apply(Split { sizes: sizes.to_vec(), secondary: secondary.clone() }, [x.into_dispatch()]);
    std::array::from_fn(|i| if i == 0 { first.clone() } else { secondary_output(&first, &secondary, i - 1) })
}

/// The kernels of [`split`]; the default bodies are Burn's slices.
pub trait SplitKernels: Backend {
    /// Chunks of these sizes along the last of three dimensions.
    fn split(x: FloatTensor<Self>, sizes: &[usize]) -> Vec<FloatTensor<Self>> {
        slices::<Self>(x, sizes)
    }

    /// The concatenation of the chunks.
    fn join(parts: Vec<FloatTensor<Self>>) -> FloatTensor<Self> {
        Self::float_cat(parts, 2)
    }
}

impl SplitKernels for Flex {}

pub fn slices<B: Backend>(x: FloatTensor<B>, sizes: &[usize]) -> Vec<FloatTensor<B>> {
    let mut end = 0;
    let slice = |size: &usize| {
        let start = end;
        end += size;
        B::float_slice(x.clone(), &[Slice::full(), Slice::full(), Slice::from(start..end)])
    };
    sizes.iter().map(slice).collect()
}

operation! {
    /// Returns the first chunk; the other ones are the `secondary` outputs.
    Split { sizes: Vec<usize>, secondary: SecondaryOutputs }, 1, SecondaryOutputs,
    |[x], _, _| {
        let mut parts = B::split(x, &sizes).into_iter();
        let first = parts.next().expect("there is a part");
        secondary.put::<B>(parts);
        (first, Some(secondary))
    },
    |secondary, first, parents| {
        let parts = [first].into_iter().chain(secondary.gradients::<B>()).collect();
        parents.register::<B>([B::join(parts)]);
    },
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, Distribution};

    use super::*;

    /// Values and gradients are those of slices.
    #[test]
    fn parts_are_slices() {
        let device = Device::flex().autodiff();
        let random = || Tensor::<3>::random([3, 2, 9], Distribution::Default, (&device, DType::F64));
        let (x, slope) = (random().require_grad(), random());
        let slopes = split(slope.clone(), [4, 2, 3]);
        let parts = split(x.clone(), [4, 2, 3]);
        let mut first = 0;
        for part in &parts {
            let size = part.dims()[2];
            part.to_data().assert_eq(&x.clone().narrow(2, first, size).to_data(), true);
            first += size;
        }
        let sums = parts.into_iter().zip(slopes).map(|(part, slope)| (part * slope).sum());
        let grads = sums.reduce(|a, b| a + b).expect("three parts").backward();
        x.grad(&grads).expect("it takes part").into_data().assert_eq(&slope.into_data(), true);
    }
}
