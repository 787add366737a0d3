//! Send and receive between two GPUs.
//!
//! Every ordered pair of neighbours has its own communicator with its own stream, so that one direction never waits for
//! the other, in any order of operations of the two ranks. The compute stream waits for a receive only when the tensor
//! is used, so that an early receive overlaps the passes before. The compute stream never waits for a pipeline's send:
//! the receiver may be waiting for later work of this stream. The source is held until the host sees that it is sent.
//!
//! In a ring that would hold too much memory: the host runs layers ahead of the GPU, and all sources up to there would
//! be held, 2 GiB a layer and backward pass for 32,768 tokens a rank of Llama 3 8B. There the compute stream waits for
//! a send some messages later ([`send_in_ring`]), after which the memory is reused.
//!
//! Invariant: all members of a ring run the same rounds in the same order, and the receiver starts the receive of a
//! message at most two messages after the position of its send on the sender. So a compute stream waits for a receive
//! that is earlier in the list of operations of every member than the wait itself. A cycle of waiting ranks would have
//! to lead back to a later position, so there is none. (Collectives have the same position on all members, a ring's
//! receive waits for a send at an earlier one, and lists of stages are ordered by their schedule.)
//!
//! The rank that arrives first spins on the GPU until the other has arrived, so the kernels are small.

use super::library::finished;
use super::{Communicator, collective_operation, data_type, elements, gpu_of, own_gpus};
use crate::comm::{DeviceOp, DeviceOpKind, Group};
use burn::backend::Cube;
use burn::tensor::{DType, Device, Shape, Tensor};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cudarc::nccl::result as nccl;
use gpu::cuda::{PinnedBuffer, dense, empty};
use gpu::memory_use::ledger;
use gpu::profile;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Thread blocks of a message's kernel. Each occupies an SM while it waits for the other rank; four transfer some 80
/// GB/s over NVLink, which is enough next to passes of many milliseconds.
const BLOCKS: i32 = 4;

/// Messages of rings in flight before the compute stream waits for the oldest: keys and values, or their gradients, of
/// two sends. At least two, see the invariant.
const IN_FLIGHT_IN_RING: usize = 4;

/// A pipeline's message, until its event has passed.
struct Sent {
    message: Message,
    /// Before this is set, the slot's event may still be that of an earlier message.
    is_recorded: Arc<AtomicBool>,
}

/// A message's source, and the event that marks it as sent.
struct Message {
    link: Arc<Communicator>,
    slot: usize,
    source: Source,
}

/// A source that must stay until a message is sent; counted in memory reports.
struct Source {
    held: PinnedBuffer,
    gpu: usize,
    bytes: u64,
}

impl Source {
    fn new(x: CubeTensor) -> Self {
        let (gpu, bytes) = (usize::from(x.client.service_id().device.index_id), (elements(&x) * x.dtype.size()) as u64);
        ledger::add(ledger::Kind::Message, gpu, bytes);
        Self { held: PinnedBuffer::new(x), gpu, bytes }
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        ledger::remove(ledger::Kind::Message, self.gpu, self.bytes);
    }
}

thread_local! {
    static IN_FLIGHT: RefCell<VecDeque<Sent>> = const { RefCell::new(VecDeque::new()) };
    static IN_RINGS: RefCell<VecDeque<Message>> = const { RefCell::new(VecDeque::new()) };
}

/// Creates the communicators between neighbours of the ring `group`, if every member has its own GPU.
pub fn connect(group: &Group, device: &Device) {
    join(group, anchor(device));
}

/// [`connect`] on the device of `like`, once.
pub fn connect_once(group: &Group, like: &CubeTensor) {
    let size = group.size();
    if size == 1 {
        return;
    }
    // All members have created or refused their communicators in the same call.
    let ahead = group.pair(group.rank(), (group.rank() + 1) % size);
    if ahead.knows_link() {
        return;
    }
    let (client, device) = (like.client.clone(), like.device.clone());
    join(group, Some(empty_device_contiguous_dtype(client, device, Shape::from([1]), DType::F32)));
    ahead.device_link::<Communicator>(|_| None);
}

/// `anchor` is a small tensor on the rank's GPU, if it has one.
fn join(group: &Group, anchor: Option<CubeTensor>) {
    let index = anchor.as_ref().and_then(|anchor| gpu_of(&anchor.device));
    let size = group.size();
    if size == 1 {
        return;
    }
    let (Some(index), Some(anchor)) = (own_gpus(group, index), anchor) else { return };
    // All ranks visit the pairs in the same order: setting one up, and its first message, wait for both members.
    for from in 0..size {
        let mut targets = vec![(from + 1) % size, (from + size - 1) % size];
        targets.dedup();
        for to in targets {
            if group.rank() != from && group.rank() != to {
                continue;
            }
            let pair = group.pair(from, to);
            if pair.existing_link::<Communicator>().is_some() {
                continue;
            }
            let link = Communicator::join(&pair, index, Some(BLOCKS))
                .unwrap_or_else(|message| panic!("NCCL communicator of {pair:?}: {message}"));
            pair.device_link(|_| Some(link.clone()));
            match group.rank() == from {
                true => send(anchor.clone(), &pair, &link),
                false => drop(receive(&anchor, Shape::from([1]), anchor.dtype, &pair, &link).wait()),
            }
        }
    }
}

/// The communicator from one member to another, if [`connect`] has created it.
pub fn link(group: &Group, from: usize, to: usize) -> Option<(Group, Arc<Communicator>)> {
    let pair = group.pair(from, to);
    let link = pair.existing_link::<Communicator>()?;
    Some((pair, link))
}

