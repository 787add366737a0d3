//! The decorator as a backend of Burn: a router whose only client is a rank's interpreter.

use super::command::{self, Command};
use super::follow::{Followers, Message};
use super::{across::Across, ids::ById, slot::MeshDevice, worker::Worker};
use crate::logical::{Placement, TensorState};
use burn::backend::{DTypeUsageSet, DeviceOps, ExecutionError};
use burn::tensor::{DType, Shape, TensorData};
use burn_ir::{GraphBindings, GraphId, OperationIr, TensorId, TensorIr};
use burn_router::{BackendRouter, MultiBackendBridge, RouterChannel, RouterClient, RouterTensor};
use burn_std::future::{DynFut, block_on};
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A complete backend of Burn.
pub(super) type MeshBackend = BackendRouter<MeshChannel>;

/// Whatever [`MeshBackend`] does goes to the client of its device.
#[derive(Clone)]
pub(super) struct MeshChannel;

/// One rank's side of a logical device. Each of its tensors has one.
#[derive(Clone)]
pub(super) struct MeshClient {
    pub device: MeshDevice,
    shared: Arc<Shared>,
}

struct Shared {
    worker: Mutex<Worker>,
    /// Tensors that nobody has any more.
    ///
    /// Burn's autodiff frees what is left of *all* graphs of the process at the end of a backward pass, so a rank drops
    /// tensors of another. It must not wait then for the other, which may wait for this one in a collective.
    dropped: Mutex<Vec<TensorId>>,
    states: Mutex<States>,
    /// Ranks that do what this one does, in the order in which its interpreter does it.
    followers: Followers,
    /// Of the last tensor. Followers get ids with the tensors, so interpreters have others for what they make.
    last: AtomicU64,
}

impl MeshClient {
    pub fn new(device: MeshDevice, worker: Worker, followers: Followers) -> Self {
        let (worker, dropped, states) = (Mutex::new(worker), Mutex::default(), Mutex::default());
        Self { device, shared: Arc::new(Shared { worker, dropped, states, followers, last: AtomicU64::new(0) }) }
    }

    /// Who runs the interpreter, which knows what was dropped.
    pub fn worker(&self) -> MutexGuard<'_, Worker> {
        let mut worker = self.shared.worker.lock();
        let dropped = std::mem::take(&mut *self.shared.dropped.lock());
        if !dropped.is_empty() {
            self.shared.followers.tell(|| Message::Drop(dropped.clone()));
            worker.tell(Message::Drop(dropped));
        }
        worker
    }

    /// Where a tensor is.
    pub fn state(&self, id: TensorId) -> TensorState {
        if let Some(state) = self.shared.states.lock().get(id) {
            return state;
        }
        let mut worker = self.worker();
        let known = worker.ask(|interpreter| interpreter.states());
        let state = known.get(&id).unwrap_or_else(|| panic!("{id} is no tensor of this logical device")).clone();
        *self.shared.states.lock() = States { known, is_of_now: true };
        state
    }

    /// What `message` says, here and on the followers, which begin first.
    pub fn everywhere(&self, message: Message) {
        let mut worker = self.worker();
        if matches!(message, Message::Whole(_)) {
            *self.shared.states.lock() = States::default();
        }
        self.shared.followers.tell(|| message.clone());
        worker.tell(message);
    }

    /// Collectives of all ranks' shares. No lock is held meanwhile.
    pub fn across(&self, across: Across) {
        let outs = across.outs();
        let run = {
            let mut worker = self.worker();
            self.shared.followers.tell(|| Message::Across(across.clone()));
            match &mut *worker {
                Worker::Here(interpreter) => interpreter.across(across),
                ahead => return ahead.tell(Message::Across(across)),
            }
        };
        run();
        self.worker().ask(move |interpreter| interpreter.arrived(&outs));
    }

    /// A name for a tensor to come.
    pub fn new_id(&self) -> TensorId {
        TensorId::new(self.shared.last.fetch_add(1, Ordering::Relaxed) + 1)
    }
}

/// Where tensors were when the interpreter was last asked, which had to catch up for that: whoever asks about one tensor
/// mostly asks about all parameters of a module next.
#[derive(Default)]
struct States {
    known: ById<TensorState>,
    /// Whether no operation has come since.
    is_of_now: bool,
}

impl States {
    /// Where a tensor is, if that is known. A sum that has not been added up yet is, in place, by the first operation that
    /// needs it; other tensors stay where they are.
    fn get(&self, id: TensorId) -> Option<TensorState> {
        self.known.get(&id).filter(|state| self.is_of_now || !state.at.contains(&Placement::Partial)).cloned()
    }
}

