//! One rank's end of the reductions of a module's gradients: each bucket starts as soon as its gradients are there.

use std::fmt;

use burn::tensor::Tensor;
use parking_lot::Mutex;

use super::buckets::{Bucket, Reduced, Started, buckets};
use crate::gradients::flat::{FlatGrad, used_anywhere};
#[cfg(feature = "decorator")]
use crate::mesh_backend::async_collectives::{self, Held};
use crate::pending::Pending;
use ranks::collective;
#[cfg(feature = "decorator")]
use ranks::collective_ops::Collective;
use ranks::comm::{Group, ReduceOp};
#[cfg(feature = "cuda")]
use ranks::overlap;

/// What a user may call one after the other.
const ORDER: &str = "begin_pass, the forward pass, pause, resume, the backward pass, pause, end_pass";

/// How many buckets were reduced since the last call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// During backward passes.
    pub during: usize,
    /// After them: those with a parameter that this rank did not use.
    pub after: usize,
}

/// A field of a module that holds a parameter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field {
    /// The parameter.
    pub index: usize,
    /// Its place among all fields.
    pub at: usize,
}

pub(super) struct Reducing {
    paths: Vec<String>,
    params: Vec<Reduced>,
    group: Group,
    /// Bytes of a bucket.
    limit: usize,
    state: Mutex<State>,
}

struct State {
    /// From the beginning of a pass to its end.
    is_in_pass: bool,
    /// Whether gradients of this pass are reduced.
    is_on: bool,
    /// By parameter; those of earlier passes, and of this one once it has them all.
    grads: Vec<FlatGrad>,
    /// By parameter, of this pass.
    uses: Vec<Uses>,
    /// Parameters in the order in which this pass had their gradients.
    order: Vec<usize>,
    /// Whether the buckets follow the order of a pass.
    is_learned: bool,
    buckets: Vec<Bucket>,
    started: Vec<Started>,
    counts: Counts,
}

/// The uses of a parameter in a pass.
#[derive(Clone, Default)]
struct Uses {
    /// Without a gradient so far.
    pending: usize,
    /// Of the last field with a gradient, as in Burn's `GradientsParams::from_grads`, and its place.
    sum: Option<(usize, Tensor<1>)>,
    is_complete: bool,
}

impl fmt::Debug for Reducing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reducing({} parameters over {:?})", self.params.len(), self.group)
    }
}

impl Reducing {
    pub fn new(paths: Vec<String>, params: Vec<Reduced>, group: Group, limit: usize) -> Self {
        // Until it is known better: the last layer is the first to have gradients.
        let order: Vec<usize> = (0..params.len()).rev().collect();
        let state = State {
            is_in_pass: false,
            is_on: false,
            grads: Vec::new(),
            uses: Vec::new(),
            order: Vec::new(),
            is_learned: false,
            buckets: buckets(&params, &order, limit),
            started: Vec::new(),
            counts: Counts::default(),
        };
        Self { paths, params, group, limit, state: Mutex::new(state) }
    }

    pub fn path(&self, index: usize) -> &str {
        &self.paths[index]
    }

    /// Whether gradients are reduced now.
    pub fn is_on(&self) -> bool {
        self.state.lock().is_on
    }

    pub fn take_counts(&self) -> Counts {
        std::mem::take(&mut self.state.lock().counts)
    }

    /// Begins a pass whose gradients are added to `grads`, one for each parameter.
    pub fn begin(&self, grads: Vec<FlatGrad>) {
        let mut state = self.state.lock();
        (state.is_in_pass, state.is_on) = (true, true);
        state.uses = vec![Uses::default(); grads.len()];
        state.grads = grads;
        state.order.clear();
        state.started.clear();
    }

    /// Until [`resume`](Self::resume) or [`end`](Self::end) parameters are used without a hook.
    pub fn pause(&self) {
        self.state.lock().is_on = false;
    }

    /// Begins the backward pass, whose gradients are added to those of `earlier`, one for each parameter.
    pub fn resume(&self, earlier: Vec<FlatGrad>) {
        let mut state = self.state.lock();
        let state = &mut *state;
        assert!(
            state.is_in_pass,
            "gradients of earlier micro-batches would be lost outside of a pass; nearest legal: {ORDER}"
        );
        let has_left = self.has_left(state);
        state.is_on = true;
        let added = state.grads.iter_mut().zip(earlier).enumerate().filter(|(_, (_, earlier))| earlier.is_used());
        for (index, (grad, earlier)) in added {
            assert!(
                !has_left[index],
                "gradients of earlier micro-batches of parameter `{}` come after its sum has left, and would be lost; nearest \
                 legal: {ORDER}",
                self.paths[index]
            );
            grad.add(earlier.value());
        }
    }

    /// The forward pass uses a parameter.
    pub fn used(&self, index: usize) {
        let uses = &mut self.state.lock().uses[index];
        assert!(
            !uses.is_complete,
            "parameter `{}` is used after a backward pass had its gradient, which may be reduced: gradients that are reduced \
             during the backward pass need steps with one backward pass; nearest legal: without overlap",
            self.paths[index]
        );
        uses.pending += 1;
    }

