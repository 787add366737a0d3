//! All-reduces of small tensors by one kernel of our own, for members whose GPUs write to each other's memory.
//!
//! NCCL takes about 20 µs for 8 KiB, and a decode step of tensor parallelism has two all-reduces a layer. Here every
//! member stores its tensor into the memory of every other one and sums what has arrived in its own ("one-shot", as
//! vLLM and TensorRT-LLM call it). The kernel runs on the compute stream, so no events order it, and a CUDA graph can
//! record it: its pointers are fixed, and the number of a call is in device memory.
//!
//! A rank asks for it while it generates ([`one_shot_sums`](crate::collective::one_shot_sums)). Training has collectives
//! in flight on other streams and does not.

pub(crate) mod layout;
#[cfg(feature = "cuda")]
mod memory;
mod ptx;
#[cfg(test)]
mod tests;

#[cfg(feature = "cuda")]
pub(crate) use all_reduce::OneShot;

#[cfg(feature = "cuda")]
mod all_reduce {
    use super::layout::{MEMBERS, THREADS, blocks, limit, region};
    use super::memory::{Opened, Own};
    use crate::comm::Group;
    use crate::comm::one_host::agree;
    use burn::tensor::DType;
    use cudarc::driver::result as driver;
    use cudarc::driver::sys::CUstream;
    use parking_lot::Mutex;
    use std::ffi::c_void;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// One member's side. Raw handles are stored as integers, because they cross threads.
    pub(crate) struct OneShot {
        rank: u32,
        size: u32,
        /// Every member's memory, as this GPU addresses it.
        members: [u64; MEMBERS],
        /// Device address of the word that ends kernels that wait.
        stop: u64,
        kernels: [usize; 4],
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
            Ok(Self {
                rank: rank as u32,
                size: size as u32,
                members: opened.members,
                stop: own.stop_on_device(),
                kernels: own.kernels(),
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
            let mut arguments: [*mut c_void; 8] = [
                (&raw mut from).cast(),
                (&raw mut to).cast(),
                (&raw mut stop).cast(),
                (&raw mut count).cast(),
                (&raw mut rank).cast(),
                (&raw mut size).cast(),
                (&raw mut units).cast(),
                members.as_mut_ptr().cast(),
            ];
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
