//! Logical devices: how a program gets one.

use super::channel::{MeshBackend, MeshChannel, MeshClient};
use super::follow::Followers;
use super::interpreter::{Interpret, Interpreter};
use super::live::{Live, live};
use super::local::COLLECTIVES;
use super::options::LogicalOptions;
use super::report::Report;
use super::slot::{MeshDevice, Slot};
use super::worker::Worker;
use crate::logical::MeshAxis;
use crate::logical::rules::Policy;
use burn::backend::{DeviceSettings, DispatchDevice};
use burn::tensor::Device;
use burn_group::{GroupDevice, MemberDevice};
use burn_router::{RouterClientRegistration, register_scoped_client};
use parking_lot::Mutex;
use ranks::attached::Attached;
use ranks::collective_ops::ON_GROUPS;
use ranks::comm::Group;
use ranks::gpu;
use ranks::launch::Rank;
use ranks::mesh::Axis;

/// A slot in use.
struct Opened {
    client: MeshClient,
    registration: Option<RouterClientRegistration<MeshChannel>>,
}

/// A slot whose default types are those of `settings`, behind which `client` makes the client of its member.
fn open(settings: DeviceSettings, client: impl FnOnce(MeshDevice) -> MeshClient) -> (Slot, Opened) {
    ON_GROUPS.get_or_init(|| COLLECTIVES);
    let (member, group) = Slot::take(settings);
    let client = client(member);
    let registration = register_scoped_client::<MeshChannel>(&member, client.clone());
    let new_group = || {
        let member = MemberDevice { device: member, settings };
        let group = GroupDevice::with_member_settings::<MeshBackend>(&[member]);
        group.unwrap_or_else(|error| panic!("a device group of one member: {error}"))
    };
    (Slot { group: group.unwrap_or_else(new_group), member }, Opened { client, registration })
}

/// What the logical device `device` has done on this rank, with or without autodiff: operations, collectives, and what
/// ran whole for want of a rule.
///
/// # Panics
/// If `device` is no logical device of a running rank.
pub fn explain(device: &Device) -> Report {
    let live = live(device).unwrap_or_else(|| panic!("{device:?} is no logical device: see `Rank::logical_device`"));
    live.client.worker().ask(|interpreter| interpreter.report())
}

/// What a [`Rank`] has with this crate: devices that distribute what is on them.
///
/// ```
/// use backend_dist::{launch::launch, mesh::{Axis, Mesh}, mesh_backend::LogicalDevice};
/// use burn::tensor::{Device, Tensor};
///
/// let sums = launch(&Mesh::new("TP2".parse()?)?, &[Device::flex()], |rank| {
///     let device = rank.logical_device(&[Axis::Tp]);
///     Ok(Tensor::<1>::ones([3], &device).sum().into_scalar::<f32>())
/// })?;
/// assert_eq!(sums, [3.0; 2]);
/// # Ok::<(), backend_dist::launch::BoxError>(())
/// ```
pub trait LogicalDevice {
    /// The device whose tensors have the shapes of one device and live on the ranks along `axes`: see
    /// [`mesh_backend`](crate::mesh_backend). All of these ranks must do the same with it, with the same data. Repeated
    /// calls give the same device. It ends with the rank, whose results must be read before.
    ///
    /// Random tensors are the same on every rank and in every layout; `Device::seed` begins their stream.
    ///
    /// # Panics
    /// If two of the axes have a rank in common but this one, or the rank's device has autodiff.
    fn logical_device(&self, axes: &[Axis]) -> Device {
        self.logical_device_with(axes, LogicalOptions::default())
    }

    /// A [`logical_device`](Self::logical_device) with options.
    ///
    /// # Panics
    /// As [`logical_device`](Self::logical_device), or if the autocast type is neither bf16 nor f16, or fusion is off with it.
    fn logical_device_with(&self, axes: &[Axis], options: LogicalOptions) -> Device;
}

impl LogicalDevice for Rank {
    fn logical_device_with(&self, axes: &[Axis], options: LogicalOptions) -> Device {
        options.check();
        for (i, &axis) in axes.iter().enumerate() {
            let ranks = self.mesh.group_of(axis, self.rank);
            let shared = |other: &&Axis| {
                let others = self.mesh.group_of(**other, self.rank);
                others.iter().filter(|rank| ranks.contains(rank)).count() > 1
            };
            if let Some(other) = axes[..i].iter().find(shared) {
                panic!("logical device: the axes {other} and {axis} share ranks; name axes that do not, as tp and dp");
            }
        }
        self.attached::<LogicalDevices>().device(self, axes, options)
    }
}

