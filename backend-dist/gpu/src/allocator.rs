//! CubeCL's memory comes from CUDA's stream-ordered allocator: a pool that grows does not wait for the work of other
//! streams, such as collectives.

use super::PoolUse;
use cubecl_environment::config::RuntimeConfig;
use cubecl_runtime::config::CubeClRuntimeConfig;
use cubecl_runtime::config::memory::CudaAllocator;
use cudarc::driver::result as driver;
use cudarc::driver::sys;
use std::sync::Once;

/// Selects the stream-ordered allocator for this process, unless CubeCL has been used or configured before. Other
/// settings come from CubeCL's files and environment variables as usual.
pub fn choose() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // NCCL must not use such memory without peer access, see `share_pools`.
        if share_pools().is_ok() {
            let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
            config.memory.cuda.allocator = CudaAllocator::Async;
            CubeClRuntimeConfig::try_set(config);
        }
    });
}

/// `CUmemAccessDesc`, whose fields are named differently in each version of CUDA.
#[repr(C)]
struct Access {
    location: sys::CUmemLocationType,
    device: i32,
    flags: sys::CUmemAccess_flags,
}

const _: () = assert!(size_of::<Access>() == size_of::<sys::CUmemAccessDesc>());

/// Grants the GPUs of this process access to each other's pools. NCCL reads and writes the buffers of ranks in its
/// process directly, and memory of these pools is, unlike other memory, closed to peers by default
/// (`NCCL_P2P_DIRECT_DISABLE` in NCCL's manual).
fn share_pools() -> Result<(), driver::DriverError> {
    driver::init()?;
    let count = driver::device::get_count()?;
    for owner in 0..count {
        let reaches = |peer: &i32| {
            let mut reaches = 0;
            // SAFETY: both are device ordinals, and `reaches` is valid for writes.
            let asked = unsafe { sys::cuDeviceCanAccessPeer(&mut reaches, *peer, owner) }.result();
            asked.is_ok() && reaches == 1
        };
        let access = |device| Access {
            location: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            device,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let peers: Vec<Access> = (0..count).filter(|peer| *peer != owner).filter(reaches).map(access).collect();
        if peers.is_empty() {
            continue;
        }
        let mut pool = std::ptr::null_mut();
        // SAFETY: the pool is written before it is read, and `Access` has the layout of `CUmemAccessDesc`.
        unsafe {
            sys::cuDeviceGetDefaultMemPool(&mut pool, owner).result()?;
            sys::cuMemPoolSetAccess(pool, peers.as_ptr().cast(), peers.len()).result()?;
        }
    }
    Ok(())
}

/// The memory use of a GPU's pool, if the driver reports it.
pub(crate) fn pool_use(gpu: usize) -> Option<PoolUse> {
    use sys::CUmemPool_attribute_enum as Attribute;
    let mut pool = std::ptr::null_mut();
    // SAFETY: the pool is written before it is read.
    unsafe { sys::cuDeviceGetDefaultMemPool(&mut pool, gpu as i32) }.result().ok()?;
    let ask = |attribute| {
        let mut bytes = 0u64;
        // SAFETY: the pool is the driver's, and these attributes are 64-bit numbers.
        unsafe { sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut bytes).cast()) }.result().ok()?;
        Some(bytes)
    };
    Some(PoolUse {
        reserved: ask(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
        used: ask(Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
        most_reserved: ask(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)?,
        most_used: ask(Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
    })
}

/// Returns the memory that CubeCL has freed from the pool to the driver, and resets the pool's peaks.
pub(crate) fn trim(gpu: usize) {
    let mut pool = std::ptr::null_mut();
    // SAFETY: the pool is written before it is read; only unused memory is returned; the attributes are 64-bit numbers.
    // An error leaves the pool as it is.
    unsafe {
        if sys::cuDeviceGetDefaultMemPool(&mut pool, gpu as i32).result().is_ok() {
            let _ = sys::cuMemPoolTrimTo(pool, 0).result();
            use sys::CUmemPool_attribute_enum as Attribute;
            for most in [Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH] {
                let mut zero = 0u64;
                let _ = sys::cuMemPoolSetAttribute(pool, most, (&raw mut zero).cast()).result();
            }
        }
    }
}
