//! One element-wise update of any optimizer: in place on the host, or by tensor operations.

use super::flat::{Flat, with_float};
use super::real::Real;
use super::{adamw, lion, sgd};
use backend_dist::gpu::buffer::{self, Place};
use burn::tensor::{DType, Tensor};
use half::bf16;
use std::ops::Range;

/// An update rule with the constants of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Rule {
    AdamW(adamw::Coefficients),
    Sgd(sgd::Step<sgd::SgdConfig>),
    Lion(sgd::Step<lion::LionConfig>),
}

/// Moments, and which of their elements belong to the parameter; `None` where the rule keeps none.
pub(super) type Moment<'a> = Option<(&'a mut Flat, Range<usize>)>;

impl Rule {
    /// Whether vectors decay too.
    pub fn decays_vectors(&self) -> bool {
        match self {
            Self::AdamW(k) => k.config.decay_vectors,
            Self::Sgd(k) => k.config.decay_vectors,
            Self::Lion(k) => k.config.decay_vectors,
        }
    }

    /// Updates some elements of `param` and their moments with as many elements of `grad`. `place` says which elements of
    /// a global tensor they are.
    pub fn update<'a>(
        &self,
        (param, at): (&mut Flat, Range<usize>),
        (grad, from): (&Flat, Range<usize>),
        mut first: Moment<'a>,
        mut second: Moment<'a>,
        (decays, place): (bool, Place),
    ) {
        if param.is_on_host() {
            with_float!(param.dtype(), Float => {
                self.on_host::<Float>((param, at), (grad, from), first, second, (decays, place));
            });
            return;
        }
        let [one, two] = [&first, &second].map(|moment| moment.as_ref().map(|(flat, range)| flat.part(range.clone())));
        let (new, one, two) = self.by_tensors(param.part(at.clone()), grad.part(from), one, two, decays);
        param.put(at.start, new);
        for (moment, values) in [(&mut first, one), (&mut second, two)] {
            if let (Some((flat, range)), Some(values)) = (moment, values) {
                flat.put(range.start, values);
            }
        }
    }

    fn on_host<E: Real>(
        &self,
        (param, at): (&mut Flat, Range<usize>),
        (grad, from): (&Flat, Range<usize>),
        first: Moment,
        second: Moment,
        (decays, place): (bool, Place),
    ) {
        let (view, narrow) = (grad.view(), grad.dtype() == DType::BF16);
        let widened: Vec<E> = match narrow {
            true => view.read::<bf16>()[from.clone()].iter().map(|value| E::of(value.wide())).collect(),
            false => Vec::new(),
        };
        let grad = if narrow { &widened } else { &view.read::<E>()[from] };
        let mut own = param.take_host();
        let values = &mut E::write(&mut own)[at];
        match self {
            Self::AdamW(k) => {
                let random = |i: usize| place.random(i as u32, k.step);
                in_place(
                    first,
                    |i| random(i) as u16,
                    |m| {
                        in_place(
                            second,
                            |i| (random(i) >> 16) as u16,
                            |v: &mut [E]| {
                                adamw::update(values, grad, m, v, decays, k);
                            },
                        );
                    },
                );
            }
            // Their momentum is as wide as the parameter.
            Self::Sgd(k) => in_place(first, |_| 0, |m| sgd::update(values, grad, m, decays, k)),
            Self::Lion(k) => in_place(first, |_| 0, |m| lion::update(values, grad, m, decays, k)),
        }
        param.put_host(own);
    }

    /// New values and moments. The plain formulation, for every device.
    fn by_tensors(
        &self,
        param: Tensor<1>,
        grad: Tensor<1>,
        first: Option<Tensor<1>>,
        second: Option<Tensor<1>>,
        decays: bool,
    ) -> (Tensor<1>, Option<Tensor<1>>, Option<Tensor<1>>) {
        let moment = |state: Option<Tensor<1>>| state.expect("the rule's moments are kept");
        let kept = |param: Tensor<1>, keep: f64| if decays { param.mul_scalar(keep) } else { param };
        match self {
            Self::AdamW(k) => {
                let (beta1, beta2) = (k.config.beta1, k.config.beta2);
                let grad = grad.mul_scalar(k.grad_scale);
                let first = moment(first).mul_scalar(beta1) + grad.clone().mul_scalar(1.0 - beta1);
                let second = moment(second).mul_scalar(beta2) + (grad.clone() * grad).mul_scalar(1.0 - beta2);
                let root = second.clone().sqrt().mul_scalar(k.root_scale).add_scalar(k.config.eps);
                let step = (first.clone() / root).mul_scalar(k.step_size);
                (kept(param, k.keep) - step, Some(first), Some(second))
            }
            Self::Sgd(k) => {
                let grad = grad.mul_scalar(k.grad_scale);
                let param = kept(param, 1.0 - k.lr * k.config.weight_decay);
                let Some(sum) = first else { return (param - grad.mul_scalar(k.lr), None, None) };
                let sum = sum.mul_scalar(k.config.momentum) + grad.clone();
                let step =
                    if k.config.nesterov { grad + sum.clone().mul_scalar(k.config.momentum) } else { sum.clone() };
                (param - step.mul_scalar(k.lr), Some(sum), None)
            }
            Self::Lion(k) => {
                let (beta1, beta2) = (k.config.beta1, k.config.beta2);
                let grad = grad.mul_scalar(k.grad_scale);
                let old = moment(first);
                let mixed = old.clone().mul_scalar(beta1) + grad.clone().mul_scalar(1.0 - beta1);
                let param = kept(param, 1.0 - k.lr * k.config.weight_decay) - mixed.sign().mul_scalar(k.lr);
                (param, Some(old.mul_scalar(beta2) + grad.mul_scalar(1.0 - beta2)), None)
            }
        }
    }
}

/// Runs `f` on the elements of a host array, or on nothing. Those in bf16 are computed wider and rounded stochastically,
/// with the random bits of each.
fn in_place<E: Real>(moment: Moment, random: impl Fn(usize) -> u16, f: impl FnOnce(&mut [E])) {
    let Some((flat, range)) = moment else { return f(&mut []) };
    let mut host = flat.take_host();
    if flat.dtype() == DType::BF16 {
        let stored = &mut bf16::write(&mut host)[range];
        let mut values: Vec<E> = stored.iter().map(|value| E::of(value.wide())).collect();
        f(&mut values);
        for (i, (stored, value)) in stored.iter_mut().zip(values).enumerate() {
            *stored = bf16::from_bits(buffer::round(value.wide() as f32, random(i)));
        }
    } else {
        f(&mut E::write(&mut host)[range]);
    }
    flat.put_host(host);
}
