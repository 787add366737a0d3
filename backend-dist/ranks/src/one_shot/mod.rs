//! All-reduces of small tensors by one kernel of our own, for members whose GPUs write to each other's memory.
//!
//! NCCL takes about 20 µs for 8 KiB, and a decode step of tensor parallelism has two all-reduces a layer. Here every
//! member stores its tensor into the memory of every other one and sums what has arrived in its own ("one-shot", as
//! vLLM and TensorRT-LLM call it). The kernel runs on the compute stream, so no events order it, and a CUDA graph can
//! record it: its pointers are fixed, and the number of a call is in device memory.
//!
//! A second kernel does what follows in a decoder too: it adds the sum to the residual stream and takes the RMSNorm of
//! that, as vLLM, TensorRT-LLM and FlashInfer do (`trtllm_allreduce_fusion`, `kARResidualRMSNorm`).
//!
//! A rank asks for it while it generates ([`one_shot_sums`](crate::collective::one_shot_sums)). Training has collectives
//! in flight on other streams and does not.

pub(crate) mod layout;
#[cfg(feature = "cuda")]
mod memory;
mod norm_ptx;
#[cfg(feature = "cuda")]
mod norms;
mod ptx;
#[cfg(test)]
mod tests;

#[cfg(feature = "cuda")]
pub(crate) use all_reduce::OneShot;
#[cfg(feature = "cuda")]
pub(crate) use norms::NormedRows;

#[cfg(feature = "cuda")]
mod all_reduce {
    use super::layout::{MEMBERS, PREFETCHERS, THREADS, blocks, limit, region};
    use super::memory::{Offer, Opened, Own};
    use super::norms::{NormedRows, Norms};
    use crate::comm::Group;
    use crate::comm::one_host::agree;
    use burn::tensor::DType;
    use cudarc::driver::result as driver;
    use cudarc::driver::sys::CUstream;
    use parking_lot::Mutex;
    use std::ffi::c_void;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Where the arguments of a kernel are.
    macro_rules! pointers {
        ($($argument:ident),+) => {
            [$((&raw mut $argument).cast::<c_void>()),+]
        };
    }

    /// One member's side. Raw handles are stored as integers, because they cross threads.
    pub(crate) struct OneShot {
        rank: u32,
        size: u32,
        /// Every member's memory, as this GPU addresses it.
        members: [u64; MEMBERS],
        /// Device address of the word that ends kernels that wait.
        stop: u64,
        kernels: [usize; 4],
        /// If all members' GPUs have them.
        norms: Option<Norms>,
        /// How many times it is asked for now.
        users: AtomicUsize,
        held: Mutex<Held>,
    }

    /// The others close what they have opened before its owner frees it.
    #[derive(Default)]
    struct Held {
        opened: Option<Opened>,
        own: Option<Own>,
    }

    impl OneShot {
        /// This member's side of `group`, on a GPU with this index and context; `stream` is idle. A collective.
        ///
        /// # Errors
        /// The same for all members: why the first of them cannot take part.
        pub(crate) fn join(group: &Group, gpu: usize, context: usize, stream: usize) -> Result<Self, String> {
            let (rank, size) = (group.rank(), group.size());
            let own = if size > MEMBERS {
                Err(format!("at most {MEMBERS} members, here are {size}"))
            } else if !group.is_on_one_host() {
                Err("the members are on several hosts".into())
            } else {
                Own::new(group.ranks()[rank], size, context, stream)
            };
            let offer = own.as_ref().map_err(Clone::clone).and_then(|own| own.offer(gpu, group.is_in_one_process()));
            let offers = group.all_gather_host(offer).into_iter().enumerate();
            let named = |(member, offer): (usize, Result<_, String>)| {
                offer.map_err(|why| format!("rank {}: {why}", group.ranks()[member]))
            };
            let offers = offers.map(named).collect::<Result<Vec<_>, _>>()?;
            let own = own?;
            let opened = agree(group, Opened::open(group, &offers, &own));
            if opened.is_err() {
                // Nobody frees what another one has open.
                group.barrier();
            }
            let opened = opened?;
            let least = offers.iter().map(Offer::capability).min();
            Ok(Self {
                rank: rank as u32,
                size: size as u32,
                members: opened.members,
                stop: own.stop_on_device(),
                kernels: own.kernels(),
                norms: least.filter(|capability| *capability >= 8).map(Norms::new),
                users: AtomicUsize::new(0),
                held: Mutex::new(Held { opened: Some(opened), own: Some(own) }),
            })
        }

        /// Begins (`true`) or ends its use for this rank's sums.
        pub(crate) fn use_it(&self, begin: bool) {
            match begin {
                true => self.users.fetch_add(1, Ordering::AcqRel),
                false => self.users.fetch_sub(1, Ordering::AcqRel),
            };
        }

