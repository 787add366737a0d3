//! Kernels compiled to PTX for Hopper without a GPU.
//!
//! An attention kernel that reaches local memory or calls a function is still right, but its warpgroup MMAs then wait for each
//! other: forward attention ran at 350 instead of 630 TFLOP/s on an H200 before these were gone.
#![cfg(feature = "cuda")]

mod fp8;
mod pointwise;
mod random;

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
use kernels_cubecl::attention::forward::{self, ForwardPlan};
use kernels_cubecl::attention::key_gradient::{self, KeyGradientPlan};
use kernels_cubecl::attention::query_gradient::{self, QueryGradientPlan};
use std::ffi::CStr;
use std::sync::Arc;

/// What a cube may have on Hopper.
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
    KernelSettings::new(*CubeDim::new_1d(256), ExecutionMode::Unchecked, AddressType::U32)
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
    let Ok(PlironArtifact::NvptxCode(module)) = compiled else { panic!("{what} does not compile to PTX") };
    // SAFETY: the compiler ends PTX with a zero byte.
    let ptx = unsafe { CStr::from_ptr(module.ptx.as_ptr()) }.to_string_lossy().into_owned();
    assert!(ptx.contains(".target sm_90a"), "{what} is not compiled for Hopper");
    assert!(module.shared_memory_size <= SHARED_BYTES, "{what} asks for {} shared bytes", module.shared_memory_size);
    ptx
}

/// Checks what must hold for every attention kernel.
fn check(what: &str, kernel: impl CubeKernel, mmas: usize) {
    let ptx = compile(what, kernel);
    assert_eq!(ptx.matches("wgmma.mma_async").count(), mmas, "warpgroup MMAs of {what}");
    for costly in [".local", "call", "div.rn", "sqrt.rn"] {
        let line = ptx.lines().find(|line| line.trim_start().contains(costly) && !line.contains("//"));
        assert_eq!(line, None, "{what} has an instruction that serialises its MMAs");
    }
}

/// The two head dimensions, causal and full.
fn problems() -> [(usize, bool); 4] {
    [(64, false), (64, true), (128, false), (128, true)]
}

#[test]
fn forward_overlaps_its_products() {
    for (head_dim, causal) in problems() {
        let plan = ForwardPlan::fastest(head_dim, causal);
        let kernel = forward::forward::Forward::new(
            settings(),
            hopper(),
            Default::default(),
            (),
            (),
            (),
            (),
            buffer(),
            (),
            (),
            (),
            (),
            (),
            plan,
        );
        // Scores and values of a step; the step stands there for edge and inner blocks, and its parts before and after.
        let mmas = 3 * (head_dim / 16 + plan.block / 16);
        check(&format!("{plan:?}"), kernel, mmas);
    }
}

#[test]
fn query_gradient_overlaps_its_products() {
    for (head_dim, causal) in problems() {
        let plan = QueryGradientPlan::fastest(head_dim, causal);
        let kernel = query_gradient::query_gradient::QueryGradient::new(
            settings(),
            hopper(),
            Default::default(),
            (),
            (),
            (),
            (),
            buffer(),
            buffer(),
            (),
            (),
            (),
            (),
            (),
            (),
            plan,
        );
        check(&format!("{plan:?}"), kernel, 2 * (2 * head_dim / 16 + plan.block / 16));
    }
}

#[test]
fn key_gradient_overlaps_its_products() {
    for (head_dim, causal) in problems() {
        let plan = KeyGradientPlan::fastest(head_dim, causal);
        let kernel = key_gradient::key_gradient::KeyGradient::new(
            settings(),
            hopper(),
            Default::default(),
            (),
            (),
            (),
            (),
            buffer(),
            buffer(),
            (),
            (),
            (),
            (),
            (),
            (),
            (),
            plan,
        );
        check(&format!("{plan:?}"), kernel, 2 * head_dim / 16 + 2 * plan.block / 16);
    }
}
