//! What travels between the owners of parameters and the ranks that use them.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use burn::module::ParamId;
use burn::tensor::Tensor;
use parking_lot::Mutex;

use super::owned::{Gathered, Owned};
use super::reductions::Leaving;
use super::sequence::Sequence;
#[cfg(feature = "decorator")]
use crate::mesh_backend::async_collectives::{self, Held};
use crate::pending::Pending;
use ranks::collective;
#[cfg(feature = "decorator")]
use ranks::collective_ops::Collective;
use ranks::comm::{Group, ReduceOp};
#[cfg(feature = "cuda")]
use ranks::overlap;

/// How often values were gathered, and gradients reduced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// In forward passes.
    pub forward: usize,
    /// Again in backward passes.
    pub backward: usize,
    /// Gradients reduced to their owners.
    pub reduced: usize,
}

/// One rank's end of all gathers and reductions of a module.
pub(super) struct Gathers {
    owned: Owned,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Whether the caller says where a pass begins and ends.
    in_pass: bool,
    /// What this rank holds of every parameter in this pass.
    bases: Vec<Option<Tensor<1>>>,
    /// The parameters that are sharded, by their present ids.
    ids: HashSet<ParamId>,
    forward: Sequence,
    backward: Sequence,
    /// Values that come ahead of their use, in the order of their use, in a backward pass or a forward pass.
    coming: VecDeque<(usize, Coming)>,
    is_backward: bool,
    leaving: Leaving,
    /// Parameters that had a gradient in this pass.
    reduced: HashSet<usize>,
    /// Whether they may be used again, as by blocks that run again in a backward pass.
    recomputes: bool,
    record_on: Option<usize>,
    counts: Counts,
}

/// A value on its way.
struct Coming {
    value: Tensor<1>,
    pending: Pending,
}

impl Coming {
    fn wait(self) -> Tensor<1> {
        self.pending.wait();
        self.value
    }
}

impl State {
    /// Throws away what comes ahead of its use.
    fn forget_coming(&mut self) {
        self.coming.drain(..).for_each(|(_, coming)| drop(coming.wait()));
    }
}

impl fmt::Debug for Gathers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gathers({} parameters of {:?})", self.owned.params.len(), self.owned.group)
    }
}

impl Gathers {
    pub fn new(params: Vec<Gathered>, group: Group) -> Self {
        Self { owned: Owned { params, group }, state: Mutex::default() }
    }

    pub fn group(&self) -> &Group {
        &self.owned.group
    }

    pub fn len(&self) -> usize {
        self.owned.params.len()
    }

    pub fn is_owner(&self, index: usize) -> bool {
        self.owned.is_owner(index)
    }

    /// Whether `into_record` gives whole values on this rank.
    pub fn saves(&self) -> bool {
        self.state.lock().record_on.is_none_or(|member| member == self.owned.group.rank())
    }

    pub fn record_on(&self, member: usize) {
        self.state.lock().record_on = Some(member);
    }

    pub fn recompute(&self) {
        self.state.lock().recomputes = true;
    }

    /// The forward pass uses the trained parameter `index`.
    ///
    /// # Panics
    /// If a backward pass had its gradient, which is on its way: those of a pass are added up, whatever the program does with
    /// them.
    pub fn used(&self, index: usize, path: &str) {
        let state = self.state.lock();
        assert!(
            !state.in_pass || state.recomputes || !state.reduced.contains(&index),
            "parameter `{path}` is used after a backward pass had its gradient, which is on its way to its owner: ZeRO 3 needs \
             steps with one backward pass; nearest legal: ZeRO 2"
        );
    }

    pub fn take_counts(&self) -> Counts {
        std::mem::take(&mut self.state.lock().counts)
    }

    pub fn begin_pass(&self, bases: Vec<Option<Tensor<1>>>, ids: HashSet<ParamId>) {
        self.end_pass();
        let mut state = self.state.lock();
        state.in_pass = true;
        (state.bases, state.ids) = (bases, ids);
        state.forward.begin();
        state.backward.begin();
    }

    /// Waits for all that is on its way. Returns the parameters that are sharded, and by field the means of the gradients
    /// of those that this rank owns.
    pub fn end_pass(&self) -> (HashSet<ParamId>, HashMap<Arc<str>, Tensor<1>>) {
        let mut state = self.state.lock();
        state.in_pass = false;
        state.is_backward = false;
        state.bases.clear();
        state.reduced.clear();
        state.forget_coming();
        let means = state.leaving.finish(&self.owned);
        (std::mem::take(&mut state.ids), means)
    }

