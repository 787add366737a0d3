//! An operation on where its inputs are: planned, run on the rank's shares, and noted in the table.

use super::super::inner::Inner;
use super::Interpreter;
use super::inputs::{Local, Locals, Rename};
use crate::logical::Placement::{self, Replicate};
use crate::logical::{ByTensor, TensorState, makes_weights, plan};
use burn_ir::{FloatOperationIr, NumericOperationIr, OperationIr, ScalarIr, ScalarOpIr, TensorIr, TensorStatus};

impl<B: Inner> Interpreter<B> {
    /// Runs an operation whose inputs are replicated, or of one rank: there is nothing to plan. Returns it if there is.
    fn run_replicated(&mut self, mut op: OperationIr) -> Option<OperationIr> {
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
        let is_embedding = self.axes.first().is_some_and(|axis| self.homes.of_embedding(&op, axis.ranks).is_some());
        let is_alone = self.axes.iter().all(|axis| axis.ranks == 1);
        if !is_alone && (!is_whole || is_embedding || self.homes.has_scatter(&op)) {
            return Some(op);
        }
        let weight = from_weight && makes_weights(&op, |id| self.table.get(id).state.weight);
        for out in op.outputs() {
            let at = if is_whole { None } else { self.at_of_updated(&op, out) };
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
        None
    }

    /// Where the input is that arithmetic gives `out` in place of, so that a parameter stays where it was.
    fn at_of_updated(&self, op: &OperationIr, out: &TensorIr) -> Option<Vec<Placement>> {
        let OperationIr::NumericFloat(..) = op else { return None };
        let updated = op.inputs().find(|x| x.shape == out.shape)?;
        Some(self.table.get(updated.id).state.at.clone())
    }

    /// Runs an operation as planned for where its inputs are.
    pub(super) fn run_planned(&mut self, op: OperationIr) {
        let Some(op) = self.run_replicated(op) else { return };
        let is_half = |id| self.executor.is_half(self.table.get(id).local);
        let plan = plan(&op, |id| &self.table.get(id).state, is_half, &self.axes, &self.homes);
        self.homes.note(&op, |id| &self.table.get(id).state, &plan);
        if plan.fell_back {
            let sharded = |x: &&TensorIr| self.table.get(x.id).state.at.iter().any(|at| at.is_shard());
            let bytes = op.inputs().filter(sharded).map(|x| x.shape.num_elements() * x.dtype.size()).sum();
            let shapes = |x: &TensorIr| format!("{:?}", x.shape.to_vec());
            let inputs: Vec<_> = op.inputs().map(shapes).collect();
            let outputs: Vec<_> = op.outputs().map(shapes).collect();
            self.report.fallback(format!("{} {} -> {}", name(&op), inputs.join(" "), outputs.join(" ")), bytes);
        }
        let inputs: Vec<TensorIr> = op.inputs().cloned().collect();
        // As GEMMs read them.
        let half = matches!(op, OperationIr::Float(_, FloatOperationIr::Matmul(_)));
        let mut locals: ByTensor<Local> = ByTensor::default();
        for input in &inputs {
            if locals.get(input.id).is_none() {
                let is_consumed = |x: &TensorIr| x.id == input.id && x.status == TensorStatus::ReadWrite;
                let consumed = inputs.iter().any(is_consumed);
                locals.add(input.id, self.place(input, &plan.inputs[input.id], consumed, half));
            }
        }
        let mut local = plan.local;
        local.visit_mut(&mut Rename(&locals));
        let is_scaled = |out: &&TensorIr| plan.scale.is_some() && out.dtype.is_float();
        let scaled: Vec<TensorIr> = local.outputs().filter(is_scaled).cloned().collect();
        match plan.completion {
            None => self.executor.register_op(local),
            Some((axis, completion)) => self.run_completed(local, axis, completion),
        }
        for (id, state) in plan.outputs {
            self.table.insert(id, state, id);
        }
        op.outputs().for_each(|out| self.table.describe(out));
        if let Some(factor) = plan.scale {
            self.scale(&scaled, factor);
        }
        self.link_view(&op);
        self.shard_sequence(&op);
        for (id, local) in locals {
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
            self.executor.register_op(OperationIr::NumericFloat(out.dtype, NumericOperationIr::MulScalar(scaled)));
        }
    }
}

/// The operation's name: `Reshape`, `Matmul`, `Conv2dWeightBackward`, …
pub(super) fn name(op: &OperationIr) -> String {
    let text = format!("{op:?}");
    let end = text.find("OpIr").or_else(|| text.find(" {")).unwrap_or(text.len());
    let start = text[..end].rfind(['(', ' ']).map_or(0, |at| at + 1);
    let before = &text[..start.saturating_sub(1)];
    // `BaseFloat(Reshape(ShapeOpIr { .. }))`: the word before the structure's name.
    before.rsplit(['(', ' ']).next().unwrap_or(&text[..end]).to_string()
}