impl RouterClient for MeshClient {
    type Device = MeshDevice;

    fn register_op(&self, op: OperationIr) {
        match op {
            OperationIr::Drop(tensor) => self.shared.dropped.lock().push(tensor.id),
            // The data came with the tensor; a command waits for what follows.
            OperationIr::Init(_) => {}
            op => {
                let command = command::take();
                if command.is_some() {
                    let first = op.inputs().chain(op.outputs()).next().expect("a carrier has a tensor");
                    command::answer(first.id);
                }
                if command == Some(Command::Name) {
                    return;
                }
                let mut worker = self.worker();
                // Others leave their inputs where they are.
                if matches!(command, None | Some(Command::Step(_))) {
                    self.shared.states.lock().is_of_now = false;
                }
                let message = Message::Run(Box::new(op), command);
                self.shared.followers.tell(|| message.clone());
                worker.tell(message);
            }
        }
    }

    fn read_tensor_async(&self, tensor: TensorIr) -> DynFut<Result<TensorData, ExecutionError>> {
        let mut worker = self.worker();
        self.shared.states.lock().is_of_now = false;
        self.shared.followers.tell(|| Message::Gather(tensor.clone()));
        let made = self.shared.followers.are_none().then(|| self.shared.last.load(Ordering::Relaxed));
        let data = worker.asked(move |interpreter| interpreter.read(tensor, made));
        // Metrics are read by a thread of their own, for which the program is not to stop.
        drop(worker);
        data.wait()
    }

    fn sync(&self) -> Result<(), ExecutionError> {
        self.worker().ask(|interpreter| interpreter.sync())
    }

    fn flush(&self) {
        self.worker().ask(|interpreter| interpreter.flush());
    }

    fn create_empty_handle(&self) -> TensorId {
        self.new_id()
    }

    fn register_tensor_data(&self, data: TensorData) -> RouterTensor<Self> {
        // What comes from another backend has that one's booleans, which CubeCL's does not read.
        let data = match data.dtype() {
            DType::Bool(_) => data.convert_dtype(self.device.defaults().bool_dtype.into()),
            _ => data,
        };
        let (shape, dtype) = (data.shape().clone(), data.dtype());
        let id = self.new_id();
        self.everywhere(Message::Data(id, data));
        RouterTensor::new(id, shape, dtype, self.clone())
    }

    fn device(&self) -> MeshDevice {
        self.device
    }

    fn seed(&self, seed: u64) {
        self.everywhere(Message::Seed(seed));
    }

    fn dtype_usage(&self, dtype: DType) -> DTypeUsageSet {
        self.worker().ask(move |interpreter| interpreter.dtype_usage(dtype))
    }

    fn register_and_execute_graph(&self, _: GraphId, _: Vec<OperationIr>, _: GraphBindings) {
        unreachable!("only fusion replays graphs, and the router runs without it")
    }

    fn execute_graph(&self, _: GraphId, _: GraphBindings) {
        unreachable!("only fusion replays graphs, and the router runs without it")
    }

    fn register_alias(&self, _: TensorId, _: TensorId) {
        unreachable!("only fusion aliases tensors, and the router runs without it")
    }
}

impl RouterChannel for MeshChannel {
    type Device = MeshDevice;
    type Bridge = HostBridge;
    type Client = MeshClient;

    fn name(_: &MeshDevice) -> String {
        "mesh".into()
    }

    fn init_client(device: &MeshDevice) -> MeshClient {
        panic!("{device:?} ended with the rank that made it: see `Rank::logical_device`")
    }

    fn get_tensor_handle(tensor: &TensorIr, client: &MeshClient) -> TensorData {
        block_on(client.read_tensor_async(tensor.clone())).unwrap_or_else(|error| panic!("reading a tensor: {error}"))
    }

    fn register_tensor(client: &MeshClient, data: TensorData, _: Shape, _: DType) -> RouterTensor<MeshClient> {
        client.register_tensor_data(data)
    }
}

/// Between logical devices tensors move through the host.
pub(super) struct HostBridge;

impl MultiBackendBridge for HostBridge {
    type TensorHandle = TensorData;
    type Device = MeshDevice;

    fn change_backend_float(data: TensorData, _: Shape, _: &MeshDevice) -> TensorData {
        data
    }

    fn change_backend_int(data: TensorData, _: Shape, _: &MeshDevice) -> TensorData {
        data
    }

    fn change_backend_bool(data: TensorData, _: Shape, _: &MeshDevice) -> TensorData {
        data
    }
}
