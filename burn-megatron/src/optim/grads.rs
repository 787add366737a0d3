//! The main gradients of one bucket, from the first contribution of a step to the sum over the data-parallel ranks.

use super::flat::Flat;
use super::layout::{Layout, Slot};
use super::sharding::Sharding;
use backend_dist::buffer_collectives::{Wait, all_reduce, reduce_scatter};
use backend_dist::comm::Group;
use backend_dist::gpu::buffer::Buffer;
use backend_dist::ops::main_grads::MainGrad;
use burn::tensor::{DType, Device, Tensor};
use std::cell::RefCell;
use std::ops::Range;

/// Raw sums, in fp32, fp64 or bf16. Two buffers that rarely exist together: the whole bucket while gradients are added, and this
/// rank's shard of the sum over the data-parallel ranks.
///
/// | ZeRO | whole bucket | shard |
/// |---|---|---|
/// | 0 | always; sum of the rank, then of all | never |
/// | 1 | from the first contribution of a step to its reduction | from the reduction to the next step |
/// | 2, 3 | during the backward pass of the bucket | always; sum over micro-batches of sums over data-parallel ranks |
///
/// With hybrid sharding these sums are over the ranks of a group, and the ranks that hold the same shard add theirs up
/// once per step.
///
/// On GPUs the whole bucket is there for good under ZeRO 0 and 1, and the shard is a view of it. Backward passes add to
/// the whole bucket themselves (`backend_dist::ops::main_grads`), and sums over data-parallel ranks overlap with them until somebody
/// needs the result.
pub(super) struct Grads {
    zero: u8,
    device: Device,
    dtype: DType,
    whole: Option<Flat>,
    /// By parameter: the next contribution replaces what is there.
    fresh: Vec<bool>,
    part: Option<Flat>,
    /// The next sum over data-parallel ranks replaces what is there.
    part_fresh: bool,
    /// By parameter: where backward passes write to. Empty where they do not.
    places: Vec<MainGrad>,
    running: RefCell<Option<Running>>,
}

/// A sum over data-parallel ranks in flight.
enum Running {
    /// Into the shard, or into a buffer that is then added to it. Then the ranks that hold the same shard sum it, if they are to.
    Scatter(Wait, Option<Box<Buffer>>, Option<Box<Group>>),
    /// Of what the rank keeps.
    Sum(Wait),
}

impl Grads {
    /// Empty. `dtype` is fp32, fp64 or bf16, `region` what this rank updates.
    pub fn new(layout: &Layout, region: &Range<usize>, zero: u8, device: &Device, dtype: DType) -> Self {
        let buffer = if zero < 2 { Buffer::zeros(layout.len, device, dtype) } else { None };
        let places = buffer.as_ref().map(|buffer| places(layout, buffer)).unwrap_or_default();
        let part = match zero {
            0 => None,
            1 => buffer.as_ref().map(|buffer| Flat::over(buffer.part(region.clone()), dtype, region.len())),
            _ => Some(Flat::zeros(region.len(), device, dtype)),
        };
        let whole = buffer.map(|buffer| Flat::whole(buffer, dtype, layout.len));
        let fresh = vec![true; layout.slots.len()];
        let running = RefCell::new(None);
        Self { zero, device: device.clone(), dtype, whole, fresh, part, part_fresh: true, places, running }
    }

    /// By parameter, where backward passes write to; empty where gradients are added by [`Grads::add`] only.
    pub fn places(&self) -> &[MainGrad] {
        &self.places
    }

    /// Under ZeRO 2 and 3 there are places from here to [`Grads::complete`].
    pub fn open(&mut self, layout: &Layout) {
        if self.places.is_empty() && self.part.as_ref().is_some_and(|part| part.buffer().is_some()) {
            self.start(layout, false);
            self.places = self.whole.as_ref().and_then(Flat::buffer).map(|b| places(layout, b)).unwrap_or_default();
            for (place, _) in self.places.iter().zip(&self.fresh).filter(|(_, fresh)| !**fresh) {
                place.mark_written();
            }
        }
    }

