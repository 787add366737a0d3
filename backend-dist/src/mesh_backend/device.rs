//! Logical devices: how a program gets one.

use super::channel::{MeshBackend, MeshChannel, MeshClient};
use super::interpreter::{Interpret, Interpreter};
use super::live::{Live, live};
use super::meta::{Counts, Meta, Shared};
use super::slot::{MeshDevice, Slot};
use super::{follow::Followers, local::COLLECTIVES, options::LogicalOptions, report::Report, worker::Worker};
use crate::logical::MeshAxis;
use crate::logical::rules::Policy;
use burn::backend::{DeviceSettings, DispatchDevice};
use burn::tensor::Device;
use burn_group::{GroupDevice, MemberDevice};
use burn_router::{RouterClientRegistration, register_scoped_client};
use parking_lot::Mutex;
use ranks::attached::Attached;
use ranks::collective;
use ranks::collective_ops::ON_GROUPS;
use ranks::comm::Group;
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

/// A device whose tensors have no data, as PyTorch's meta device: a program that runs on it learns what memory and
/// arithmetic it would need, in seconds and whatever its size.
///
/// Operations have the placements, shapes and collectives that they have on a
/// [logical device](LogicalDevice::logical_device). What is read from it is zeros.
///
/// ```
/// use backend_dist::{launch::launch, mesh::{Axis, Mesh}, mesh_backend::MetaDevice, parallelize::{Plan, parallelize}};
/// use burn::nn::transformer::{TransformerEncoderConfig, TransformerEncoderInput};
/// use burn::tensor::{Device, Tensor};
///
/// launch(&Mesh::new("TP2".parse()?)?, &[Device::flex()], |rank| {
///     let meta = MetaDevice::new(&rank, &[Axis::Tp], false, false);
///     let model = TransformerEncoderConfig::new(4096, 16384, 32, 2).init(&meta.device().autodiff());
///     let model = parallelize(model, &rank, &Plan::auto())?;
///     let weights = meta.counts().live;
///     let x = Tensor::<3>::ones([8, 512, 4096], &meta.device().autodiff());
///     let gradients = model.forward(TransformerEncoderInput::new(x)).sum().backward();
///     assert!(meta.counts().live >= 2 * weights && meta.counts().flops > 1e12);
///     drop(gradients);
///     Ok(())
/// })?;
/// # Ok::<(), backend_dist::launch::BoxError>(())
/// ```
pub struct MetaDevice {
    device: Device,
    counts: Shared,
}

impl MetaDevice {
    /// For `rank`, along `axes`, perhaps with sequence parallelism along the first of them and with autocast to half
    /// precision. It ends with the rank.
    ///
    /// # Panics
    /// If the rank's device has autodiff.
    pub fn new(rank: &Rank, axes: &[Axis], is_sequence_parallel: bool, has_autocast: bool) -> Self {
        let mesh_axis = |&axis: &Axis| MeshAxis { ranks: rank.group(axis).size(), policy: policy(axis) };
        let meta = Meta::new(axes.iter().map(mesh_axis).collect(), is_sequence_parallel, has_autocast);
        let counts = meta.counts();
        let device = rank.attached::<LogicalDevices>().add(
            rank,
            axes,
            (Worker::Here(Box::new(meta)), Followers::default()),
            None,
        );
        Self { device, counts }
    }

    /// Without autodiff.
    pub fn device(&self) -> Device {
        self.device.clone()
    }

    /// What has been counted so far.
    pub fn counts(&self) -> Counts {
        // Tensors that were dropped are freed with the next operation.
        if let Some(live) = live(&self.device) {
            live.client.worker().ask(|_| ());
        }
        self.counts.lock().clone()
    }

    /// Begins to count anew, with what exists now.
    pub fn reset(&self) {
        let live = self.counts().live;
        *self.counts.lock() = Counts { live, peak: live, ..Counts::default() };
    }
}

/// The logical devices of one rank. They end with it.
#[derive(Default)]
pub(crate) struct LogicalDevices {
    made: Mutex<Vec<Made>>,
}

struct Made {
    /// Unless it is a meta device.
    of: Option<(Vec<Axis>, LogicalOptions)>,
    device: Device,
    slot: Slot,
    registration: Option<RouterClientRegistration<MeshChannel>>,
}

impl LogicalDevices {
    /// The logical device of `rank` along `axes`.
    pub fn device(&self, rank: &Rank, axes: &[Axis], options: LogicalOptions) -> Device {
        let wanted = Some((axes.to_vec(), options));
        if let Some(made) = self.made.lock().iter().find(|made| made.of == wanted) {
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
        self.add(rank, wanted.axes, (worker, followers), Some((wanted.axes.to_vec(), wanted.options)))
    }

    /// A device along `axes` that the worker runs.
    fn add(
        &self,
        rank: &Rank,
        axes: &[Axis],
        (worker, followers): (Worker, Followers),
        of: Option<(Vec<Axis>, LogicalOptions)>,
    ) -> Device {
        let client = |member| MeshClient::new(member, worker, followers);
        let (slot, opened) = open(rank.device.settings(), client);
        let device = Device::new(slot.group);
        let ranks = axes.iter().map(|&axis| rank.group(axis).size()).collect();
        Live { device: device.clone(), client: opened.client, axes: axes.to_vec(), ranks }.begin();
        self.made.lock().push(Made { of, device: device.clone(), slot, registration: opened.registration });
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
    // The first collective of GPUs gathers over its group. On a thread of the device that would come between collectives
    // of the program.
    within.iter().chain(&across).for_each(|group| collective::join(group, &rank.device));
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
