//! Commands: what operations carry to the device instead of being run.

use super::Interpreter;
use super::plans::name;
use crate::logical::{MeshAxis, Placement, TensorState};
use crate::mesh_backend::{formula::AdamWStep, inner::Inner, interpreter::Interpret};
use burn_ir::{OperationIr, TensorId, TensorIr, TensorStatus};

impl<B: Inner> Interpreter<B> {
    /// The output of `carrier` is its input, moved to `to` along the mesh's axis `axis`, and a parameter if `weight` says so.
    pub(super) fn move_along(&mut self, (axis, to, weight): (usize, Placement, bool), carrier: &OperationIr) {
        let inputs: Vec<TensorIr> = carrier.inputs().cloned().collect();
        let outputs: Vec<TensorId> = carrier.outputs().map(|x| x.id).collect();
        let ([x], [out]) = (&inputs[..], &outputs[..]) else {
            panic!("a move to {to:?} was carried by {}", name(carrier));
        };
        let entry = self.table.get(x.id);
        let (shard, mut state) = (entry.local, entry.state.clone());
        let from = state.at.clone();
        (state.at[axis], state.weight) = (to, weight);
        if weight {
            self.homes.note_parameter(&x.shape);
            let ranks = |(at, axis): (&Placement, &MeshAxis)| if at.is_shard() { axis.ranks } else { 1 };
            let shares: usize = state.at.iter().zip(&self.axes).map(ranks).product();
            self.executor.note_parameter(x.shape.num_elements() / shares);
        }
        let is_consumed = x.status == TensorStatus::ReadWrite;
        if from == state.at {
            self.executor.register_alias(*out, shard);
            self.table.insert(*out, state, *out);
            if is_consumed {
                self.drop_tensor(x.id);
            }
        } else {
            let id = self.moved(x, shard, (&from, &state.at), is_consumed, false);
            self.table.insert(*out, state, id);
            if is_consumed && let Some(entry) = self.table.remove(x.id) {
                self.drop_copies(entry);
            }
        }
    }

    /// The outputs of `carrier` are what a step makes of its inputs.
    pub(super) fn step(&mut self, step: AdamWStep, carrier: &OperationIr) {
        self.report.operations += 1;
        let (inputs, outputs): (Vec<_>, Vec<_>) = (carrier.inputs().collect(), carrier.outputs().collect());
        let (&[weight, moment_1, moment_2, .., gradient], Ok(outputs)) = (&inputs[..], outputs.try_into()) else {
            panic!("{step:?} was carried by {}", name(carrier));
        };
        let (inputs, outputs): ([&TensorIr; 4], [&TensorIr; 3]) = ([weight, moment_1, moment_2, gradient], outputs);
        // What takes the place of a parameter is one.
        let weights = [self.table.get(weight.id).state.weight, false, false];
        let [at, others @ ..] = inputs.map(|x| &self.table.get(x.id).state.at);
        // On an axis of one rank all placements are one.
        let divides = |axis: &MeshAxis| axis.ranks > 1;
        let differ = |(axis, pair): (&MeshAxis, (&Placement, &Placement))| divides(axis) && pair.0 != pair.1;
        let is_apart = |other: &&Vec<Placement>| self.axes.iter().zip(at.iter().zip(*other)).any(differ);
        let is_sum = |(axis, at): (&MeshAxis, &Placement)| divides(axis) && *at == Placement::Partial;
        if others.iter().any(is_apart) || self.axes.iter().zip(at).any(is_sum) {
            let operations = step.operations(inputs, outputs, || self.new_id());
            operations.into_iter().for_each(|mut op| self.run_planned(&mut op));
            for (out, weight) in outputs.into_iter().zip(weights) {
                self.table.get_mut(out.id).state.weight = weight;
            }
            return;
        }
        // Every rank computes its share from its shares: there is nothing to plan.
        let at = at.clone();
        let here = |x: &TensorIr| TensorIr {
            id: self.table.try_get(x.id).map_or(x.id, |entry| entry.local),
            shape: self.shape_here(&x.shape, &at),
            ..*x
        };
        let (here_in, here_out) = (inputs.map(here), outputs.map(here));
        if let Some(here_out) = self.executor.step(step, here_in.each_ref(), here_out) {
            let operations = step.operations(here_in.each_ref(), here_out.each_ref(), || self.new_id());
            operations.iter().for_each(|op| self.executor.register_op(op));
        }
        for (out, weight) in outputs.into_iter().zip(weights) {
            self.table.insert(out.id, TensorState { at: at.clone(), weight }, out.id);
            self.table.describe(out);
        }
        for x in inputs.into_iter().filter(|x| x.status == TensorStatus::ReadWrite) {
            if let Some(entry) = self.table.remove(x.id) {
                self.drop_copies(entry);
            }
        }
    }

    /// The output of `carrier` is the tensor `id`.
    pub(super) fn adopt(&mut self, id: TensorId, carrier: &OperationIr) {
        let out = carrier.outputs().next().expect("a carrier makes a tensor").id;
        let entry = self.table.remove(id).expect("a tensor is adopted once");
        self.table.insert(out, entry.state, entry.local);
    }
}
