//! NVML's measurements of a GPU, found by its PCI bus address, because `CUDA_VISIBLE_DEVICES` renumbers CUDA's GPUs,
//! but not NVML's.

use super::{MemoryInfo, Readings};
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::{Device, Nvml};
use std::sync::OnceLock;

/// NVML, if it is installed.
fn nvml() -> Option<&'static Nvml> {
    static NVML: OnceLock<Option<Nvml>> = OnceLock::new();
    NVML.get_or_init(|| Nvml::init().ok()).as_ref()
}

fn device(bus: &str) -> Option<Device<'static>> {
    nvml()?.device_by_pci_bus_id(bus).ok()
}

pub(super) fn driver_version() -> Option<String> {
    nvml()?.sys_driver_version().ok()
}

pub(super) fn memory(bus: &str) -> Option<MemoryInfo> {
    let memory = device(bus)?.memory_info().ok()?;
    Some(MemoryInfo { free: memory.free, total: memory.total })
}

pub(super) fn readings(bus: &str) -> Option<Readings> {
    let device = device(bus)?;
    let watts = |milliwatts: u32| f64::from(milliwatts) / 1000.0;
    // NVML_NVLINK_MAX_LINKS is 18; after the GPU's last link it returns an error.
    let links = (0..18).map_while(|link| device.link_wrapper_for(link).is_active().ok());
    let links: Vec<bool> = links.collect();
    Some(Readings {
        utilisation: device.utilization_rates().ok().map(|rates| rates.gpu),
        clock: device.clock_info(Clock::SM).ok(),
        max_clock: device.max_clock_info(Clock::SM).ok(),
        power: device.power_usage().ok().map(watts),
        power_limit: device.enforced_power_limit().ok().map(watts),
        temperature: device.temperature(TemperatureSensor::Gpu).ok(),
        nvlinks: (!links.is_empty()).then(|| links.iter().filter(|up| **up).count()),
    })
}
