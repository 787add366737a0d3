//! A step of a bucket: where its values are, in the module or here, and how they get back into it.

use super::super::flat::Flat;
use super::super::modules::map;
use super::super::rule::Rule;
use super::update::{MatrixSteps, Update};
use super::{Bucket, Offload};
use burn::module::Module;

impl Bucket {
    /// One step. `matrices` are the orthogonalised steps of the parts that are not updated by `rule`.
    pub fn step<M: Module>(
        &mut self,
        model: M,
        rule: &Rule,
        matrices: &MatrixSteps,
        offload: Option<&mut Offload>,
    ) -> M {
        if let (Some(hosted), Some(offload)) = (self.hosted.take(), offload) {
            let model = self.step_in_pieces(model, rule, &hosted, offload);
            self.hosted = Some(hosted);
            return model;
        }
        if let Some(weights) = self.weights.as_ref().filter(|weights| weights.has_remainders()) {
            // A region without parts has nothing to update.
            self.step_at_once(None, rule);
            if matches!(self.sharding.zero, 1 | 2) {
                weights.collective(&self.sharding.shards);
            }
            self.grads.forget();
            return model;
        }
        let widened = self.widen_moments();
        let in_module = self.sharding.zero == 0 && !self.keeps_values() && self.weights.is_none();
        let model = match in_module {
            true => self.step_in_module(model, rule, matrices),
            false => {
                let mut values = self.values.take().unwrap_or_else(|| self.extract(&model));
                let at_once = self.step_at_once(Some(&values), rule);
                if !at_once {
                    let mut update = self.update(rule, matrices);
                    for (index, part) in update.parts.iter().enumerate() {
                        update.part(index, &mut values, part.at);
                    }
                }
                if let Some(weights) = &self.weights {
                    if !at_once {
                        weights.set_own(&values);
                    }
                    if matches!(self.sharding.zero, 1 | 2) {
                        weights.collective(&self.sharding.shards);
                    }
                    self.values = Some(values);
                    model
                } else if !self.keeps_values() {
                    self.fill(model, &self.gather(values.into_tensor()))
                } else {
                    let model = match self.sharding.zero {
                        3 => model,
                        _ => self.fill(model, &self.gather(values.part(0..values.len()))),
                    };
                    self.values = Some(values);
                    model
                }
            }
        };
        if widened {
            self.narrow_moments();
        }
        self.grads.forget();
        model
    }

    /// On the host, moments in 8 bits are in fp32 while they are updated; whether they are.
    fn widen_moments(&mut self) -> bool {
        let Some(blocks) = self.blocks.as_ref().filter(|blocks| blocks[0].gpu().is_none()) else { return false };
        let device = self.grads.sum().device();
        let [first, second] = blocks.each_ref().map(|moment| Some(moment.widen(&device)));
        (self.first, self.second) = (first, second);
        true
    }

    fn narrow_moments(&mut self) {
        let moments = [self.first.take(), self.second.take()];
        for (blocks, values) in self.blocks.iter_mut().flatten().zip(moments.iter().flatten()) {
            blocks.keep(values);
        }
    }

    fn update<'a>(&'a mut self, rule: &'a Rule, matrices: &'a MatrixSteps) -> Update<'a> {
        Update {
            layout: &self.layout,
            parts: &self.parts,
            second_at: &self.second_at,
            first: self.first.as_mut(),
            second: self.second.as_mut(),
            sum: self.grads.sum(),
            rule,
            matrices,
        }
    }

    /// Updates the module's own parameters.
    fn step_in_module<M: Module>(&mut self, model: M, rule: &Rule, matrices: &MatrixSteps) -> M {
        let mut update = self.update(rule, matrices);
        let (layout, parts) = (update.layout, update.parts);
        map(model, layout, |slot, values| {
            let (start, mut values) = (layout.slots[slot].range.start, Flat::new(values));
            for (index, part) in parts.iter().enumerate() {
                if layout.units[part.unit].slot == slot {
                    update.part(index, &mut values, part.range.start - start);
                }
            }
            values.into_tensor()
        })
    }

    /// Updates main values and weights in one launch; false where that is not possible.
    fn step_at_once(&self, values: Option<&Flat>, rule: &Rule) -> bool {
        let Some(launches) = &self.launches else { return false };
        let flats = [values, self.first.as_ref(), self.second.as_ref(), Some(self.grads.sum())];
        launches.step(rule, flats, self.blocks.as_ref(), self.weights.as_ref())
    }
}
