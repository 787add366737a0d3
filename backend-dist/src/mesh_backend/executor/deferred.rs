//! Tensors that are computed only if somebody reads them.

use super::chain::{Launch, Origin};
use super::lazy::Source;
use super::views::View;
use super::{Executor, Float};
use crate::mesh_backend::inner::Inner;
use burn_ir::{TensorId, TensorIr};
use std::sync::Arc;

impl<B: Inner> Executor<B> {
    /// Defers what a launch has not written, since it follows from what it has.
    pub(super) fn defer_remade(&mut self, remade: Vec<Launch<Origin<Source<B>>>>, written: &[Float<B>]) {
        let first = self.written;
        self.written += written.len();
        for launch in remade {
            let launch = launch.with_inputs(|origin| match origin {
                Origin::Output(output) => Source::Output(first + output, written[output].clone()),
                Origin::Input(source) => source,
            });
            let id = launch.outputs[0].id.expect("it is a value of the chain");
            self.deferred.insert(id, Arc::new(launch));
        }
    }

    /// Defers the view of a deferred tensor.
    pub(super) fn defer_view(&mut self, x: &TensorIr, out: TensorId, view: &View) -> bool {
        let of_root = self.deferred.get(&x.id).map(|launch| (launch.clone(), Vec::new()));
        let Some((launch, mut views)) = of_root.or_else(|| self.viewed.get(&x.id).cloned()) else { return false };
        views.push(view.clone());
        self.viewed.insert(out, (launch, views));
        if let Some(copy) = self.copies.get(&x.id) {
            let copy = view.clone().apply::<B>(copy.clone());
            self.copies.insert(out, copy);
        }
        self.end(x);
        true
    }

    /// Computes a deferred tensor, or a view of it.
    pub(super) fn run_deferred(&mut self, id: TensorId) {
        let deferred = self.deferred.remove(&id).map(|launch| (launch, Vec::new()));
        let Some((launch, views)) = deferred.or_else(|| self.viewed.remove(&id)) else { return };
        let x = self.launch(Launch::clone(&launch)).remove(0);
        let x = views.into_iter().fold(x, |x, view| view.apply::<B>(x));
        self.insert(id, x, launch.outputs[0].is_half);
    }
}
