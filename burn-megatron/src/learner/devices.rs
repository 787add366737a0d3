//! Where a learner is: the devices of ranks that nobody has named devices for, the host, and a seed from their generators.

use std::ops::Range;

use backend_dist::gpu;
use burn::module::Module;
use burn::tensor::{Device, Distribution, GradientCheckpointingStrategy, Tensor};

/// Where the learner's copies of parameters that it never steps cost no accelerator memory. A parameter that it steps
/// moves to the device of its gradient, and stays there.
pub(super) fn host() -> Device {
    Device::flex().autodiff()
}

/// Whether what is computed there has gradient checkpointing.
pub(super) fn has_checkpointing(device: &Device) -> bool {
    device.gradient_checkpointing_strategy() == Some(GradientCheckpointingStrategy::Balanced)
}

/// [`host`] for what is computed with on `device`: tensors keep their gradient checkpointing when they move.
pub(super) fn host_of(device: &Device) -> Device {
    if has_checkpointing(device) { host().gradient_checkpointing() } else { host() }
}

/// A device for each rank of a model that is on `device`: these GPUs of the host if it is a GPU, else all ranks share it.
pub(super) fn like(device: Device, ranks: Range<usize>) -> Result<Vec<Device>, String> {
    let is_gpu = gpu::index(&device.clone().inner()).is_some();
    if !is_gpu {
        return Ok(vec![device; ranks.len()]);
    }
    enough_gpus(ranks.end, gpu::gpus().map_or(1, |gpus| gpus.len()))?;
    ranks.map(cuda).collect()
}

/// Refuses more ranks than there are GPUs.
fn enough_gpus(ranks: usize, present: usize) -> Result<(), String> {
    if ranks <= present {
        return Ok(());
    }
    Err(format!(
        "{ranks} ranks of a model on a GPU take a GPU each, and this machine has {present}; nearest legal: {present}. \
         MegatronStrategy::data_parallel_on(devices), zero_on and mesh_on name the device of every rank, several on one GPU too"
    ))
}

#[cfg(feature = "cuda")]
fn cuda(index: usize) -> Result<Device, String> {
    Ok(Device::cuda(index))
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: usize) -> Result<Device, String> {
    Err("a GPU needs a build with --features cuda".into())
}

/// A seed for random numbers on logical devices, from the generator of the first of `devices`, or else of the model's. To be
/// called before anything draws parameters: only a run that is not resumed does.
pub(super) fn drawn<M: Module>(devices: &[Device], model: &M) -> u64 {
    let bits = Tensor::<1>::random([2], Distribution::Uniform(0.0, (1 << 24) as f64), &first(devices, model).inner());
    bits.into_data().iter::<f64>().fold(0, |seed, bits| seed << 24 | bits as u64)
}

/// The first of `devices`, or else of the model's.
pub(super) fn first<M: Module>(devices: &[Device], model: &M) -> Device {
    devices.first().cloned().or_else(|| model.devices().first().cloned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_ranks_share_the_models_device_and_gpu_ranks_need_one_each() {
        assert_eq!(like(Device::flex(), 3..6).unwrap(), vec![Device::flex(); 3]);
        assert_eq!(enough_gpus(4, 4), Ok(()));
        says!(enough_gpus(4, 2).unwrap_err(), "nearest legal: 2", "data_parallel_on(devices)");
    }
}
