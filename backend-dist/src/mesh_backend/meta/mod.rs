//! A device whose tensors have no data, as PyTorch's meta device. It plans every operation as a logical device does and
//! counts what a rank would keep, compute and send.

mod kinds;
mod placing;
mod storage;
mod views;

use super::report::{Count, Report};
use super::{across::Across, command::Command, ids::ById, interpreter::Interpret};
use crate::logical::Placement::{self, Replicate};
use crate::logical::rules::Completion;
use crate::logical::{Homes, MeshAxis, TensorState, plan};
use burn::backend::{DTypeUsageSet, ExecutionError, Flex};
use burn::tensor::{DType, TensorData};
use burn_ir::{FloatOperationIr, NumericOperationIr, OperationIr, TensorId, TensorIr, TensorStatus};
use burn_router::TensorInterpreter;
use burn_std::future::DynFut;
use kinds::{flops, is_view, keeps_half, makes_half, writes_strides};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use storage::{Share, Storage, size};

/// What a rank has kept, computed and sent on a [meta device](super::MetaDevice).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counts {
    /// Bytes of the tensors that exist.
    pub live: u64,
    /// The most bytes that existed at a time.
    pub peak: u64,
    /// Floating-point operations of GEMMs, convolutions and attention.
    pub flops: f64,
    /// Bytes that all other operations read and write, each alone.
    pub moved: u64,
    /// Number of operations that compute or move bytes.
    pub operations: usize,
    /// Tensors that a collective moved, by the collective's name; bytes are those of the whole tensor.
    pub collectives: BTreeMap<&'static str, Count>,
}

/// The counts of a device, which the device and who asks share.
pub(super) type Shared = Arc<Mutex<Counts>>;

/// What is known of a tensor.
struct Kept {
    state: TensorState,
    share: Share,
    /// The same tensor in other placements.
    copies: Vec<(Vec<Placement>, Share)>,
    /// The tensor that this is a view of.
    source: Option<TensorIr>,
}

/// The first id of tensors that only the rank knows; those of programs are below.
const OWN_IDS: u64 = 1 << 62;

/// Counts instead of running operations.
pub(super) struct Meta {
    axes: Vec<MeshAxis>,
    homes: Homes,
    /// With autocast, what follows from GEMMs alone is stored in half precision.
    has_autocast: bool,
    table: ById<Kept>,
    storages: HashMap<u64, Storage>,
    next: u64,
    counts: Shared,
    flex: TensorInterpreter<Flex>,
}

impl Meta {
    pub fn new(axes: Vec<MeshAxis>, is_sequence_parallel: bool, has_autocast: bool) -> Self {
        Self {
            axes,
            homes: Homes::default().with_sequence(is_sequence_parallel),
            has_autocast,
            table: ById::default(),
            storages: HashMap::new(),
            next: OWN_IDS,
            counts: Shared::default(),
            flex: TensorInterpreter::new(Default::default()),
        }
    }

    pub fn counts(&self) -> Shared {
        self.counts.clone()
    }

    fn forget(&mut self, id: TensorId) {
        if let Some(kept) = self.table.remove(&id) {
            let copies = kept.copies.into_iter().map(|(_, copy)| copy);
            [kept.share].into_iter().chain(copies).for_each(|share| self.release(share));
        }
    }

    fn keep(&mut self, id: TensorId, state: TensorState, share: Share) {
        self.table.insert(id, Kept { state, share, copies: Vec::new(), source: None });
    }

    fn replicated(&self) -> TensorState {
        TensorState { at: vec![Replicate; self.axes.len()], weight: false }
    }

    /// A tensor that no operation has made, whole on every rank.
    fn fill(&mut self, x: &TensorIr) {
        let state = self.replicated();
        let bytes = self.bytes_of(x, &state.at, false);
        let storage = self.allocate(bytes);
        self.count().moved += bytes;
        self.keep(x.id, state, Share { storage, is_strided: false, is_half: false });
    }

