//! Gradients and moments in host memory, for CPU ranks.

use super::adamw::{Coefficients, update};
use super::real::Real;
use super::store::{GradStore, State};
use backend_dist::collective::all_reduce;
use backend_dist::comm::{Group, ReduceOp};
use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Tensor, TensorData};
use std::borrow::Cow;
use std::ops::Range;

/// Flat buffers of one float type.
pub struct HostStore<E> {
    grads: Vec<E>,
    first: Vec<E>,
    second: Vec<E>,
}

impl<E: Real> HostStore<E> {
    /// Zeroed buffers of `len` elements.
    pub fn new(len: usize) -> Self {
        let zeros = || vec![E::of(0.0); len];
        Self { grads: zeros(), first: zeros(), second: zeros() }
    }
}

fn host(tensor: Tensor<1>) -> FlexTensor {
    tensor.try_into_primitive::<Flex>().expect("the parameters of this rank are on the CPU")
}

/// Sums a host buffer over the group.
fn reduce<E: Real>(values: Vec<E>, group: &Group) -> Vec<E> {
    let len = values.len();
    let tensor = Tensor::<1>::from_primitive::<Flex>(FlexTensor::from_data(TensorData::new(values, [len])));
    all_reduce(tensor, ReduceOp::Sum, group).into_data().try_into_vec().expect("a reduction keeps the type")
}

impl<E: Real> GradStore for HostStore<E> {
    fn accumulate(&mut self, range: Range<usize>, grad: Option<Tensor<1>>, first: bool) {
        let target = &mut self.grads[range];
        let Some(grad) = grad else {
            if first {
                target.fill(E::of(0.0));
            }
            return;
        };
        let grad = host(grad).to_contiguous();
        let grad = E::read(&grad).expect("it was made contiguous and has the parameter's type");
        if first {
            target.copy_from_slice(grad);
        } else {
            target.iter_mut().zip(grad).for_each(|(sum, g)| *sum = *sum + *g);
        }
    }

    fn all_reduce(&mut self, group: &Group) {
        if group.size() > 1 {
            self.grads = reduce(std::mem::take(&mut self.grads), group);
        }
    }

    fn all_reduce_ranges(&mut self, ranges: &[Range<usize>], group: &Group) {
        let packed: Vec<E> = ranges.iter().flat_map(|range| &self.grads[range.clone()]).copied().collect();
        let summed = reduce(packed, group);
        let mut rest = summed.as_slice();
        for range in ranges {
            let (part, tail) = rest.split_at(range.len());
            self.grads[range.clone()].copy_from_slice(part);
            rest = tail;
        }
    }

    fn sum_of_squares(&self, ranges: &[Range<usize>]) -> f64 {
        ranges.iter().map(|range| squares(&self.grads[range.clone()])).sum()
    }

    fn gradients(&self) -> Vec<f64> {
        self.grads.iter().map(|g| g.wide()).collect()
    }

    fn update(&mut self, range: Range<usize>, param: Tensor<1>, decays: bool, k: &Coefficients) -> Tensor<1> {
        let mut param = host(param);
        if E::read(&param).is_none_or(|slice| size_of_val(slice) != param.bytes().len()) {
            // A view into a larger buffer: the write below takes the whole storage.
            param = FlexTensor::from_data(param.into_data());
        }
        let (grads, first, second) =
            (&self.grads[range.clone()], &mut self.first[range.clone()], &mut self.second[range]);
        update(E::write(&mut param), grads, first, second, decays, k);
        Tensor::from_primitive::<Flex>(param)
    }

    fn state(&self, state: State, range: Range<usize>) -> Option<(DType, Cow<'_, [u8]>)> {
        let values = match state {
            State::FirstMoment => &self.first,
            State::SecondMoment => &self.second,
            State::Master => return None,
        };
        Some((E::dtype(), Cow::Borrowed(bytemuck::cast_slice(&values[range]))))
    }

    fn set_state(&mut self, state: State, range: Range<usize>, values: Vec<f64>) {
        let target = match state {
            State::FirstMoment => &mut self.first[range],
            State::SecondMoment => &mut self.second[range],
            State::Master => return,
        };
        target.iter_mut().zip(values).for_each(|(target, value)| *target = E::of(value));
    }
}

/// Sum of squares in double precision; eight running sums, so that the additions do not wait for each other.
fn squares<E: Real>(values: &[E]) -> f64 {
    let mut sums = [0.0f64; 8];
    let chunks = values.chunks_exact(8);
    let tail: f64 = chunks.remainder().iter().map(|x| x.wide() * x.wide()).sum();
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += x.wide() * x.wide();
        }
    }
    sums.iter().sum::<f64>() + tail
}