        /// Whether it sums a tensor of these elements now.
        pub(crate) fn takes(&self, dtype: DType, elements: usize) -> bool {
            let bytes = elements * dtype.size();
            let fits = bytes > 0 && bytes <= limit(self.size as usize);
            fits && kernel_of(dtype).is_some() && self.users.load(Ordering::Acquire) > 0
        }

        /// Queues the sum on `stream`, a stream of this member's GPU. All members' calls are in one order.
        ///
        /// `from` and `to` hold `count` elements.
        pub(crate) fn launch(
            &self,
            stream: CUstream,
            (from, to): (*mut c_void, *mut c_void),
            dtype: DType,
            count: usize,
        ) -> Result<(), String> {
            let kernel = kernel_of(dtype).ok_or_else(|| format!("no sum of {dtype:?}"))?;
            let (mut from, mut to, mut stop, mut members) = (from as u64, to as u64, self.stop, self.members);
            let (mut count, mut rank, mut size) = (count as u32, self.rank, self.size);
            let mut units = region(self.size as usize) as u32;
            let mut arguments = pointers!(from, to, stop, count, rank, size, units, members);
            let grid = (blocks(count as usize * dtype.size()) as u32, 1, 1);
            // SAFETY: the arguments have the kernel's types; the caller's buffers hold `count` elements, and the members'
            // memory has a region for as many, as `takes` has found. The module and the memory stay until the end of the
            // communicator, from where on no call reaches this line.
            unsafe {
                let kernel = self.kernels[kernel] as _;
                driver::launch_kernel(kernel, grid, (THREADS as u32, 1, 1), 0, stream, &mut arguments)
            }
            .map_err(|error| format!("the kernel of a small all-reduce: {error}"))
        }

        /// Whether it also adds such rows to the residual stream and normalises them, now.
        pub(crate) fn takes_norms(&self, rows: &NormedRows) -> bool {
            self.norms.is_some() && rows.has_kernel() && self.takes(rows.dtype, rows.rows * rows.columns)
        }

        /// Queues the sum of the members' partial sums, its sum with the stream and the RMSNorm of that on `stream`, in
        /// the order of all other calls. The buffers, each aligned to 16 bytes: the partial sums, the stream, the norm's
        /// weight `[columns]`; the new stream and the normalised rows. `next` has so many bytes that the cache should
        /// have for later calls, as [`prefetched`](super::layout::prefetched) says.
        pub(crate) fn launch_norm(
            &self,
            stream: CUstream,
            buffers: [*mut c_void; 5],
            (next, next_bytes): (*mut c_void, usize),
            rows: NormedRows,
            eps: f32,
        ) -> Result<(), String> {
            let norms = self.norms.as_ref().ok_or("a member's GPU has no kernel for sums and norms")?;
            let kernel = norms.kernel(&rows)?;
            let [mut from, mut old, mut weight, mut new, mut normed] = buffers.map(|at| at as u64);
            let (mut stop, mut members) = (self.stop, self.members);
            let (mut rank, mut size, mut units) = (self.rank, self.size, region(self.size as usize) as u32);
            let (mut width, mut inverse, mut eps) = (rows.columns as u32 / 8, 1.0 / rows.columns as f32, eps);
            let next_bytes = if norms.prefetch() { next_bytes } else { 0 };
            let prefetchers = if next_bytes > 0 { PREFETCHERS } else { 0 };
            let grid = ((rows.rows + prefetchers) as u32, 1, 1);
            let (mut next, mut next_bytes, mut count) = (next as u64, next_bytes as u32, rows.rows as u32);
            let mut arguments = pointers!(
                from, old, weight, new, normed, stop, width, inverse, eps, rank, size, units, next, next_bytes, count,
                members
            );
            let block = (rows.threads as u32, 1, 1);
            // SAFETY: as in `launch`; the buffers hold the rows, and the weight one; `next` is as long.
            unsafe { driver::launch_kernel(kernel as _, grid, block, 0, stream, &mut arguments) }
                .map_err(|error| format!("the kernel of a small sum and its norm: {error}"))
        }

        /// Ends kernels that wait for other members, and all later ones.
        pub(crate) fn stop(&self) {
            if let Some(own) = &self.held.lock().own {
                own.stop();
            }
        }

        /// Closes the other members' memory. All calls have ended, here and so in the others' memory.
        pub(crate) fn close(&self) {
            drop(self.held.lock().opened.take());
        }

        /// Frees this member's own, which the others have closed.
        pub(crate) fn free(&self) {
            self.norms.iter().for_each(Norms::unload);
            drop(self.held.lock().own.take());
        }
    }

    impl Drop for OneShot {
        /// Leaks what a run that has failed has left: kernels of other members may still write there.
        fn drop(&mut self) {
            std::mem::forget(std::mem::take(self.held.get_mut()));
        }
    }

    /// The index of the kernel for elements of this type.
    fn kernel_of(dtype: DType) -> Option<usize> {
        Some(match dtype {
            DType::BF16 => 0,
            DType::F16 => 1,
            DType::F32 | DType::Flex32 => 2,
            DType::F64 => 3,
            _ => return None,
        })
    }
}