/// Sends `x` from the first member of `pair` to the second.
pub fn send(x: CubeTensor, pair: &Group, link: &Arc<Communicator>) {
    release();
    let is_recorded = Arc::new(AtomicBool::new(false));
    let recorded = is_recorded.clone();
    let message = start(x, pair, link, move || recorded.store(true, Ordering::Release));
    IN_FLIGHT.with_borrow_mut(|sent| sent.push_back(Sent { message, is_recorded }));
}

/// The same in a ring, where the compute stream then waits for the message [`IN_FLIGHT_IN_RING`] messages earlier.
pub fn send_in_ring(x: CubeTensor, pair: &Group, link: &Arc<Communicator>) {
    let message = start(x, pair, link, || ());
    let oldest = IN_RINGS.with_borrow_mut(|sent| {
        sent.push_back(message);
        if sent.len() > IN_FLIGHT_IN_RING { sent.pop_front() } else { None }
    });
    if let Some(Message { link, slot, source }) = oldest {
        let x = source.held.tensor.clone();
        pass(&link, slot, &x, source);
    }
}

/// Queues a send; `recorded` is called once the event of the message is recorded in its stream.
fn start(x: CubeTensor, pair: &Group, link: &Arc<Communicator>, recorded: impl FnOnce() + Send + 'static) -> Message {
    let source = Source::new(dense(x));
    let x = &source.held.tensor;
    let (count, data_type) = (elements(x), data_type(x.dtype));
    let op = DeviceOp::new(DeviceOpKind::Message, x.dtype, x.meta.shape());
    let _noted = profile::operation(x, || collective_operation(&op, count * x.dtype.size(), 2, ", sent"));
    let (sequence, slot) = (pair.issue(op.clone()), link.events.take());
    link.queue((sequence, op), [x], move |call, [from]| {
        call.follow()?;
        let (comm, stream) = call.target();
        // SAFETY: the buffer holds `count` elements and is held until the event has passed, or a stream waits for it.
        finished(unsafe { nccl::send(from, count, data_type, 1, comm, stream) })?;
        call.record(slot)?;
        recorded();
        Ok(())
    });
    Message { link: link.clone(), slot, source }
}

/// A tensor that is being received. Dropping it waits for it as [`Receiving::wait`] does.
pub struct Receiving {
    in_flight: Option<(Arc<Communicator>, usize, PinnedBuffer)>,
}

impl Receiving {
    /// The tensor; later work of this thread waits for it on the GPU.
    pub fn wait(mut self) -> CubeTensor {
        let (link, slot, buffer) = self.in_flight.take().expect("it is waited for once");
        let x = buffer.tensor.clone();
        pass(&link, slot, &x, buffer);
        x
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        match self.in_flight.take() {
            None => {}
            // The run ends. The buffer must not be freed while NCCL may still write to it, so it is abandoned.
            Some((_, _, buffer)) if std::thread::panicking() => buffer.abandon(),
            Some((link, slot, buffer)) => {
                let x = buffer.tensor.clone();
                pass(&link, slot, &x, buffer);
            }
        }
    }
}

/// Lets the compute stream wait for the message of `slot`, whose tensor is `x`; `held` is held until that is queued.
fn pass(link: &Arc<Communicator>, slot: usize, x: &CubeTensor, held: impl Send + 'static) {
    link.submit([x], move |call, _| {
        call.wait(slot)?;
        call.events().give(slot);
        drop(held);
        Ok(())
    });
}

/// Starts to receive on the second member of `pair` the next message of the first, after the queued work of the compute
/// stream and earlier messages of the pair; `like` is on the device.
pub fn receive(like: &CubeTensor, shape: Shape, dtype: DType, pair: &Group, link: &Arc<Communicator>) -> Receiving {
    release();
    let x = empty(like, shape, dtype);
    let (count, data_type) = (elements(&x), data_type(dtype));
    let op = DeviceOp::new(DeviceOpKind::Message, dtype, x.meta.shape());
    let noted = profile::operation(&x, || collective_operation(&op, count * dtype.size(), 2, ", received"));
    let (sequence, slot) = (pair.issue(op.clone()), link.events.take());
    let buffer = PinnedBuffer::new(x.clone());
    link.queue((sequence, op), [&x], move |call, [to]| {
        // Earlier uses of the buffer's memory are done when the compute stream is here, and nothing uses it before the
        // stream has waited for the message.
        call.follow()?;
        let (comm, stream) = call.target();
        // SAFETY: the buffer holds `count` elements and is held until the compute stream has queued its wait.
        finished(unsafe { nccl::recv(to, count, data_type, 0, comm, stream) })?;
        call.record(slot)
    });
    drop(noted);
    Receiving { in_flight: Some((link.clone(), slot, buffer)) }
}

/// A small tensor on the device, if it is one of CubeCL's.
pub fn anchor(device: &Device) -> Option<CubeTensor> {
    Tensor::<1>::empty([1], &device.clone().without_autodiff()).try_into_primitive::<Cube>().ok()
}

/// Releases the sources of messages that are sent.
fn release() {
    IN_FLIGHT.with_borrow_mut(|sent| {
        sent.retain(|Sent { message: Message { link, slot, .. }, is_recorded }| {
            let has_gone = is_recorded.load(Ordering::Acquire) && link.events.has_passed(*slot);
            if has_gone {
                link.events.give(*slot);
            }
            !has_gone
        });
    });
}
