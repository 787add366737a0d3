//! The main gradients of one bucket, from the first contribution of a step to the sum over the replicas.

use super::flat::Flat;
use super::layout::Layout;
use backend_dist::comm::Group;
use backend_dist::memory::{Kind, OfKind};
use burn::tensor::{DType, Device, Tensor};

/// Raw sums, in the wide type. Two buffers that are rarely there together: the whole bucket while gradients come in,
/// and this rank's part of the sum over the replicas.
///
/// | ZeRO | whole bucket | part |
/// |---|---|---|
/// | 0 | always; sum of the rank, then of all | never |
/// | 1 | from the first contribution of a step to its reduction | from the reduction to the next step |
/// | 2, 3 | during the backward pass of the bucket | always; sum over micro-batches of sums over replicas |
pub(super) struct Grads {
    zero: u8,
    device: Device,
    dtype: DType,
    whole: Option<Flat>,
    /// By parameter: the next contribution replaces what is there.
    fresh: Vec<bool>,
    part: Option<Flat>,
    /// The next sum over replicas replaces what is there.
    part_fresh: bool,
}

impl Grads {
    /// Nothing yet. `dtype` is the wide type.
    pub fn new(layout: &Layout, zero: u8, device: &Device, dtype: DType) -> Self {
        let _kind = OfKind::begin(Kind::Gradients);
        let part = (zero >= 2).then(|| Flat::zeros(layout.len / layout.replicas(), device, dtype));
        let fresh = vec![true; layout.slots.len()];
        Self { zero, device: device.clone(), dtype, whole: None, fresh, part, part_fresh: true }
    }

    /// Adds the flat gradient of one parameter.
    pub fn add(&mut self, layout: &Layout, slot: usize, grad: Tensor<1>) {
        let starts = self.fresh.iter().all(|fresh| *fresh);
        self.start(layout, starts);
        let whole = self.whole.as_mut().expect("a sum was started");
        let at = layout.slots[slot].range.start;
        if std::mem::take(&mut self.fresh[slot]) {
            whole.put(at, grad);
        } else {
            whole.add(at, grad);
        }
    }

    /// Makes sure that there is a buffer for the whole bucket; `anew` if nothing in it is needed.
    fn start(&mut self, layout: &Layout, anew: bool) {
        if self.zero == 1 {
            self.part = None;
        }
        // Writing to storage that peers hold too would copy what is replaced anyway.
        if self.whole.as_mut().is_none_or(|whole| anew && whole.is_shared()) {
            self.whole = None;
            let _kind = OfKind::begin(Kind::Gradients);
            self.whole = Some(Flat::zeros(layout.len, &self.device, self.dtype));
        }
    }

    /// The whole bucket; parameters without a contribution have none, whatever the buffer held.
    fn settled(&mut self, layout: &Layout) -> &mut Flat {
        self.start(layout, false);
        let whole = self.whole.as_mut().expect("a sum was started");
        for (fresh, slot) in self.fresh.iter_mut().zip(&layout.slots) {
            if std::mem::take(fresh) {
                whole.clear(slot.range.clone());
            }
        }
        whole
    }

    /// Ends a micro-batch: ZeRO 2 and 3 sum it over the replicas and keep their part.
    pub fn complete(&mut self, layout: &Layout, replicas: &Group) {
        if self.zero < 2 {
            return;
        }
        self.settled(layout);
        self.fresh.fill(true);
        let _kind = OfKind::begin(Kind::Gradients);
        let sum = self.whole.take().expect("it is settled").reduce_scatter(replicas);
        match &mut self.part {
            Some(part) if !self.part_fresh => part.add(0, sum.into_tensor()),
            part => *part = Some(sum),
        }
        self.part_fresh = false;
    }

    /// Ends the micro-batches of a step: ZeRO 0 and 1 sum over the replicas.
    pub fn reduce(&mut self, layout: &Layout, replicas: &Group) {
        let _kind = OfKind::begin(Kind::Gradients);
        match self.zero {
            0 => self.settled(layout).all_reduce(replicas),
            1 => {
                self.settled(layout);
                self.fresh.fill(true);
                self.part = self.whole.take().map(|whole| whole.reduce_scatter(replicas));
            }
            _ => {
                if std::mem::take(&mut self.part_fresh) {
                    let part = self.part.as_mut().expect("ZeRO 2 and 3 keep their part");
                    part.clear(0..part.len());
                }
            }
        }
    }

    /// The next contributions start a new sum; until then the old one can be read.
    pub fn forget(&mut self) {
        self.fresh.fill(true);
        self.part_fresh = true;
    }

    /// What the rank keeps of the sum over the replicas: everything under ZeRO 0, else its shard.
    ///
    /// # Panics
    /// If nothing was reduced yet.
    pub fn sum(&self) -> &Flat {
        let sum = if self.zero == 0 { &self.whole } else { &self.part };
        sum.as_ref().expect("gradients are used after they were reduced")
    }

    /// [`Grads::sum`], to complete it.
    pub fn sum_mut(&mut self) -> &mut Flat {
        let sum = if self.zero == 0 { &mut self.whole } else { &mut self.part };
        sum.as_mut().expect("gradients are used after they were reduced")
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
