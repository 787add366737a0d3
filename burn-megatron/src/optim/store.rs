//! Gradients and moments of a rank: on the host for CPU ranks, as tensors elsewhere.

use super::adamw::Coefficients;
use super::plan::BucketPlan;
use super::{device::DeviceStore, host::HostStore};
use backend_dist::comm::Group;
use burn::backend::Flex;
use burn::tensor::{DType, Tensor};
use std::borrow::Cow;
use std::ops::Range;

/// What an optimizer keeps of every parameter between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Running mean of the gradient.
    FirstMoment,
    /// Running mean of the squared gradient.
    SecondMoment,
    /// The parameter in the type of the moments, where its own type is narrower.
    Master,
}

/// One contiguous buffer of main gradients and two of moments, laid out by a [`BucketPlan`].
///
/// Gradients are raw sums until [`GradStore::update`] multiplies them with the factor of the step.
pub trait GradStore: Send {
    /// Adds a flat gradient to the parameter's; the first of a step replaces what was there. `None` is zero.
    fn accumulate(&mut self, range: Range<usize>, grad: Option<Tensor<1>>, first: bool);
    /// Sums the whole buffer over the group, in one collective.
    fn all_reduce(&mut self, group: &Group);
    /// Sums these elements over the group, in one collective.
    fn all_reduce_ranges(&mut self, ranges: &[Range<usize>], group: &Group);
    /// Sum of squares of these elements, in double precision where the device has it.
    fn sum_of_squares(&self, ranges: &[Range<usize>]) -> f64;
    /// All gradients.
    fn gradients(&self) -> Vec<f64>;
    /// One AdamW step over one parameter, given and returned flat. `first` and `second` moments are kept here.
    fn update(&mut self, range: Range<usize>, param: Tensor<1>, decays: bool, k: &Coefficients) -> Tensor<1>;
    /// The state of one parameter, given by its range: element type and bytes in machine order. `None` where there is no such state,
    /// which means zeros for a moment.
    fn state(&self, state: State, range: Range<usize>) -> Option<(DType, Cow<'_, [u8]>)>;
    /// Replaces the state of one parameter.
    fn set_state(&mut self, state: State, range: Range<usize>, values: Vec<f64>);
}

/// The store for parameters like `sample`: the type of the states is `f64` for `f64` parameters, else `f32`.
pub(super) fn store_for(sample: &Tensor<1>, plan: &BucketPlan) -> Box<dyn GradStore> {
    let on_host = sample.clone().try_into_primitive::<Flex>().is_ok();
    match (on_host, sample.dtype()) {
        (true, DType::F32) => Box::new(HostStore::<f32>::new(plan.len())),
        (true, DType::F64) => Box::new(HostStore::<f64>::new(plan.len())),
        (_, dtype) => Box::new(DeviceStore::new(plan, &sample.device(), dtype)),
    }
}