    /// The value of parameter `index`, flat. `base` gives what this rank holds: the value, or one element of its type and
    /// device. A collective.
    pub fn whole(&self, index: usize, base: impl FnOnce() -> Tensor<1>, backward: bool) -> Tensor<1> {
        if self.owned.group.size() == 1 {
            return base();
        }
        let mut state = self.state.lock();
        *(if backward { &mut state.counts.backward } else { &mut state.counts.forward }) += 1;
        if !state.in_pass {
            return self.whole_of(index, base());
        }
        if state.is_backward != backward {
            // A block that runs again in a backward pass goes forward in between.
            state.is_backward = backward;
            state.forget_coming();
            state.forward.interrupt();
            state.backward.interrupt();
        }
        let sequence = if backward { &mut state.backward } else { &mut state.forward };
        if !sequence.follow(index) {
            state.forget_coming();
        }
        let value = match state.coming.pop_front() {
            Some((came, value)) => {
                debug_assert_eq!(came, index);
                value.wait()
            }
            None => self.start(index, base(), true).wait(),
        };
        let sequence = if backward { &mut state.backward } else { &mut state.forward };
        let unit = |index: usize| self.owned.unit(index);
        let ahead = sequence.ahead(unit);
        for of_unit in ahead.chunk_by(|a, b| unit(*a) == unit(*b)) {
            let base =
                |index: &usize| state.bases[*index].clone().expect("a module is sharded as long as it is trained");
            let coming = self.start_together(of_unit.iter().map(|index| (*index, base(index))).collect(), true);
            state.coming.extend(of_unit.iter().copied().zip(coming));
        }
        value
    }

    /// What the owner of parameter `index` gives as `base`, flat, on every rank: something of the parameter's size that is not its
    /// value in a pass. A collective, which is not counted.
    pub fn whole_of(&self, index: usize, base: Tensor<1>) -> Tensor<1> {
        if self.owned.group.size() == 1 { base } else { self.start(index, base, false).wait() }
    }

    /// The mean of the members' gradients of parameter `index`, in the field `path`, on its owner; of the others, something to throw away. `None`
    /// in a pass, which gives it at its [end](Self::end_pass). With `None`, of a parameter that is whole everywhere. A
    /// collective.
    pub fn reduce(&self, index: Option<usize>, path: &Arc<str>, gradient: Tensor<1>) -> Option<Tensor<1>> {
        if self.owned.group.size() == 1 {
            return Some(gradient);
        }
        let mut state = self.state.lock();
        let Some(index) = index else {
            if state.in_pass {
                return Some(gradient);
            }
            let size = self.owned.group.size() as f64;
            return Some(collective::all_reduce(gradient, ReduceOp::Sum, &self.owned.group).div_scalar(size));
        };
        state.counts.reduced += 1;
        if state.in_pass {
            state.reduced.insert(index);
            state.leaving.add((index, path.clone()), gradient, &self.owned);
            return None;
        }
        let (mean, pending) = self.owned.start_means(vec![(index, gradient)]).remove(0);
        pending.wait();
        Some(mean)
    }

    /// Starts to bring the value of parameter `index`, to compute with it or as it is.
    fn start(&self, index: usize, base: Tensor<1>, to_compute: bool) -> Coming {
        self.start_together(vec![(index, base)], to_compute).remove(0)
    }

    /// [`start`](Self::start) of several parameters, on a logical device by one operation.
    #[cfg_attr(not(feature = "decorator"), allow(unused_variables, reason = "no device computes in half precision"))]
    fn start_together(&self, uses: Vec<(usize, Tensor<1>)>, to_compute: bool) -> Vec<Coming> {
        let (indices, bases): (Vec<usize>, Vec<Tensor<1>>) = uses.into_iter().unzip();
        #[cfg(feature = "decorator")]
        let bases: Vec<Tensor<1>> = {
            let held = indices.iter().zip(bases).map(|(&index, tensor)| {
                let Gathered { owner, length, is_matrix, .. } = self.owned.params[index];
                Held { tensor, length, what: Collective::Broadcast(owner), for_gemms: to_compute && is_matrix }
            });
            match async_collectives::begin(held.collect(), false, &self.owned.group) {
                Ok((values, work)) => {
                    let pending = || Pending::Logical(work.clone());
                    return values.into_iter().map(|value| Coming { value, pending: pending() }).collect();
                }
                Err(held) => held.into_iter().map(|held| held.tensor).collect(),
            }
        };
        indices.into_iter().zip(bases).map(|(index, base)| self.start_alone(index, base)).collect()
    }

    fn start_alone(&self, index: usize, base: Tensor<1>) -> Coming {
        let param = &self.owned.params[index];
        let own = self.is_owner(index);
        #[cfg(feature = "cuda")]
        if overlap::has_device_link(&self.owned.group, &base.device()) {
            let value = if own { base } else { Tensor::empty([param.length], (&base.device(), base.dtype())) };
            let pending = overlap::broadcast_in_place(&value, param.owner, &self.owned.group);
            return Coming { value, pending: Pending::Gpu(pending) };
        }
        let value = if own { base } else { base.expand([param.length]) };
        Coming { value: collective::broadcast(value, param.owner, &self.owned.group), pending: Pending::Done }
    }
}
