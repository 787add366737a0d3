//! Numbers of logical devices, and the device groups behind which Burn finds them. They are used again.

use burn::backend::{DeviceId, DeviceOps, DeviceSettings};
use burn::tensor::Device;
use burn_group::GroupDevice;
use parking_lot::Mutex;

/// The only member of the device group through which Burn reaches one rank's side of a logical device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MeshDevice(u16);

impl burn_std::device::Device for MeshDevice {
    fn from_id(id: DeviceId) -> Self {
        Self(id.index_id)
    }

    fn to_id(&self) -> DeviceId {
        // Any number that is no other backend's.
        DeviceId { type_id: 200, index_id: self.0 }
    }
}

impl DeviceOps for MeshDevice {
    fn defaults(&self) -> DeviceSettings {
        let settings = SLOTS.lock().settings.get(usize::from(self.0)).copied();
        settings.unwrap_or_else(|| Device::flex().settings())
    }
}

/// A device group and its only member. Burn keeps groups for the life of the process, so they are used again.
#[derive(Clone, Copy)]
pub(super) struct Slot {
    pub group: GroupDevice,
    pub member: MeshDevice,
}

/// Every slot that was made.
struct Slots {
    /// The default types of each.
    settings: Vec<DeviceSettings>,
    /// Those that no rank has.
    free: Vec<Slot>,
}

static SLOTS: Mutex<Slots> = Mutex::new(Slots { settings: Vec::new(), free: Vec::new() });

impl Slot {
    /// A member whose default types are those of `settings`, and its group if it has had one.
    pub fn take(settings: DeviceSettings) -> (MeshDevice, Option<GroupDevice>) {
        let mut slots = SLOTS.lock();
        let has_settings = |slot: &Slot| slots.settings[usize::from(slot.member.0)] == settings;
        match slots.free.iter().position(has_settings) {
            Some(free) => {
                let slot = slots.free.swap_remove(free);
                (slot.member, Some(slot.group))
            }
            None => {
                let index = u16::try_from(slots.settings.len());
                slots.settings.push(settings);
                (MeshDevice(index.expect("a process has fewer than 65536 logical devices at a time")), None)
            }
        }
    }

    /// For another rank, unless the last one has configured other default types.
    pub fn close(self) {
        let settings = Device::new(self.group).settings();
        let mut slots = SLOTS.lock();
        if slots.settings[usize::from(self.member.0)] == settings {
            slots.free.push(self);
        }
    }
}