    /// Whether no gradient of this parameter has been added yet.
    fn is_fresh(&self, slot: usize) -> bool {
        self.fresh[slot] && self.places.get(slot).is_none_or(|place| !place.is_written())
    }

    /// Notes whether a gradient of this parameter has been added.
    fn note(&mut self, slot: usize, fresh: bool) {
        self.fresh[slot] = fresh;
        if let Some(place) = self.places.get(slot) {
            if fresh { place.reset() } else { place.mark_written() }
        }
    }

    /// Adds the flat gradient of one parameter.
    pub fn add(&mut self, layout: &Layout, slot: usize, grad: Tensor<1>) {
        let starts = self.fresh.iter().all(|fresh| *fresh);
        self.start(layout, starts);
        let fresh = self.is_fresh(slot);
        let whole = self.whole.as_mut().expect("a sum was started");
        let at = layout.slots[slot].range.start;
        if fresh {
            whole.put(at, grad);
        } else {
            whole.add(at, grad);
        }
        self.note(slot, false);
    }

    /// Makes sure that there is a buffer for the whole bucket; `anew` if nothing in it is needed.
    fn start(&mut self, layout: &Layout, anew: bool) {
        if self.zero == 1 && self.places.is_empty() {
            self.part = None;
        }
        // Writing to storage that peers hold too would copy what is replaced anyway.
        if self.whole.as_mut().is_none_or(|whole| anew && whole.is_shared()) {
            self.whole = None;
            self.whole = Some(Flat::zeros(layout.len, &self.device, self.dtype));
        }
    }

    /// The whole bucket; parameters without a contribution have none, whatever the buffer held.
    fn settled(&mut self, layout: &Layout) -> &mut Flat {
        self.start(layout, false);
        for (slot, Slot { range, .. }) in layout.slots.iter().enumerate() {
            if self.is_fresh(slot) {
                self.whole.as_mut().expect("a sum was started").clear(range.clone());
            }
            self.note(slot, false);
        }
        self.whole.as_mut().expect("a sum was started")
    }

    /// The next contributions replace what is there.
    fn renew(&mut self) {
        (0..self.fresh.len()).for_each(|slot| self.note(slot, true));
    }

    /// Ends a micro-batch: ZeRO 2 and 3 reduce it over the data-parallel ranks and keep their shard.
    pub fn complete(&mut self, layout: &Layout, region: &Range<usize>, Sharding { shards, .. }: &Sharding) {
        if self.zero < 2 {
            return;
        }
        self.settled(layout);
        self.renew();
        self.places.clear();
        self.wait();
        let whole = self.whole.take().expect("it is settled");
        let first = std::mem::take(&mut self.part_fresh);
        let part = self.part.as_mut().expect("ZeRO 2 and 3 keep their part");
        match (whole.buffer(), part.buffer()) {
            (Some(whole), Some(part)) if first => {
                self.running = Some(Running::Scatter(reduce_scatter(whole, part, shards), None, None)).into()
            }
            (Some(whole), Some(_)) => {
                let own = whole.part(region.clone());
                let scatter = reduce_scatter(whole, &own, shards);
                self.running = Some(Running::Scatter(scatter, Some(Box::new(own)), None)).into();
            }
            _ if first => *part = whole.reduce_scatter(shards),
            _ => part.add(0, whole.reduce_scatter(shards).into_tensor()),
        }
    }

