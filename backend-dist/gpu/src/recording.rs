//! Work of a GPU that is recorded once and replayed with one launch (CUDA graphs).

#[cfg(not(feature = "cuda"))]
use burn::tensor::{Int, Tensor};

/// Recorded work. It reads and writes the very memory of the tensors that it was recorded with; CubeCL keeps that
/// memory for as long as this exists.
#[derive(Debug)]
pub struct Recording {
    #[cfg(feature = "cuda")]
    graph: cubecl_runtime::client::Graph,
}

#[cfg(feature = "cuda")]
mod built {
    use burn::backend::Cube;
    use burn::tensor::{Int, Tensor};
    use burn_cubecl::tensor::CubeTensor;
    use cubecl_common::bytes::Bytes;
    use std::ops::Range;

    use super::Recording;

    /// Runs that compile kernels and leave memory in CubeCL's pools: the recorded run may allocate none.
    const WARM_UPS: usize = 2;

    impl Recording {
        /// Records what `run` launches on the GPU of `input` and returns it with the last run's result, which every
        /// replay recomputes. `run` is called several times; it uploads, downloads and waits for nothing, and
        /// reads what changes between replays from tensors that [`overwrite`] fills.
        ///
        /// # Errors
        /// What CUDA or CubeCL refuses.
        pub fn new<T>(input: &Tensor<1, Int>, mut run: impl FnMut() -> T) -> Result<(Self, T), String> {
            let client = tensor(input)?.client;
            client.graph_prepare().map_err(|error| error.to_string())?;
            for _ in 0..WARM_UPS {
                run();
                cubecl::future::block_on(client.sync()).map_err(|error| error.to_string())?;
            }
            client.start_capture().map_err(|error| error.to_string())?;
            let result = run();
            let graph = client.stop_capture().map_err(|error| error.to_string())?;
            Ok((Self { graph }, result))
        }

        /// Queues the recorded work once more, after all that this thread has queued.
        ///
        /// # Errors
        /// If the driver refuses it.
        pub fn replay(&self) -> Result<(), String> {
            // SAFETY: CubeCL guards the memory that the recording touched for as long as `graph` lives, and inputs and
            // results are used on this thread's stream only.
            unsafe { self.graph.replay() }.map_err(|error| error.to_string())
        }
    }

    /// Writes `values` to the start of `to`, whoever else holds it, after all that this thread has queued. `false` on a
    /// CPU, where tensors are not written in place.
    ///
    /// # Panics
    /// If there are more values than `to` has room for, or it is not i32.
    pub fn overwrite(to: &Tensor<1, Int>, values: &[i32]) -> bool {
        let Ok(tensor) = tensor(to) else { return false };
        let fits = tensor.dtype == burn::tensor::DType::I32 && values.len() <= tensor.meta.shape().num_elements();
        assert!(fits, "{} values for {:?} of {:?}", values.len(), tensor.meta.shape(), tensor.dtype);
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let held = tensor.handle.size_in_used() - bytes.len() as u64;
        tensor.client.write(&tensor.handle.offset_end(held), Bytes::from_bytes_vec(bytes));
        true
    }

    /// Some of the numbers of `of`, in its very memory; `None` on a CPU. [`overwrite`] of `of` changes them.
    ///
    /// # Panics
    /// If `of` has no such numbers, or gaps.
    pub fn part(of: &Tensor<1, Int>, range: Range<usize>) -> Option<Tensor<1, Int>> {
        let whole = tensor(of).ok()?;
        let (count, size) = (whole.meta.shape().num_elements(), whole.dtype.size());
        assert!(range.end <= count && whole.is_contiguous(), "{range:?} of {count} numbers");
        let (before, behind) = ((range.start * size) as u64, ((count - range.end) * size) as u64);
        let (shape, handle) = ([range.len()].into(), whole.handle.clone().offset_start(before).offset_end(behind));
        let part = CubeTensor::new_contiguous(whole.client.clone(), whole.device.clone(), shape, handle, whole.dtype);
        Some(Tensor::from_primitive::<Cube>(part))
    }

    fn tensor(of: &Tensor<1, Int>) -> Result<CubeTensor, String> {
        of.clone().try_into_primitive::<Cube>().map_err(|_| "only work of a GPU can be recorded".to_owned())
    }
}

#[cfg(feature = "cuda")]
pub use built::{overwrite, part};

#[cfg(not(feature = "cuda"))]
impl Recording {
    /// Records what `run` launches on the GPU of `input`; this build has no GPUs.
    ///
    /// # Errors
    /// Always.
    pub fn new<T>(_: &Tensor<1, Int>, _: impl FnMut() -> T) -> Result<(Self, T), String> {
        Err(super::GpuError::NotBuilt.to_string())
    }

    /// Queues the recorded work once more.
    ///
    /// # Errors
    /// Always.
    pub fn replay(&self) -> Result<(), String> {
        Err(super::GpuError::NotBuilt.to_string())
    }
}

/// Writes `values` to the start of `to`: `false`, as this build has no GPUs.
#[cfg(not(feature = "cuda"))]
pub fn overwrite(_: &Tensor<1, Int>, _: &[i32]) -> bool {
    false
}

/// Some of the numbers of `of` in its very memory: `None`, as this build has no GPUs.
#[cfg(not(feature = "cuda"))]
pub fn part(_: &Tensor<1, Int>, _: std::ops::Range<usize>) -> Option<Tensor<1, Int>> {
    None
}
