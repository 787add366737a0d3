//! Gradients and moments as tensors, for every device: the plain formulation that the host buffers are tested against.

use super::adamw::Coefficients;
use super::plan::BucketPlan;
use super::store::{GradStore, State};
use backend_dist::collective::all_reduce;
use backend_dist::comm::{Group, ReduceOp};
use burn::tensor::{DType, Device, Tensor, TensorData};
use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;

/// Flat tensors of one float type. Parameters of a narrower type are updated from a wider copy kept here.
pub struct DeviceStore {
    grads: Tensor<1>,
    /// By the start of the parameter's range.
    states: HashMap<usize, States>,
    /// Parameters are narrower than the moments.
    narrow: bool,
}

/// States that are not there yet are zeros, and the parameter itself.
#[derive(Default)]
struct States {
    first: Option<Tensor<1>>,
    second: Option<Tensor<1>>,
    /// Only for parameters narrower than the moments.
    master: Option<Tensor<1>>,
}

impl States {
    fn get(&self, state: State) -> &Option<Tensor<1>> {
        match state {
            State::FirstMoment => &self.first,
            State::SecondMoment => &self.second,
            State::Master => &self.master,
        }
    }

    fn get_mut(&mut self, state: State) -> &mut Option<Tensor<1>> {
        match state {
            State::FirstMoment => &mut self.first,
            State::SecondMoment => &mut self.second,
            State::Master => &mut self.master,
        }
    }
}

impl DeviceStore {
    /// Zeroed buffers on `device` for parameters of type `param`; states appear with the first step.
    pub fn new(plan: &BucketPlan, device: &Device, param: DType) -> Self {
        let wide = state_type(param);
        Self { grads: Tensor::zeros([plan.len()], (device, wide)), states: HashMap::new(), narrow: param != wide }
    }
}

/// The type of gradients and moments for parameters of type `param`.
fn state_type(param: DType) -> DType {
    if param == DType::F64 { DType::F64 } else { DType::F32 }
}

impl GradStore for DeviceStore {
    #[allow(clippy::single_range_in_vec_init, reason = "a one-dimensional slice is one range")]
    fn accumulate(&mut self, range: Range<usize>, grad: Option<Tensor<1>>, first: bool) {
        let Some(grad) = grad else {
            if first {
                let zeros = Tensor::zeros([range.len()], (&self.grads.device(), self.grads.dtype()));
                self.grads = self.grads.clone().slice_assign([range], zeros);
            }
            return;
        };
        let grad = grad.cast(self.grads.dtype());
        let grad = if first { grad } else { self.grads.clone().slice([range.clone()]) + grad };
        self.grads = self.grads.clone().slice_assign([range], grad);
    }

    fn all_reduce(&mut self, group: &Group) {
        self.grads = all_reduce(self.grads.clone(), ReduceOp::Sum, group);
    }

    #[allow(clippy::single_range_in_vec_init, reason = "a one-dimensional slice is one range")]
    fn all_reduce_ranges(&mut self, ranges: &[Range<usize>], group: &Group) {
        let parts = ranges.iter().map(|range| self.grads.clone().slice([range.clone()])).collect();
        let summed = all_reduce(Tensor::cat(parts, 0), ReduceOp::Sum, group);
        let mut start = 0;
        for range in ranges {
            let part = summed.clone().slice([start..start + range.len()]);
            self.grads = self.grads.clone().slice_assign([range.clone()], part);
            start += range.len();
        }
    }

    #[allow(clippy::single_range_in_vec_init, reason = "a one-dimensional slice is one range")]
    fn sum_of_squares(&self, ranges: &[Range<usize>]) -> f64 {
        let part = |range: &Range<usize>| {
            let grads = self.grads.clone().slice([range.clone()]);
            (grads.clone() * grads).sum().into_scalar::<f64>()
        };
        ranges.iter().map(part).sum()
    }

    fn gradients(&self) -> Vec<f64> {
        self.grads.to_data().iter::<f64>().collect()
    }

    #[allow(clippy::single_range_in_vec_init, reason = "a one-dimensional slice is one range")]
    fn update(&mut self, range: Range<usize>, param: Tensor<1>, decays: bool, k: &Coefficients) -> Tensor<1> {
        let (own, wide) = (param.dtype(), self.grads.dtype());
        let grad = self.grads.clone().slice([range.clone()]).mul_scalar(k.grad_scale);
        let States { first, second, master } = self.states.remove(&range.start).unwrap_or_default();
        let (first, second) = (first.unwrap_or_else(|| grad.zeros_like()), second.unwrap_or_else(|| grad.zeros_like()));
        let param = master.unwrap_or_else(|| param.cast(wide));
        let (beta1, beta2) = (k.config.beta1, k.config.beta2);
        let first = first.mul_scalar(beta1) + grad.clone().mul_scalar(1.0 - beta1);
        let second = second.mul_scalar(beta2) + (grad.clone() * grad).mul_scalar(1.0 - beta2);
        let root = second.clone().sqrt().mul_scalar(k.root_scale).add_scalar(k.config.eps);
        let kept = if decays { param.mul_scalar(k.keep) } else { param };
        let param = kept - (first.clone() / root).mul_scalar(k.step_size);
        let master = self.narrow.then(|| param.clone());
        self.states.insert(range.start, States { first: Some(first), second: Some(second), master });
        param.cast(own)
    }

    fn state(&self, state: State, range: Range<usize>) -> Option<(DType, Cow<'_, [u8]>)> {
        let values = self.states.get(&range.start)?.get(state).clone()?;
        let data = values.into_data();
        Some((data.dtype(), Cow::Owned(data.bytes().to_vec())))
    }

    fn set_state(&mut self, state: State, range: Range<usize>, values: Vec<f64>) {
        if state == State::Master && !self.narrow {
            return;
        }
        let shape = [values.len()];
        let values = Tensor::from_data(TensorData::new(values, shape), (&self.grads.device(), self.grads.dtype()));
        *self.states.entry(range.start).or_default().get_mut(state) = Some(values);
    }
}
