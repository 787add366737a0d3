//! Whether a module and the buckets describe the same parameters.

use super::layout::Layout;
use super::optimizer::Optimizer;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;

/// A module and buckets that do not describe the same parameters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum OptimError {
    /// The module holds a float parameter that no bucket knows.
    #[error(
        "parameter {id:#x} of shape {shape:?} is in the module but not in the registry: build it with `ParamBuilder`"
    )]
    Unregistered { id: u64, shape: Vec<usize> },
    /// The registered number of elements is another one.
    #[error("parameter `{name}` has shape {shape:?}, but {registered} elements are registered")]
    Length { name: String, shape: Vec<usize>, registered: usize },
    /// The module holds a registered parameter never or more than once.
    #[error(
        "parameter `{name}` is in the module {times} times, it must be once: a tied weight is used twice, not held twice"
    )]
    Times { name: String, times: usize },
}

impl Optimizer {
    /// Checks that every float parameter of `model` is in exactly one of these buckets or has one of the ids
    /// `untrained`, and that every one of the buckets is in `model`.
    ///
    /// # Errors
    /// Names the first parameter that is not.
    pub fn check<M: Module>(&self, model: &M, buckets: &[usize], untrained: &[u64]) -> Result<(), OptimError> {
        let layouts: Vec<&Layout> = buckets.iter().map(|&bucket| &self.buckets[bucket].layout).collect();
        let times = layouts.iter().map(|layout| vec![0; layout.slots.len()]).collect();
        let mut check = Check { layouts, times, untrained, error: None };
        model.visit(&mut check);
        if let Some(error) = check.error {
            return Err(error);
        }
        let slots = check.layouts.iter().flat_map(|layout| &layout.slots);
        match slots.zip(check.times.into_iter().flatten()).find(|(_, times)| *times != 1) {
            Some((slot, times)) => Err(OptimError::Times { name: slot.name.clone(), times }),
            None => Ok(()),
        }
    }
}

struct Check<'a> {
    layouts: Vec<&'a Layout>,
    /// By bucket and slot.
    times: Vec<Vec<usize>>,
    untrained: &'a [u64],
    error: Option<OptimError>,
}

impl ModuleVisitor for Check<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (id, shape) = (param.id.val(), param.lazy_shape().to_vec());
        let mut places = self.layouts.iter().enumerate().filter_map(|(at, layout)| Some((at, layout.slot(id)?)));
        match places.next().map(|(at, slot)| (at, slot, &self.layouts[at].slots[slot])) {
            None if self.untrained.contains(&id) => {}
            None => self.error = Some(OptimError::Unregistered { id, shape }),
            Some((_, _, slot)) if slot.range.len() != shape.iter().product::<usize>() => {
                self.error = Some(OptimError::Length { name: slot.name.clone(), shape, registered: slot.range.len() });
            }
            Some((at, slot, _)) => self.times[at][slot] += 1,
        }
    }
}
