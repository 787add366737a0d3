//! Kernels compiled to PTX for Hopper without a GPU. With `KERNELS_PTX=folder` the PTX is also written there, for
//! `ptxas -c -arch=sm_90a -v`.
//!
//! ptxas serialises the warpgroup MMAs of an attention kernel that spills to local memory or calls a function: its results are right,
//! but forward attention ran at 350 instead of 630 TFLOP/s on an H200.
#![cfg(feature = "cuda")]

/// A kernel to compile, with `settings`; then the compile-time form of its arguments.
macro_rules! kernel {
    ($kernel:ty, $settings:expr; $($argument:expr),*) => {
        <$kernel>::new($settings, crate::hopper(), Default::default(), $($argument),*)
    };
}

mod attention;
mod decode;
mod fp8;
mod grouped;
mod optimizers;
mod pointwise;
mod portable;
mod random;
mod recurrent;
mod routing;

use cubecl::Compiler;
use cubecl::benchmark::TimingMethod;
use cubecl::ir::features::{Features, Tma};
use cubecl::ir::nvidia::SmArch;
use cubecl::ir::{
    AddressType, DeviceIdentity, DeviceProperties, HardwareProperties, MemoryDeviceProperties, OpaqueType, VectorSize,
};
use cubecl::prelude::*;
use cubecl_llvm::nvptx::ptx_version::PtxVersion;
use cubecl_llvm::{LlvmTarget, PlironArtifact, PlironCompiler, PlironOptions};
use cubecl_runtime::kernel::CubeKernel;
use std::ffi::CStr;
use std::sync::Arc;

/// Shared memory of a cube on Hopper.
const SHARED_BYTES: usize = 227 * 1024;

fn hopper() -> Arc<DeviceProperties> {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 32,
        max_shared_memory_size: SHARED_BYTES,
        max_cube_count: (u32::MAX, u16::MAX as u32, u16::MAX as u32),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 1024),
        num_streaming_multiprocessors: Some(132),
        num_tensor_cores: None,
        min_tensor_cores_dim: None,
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: VectorSize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let identity = DeviceIdentity { name: "hopper".into(), fingerprint: "hopper".into(), physical: None };
    let memory = MemoryDeviceProperties::new(u64::MAX, 256);
    let mut properties = DeviceProperties::new(Features::default(), memory, hardware, TimingMethod::Device, identity);
    properties.features.tma.insert(Tma::Base);
    properties.register_opaque_type(OpaqueType::TensorMap);
    properties.register_opaque_type(OpaqueType::Barrier);
    Arc::new(properties)
}

fn settings() -> KernelSettings {
    settings_of(256)
}

fn settings_of(units: u32) -> KernelSettings {
    KernelSettings::new(*CubeDim::new_1d(units), ExecutionMode::Unchecked, AddressType::U32)
}

fn buffer() -> BufferCompilationArg {
    BufferCompilationArg { inplace: None }
}

/// PTX for `sm_90a`.
fn compile(what: &str, kernel: impl CubeKernel) -> String {
    let options = PlironOptions {
        sm_arch: Some(SmArch::new(90, false)),
        ptx_version: PtxVersion::for_driver(13000),
        grid_constants: true,
        ..Default::default()
    };
    let compiled = PlironCompiler { target: LlvmTarget::Nvptx }.compile(kernel.define(), &options);
    let module = match compiled {
        Ok(PlironArtifact::NvptxCode(module)) => module,
        Ok(_) => panic!("{what} compiles to something else than PTX"),
        Err(error) => panic!("{what} does not compile to PTX: {error}"),
    };
    // SAFETY: the compiler ends PTX with a zero byte.
    let ptx = unsafe { CStr::from_ptr(module.ptx.as_ptr()) }.to_string_lossy().into_owned();
    if let Some(folder) = std::env::var_os("KERNELS_PTX") {
        let name: String = what.chars().filter(|c| c.is_alphanumeric()).collect();
        std::fs::write(std::path::Path::new(&folder).join(name + ".ptx"), &ptx).expect("KERNELS_PTX is a folder");
    }
    assert!(ptx.contains(".target sm_90a"), "{what} is not compiled for Hopper");
    assert!(module.shared_memory_size <= SHARED_BYTES, "{what} asks for {} shared bytes", module.shared_memory_size);
    ptx
}

/// PTX of a kernel, which must not spill.
fn registers_only(what: &str, kernel: impl CubeKernel) -> String {
    let ptx = compile(what, kernel);
    let spilled = ptx.lines().find(|line| line.trim_start().starts_with(".local"));
    assert_eq!(spilled, None, "{what} spills to local memory");
    ptx
}