    /// The backward pass has the gradient of a use. A collective, if a bucket has all gradients then.
    pub fn arrived(&self, field: Field, grad: Tensor<1>) {
        let index = field.index;
        let mut state = self.state.lock();
        assert!(state.is_on, "the gradient of `{}` comes after the end of its pass", self.paths[index]);
        let uses = &mut state.uses[index];
        uses.pending -= 1;
        uses.sum = Some(match uses.sum.take() {
            Some((at, sum)) if at == field.at => (at, sum + grad),
            Some(later) if later.0 > field.at => later,
            _ => (field.at, grad),
        });
        if uses.pending > 0 {
            return;
        }
        uses.is_complete = true;
        let (_, sum) = uses.sum.take().expect("it has just come");
        state.grads[index].add(sum);
        state.order.push(index);
        // In their order, which is that of all ranks.
        while let Some(bucket) = state.buckets.get(state.started.len())
            && bucket.members.iter().all(|member| state.uses[*member].is_complete)
        {
            self.start(&mut state);
            state.counts.during += 1;
        }
    }

    /// Ends a pass: reduces what is left, with the gradients `others` that came another way, and waits. The means that this
    /// rank gets, by parameter.
    pub fn end(&self, others: Vec<FlatGrad>) -> Vec<(usize, Tensor<1>)> {
        let mut state = self.state.lock();
        let state = &mut *state;
        assert!(state.is_in_pass, "a pass ends that was not begun; nearest legal: {ORDER}");
        (state.is_in_pass, state.is_on) = (false, false);
        let has_left = self.has_left(state);
        for (index, ((grad, uses), other)) in state.grads.iter_mut().zip(&mut state.uses).zip(others).enumerate() {
            // Of a use that no gradient reached, and of a parameter without a hook.
            let left = uses.sum.take().map(|(_, sum)| sum).into_iter().chain(other.is_used().then(|| other.value()));
            left.for_each(|left| {
                assert!(
                    !has_left[index],
                    "parameter `{}` has one more gradient after its sum has left: it is used outside of the pass, without \
                     `Param::val()`, or in parts of a pipeline that do not own it; nearest legal: `param.val()`, Part::Shared, or \
                     without overlap",
                    self.paths[index]
                );
                grad.add(left);
            });
        }
        let used = state.grads.iter().zip(&state.uses).map(|(grad, uses)| uses.is_complete || grad.is_used()).collect();
        while state.started.len() < state.buckets.len() {
            self.start(state);
            state.counts.after += 1;
        }
        let used = used_anywhere(used, &self.group);
        let mut means = Vec::new();
        for (bucket, started) in state.buckets.iter().zip(std::mem::take(&mut state.started)) {
            let lengths: Vec<usize> = bucket.members.iter().map(|&index| self.params[index].length).collect();
            let of_members = started.wait(&lengths);
            if bucket.owner.is_some_and(|owner| owner != self.group.rank()) {
                continue;
            }
            means.extend(bucket.members.iter().copied().zip(of_members).filter(|(index, _)| used[*index]));
        }
        self.learn(state);
        means
    }

    /// By parameter, whether the sum of its gradients is on its way.
    fn has_left(&self, state: &State) -> Vec<bool> {
        let mut has_left = vec![false; self.params.len()];
        for bucket in &state.buckets[..state.started.len()] {
            bucket.members.iter().for_each(|member| has_left[*member] = true);
        }
        has_left
    }

    /// From the first pass on buckets are those of its order on the first rank.
    fn learn(&self, state: &mut State) {
        if std::mem::replace(&mut state.is_learned, true) {
            return;
        }
        let mut order = std::mem::take(&mut state.order);
        let rest: Vec<usize> = (0..self.params.len()).rev().filter(|index| !order.contains(index)).collect();
        order.extend(rest);
        let order = self.group.broadcast_host((self.group.rank() == 0).then_some(order), 0);
        state.buckets = buckets(&self.params, &order, self.limit);
    }

    /// Starts the next bucket.
    fn start(&self, state: &mut State) {
        let Bucket { owner, members } = &state.buckets[state.started.len()];
        let values = members.iter().map(|index| state.grads[*index].take()).collect();
        let started = self.reduce(values, *owner);
        state.started.push(started);
    }

    fn reduce(&self, values: Vec<Tensor<1>>, owner: Option<usize>) -> Started {
        let ranks = self.group.size();
        #[cfg(feature = "decorator")]
        let values = {
            let what = owner.map_or(Collective::AllReduce(ReduceOp::Sum), Collective::Reduce);
            let held =
                |tensor: Tensor<1>| Held { length: tensor.dims()[0], tensor, what: what.clone(), for_gemms: false };
            match async_collectives::begin(values.into_iter().map(held).collect(), true, &self.group) {
                Ok((means, work)) => {
                    return Started { sums: means, ranks: 1, pending: Pending::Logical(work) };
                }
                Err(held) => held.into_iter().map(|held| held.tensor).collect(),
            }
        };
        let buffer = Tensor::cat(values, 0);
        #[cfg(feature = "cuda")]
        if overlap::has_device_link(&self.group, &buffer.device()) {
            let (pending, ranks) = match owner {
                Some(owner) => (overlap::reduce_mean_into(&buffer, &buffer, owner, &self.group), 1),
                None => (overlap::all_reduce_in_place(&buffer, &self.group), ranks),
            };
            return Started { sums: vec![buffer], ranks, pending: Pending::Gpu(pending) };
        }
        let buffer = match owner {
            Some(owner) => collective::reduce(buffer, owner, &self.group),
            None => collective::all_reduce(buffer, ReduceOp::Sum, &self.group),
        };
        Started { sums: vec![buffer], ranks, pending: Pending::Done }
    }
}