    fn run_planned(&mut self, op: &OperationIr) {
        let plan = plan(op, |id| &self.table[&id].state, |_| false, &self.axes, &self.homes);
        self.homes.note(op, |id| &self.table[&id].state, &plan);
        let inputs: Vec<TensorIr> = op.inputs().cloned().collect();
        let mut placed: Vec<(TensorId, Share, bool)> = Vec::new();
        for x in &inputs {
            if placed.iter().all(|(id, ..)| *id != x.id) {
                let (share, is_temporary) = self.place(x, &plan.inputs[x.id].clone());
                placed.push((x.id, share, is_temporary));
            }
        }
        let floats = inputs.iter().filter(|x| x.dtype.is_float());
        let halves = floats.map(|x| placed.iter().any(|(id, share, _)| *id == x.id && share.is_half));
        let (are_half, any): (bool, usize) = halves.fold((true, 0), |(all, count), half| (all && half, count + 1));
        let is_half = self.has_autocast && (makes_half(op) || (keeps_half(op) && are_half && any > 0));
        let outputs: Vec<TensorIr> = plan.local.outputs().cloned().collect();
        let local = |x: &TensorIr, is_half| x.shape.num_elements() as u64 * size(x.dtype, is_half);
        let source = placed.first().map(|(_, share, _)| *share);
        let viewed = source.filter(|share| is_view(op) && !(share.is_strided && writes_strides(op)));
        if viewed.is_none() {
            let read: u64 = plan.local.inputs().map(|x| local(x, false)).sum();
            let written: u64 = outputs.iter().map(|x| local(x, is_half)).sum();
            let (mut counts, flops) = (self.count(), flops(&plan.local));
            counts.moved += if flops > 0.0 { 0 } else { read + written };
            counts.flops += flops;
            counts.operations += 1;
        }
        let mut made = Vec::new();
        for out in &outputs {
            let is_half = is_half && out.dtype == DType::F32;
            let share = match viewed {
                Some(share) => Share { is_strided: share.is_strided || !writes_strides(op), ..self.share(share) },
                None => match self.in_place(op, &inputs, local(out, is_half)) {
                    Some(share) => Share { is_half, ..self.share(share) },
                    None => Share { storage: self.allocate(local(out, is_half)), is_strided: false, is_half },
                },
            };
            made.push((out.id, share));
        }
        for ((id, share), (_, state)) in made.into_iter().zip(plan.outputs) {
            self.keep(id, state, share);
        }
        if viewed.is_some() {
            let out = op.outputs().next().expect("a view is a tensor");
            self.link_view(&inputs[0], out);
        }
        for (id, share, is_temporary) in placed {
            if is_temporary {
                self.release(share);
            }
            if inputs.iter().any(|x| x.id == id && x.status == TensorStatus::ReadWrite) {
                self.forget(id);
            }
        }
        if let Some((_, Completion::Max | Completion::Min)) = plan.completion {
            let bytes = outputs.iter().map(|x| local(x, is_half) as usize).sum();
            self.count().collectives.entry("all-reduce").or_default().add(bytes);
        }
        let of_embedding = self.axes.first().and_then(|axis| self.homes.of_embedding(op, axis.ranks));
        if let Some((out, home)) = of_embedding {
            let mut at = self.table[&out.id].state.at.clone();
            at[0] = home;
            self.place_for_good(&out, at);
        }
    }

    fn move_along(&mut self, (axis, to, weight): (usize, Placement, bool), carrier: &OperationIr) {
        let (x, out) = (carrier.inputs().next().cloned(), carrier.outputs().next().map(|out| out.id));
        let (Some(x), Some(out)) = (x, out) else { panic!("a move to {to:?} was carried by {carrier:?}") };
        let mut state = self.table[&x.id].state.clone();
        let from = state.at.clone();
        (state.at[axis], state.weight) = (to, weight);
        let own = self.table[&x.id].share;
        let share = if from == state.at { self.share(own) } else { self.moved(&x, &from, &state.at, own.is_half) };
        if x.status == TensorStatus::ReadWrite {
            self.forget(x.id);
        }
        self.keep(out, state, share);
    }
}

