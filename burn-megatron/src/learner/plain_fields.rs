//! Plain fields of a model, as numbers and names. Where a rank computes with a model of its own, that never learns what a model's own
//! `TrainStep::optimize` makes of them.

use std::collections::HashSet;
use std::fmt::Display;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Int, Tensor};

use super::devices::host;
use super::zero::running_states;

/// Watches the steps of an optimizer, and looks after the 1st, 2nd, 4th, 8th and so on, because it prints the model, which takes
/// time. What changes in between is seen then.
pub(super) struct PlainFields<M> {
    steps: u64,
    /// The model before the first step.
    first: Option<M>,
}

impl<M> Default for PlainFields<M> {
    fn default() -> Self {
        Self { steps: 0, first: None }
    }
}

impl<M: Module + Display> PlainFields<M> {
    /// Before a step of `model`.
    pub fn begin(&mut self, model: &M) {
        self.first.get_or_insert_with(|| without_values(model.clone()));
    }

    /// After it.
    ///
    /// # Panics
    /// If this step is looked at, and the plain fields of `model`, as it prints them, are others than before the first.
    pub fn refuse_changed(&mut self, model: M) {
        self.steps += 1;
        if let Some(first) = self.first.as_ref().filter(|_| self.steps.is_power_of_two()) {
            refuse_others(first, &without_values(model));
        }
    }
}

fn refuse_others<M: Module + Display>(before: &M, after: &M) {
    // What is behind a lock is shared by clones, and prints otherwise while another rank holds it.
    let is_shared =
        |line: &&str| ["Mutex {", "RwLock {", "RefCell {", "<locked>"].iter().any(|lock| line.contains(lock));
    let print = |model: &M| {
        let printed = model.to_string();
        printed.lines().map(str::trim).filter(|line| !is_shared(line)).map(String::from).collect::<Vec<_>>()
    };
    // What clones share, as a counter of all ranks, changes in both, and meanwhile.
    let (first, other, again) = (print(before), print(after), print(before));
    if first != again || first == other {
        return;
    }
    let differs = first.iter().zip(&other).find(|(before, after)| before != after);
    let what = differs.map_or_else(String::new, |(before, after)| format!(", from `{before}` to `{after}`"));
    panic!(
        "`TrainStep::optimize` changes plain fields of the model{what}: with ZeRO, tensor parallelism, pipelines, overlap or running \
         statistics a rank computes with a model of its own, which does not see it; nearest legal: a parameter of integers, as \
         Param<Tensor<1, Int>>, or data parallelism without these"
    );
}

/// `model` without the memory of its parameters, which an optimizer steps in place if nothing else holds it.
fn without_values<M: Module>(model: M) -> M {
    let states = running_states(&model);
    model.map(&mut Strip { states })
}

struct Strip {
    /// What a model's clones share, so that a mapper changes it in all of them.
    states: HashSet<ParamId>,
}

impl ModuleMapper for Strip {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.states.contains(&param.id) {
            return param;
        }
        Param::initialized(param.id, Tensor::zeros([1; D], &host().inner()))
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        Param::initialized(param.id, Tensor::zeros([1; D], &host().inner()))
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    use burn::nn::{Linear, LinearConfig};

    use super::*;

    #[derive(Module, Debug)]
    struct Counting {
        linear: Linear,
        depth: usize,
        #[module(skip)]
        temperature: f64,
        #[module(skip)]
        seen: Arc<AtomicUsize>,
        #[module(skip)]
        notes: Arc<Mutex<usize>>,
    }

    fn model() -> Counting {
        let linear = LinearConfig::new(2, 3).init(&host());
        Counting { linear, depth: 2, temperature: 0.5, seen: Arc::default(), notes: Arc::default() }
    }

    /// What is said of a step that changes the model so.
    fn message(
        watch: &mut PlainFields<Counting>,
        model: &mut Counting,
        change: impl Fn(&mut Counting),
    ) -> Option<String> {
        watch.begin(model);
        change(model);
        let refused = catch_unwind(AssertUnwindSafe(|| watch.refuse_changed(model.clone()))).err();
        refused.map(|panic| *panic.downcast::<String>().unwrap())
    }

    fn of_first_step(change: impl Fn(&mut Counting)) -> Option<String> {
        message(&mut PlainFields::default(), &mut model(), change)
    }

    #[test]
    fn a_plain_field_that_changes_is_named_and_what_clones_share_is_not_one() {
        says!(of_first_step(|model| model.depth += 1).unwrap(), "from `depth: 2` to `depth: 3`");
        says!(
            of_first_step(|model| model.temperature *= 2.0).unwrap(),
            "from `temperature: 0.5` to `temperature: 1.0`"
        );
        let trains = |model: &mut Counting| {
            let weight = model.linear.weight.clone();
            model.linear.weight = weight.map(|weight| (weight * 2.0).detach().require_grad());
            model.seen.fetch_add(1, Ordering::Relaxed);
        };
        assert_eq!(of_first_step(trains), None);
        // Another rank holds the lock whenever the first model is printed, and not when the other is.
        let other_notes = |model: &mut Counting| model.notes = Arc::new(Mutex::new(1));
        assert_eq!(of_first_step(other_notes), None);
    }

    #[test]
    fn what_changed_once_between_the_steps_that_are_looked_at_is_seen() {
        let (mut watch, mut model) = (PlainFields::default(), model());
        for step in 1..8 {
            let change = |model: &mut Counting| model.depth += usize::from(step == 3);
            let text = message(&mut watch, &mut model, change);
            assert_eq!(text.is_some(), step == 4, "step {step}: {text:?}");
        }
    }
}
