//! Gradients on their way to the owners of their parameters: those of a unit together.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use burn::tensor::Tensor;

use super::owned::Owned;
#[cfg(feature = "decorator")]
use crate::mesh_backend::async_collectives::{self, Held};
use crate::pending::Pending;
use ranks::collective;
#[cfg(feature = "decorator")]
use ranks::collective_ops::Collective;
#[cfg(feature = "cuda")]
use ranks::overlap;

/// Bytes of gradients that are reduced behind the backward pass: more would keep whole gradients alive for nothing.
const LEAVING: usize = 256 << 20;

/// A parameter and the field of the module that has it: several may have one.
type Field = (usize, Arc<str>);

/// Gradients of a pass.
#[derive(Default)]
pub(super) struct Leaving {
    /// Those that wait for the others of their unit.
    held: Vec<(Field, Tensor<1>)>,
    /// What others wait for, and its bytes.
    sent: VecDeque<(usize, Vec<Pending>)>,
    /// Of parameters of this rank, on their way or there. Of a field that is used in two units, both.
    means: Vec<(Arc<str>, Tensor<1>)>,
}

impl Leaving {
    /// A gradient of a field.
    pub fn add(&mut self, field: Field, gradient: Tensor<1>, owned: &Owned) {
        let is_other = |((first, _), _): &(Field, _)| owned.unit(*first) != owned.unit(field.0);
        if self.held.first().is_some_and(is_other) || self.held.iter().map(bytes).sum::<usize>() > LEAVING {
            self.send(owned);
        }
        match self.held.iter_mut().find(|(other, _)| *other == field) {
            Some((_, sum)) => *sum = sum.clone() + gradient,
            None => self.held.push((field, gradient)),
        }
    }

    /// The means of the pass, on the ranks of their parameters.
    pub fn finish(&mut self, owned: &Owned) -> HashMap<Arc<str>, Tensor<1>> {
        self.send(owned);
        self.wait(0);
        let mut means = HashMap::new();
        for (path, mean) in self.means.drain(..) {
            let sum = match means.remove(&path) {
                Some(other) => mean + other,
                None => mean,
            };
            means.insert(path, sum);
        }
        means
    }

    fn send(&mut self, owned: &Owned) {
        let held = std::mem::take(&mut self.held);
        if held.is_empty() {
            return;
        }
        let bytes = held.iter().map(bytes).sum();
        let (fields, held): (Vec<Field>, Vec<_>) =
            held.into_iter().map(|(field, gradient)| (field.clone(), (field.0, gradient))).unzip();
        let (means, pending): (Vec<_>, Vec<_>) = owned.start_means(held).into_iter().unzip();
        let own = fields.into_iter().zip(means).filter(|((index, _), _)| owned.is_owner(*index));
        self.means.extend(own.map(|((_, path), mean)| (path, mean)));
        self.sent.push_back((bytes, pending));
        self.wait(LEAVING);
    }

    /// Waits for the oldest until no more than `most` bytes are on their way.
    fn wait(&mut self, most: usize) {
        while self.sent.iter().map(|(bytes, _)| bytes).sum::<usize>() > most {
            let oldest = self.sent.pop_front().map(|(_, pending)| pending);
            oldest.into_iter().flatten().for_each(Pending::wait);
        }
    }
}

fn bytes((_, gradient): &(Field, Tensor<1>)) -> usize {
    gradient.shape().num_elements() * gradient.dtype().size()
}

impl Owned {
    /// Starts to bring the means of gradients to the owners of their parameters, on a logical device by one operation.
    pub(super) fn start_means(&self, gradients: Vec<(usize, Tensor<1>)>) -> Vec<(Tensor<1>, Pending)> {
        let (indices, gradients): (Vec<usize>, Vec<Tensor<1>>) = gradients.into_iter().unzip();
        #[cfg(feature = "decorator")]
        let gradients: Vec<Tensor<1>> = {
            let held = indices.iter().zip(gradients).map(|(&index, tensor)| {
                let (length, what) = (tensor.dims()[0], Collective::Reduce(self.owner(index)));
                Held { tensor, length, what, for_gemms: false }
            });
            match async_collectives::begin(held.collect(), true, &self.group) {
                Ok((means, work)) => {
                    return means.into_iter().map(|mean| (mean, Pending::Logical(work.clone()))).collect();
                }
                Err(held) => held.into_iter().map(|held| held.tensor).collect(),
            }
        };
        indices.into_iter().zip(gradients).map(|(index, gradient)| self.start_mean(index, gradient)).collect()
    }

    fn start_mean(&self, index: usize, gradient: Tensor<1>) -> (Tensor<1>, Pending) {
        let (owner, group) = (self.owner(index), &self.group);
        #[cfg(feature = "cuda")]
        if overlap::has_device_link(group, &gradient.device()) {
            let target = match self.is_owner(index) {
                true => Tensor::empty(gradient.dims(), (&gradient.device(), gradient.dtype())),
                false => gradient.clone(),
            };
            let pending = overlap::reduce_mean_into(&gradient, &target, owner, group);
            return (target, Pending::Gpu(pending));
        }
        let sum = collective::reduce(gradient, owner, group);
        let mean = if self.is_owner(index) { sum.div_scalar(group.size() as f64) } else { sum };
        (mean, Pending::Done)
    }
}