    /// Ends the micro-batches of a step: ZeRO 0 and 1 sum over the data-parallel ranks, and then those
    /// that hold the same shard sum it.
    pub fn reduce(&mut self, layout: &Layout, Sharding { shards, same_shard, .. }: &Sharding) {
        match self.zero {
            0 => {
                let whole = self.settled(layout);
                match whole.buffer() {
                    Some(buffer) => self.running = Some(Running::Sum(all_reduce(buffer, same_shard))).into(),
                    None => whole.all_reduce(same_shard),
                }
                return;
            }
            1 => {
                self.settled(layout);
                self.renew();
                let whole = self.whole.take().expect("it is settled");
                match (whole.buffer(), self.part.as_ref().and_then(Flat::buffer)) {
                    (Some(buffer), Some(part)) => {
                        self.running = Some(Running::Scatter(reduce_scatter(buffer, part, shards), None, None)).into();
                        self.whole = Some(whole);
                    }
                    _ => self.part = Some(whole.reduce_scatter(shards)),
                }
            }
            _ => {
                if std::mem::take(&mut self.part_fresh) {
                    let part = self.part.as_mut().expect("ZeRO 2 and 3 keep their part");
                    part.clear(0..part.len());
                }
            }
        }
        if same_shard.size() > 1 {
            self.sum_same_shard(same_shard);
        }
    }

    /// Sums the shard over the ranks that hold the same, after a running reduce-scatter.
    fn sum_same_shard(&mut self, same_shard: &Group) {
        if let Some(Running::Scatter(_, _, then)) = self.running.get_mut() {
            *then = Some(Box::new(same_shard.clone()));
            return;
        }
        let part = self.part.as_mut().expect("a reduction leaves the shard");
        match part.buffer() {
            Some(buffer) => self.running = Some(Running::Sum(all_reduce(buffer, same_shard))).into(),
            None => part.all_reduce(same_shard),
        }
    }

    /// Lets the thread's stream wait for a running reduce-scatter, and starts what follows it.
    pub fn end_scatter(&self) {
        let mut running = self.running.borrow_mut();
        let (wait, own, then) = match running.take() {
            Some(Running::Scatter(wait, own, then)) => (wait, own, then),
            other => return *running = other,
        };
        wait.wait();
        let Some(part) = self.part.as_ref().and_then(Flat::buffer) else { return };
        own.into_iter().for_each(|own| part.add(0, own.tensor()));
        *running = then.map(|same_shard| Running::Sum(all_reduce(part, &same_shard)));
    }

    /// Lets the thread's stream wait for a running sum over the data-parallel ranks.
    pub fn wait(&self) {
        self.end_scatter();
        if let Some(Running::Sum(wait)) = self.running.take() {
            wait.wait();
        }
    }

    /// The next contributions start a new sum; until then the old one can be read.
    pub fn forget(&mut self) {
        self.wait();
        self.renew();
        self.part_fresh = true;
    }

    /// What the rank keeps of the sum over the data-parallel ranks: everything under ZeRO 0, else its shard. Panics if
    /// nothing was reduced yet.
    pub fn sum(&self) -> &Flat {
        self.wait();
        let sum = if self.zero == 0 { &self.whole } else { &self.part };
        sum.as_ref().expect("gradients are used after they were reduced")
    }

    /// [`Grads::sum`], to complete it.
    pub fn sum_mut(&mut self) -> &mut Flat {
        self.wait();
        let sum = if self.zero == 0 { &mut self.whole } else { &mut self.part };
        sum.as_mut().expect("gradients are used after they were reduced")
    }

    /// The GPU memory of [`Grads::sum`].
    pub fn buffer(&self) -> Option<&Buffer> {
        let sum = if self.zero == 0 { &self.whole } else { &self.part };
        sum.as_ref().and_then(Flat::buffer)
    }

    /// Puts a sum in place, as a reduction would.
    #[cfg(test)]
    pub fn replace(&mut self, sum: Flat) {
        self.whole = Some(sum);
    }

    pub fn bytes(&self) -> u64 {
        [&self.whole, &self.part].into_iter().flatten().map(Flat::bytes).sum()
    }
}

/// The parameters' elements of a buffer for the whole bucket.
fn places(layout: &Layout, buffer: &Buffer) -> Vec<MainGrad> {
    layout.slots.iter().map(|slot| MainGrad::new(buffer.part(slot.range.clone()).tensor())).collect()
}
