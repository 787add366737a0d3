//! The memory of a GPU by owner.

use std::fmt;

use burn::tensor::Device;
use serde::{Deserialize, Serialize};

use super::PoolUse;

/// CubeCL's memory for one thread's stream, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamUse {
    /// Allocated from the driver.
    pub reserved: u64,
    /// In live tensors and buffers.
    pub in_use: u64,
    /// In buffers with a fixed address: weights, gradients, the optimizer's state.
    pub persistent: u64,
    /// Size of the pages for everything else: as large as the largest tensor so far.
    pub page: u64,
    /// In pages of earlier, smaller sizes with live tensors.
    pub outdated: u64,
}

/// The memory of a GPU by owner at one moment, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryUse {
    /// By all programs and the driver.
    pub used: u64,
    /// CubeCL's, for each stream that has memory.
    pub streams: Vec<StreamUse>,
    /// CUDA's pool, which includes CubeCL's memory.
    pub pool: PoolUse,
    /// Number of NCCL communicators, and bytes allocated when they were created, without the buffers of connections
    /// that were created later.
    pub communicators: (usize, u64),
    /// Number and size of cuBLASLt's workspaces.
    pub workspaces: (usize, u64),
    /// Number and size of messages to pipeline stages and in rings that are held until they are sent; part of CubeCL's
    /// memory.
    #[serde(default)]
    pub messages: (usize, u64),
}

impl MemoryUse {
    /// CubeCL's memory for all streams.
    pub fn allocator(&self) -> u64 {
        self.streams.iter().map(|stream| stream.reserved).sum()
    }

    /// The rest of CUDA's pool: pages that CubeCL has freed, or is about to, and fragmentation.
    pub fn pool_excess(&self) -> u64 {
        self.pool.reserved.saturating_sub(self.allocator())
    }

    /// Everything else: contexts, kernels, NCCL's connections, other programs.
    pub fn rest(&self) -> u64 {
        let named = self.allocator().max(self.pool.reserved) + self.communicators.1 + self.workspaces.1;
        self.used.saturating_sub(named)
    }
}

impl fmt::Display for MemoryUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: u64| format!("{:.2}", bytes as f64 / f64::from(1 << 30));
        write!(f, "GiB: {} in all", gib(self.used))?;
        for stream in &self.streams {
            let StreamUse { reserved, in_use, persistent, page, outdated } = *stream;
            let [reserved, in_use, persistent] = [reserved, in_use, persistent].map(gib);
            write!(f, "; allocator {reserved} ({in_use} in use, {persistent} persistent, ")?;
            write!(f, "pages of {}, outdated ones {})", gib(page), gib(outdated))?;
        }
        let [excess, used, most_reserved, most_used] =
            [self.pool_excess(), self.pool.used, self.pool.most_reserved, self.pool.most_used].map(gib);
        write!(f, "; rest of CUDA's pool {excess} (used {used}; at most {most_used} used, {most_reserved} reserved)")?;
        let ((communicators, nccl), (workspaces, scratch)) = (self.communicators, self.workspaces);
        write!(f, "; {communicators} communicators {}; {workspaces} workspaces {}", gib(nccl), gib(scratch))?;
        if self.messages.0 > 0 {
            write!(f, "; {} messages held {}", self.messages.0, gib(self.messages.1))?;
        }
        write!(f, "; the rest {}", gib(self.rest()))
    }
}

/// The present memory use of the GPU `device`; `None` for other devices. Waits until CubeCL has processed all launches.
#[cfg(feature = "cuda")]
pub fn memory_use(device: &Device) -> Option<MemoryUse> {
    let index = super::index(device)?;
    let gpu = super::gpus().ok()?.into_iter().nth(index)?;
    Some(MemoryUse {
        streams: asked::streams(device)?,
        pool: super::allocator::pool_use(index).unwrap_or_default(),
        used: gpu.memory().ok()?.used(),
        communicators: ledger::sum(ledger::Kind::Communicator, index),
        workspaces: ledger::sum(ledger::Kind::Workspace, index),
        messages: ledger::sum(ledger::Kind::Message, index),
    })
}

