//! Commands: what operations carry to the device instead of being run.

use super::Interpreter;
use super::plans::name;
use crate::logical::{MeshAxis, Placement, TensorState};
use crate::mesh_backend::{command::Command, formula::AdamWStep, inner::Inner, interpreter::Interpret};
use burn_ir::{OperationIr, TensorId, TensorIr, TensorStatus};

impl<B: Inner> Interpreter<B> {
    /// Obeys a command about the input of `carrier`, and makes its output the input.
    pub(super) fn carry(&mut self, command: Command, carrier: &OperationIr) {
        let inputs: Vec<TensorIr> = carrier.inputs().cloned().collect();
        let outputs: Vec<TensorId> = carrier.outputs().map(|x| x.id).collect();
        let ([x], [out]) = (&inputs[..], &outputs[..]) else {
            panic!("{command:?} was carried by {}", name(carrier));
        };
        let entry = self.table.get(x.id);
        let (shard, mut state) = (entry.local, entry.state.clone());
        let from = state.at.clone();
        if let Command::Move { axis, to, weight } = command {
            state.at[axis] = to;
            state.weight = weight;
        }
        if state.weight {
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
        let inputs: Vec<TensorIr> = carrier.inputs().cloned().collect();
        let outputs: Vec<TensorIr> = carrier.outputs().cloned().collect();
        let ([weight, moment_1, moment_2, .., gradient], [new_weight, new_1, new_2]) = (&inputs[..], &outputs[..])
        else {
            panic!("{step:?} was carried by {}", name(carrier));
        };
        let (inputs, outputs) = ([weight, moment_1, moment_2, gradient], [new_weight, new_1, new_2]);
        let [at, others @ ..] = inputs.map(|x| &self.table.get(x.id).state.at);
        // On an axis of one rank all placements are one.
        let divides = |axis: &MeshAxis| axis.ranks > 1;
        let differ = |(axis, pair): (&MeshAxis, (&Placement, &Placement))| divides(axis) && pair.0 != pair.1;
        let is_apart = |other: &&Vec<Placement>| self.axes.iter().zip(at.iter().zip(*other)).any(differ);
        let is_sum = |(axis, at): (&MeshAxis, &Placement)| divides(axis) && *at == Placement::Partial;
        if others.iter().any(is_apart) || self.axes.iter().zip(at).any(is_sum) {
            let operations = step.operations(inputs, outputs, || self.new_id());
            return operations.into_iter().for_each(|mut op| self.run_planned(&mut op));
        }
        // Every rank computes its share from its shares: there is nothing to plan.
        let at = at.clone();
        let here = |x: &TensorIr| TensorIr {
            id: self.table.try_get(x.id).map_or(x.id, |entry| entry.local),
            shape: self.shape_here(&x.shape, &at),
            ..x.clone()
        };
        let (here_in, here_out) = (inputs.map(here), outputs.map(here));
        let operations = step.operations(here_in.each_ref(), here_out.each_ref(), || self.new_id());
        operations.iter().for_each(|op| self.executor.register_op(op));
        for out in outputs {
            self.table.insert(out.id, TensorState { at: at.clone(), weight: false }, out.id);
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