impl Interpret for Meta {
    fn run(&mut self, op: &mut OperationIr, command: Option<Command>) {
        match (&*op, command) {
            (OperationIr::Drop(x), _) => self.forget(x.id),
            (_, Some(Command::Adopt(id))) => {
                let out = op.outputs().next().expect("a carrier makes a tensor").id;
                let kept = self.table.remove(&id).expect("a tensor is adopted once");
                self.table.insert(out, kept);
            }
            (_, Some(Command::Step(step))) => {
                let (inputs, outputs): (Vec<_>, Vec<_>) = (op.inputs().collect(), op.outputs().collect());
                let ([weight, moment_1, moment_2, .., gradient], Ok(outputs)) = (&inputs[..], outputs.try_into())
                else {
                    panic!("{step:?} was carried by {op:?}")
                };
                let inputs = [*weight, *moment_1, *moment_2, *gradient];
                let operations = step.operations(inputs, outputs, || TensorId::new(self.new_number()));
                operations.iter().for_each(|op| self.run_planned(op));
            }
            (_, Some(Command::Move { axis, to, weight })) => self.move_along((axis, to, weight), op),
            (_, Some(Command::Name)) => unreachable!("the client answers that"),
            (
                OperationIr::Float(_, FloatOperationIr::Random(random))
                | OperationIr::NumericInt(_, NumericOperationIr::IntRandom(random)),
                None,
            ) => self.fill(&random.out),
            (_, None) => self.run_planned(op),
        }
    }

    fn drop_tensor(&mut self, id: TensorId) {
        self.forget(id);
    }

    /// Zeros.
    fn read(&mut self, x: TensorIr, _: Option<u64>) -> DynFut<Result<TensorData, ExecutionError>> {
        if x.status == TensorStatus::ReadWrite {
            self.forget(x.id);
        }
        let zeros = TensorData::from_bytes_vec(vec![0; x.shape.num_elements() * x.dtype.size()], x.shape, x.dtype);
        Box::pin(async move { Ok(zeros) })
    }

    fn gather(&mut self, _: TensorIr) {}

    fn register_data(&mut self, id: TensorId, data: TensorData) {
        let (shape, dtype) = (data.shape().clone(), data.dtype());
        self.fill(&TensorIr { id, shape, dtype, status: TensorStatus::NotInit });
    }

    fn across(&mut self, across: Across) -> Box<dyn FnOnce() + Send> {
        for part in across.parts {
            let kept = &self.table[&part.x.id];
            let (state, share) = (kept.state.clone(), kept.share);
            let share = self.share(share);
            self.keep(part.out, state, share);
        }
        Box::new(|| ())
    }

    fn arrived(&mut self, _: &[TensorId]) {}

    fn wait(&mut self, _: TensorId) {}

    fn distributed_since(&self, _: TensorId) -> Vec<TensorIr> {
        Vec::new()
    }

    fn make_whole(&mut self, x: TensorIr) {
        let whole = self.replicated().at;
        self.place_for_good(&x, whole);
    }

    fn alias(&mut self, x: TensorId, out: TensorId, state: TensorState) {
        let share = self.table[&x].share;
        let share = self.share(share);
        self.keep(out, state, share);
    }

    fn seed(&mut self, _: u64) {}

    fn sync(&mut self) -> Result<(), ExecutionError> {
        Ok(())
    }

    fn flush(&mut self) {}

    fn hand_over(&self) {}

    fn dtype_usage(&self, dtype: DType) -> DTypeUsageSet {
        self.flex.dtype_usage(dtype)
    }

    fn report(&self) -> Report {
        let counts = self.count();
        let (operations, collectives) = (counts.operations, counts.collectives.clone());
        Report { operations, tensors: self.table.len(), collectives, ..Report::default() }
    }

    fn states(&self) -> ById<TensorState> {
        self.table.iter().map(|(&id, kept)| (id, kept.state.clone())).collect()
    }
}