/// The present memory use of the GPU `device`; `None` for other devices.
#[cfg(not(feature = "cuda"))]
pub fn memory_use(_: &Device) -> Option<MemoryUse> {
    None
}

#[cfg(feature = "cuda")]
mod asked {
    use super::StreamUse;
    use burn::backend::Cube;
    use burn::tensor::{DType, Device, Tensor};
    use cubecl_runtime::memory_management::{MemoryPoolKind, MemoryScope, StreamMemoryReport};

    pub fn streams(device: &Device) -> Option<Vec<StreamUse>> {
        let device = device.clone().without_autodiff();
        let anchor = Tensor::<1>::empty([1], (&device, DType::F32)).try_into_primitive::<Cube>().ok()?;
        let report = anchor.client.memory_report(MemoryScope::Device);
        Some(report.streams.iter().map(stream).filter(|stream| stream.reserved > 0).collect())
    }

    fn stream(report: &StreamMemoryReport) -> StreamUse {
        let (usage, pools) = (report.usage(), &report.pools);
        let current = pools.dynamic.iter().find_map(|pool| match pool.kind {
            MemoryPoolKind::Adaptive { page_size, .. } => Some(page_size),
            _ => None,
        });
        // After the current arena follow the pools with its earlier page sizes.
        let arena = pools.dynamic.iter().position(|pool| matches!(pool.kind, MemoryPoolKind::Adaptive { .. }));
        let outgrown = arena.map_or(&[][..], |arena| &pools.dynamic[arena + 1..]);
        StreamUse {
            reserved: usage.bytes_reserved,
            in_use: usage.bytes_in_use,
            persistent: pools.persistent.usage.bytes_reserved,
            page: current.unwrap_or_default(),
            outdated: outgrown.iter().map(|pool| pool.usage.bytes_reserved).sum(),
        }
    }
}

/// Memory that libraries allocate at a known moment, or that messages hold, as recorded by the code that allocates it.
#[cfg(feature = "cuda")]
pub mod ledger {
    use parking_lot::{Mutex, MutexGuard};

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Kind {
        Communicator,
        Workspace,
        Message,
    }

    static ENTRIES: Mutex<Vec<(Kind, usize, u64)>> = Mutex::new(Vec::new());

    fn entries() -> MutexGuard<'static, Vec<(Kind, usize, u64)>> {
        ENTRIES.lock()
    }

    /// Records `bytes` of the GPU with this index.
    pub fn add(kind: Kind, gpu: usize, bytes: u64) {
        entries().push((kind, gpu, bytes));
    }

    /// Removes such a record.
    pub fn remove(kind: Kind, gpu: usize, bytes: u64) {
        let mut entries = entries();
        if let Some(at) = entries.iter().position(|entry| *entry == (kind, gpu, bytes)) {
            entries.swap_remove(at);
        }
    }

    /// Number of records and bytes of a kind.
    pub fn sum(kind: Kind, gpu: usize) -> (usize, u64) {
        let entries = entries();
        let mine = entries.iter().filter(|entry| (entry.0, entry.1) == (kind, gpu));
        mine.fold((0, 0), |(count, bytes), entry| (count + 1, bytes + entry.2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_has_a_name_or_is_the_rest() {
        let gib = |n: u64| n << 30;
        let stream = StreamUse { reserved: gib(100), in_use: gib(80), persistent: gib(60), page: gib(4), outdated: 0 };
        let memory = MemoryUse {
            used: gib(120),
            streams: vec![stream, StreamUse { reserved: gib(2), ..Default::default() }],
            pool: PoolUse { reserved: gib(110), used: gib(102), most_reserved: gib(111), most_used: gib(105) },
            communicators: (3, gib(2)),
            workspaces: (1, gib(1)),
            messages: (4, gib(3)),
        };
        assert_eq!([memory.allocator(), memory.pool_excess(), memory.rest()], [102, 8, 7].map(gib));
        let text = memory.to_string();
        for part in [
            "120.00 in all",
            "pages of 4.00",
            "rest of CUDA's pool 8.00",
            "3 communicators 2.00",
            "4 messages held 3.00",
            "the rest 7.00",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }
}
