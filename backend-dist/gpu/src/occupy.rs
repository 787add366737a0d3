//! A GPU that is slower than it is, to try out what notices it.

use burn::backend::Cube;
use burn::tensor::{Device, Tensor};
use cudarc::driver::sys;
use std::ffi::c_void;
use std::time::Duration;

/// Keeps the compute stream of the calling thread on `device` from its next work for so long, while the host continues.
/// `false` for other devices than CUDA's, on which nothing happens.
pub fn occupy(device: &Device, time: Duration) -> bool {
    let anchor = Tensor::<1>::zeros([1], &device.clone().without_autodiff()).try_into_primitive::<Cube>();
    let Some(anchor) = anchor.ok().filter(|anchor| matches!(anchor.device, cubecl::Device::Cuda(_))) else {
        return false;
    };
    let nanoseconds = time.as_nanos() as usize;
    let work = move |_: [_; 1], stream: sys::CUstream| {
        // SAFETY: the function takes a number in place of a pointer, and makes no CUDA call.
        let queued = unsafe { sys::cuLaunchHostFunc(stream, Some(sleep), nanoseconds as *mut c_void) };
        queued.result().map_err(|error| error.to_string())
    };
    crate::cuda::submit([&anchor], work, |message| panic!("a slow GPU: {message}"));
    crate::cuda::flush(&anchor);
    true
}

unsafe extern "C" fn sleep(nanoseconds: *mut c_void) {
    std::thread::sleep(Duration::from_nanos(nanoseconds as usize as u64));
}
