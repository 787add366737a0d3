//! An operation on where its inputs are: planned, run on the rank's shares, and noted in the table.

use super::inputs::{Local, Locals};
use super::{super::inner::Inner, Interpreter, plans::Names};
use crate::logical::Placement::{self, Partial, Replicate};
use crate::logical::{TensorState, makes_weights};
use burn_ir::{FloatOperationIr, NumericOperationIr, OperationIr, ScalarIr, ScalarOpIr, TensorIr, TensorStatus};

impl<B: Inner> Interpreter<B> {
    /// Runs an operation whose inputs are replicated, or of one rank: there is nothing to plan. Whether it is one.
    fn run_replicated(&mut self, op: &mut OperationIr) -> bool {
        let (mut renames, mut from_weight, mut is_whole) = (false, false, true);
        let mut consumed = Vec::new();
        for x in op.inputs() {
            let entry = self.table.get(x.id);
            is_whole &= entry.state.at.iter().all(|at| *at == Replicate);
            renames |= entry.local != x.id;
            from_weight |= entry.state.weight;
            if x.status == TensorStatus::ReadWrite {
                consumed.push(x.id);
            }
        }
        let is_embedding = self.axes.first().is_some_and(|axis| self.homes.of_embedding(op, axis.ranks).is_some());
        let is_alone = self.axes.iter().all(|axis| axis.ranks == 1);
        if !is_alone && (!is_whole || is_embedding || self.homes.has_scatter(op)) {
            return false;
        }
        let weight = from_weight && makes_weights(op, |id| self.table.get(id).state.weight);
        for out in op.outputs() {
            let at = if is_whole { None } else { self.at_of_updated(op, out) };
            let state = TensorState { weight, at: at.unwrap_or_else(|| self.replicated().at) };
            self.table.insert(out.id, state, out.id);
        }
        if renames {
            op.visit_mut(&mut Locals(&self.table));
        }
        self.executor.register_op(op);
        for id in consumed {
            if let Some(entry) = self.table.remove(id) {
                self.drop_copies(entry);
            }
        }
        true
    }

    /// Where the input is that arithmetic gives `out` in place of, so that a parameter stays where it was.
    fn at_of_updated(&self, op: &OperationIr, out: &TensorIr) -> Option<Vec<Placement>> {
        let OperationIr::NumericFloat(..) = op else { return None };
        let updated = op.inputs().find(|x| x.shape == out.shape)?;
        Some(self.table.get(updated.id).state.at.clone())
    }

    /// Runs an operation as planned for where its inputs are.
    pub(super) fn run_planned(&mut self, op: &mut OperationIr) {
        if self.run_replicated(op) {
            return;
        }
        let names = Names::take(op);
        let known = self.known(op, &names);
        let plan = &known.plan;
        if let Some((operation, bytes)) = &known.fallback {
            self.report.fallback(operation.clone(), *bytes);
        }
        // As GEMMs read them.
        let half = matches!(op, OperationIr::Float(_, FloatOperationIr::Matmul(_)));
        let mut locals = Vec::with_capacity(known.inputs.len());
        for x in &known.inputs {
            let is_consumed = x.status == TensorStatus::ReadWrite;
            let (id, wanted) = (names.of(x.id), &plan.inputs[x.id]);
            let entry = self.table.get(id);
            locals.push(match entry.state.at == *wanted {
                true => Local { id: entry.local, is_temporary: false, is_consumed },
                false => {
                    let is_summed = entry.state.at.first() == Some(&Partial) && wanted.first() == Some(&Replicate);
                    if is_summed && self.homes.leaves_whole(&x.shape, self.axes[0].ranks) {
                        self.report.whole(x.shape.as_slice(), x.shape.num_elements() * x.dtype.size());
                    }
                    self.place(&TensorIr { id, ..x.clone() }, wanted, is_consumed, half)
                }
            });
        }
        names.give(op, &[]);
        let mut local = plan.local.clone();
        names.give(&mut local, &locals);
        let is_scaled = |out: &&TensorIr| plan.scale.is_some() && out.dtype.is_float();
        let scaled: Vec<TensorIr> = local.outputs().filter(is_scaled).cloned().collect();
        match plan.completion {
            None => self.executor.register_op(&local),
            Some((axis, completion)) => self.run_completed(local, axis, completion),
        }
        for (place, state) in &plan.outputs {
            let id = names.of(*place);
            self.table.insert(id, state.clone(), id);
        }
        op.outputs().for_each(|out| self.table.describe(out));
        if let Some(factor) = plan.scale {
            self.scale(&scaled, factor);
        }
        self.link_view(op);
        self.shard_tokens(op);
        for (local, id) in locals.into_iter().zip(names.tensors) {
            if local.is_temporary {
                self.drop_local(local.id);
            }
            if local.is_consumed
                && let Some(entry) = self.table.remove(id)
            {
                self.drop_copies(entry);
            }
        }
    }

    /// Multiplies what the rank holds of an operation's outputs.
    pub(super) fn scale(&mut self, shares: &[TensorIr], factor: f64) {
        for out in shares {
            let id = self.new_id();
            let entry = self.table.get_mut(out.id);
            let lhs = TensorIr { id: entry.local, status: TensorStatus::ReadWrite, ..out.clone() };
            entry.local = id;
            let scaled = ScalarOpIr { lhs, rhs: ScalarIr::Float(factor), out: TensorIr { id, ..out.clone() } };
            self.executor.register_op(&OperationIr::NumericFloat(out.dtype, NumericOperationIr::MulScalar(scaled)));
        }
    }
}
