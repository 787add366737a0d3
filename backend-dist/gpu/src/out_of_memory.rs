//! The message of a rank whose GPU is out of memory.
//!
//! CubeCL allocates on a separate thread. An allocation that fails there (after it has freed what it can and tried
//! again) leaves its error on the buffer. All work on the buffer is skipped and fails too, and the first read by the
//! host, or the first of our operations on it, panics with the text of all those errors and their stack traces.

use super::{GpuInfo, MemoryInfo, gpus};
use burn::tensor::Device;

/// The replacement for `message`, an error or panic of a rank that owns `device`, if it is about GPU memory.
pub fn out_of_memory(message: &str, device: &Device) -> Option<String> {
    out_of_memory_on(index(device)?, message)
}

/// The same for the GPU with this CUDA index.
pub fn out_of_memory_on(index: usize, message: &str) -> Option<String> {
    let request = Request::find(message)?;
    let gpu = gpus().ok().and_then(|gpus| gpus.into_iter().nth(index));
    let memory = gpu.as_ref().and_then(|gpu| gpu.memory().ok());
    Some(request.explain(index, gpu.as_ref(), memory))
}

/// CUDA's index of the device, if it is a GPU.
#[cfg(feature = "cuda")]
pub fn index(device: &Device) -> Option<usize> {
    match device.as_dispatch() {
        burn::backend::DispatchDevice::Cube(cubecl::Device::Cuda(gpu)) => Some(gpu.index),
        _ => None,
    }
}

/// CUDA's index of the device, if it is a GPU.
#[cfg(not(feature = "cuda"))]
pub fn index(_: &Device) -> Option<usize> {
    None
}

/// Returns memory of a GPU that was used once, for example to build parameters, to the driver, and waits for the GPU.
/// Does nothing on a CPU.
#[cfg(feature = "cuda")]
pub fn release_memory(device: &Device) {
    if let Some(gpu) = index(device) {
        device.memory_cleanup();
        // A GPU that has failed reports it at its next operation.
        let _ = device.sync();
        super::allocator::trim(gpu);
    }
}

/// Returns memory of a GPU that was used once, for example to build parameters, to the driver, and waits for the GPU.
/// Does nothing on a CPU.
#[cfg(not(feature = "cuda"))]
pub fn release_memory(_: &Device) {}

/// The failed allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    /// Bytes that the GPU did not have free.
    Bytes(u64),
    /// More bytes than CubeCL allows for one buffer: a quarter of the GPU.
    OneBuffer(u64),
    /// An allocation of a library.
    Unknown,
}

impl Request {
    /// Recognised by the words of CubeCL's `IoError` (cubecl-runtime 0.12, server/base.rs), CUDA, cuBLASLt and NCCL.
    fn find(message: &str) -> Option<Self> {
        let number = |before: &str| {
            let rest = &message[message.find(before)? + before.len()..];
            rest[..rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len())].parse().ok()
        };
        let library = ["CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED", "An out-of-memory error happened"];
        number("out of device memory allocating ")
            .map(Self::Bytes)
            .or_else(|| number("can't allocate buffer of size: ").map(Self::OneBuffer))
            .or_else(|| library.iter().any(|words| message.contains(words)).then_some(Self::Unknown))
    }

    fn explain(self, index: usize, gpu: Option<&GpuInfo>, memory: Option<MemoryInfo>) -> String {
        let name = gpu.map_or_else(String::new, |gpu| format!(" ({})", gpu.name));
        let wanted = match self {
            Request::Bytes(bytes) => format!(": {} requested", size(bytes)),
            Request::OneBuffer(bytes) => {
                format!(": {} requested in one buffer, which may be a quarter of the GPU", size(bytes))
            }
            Request::Unknown => String::new(),
        };
        let left = memory.map_or_else(String::new, |memory| {
            format!(", {} free of {} (other programs' memory counts)", size(memory.free), size(memory.total))
        });
        format!(
            "GPU {index}{name} is out of memory{wanted}{left}. Use a smaller micro-batch, recomputation (granularity \
             \"full\"), a higher ZeRO stage, or more tensor or pipeline parallelism; `burn-megatron plan` says what a layout \
             needs"
        )
    }
}

fn size(bytes: u64) -> String {
    let gib = bytes as f64 / f64::from(1 << 30);
    if gib < 1.0 { format!("{:.1} MiB", gib * 1024.0) } else { format!("{gib:.1} GiB") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cubecls_words_are_understood() {
        let read = "called `Result::unwrap()` on an `Err` value: Several([IoError(out of device memory allocating \
             1610612736 bytes\n   0: std::backtrace::Backtrace::create\n)])";
        assert_eq!(Request::find(read), Some(Request::Bytes(1_610_612_736)));
        assert_eq!(Request::find("can't allocate buffer of size: 99\n"), Some(Request::OneBuffer(99)));
        let driver = "NCCL on tp[0, 1]: DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")";
        assert_eq!(Request::find(driver), Some(Request::Unknown));
        assert_eq!(Request::find("a shape does not fit"), None);
    }

    #[test]
    fn the_message_has_the_numbers_and_what_to_change() {
        let gpu = GpuInfo {
            index: 3,
            name: "NVIDIA H200".into(),
            total: 140 << 30,
            capability: (9, 0),
            processors: 132,
            bus: String::new(),
        };
        let memory = MemoryInfo { free: 300 << 20, total: 140 << 30 };
        let text = Request::Bytes(3 << 29).explain(3, Some(&gpu), Some(memory));
        let start = "GPU 3 (NVIDIA H200) is out of memory: 1.5 GiB requested, 300.0 MiB free of 140.0 GiB";
        assert!(text.starts_with(start), "{text}");
        for word in ["micro-batch", "recomputation", "ZeRO", "tensor or pipeline parallelism"] {
            assert!(text.contains(word), "{text}");
        }
        assert!(out_of_memory("out of device memory allocating 9 bytes", &Device::flex()).is_none());
    }
}
