//! The parameters of one bucket inside a module.

use super::layout::Layout;
use backend_dist::ops::main_grads::{MainGrad, attach};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Gradients, Tensor};

/// The values in one dimension, without autodiff; shares the storage.
pub(super) fn flat<const D: usize>(tensor: Tensor<D>) -> Tensor<1> {
    tensor.inner().flatten(0, D - 1)
}

/// Calls `f` with the slot and the flat values of each parameter of the bucket.
pub(super) fn visit<M: Module>(model: &M, layout: &Layout, f: impl FnMut(usize, Tensor<1>)) {
    struct Visit<'a, F>(&'a Layout, F);

    impl<F: FnMut(usize, Tensor<1>)> ModuleVisitor for Visit<'_, F> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(slot) = self.0.slot(param.id.val()) {
                (self.1)(slot, flat(param.val()));
            }
        }
    }
    model.visit(&mut Visit(layout, f));
}

/// Lets backward passes of this thread write the gradients of the bucket's parameters to `places`, one per slot or
/// none.
pub(super) fn attach_places<M: Module>(model: &M, layout: &Layout, places: &[MainGrad]) {
    if places.is_empty() {
        return;
    }
    struct Attach<'a>(&'a Layout, &'a [MainGrad]);

    impl ModuleVisitor for Attach<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(slot) = self.0.slot(param.id.val())
                && param.val().is_require_grad()
            {
                attach(&param.val(), self.1[slot].clone());
            }
        }
    }
    model.visit(&mut Attach(layout, places));
}

/// Takes the gradients of the bucket's parameters out, and calls `f` with the slot of each and its flat values.
pub(super) fn visit_gradients<M: Module>(
    model: &M,
    layout: &Layout,
    grads: &mut Gradients,
    f: impl FnMut(usize, Tensor<1>),
) {
    struct Visit<'a, F>(&'a Layout, &'a mut Gradients, F);

    impl<F: FnMut(usize, Tensor<1>)> ModuleVisitor for Visit<'_, F> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(slot) = self.0.slot(param.id.val())
                && let Some(grad) = param.val().grad_remove(self.1)
            {
                (self.2)(slot, flat(grad));
            }
        }
    }
    model.visit(&mut Visit(layout, grads, f));
}

/// Replaces each parameter of the bucket by `f` of its slot and flat values, in the slot's shape or, without
/// elements, empty. What autodiff has tracked stays tracked.
pub(super) fn map<M: Module>(model: M, layout: &Layout, f: impl FnMut(usize, Tensor<1>) -> Tensor<1>) -> M {
    struct Map<'a, F>(&'a Layout, F);

    impl<F: FnMut(usize, Tensor<1>) -> Tensor<1>> ModuleMapper for Map<'_, F> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let Some(slot) = self.0.slot(param.id.val()) else { return param };
            let (id, tensor, mapper) = param.consume();
            let tracked = tensor.is_autodiff();
            let values = (self.1)(slot, flat(tensor));
            let shape: [usize; D] = match values.dims() {
                [0] => [0; D],
                _ => self.0.slots[slot].shape.clone().try_into().expect("a parameter keeps its dimensions"),
            };
            let values: Tensor<D> = values.reshape(shape);
            let leaf = if tracked { Tensor::from_inner(values).require_grad() } else { values };
            Param::from_mapped_value(id, leaf, mapper)
        }
    }
    model.map(&mut Map(layout, f))
}
