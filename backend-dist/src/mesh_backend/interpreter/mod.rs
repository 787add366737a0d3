//! Runs operations on logical tensors: places the inputs, and lets the inner backend run the rank's share.

mod across;
mod batch_norm;
mod commands;
mod complete;
mod inputs;
mod planned;
mod plans;
mod reads;
mod views;

use super::table::{self, Table};
use super::{
    across::Across, command::Command, executor::Executor, ids::ById, inner::Inner, options::LogicalOptions,
    random::Random, report::Report,
};
use crate::logical::Placement::Replicate;
use crate::logical::{Homes, MeshAxis, TensorState};
use across::Arrivals;
use batch_norm::BatchMeans;
use burn::backend::{DTypeUsageSet, ExecutionError};
use burn::tensor::{DType, Distribution, TensorData};
use burn_ir::{FloatOperationIr, NumericOperationIr, OperationIr, TensorId, TensorIr, TensorStatus};
use burn_std::future::DynFut;
use plans::Plans;
use ranks::comm::Group;

/// An interpreter over any inner backend.
pub(super) trait Interpret: Send {
    /// Runs one operation, which makes a tensor, or obeys the command that it carries.
    fn run(&mut self, op: &mut OperationIr, command: Option<Command>);
    /// Forgets a tensor.
    fn drop_tensor(&mut self, id: TensorId);
    /// The whole tensor; a collective unless it is replicated. With `made`, the tensors that the program has made, the others
    /// of the collective run programs of their own.
    fn read(&mut self, tensor: TensorIr, made: Option<u64>) -> DynFut<Result<TensorData, ExecutionError>>;
    /// Takes part in a read of another rank.
    fn gather(&mut self, tensor: TensorIr);
    /// A new tensor of the same data on every rank.
    fn register_data(&mut self, id: TensorId, data: TensorData);
    /// Collectives on the rank's shares. The caller runs what is returned, without a lock: ranks that it waits for may free
    /// tensors of this one. Then the outputs have [arrived](Self::arrived).
    fn across(&mut self, across: Across) -> Box<dyn FnOnce() + Send>;
    /// `outs` are what collectives have given, in the placements of their inputs; if they are asynchronous, what they will give.
    fn arrived(&mut self, outs: &[TensorId]);
    /// The outputs of the collectives whose first one this is are about to be used.
    fn wait(&mut self, first: TensorId);
    /// The tensors from `id` on that are not whole on every rank.
    fn distributed_since(&self, id: TensorId) -> Vec<TensorIr>;
    /// Makes the tensor whole on every rank.
    fn make_whole(&mut self, tensor: TensorIr);
    /// `out` is what the rank holds of `x`, as its share of a tensor in this state.
    fn alias(&mut self, x: TensorId, out: TensorId, state: TensorState);
    /// Begins the stream of random numbers.
    fn seed(&mut self, seed: u64);
    /// Waits for the inner device.
    fn sync(&mut self) -> Result<(), ExecutionError>;
    /// Lets no optimizer step wait, and [hands over](Self::hand_over) what is queued.
    fn flush(&mut self);
    /// Hands what is queued to the inner device. It changes nothing else, so that it may come at any time.
    fn hand_over(&self);
    /// What the inner device can do with a type.
    fn dtype_usage(&self, dtype: DType) -> DTypeUsageSet;
    /// What has happened.
    fn report(&self) -> Report;
    /// Where all tensors are.
    fn states(&self) -> ById<TensorState>;
}

/// The first id of tensors that only the rank knows; those of programs are below.
const OWN_IDS: u64 = 1 << 62;

/// One rank's interpreter.
pub(super) struct Interpreter<B: Inner> {
    executor: Executor<B>,
    device: B::Device,
    groups: Vec<Group>,
    /// Groups whose members have tensors of their own, as those of data parallelism.
    across: Vec<Group>,
    /// What their collectives have given.
    arrivals: Arrivals<B>,
    /// With batch normalization over the ranks of these groups.
    batch_means: Option<BatchMeans>,
    axes: Vec<MeshAxis>,
    table: Table,
    next: u64,
    random: Random,
    homes: Homes,
    plans: Plans,
    report: Report,
}

impl<B: Inner> Interpreter<B> {
    /// For tensors on `device`, distributed over `groups`.
    pub fn new(device: B::Device, groups: Vec<Group>, axes: Vec<MeshAxis>, options: LogicalOptions) -> Self {
        let hides = groups.iter().any(|group| group.size() > 1);
        Self {
            executor: Executor::new(device.clone(), hides, options),
            device,
            groups,
            axes,
            table: Table::default(),
            across: Vec::new(),
            batch_means: None,
            arrivals: Arrivals::default(),
            next: OWN_IDS,
            random: Random::default(),
            homes: Homes::default(),
            plans: Plans::default(),
            report: Report::default(),
        }
    }

    /// With collectives over other groups.
    pub fn with_across(mut self, across: Vec<Group>) -> Self {
        self.across = across;
        self
    }

    /// With batch normalization over the ranks of the other groups too.
    pub fn with_sync_batch_norm(mut self, sync: bool) -> Self {
        self.batch_means = sync.then(BatchMeans::default);
        self
    }