/// The logical devices of one rank. They end with it.
#[derive(Default)]
pub(crate) struct LogicalDevices {
    made: Mutex<Vec<Made>>,
}

struct Made {
    axes: Vec<Axis>,
    options: LogicalOptions,
    device: Device,
    slot: Slot,
    registration: Option<RouterClientRegistration<MeshChannel>>,
}

impl LogicalDevices {
    /// The logical device of `rank` along `axes`.
    pub fn device(&self, rank: &Rank, axes: &[Axis], options: LogicalOptions) -> Device {
        if let Some(made) = self.made.lock().iter().find(|made| made.axes == axes && made.options == options) {
            return made.device.clone();
        }
        self.make(
            rank,
            &Wanted { axes, across: &[], sequence: false, sync_batch_norm: false, options },
            Followers::default(),
        )
    }

    /// A logical device of which `followers` are other ranks.
    pub(super) fn make(&self, rank: &Rank, wanted: &Wanted, followers: Followers) -> Device {
        let interpreter = interpreter(rank, wanted);
        let runs_ahead = wanted.options.run_ahead.unwrap_or_else(|| gpu::index(&rank.device).is_some());
        let worker = if runs_ahead { Worker::ahead(rank, interpreter) } else { Worker::Here(interpreter) };
        let client = |member| MeshClient::new(member, worker, followers);
        let (slot, opened) = open(rank.device.settings(), client);
        let (device, axes) = (Device::new(slot.group), wanted.axes.to_vec());
        let ranks = axes.iter().map(|&axis| rank.group(axis).size()).collect();
        Live { device: device.clone(), client: opened.client, axes: axes.clone(), ranks }.begin();
        let (options, registration) = (wanted.options, opened.registration);
        self.made.lock().push(Made { axes, options, device: device.clone(), slot, registration });
        device
    }
}

impl Attached for LogicalDevices {
    /// Waits until they have begun everything that was asked of them.
    fn finish(&self) {
        let devices: Vec<Device> = self.made.lock().iter().map(|made| made.device.clone()).collect();
        for live in devices.iter().filter_map(live) {
            live.client.worker().ask(|_| ());
        }
    }
}

impl Drop for LogicalDevices {
    fn drop(&mut self) {
        for made in self.made.lock().drain(..) {
            Live::end(&made.device);
            drop(made.registration);
            made.slot.close();
        }
    }
}

/// What a logical device is to have.
pub(super) struct Wanted<'a> {
    /// Along which its tensors are distributed.
    pub axes: &'a [Axis],
    /// Of other collectives.
    pub across: &'a [Axis],
    /// Sequence parallelism along the first axis.
    pub sequence: bool,
    /// Batch normalization over the ranks of `across` too.
    pub sync_batch_norm: bool,
    pub options: LogicalOptions,
}

/// A rank's interpreter.
pub(super) fn interpreter(rank: &Rank, wanted: &Wanted) -> Box<dyn Interpret> {
    let groups = |axes: &[Axis]| axes.iter().map(|&axis| rank.group(axis)).collect::<Vec<Group>>();
    let (within, across) = (groups(wanted.axes), groups(wanted.across));
    let mesh_axis = |(&axis, group): (&Axis, &Group)| MeshAxis { ranks: group.size(), policy: policy(axis) };
    let axes = wanted.axes.iter().zip(&within).map(mesh_axis).collect();
    match rank.device.as_dispatch() {
        DispatchDevice::Flex(device) => {
            let interpreter = Interpreter::<burn::backend::Flex>::new(*device, within, axes, wanted.options);
            let interpreter = interpreter.with_across(across).with_sequence(wanted.sequence);
            Box::new(interpreter.with_sync_batch_norm(wanted.sync_batch_norm))
        }
        #[cfg(feature = "cuda")]
        DispatchDevice::Cube(device) => {
            let interpreter = Interpreter::<burn::backend::Cube>::new(device.clone(), within, axes, wanted.options);
            let interpreter = interpreter.with_across(across).with_sequence(wanted.sequence);
            Box::new(interpreter.with_sync_batch_norm(wanted.sync_batch_norm))
        }
        other => panic!("a logical device needs ranks on CPUs or GPUs without autodiff, not on {other:?}"),
    }
}

/// Along data-parallel axes activations are sharded by sample, and a sharded parameter is gathered for them.
fn policy(axis: Axis) -> Policy {
    match axis {
        Axis::Dp | Axis::DpCp | Axis::Edp => Policy::WeightsMove,
        _ => Policy::WeightsStay,
    }
}