    /// With sequence parallelism along the first axis, or without.
    pub fn with_sequence(mut self, sequence: bool) -> Self {
        self.homes = self.homes.with_sequence(sequence);
        self
    }

    /// A name for a tensor that only this rank knows.
    fn new_id(&mut self) -> TensorId {
        self.next += 1;
        TensorId::new(self.next)
    }

    fn replicated(&self) -> TensorState {
        TensorState { at: vec![Replicate; self.axes.len()], weight: false }
    }

    /// Where random numbers decide between zero and one, as in dropout, the device draws them.
    fn draw(&mut self, out: &TensorIr, distribution: Distribution) {
        let stream = self.random.next();
        match distribution {
            Distribution::Bernoulli(probability) if self.executor.keep_draw(out, stream.bernoulli(probability)) => {}
            _ => self.executor.register_data(out.id, stream.tensor(&out.shape, out.dtype, distribution)),
        }
    }

    fn drop_copies(&mut self, entry: table::Entry) {
        for (_, copy) in entry.copies {
            self.drop_local(copy);
        }
    }

    fn drop_local(&mut self, id: TensorId) {
        self.executor.drop_tensor(id);
    }
}

impl<B: Inner> Interpret for Interpreter<B> {
    fn run(&mut self, op: &mut OperationIr, command: Option<Command>) {
        match (&*op, command) {
            (OperationIr::Drop(tensor), _) => self.drop_tensor(tensor.id),
            (_, Some(Command::Adopt(id))) => self.adopt(id, op),
            (_, Some(Command::Step(step))) => self.step(step, op),
            (_, Some(Command::Move { axis, to, weight })) => self.move_along((axis, to, weight), op),
            (_, Some(Command::Name)) => unreachable!("the client answers that"),
            (
                OperationIr::Float(_, FloatOperationIr::Random(random))
                | OperationIr::NumericInt(_, NumericOperationIr::IntRandom(random)),
                None,
            ) => {
                self.report.operations += 1;
                self.draw(&random.out, random.distribution);
                let state = self.replicated();
                self.table.insert(random.out.id, state, random.out.id);
            }
            (_, None) => {
                self.report.operations += 1;
                let mean = self.batch_means.as_mut().and_then(|means| means.of(op));
                self.run_planned(op);
                mean.iter().for_each(|mean| self.mean_across(mean));
            }
        }
    }

    fn drop_tensor(&mut self, id: TensorId) {
        if let Some(entry) = self.table.remove(id) {
            self.drop_local(entry.local);
            self.drop_copies(entry);
        }
    }

    fn read(&mut self, x: TensorIr, made: Option<u64>) -> DynFut<Result<TensorData, ExecutionError>> {
        let local = self.placed_for_read(&x, made);
        let is_consumed = x.status == TensorStatus::ReadWrite;
        let status = if is_consumed { TensorStatus::ReadWrite } else { TensorStatus::ReadOnly };
        let data = self.executor.read(TensorIr { id: local.id, status, ..x.clone() });
        if is_consumed && let Some(mut entry) = self.table.remove(x.id) {
            entry.copies.retain(|(_, copy)| *copy != local.id);
            self.drop_copies(entry);
        } else if local.is_temporary {
            self.drop_local(local.id);
        }
        data
    }

    fn gather(&mut self, x: TensorIr) {
        self.take_part(x);
    }

    fn register_data(&mut self, id: TensorId, data: TensorData) {
        self.executor.register_data(id, data);
        let state = self.replicated();
        self.table.insert(id, state, id);
    }

    fn across(&mut self, across: Across) -> Box<dyn FnOnce() + Send> {
        self.start_across(across)
    }

    fn arrived(&mut self, outs: &[TensorId]) {
        self.end_across(outs);
    }

    fn wait(&mut self, first: TensorId) {
        self.arrivals.wait(first);
    }

    fn distributed_since(&self, id: TensorId) -> Vec<TensorIr> {
        self.table.since(id).collect()
    }

    fn make_whole(&mut self, x: TensorIr) {
        let whole = self.replicated().at;
        self.place_for_good(&x, whole);
    }

    fn alias(&mut self, x: TensorId, out: TensorId, state: TensorState) {
        let local = self.table.get(x).local;
        self.executor.register_alias(out, local);
        self.table.insert(out, state, out);
    }

    fn seed(&mut self, seed: u64) {
        self.random.seed(seed);
    }

    fn sync(&mut self) -> Result<(), ExecutionError> {
        self.executor.sync()
    }

    fn flush(&mut self) {
        self.executor.run_steps();
        self.hand_over();
    }

    fn hand_over(&self) {
        B::hand_over(&self.device);
    }

    fn dtype_usage(&self, dtype: DType) -> DTypeUsageSet {
        self.executor.dtype_usage(dtype)
    }

    fn report(&self) -> Report {
        let kernels = self.executor.kernels().clone();
        Report { tensors: self.table.len(), kernels, ..self.report.clone() }
    }

    fn states(&self) -> ById<TensorState> {
        self.table.states()
    }
}
