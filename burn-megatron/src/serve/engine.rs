//! Every rank's loop: the first one says what is read and chooses tokens, the others follow.

use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use backend_dist::collective::one_shot_sums;
use backend_dist::launch::Rank;
use backend_dist::mesh::Axis;
use burn::tensor::Tensor;
use models::layers::paged::{Chunk, Outputs, Step};
use models::{CausalLm, PagedKvCache};
use serde::{Deserialize, Serialize};

use super::queue::{Message, Queue, locked};
use super::scheduler::{Scheduler, SchedulerConfig, SchedulerError};
use super::sequences::{Pass, Sequences};
use crate::generate::choose;

/// Ranks without work meet this often, so that none waits in a collective for long.
const IDLE: Duration = Duration::from_secs(1);

/// What the first rank tells the others.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Command {
    /// Nothing to do.
    Idle,
    /// A pass of each of some models, after the states of sequences that are gone, by their first blocks.
    Read(Vec<u32>, Vec<Pass>),
    /// The end.
    Stop,
}

/// Serves the requests of a queue until [`stop`](super::Requests::stop), or until nobody asks for more
/// ([`finish`](super::Requests::finish)) and all have their answers. All tensor-parallel ranks of some models make this call; the first has the queue. The models share the
/// blocks of one cache, so they are of one configuration: a model with and without adapters.
///
/// ```
/// use std::ops::ControlFlow;
/// use std::sync::mpsc::channel;
/// use burn::tensor::{Device, FloatDType};
/// use burn_megatron::prelude::*;
/// use burn_megatron::serve::{Event, Request, Requests, SchedulerConfig, run};
///
/// let rank = Rank::single(Device::flex());
/// let model = Llama::build(&LlamaConfig::tiny(), ParamBuilder::new(&rank, FloatDType::F32, 1).without_autodiff())?;
/// let (requests, queue) = Requests::channel();
/// let (send, events) = channel();
/// let ticket = requests.submit(Request::greedy(vec![1, 2, 3], 5), move |event| {
///     send.send(event).map_or(ControlFlow::Break(()), ControlFlow::Continue)
/// })?;
/// drop(requests);
/// run(&rank, &[model], SchedulerConfig::default(), Some(queue))?;
/// assert_eq!(events.iter().filter(|event| matches!(event, Event::Token { .. })).count(), 5);
/// drop(ticket);
/// # Ok::<(), BoxError>(())
/// ```
///
/// Fails if the sizes cannot serve. Panics if the first rank has no queue, or a request names a model that is none of
/// these.
pub fn run<M: CausalLm>(
    rank: &Rank,
    models: &[M],
    config: SchedulerConfig,
    queue: Option<Queue>,
) -> Result<(), SchedulerError> {
    run_from(rank, models, config, queue, || ())
}

/// [`run`], and calls `ready` on every rank before the first request is taken: when the cache has its memory, so that what
/// there is no memory for ends a server that has promised nothing.
pub fn run_from<M: CausalLm>(
    rank: &Rank,
    models: &[M],
    config: SchedulerConfig,
    queue: Option<Queue>,
    ready: impl FnOnce(),
) -> Result<(), SchedulerError> {
    config.check()?;
    let shares = models.iter().all(CausalLm::shares_prefixes);
    let config = SchedulerConfig { enable_prefix_caching: config.enable_prefix_caching && shares, ..config };
    let group = rank.group(Axis::Tp);
    let _sums = one_shot_sums(&group, &rank.device);
    let mut cache = PagedKvCache::new(config.num_blocks, config.block_size);
    // Recorded steps read the weights of one model.
    if config.enforce_eager || models.len() > 1 || rank.mesh.world_size() > 1 {
        cache = cache.eager();
    }
    let mut first = match group.rank() {
        0 => Some(First {
            queue: queue.expect("the first rank has the queue"),
            sequences: Sequences::new(Scheduler::new(config)?),
            is_last: false,
        }),
        _ => None,
    };
    if let Some(model) = models.first() {
        allocate(model, &mut cache);
    }
    ready();
    loop {
        let command = first.as_mut().map(First::next);
        let passes = match group.broadcast_host(command, 0) {
            Command::Idle => continue,
            Command::Stop => return Ok(()),
            Command::Read(released, passes) => {
                cache.release(&released);
                passes
            }
        };
        for pass in passes {
            let logits = models[pass.model].extend(&pass.step, &mut cache);
            if let Some(first) = &mut first {
                first.take(&pass, logits);
            }
        }
    }
}

/// Reads a token that is no sequence's: the pools of all layers are made with their first step.
fn allocate<M: CausalLm>(model: &M, cache: &mut PagedKvCache) {
    let any = Chunk { tokens: vec![0], positions: 0..1, blocks: vec![0], outputs: Outputs::Last };
    // Its numbers say that everything before them was done.
    model.extend(&Step::new(vec![any]), cache).into_data();
    cache.release(&[0]);
}

/// The first rank: where requests come from, and the sequences that they became.
struct First {
    queue: Queue,
    sequences: Sequences,
    /// Nobody asks for more.
    is_last: bool,
}

impl First {
    /// Takes what has come, and says what to do.
    fn next(&mut self) -> Command {
        let Self { queue, sequences, is_last } = self;
        // Before the first rank waits for requests, and again when it knows what is read.
        *locked(&queue.statistics) = sequences.statistics();
        let command = loop {
            let message = match sequences.is_empty() {
                true if *is_last => break Command::Stop,
                true => queue.receiver.recv_timeout(IDLE),
                false => queue.receiver.try_recv().map_err(|_| RecvTimeoutError::Timeout),
            };
            match message {
                Ok(Message::Request(submitted)) => sequences.add(*submitted),
                Ok(Message::Finish) => *is_last = true,
                Err(RecvTimeoutError::Disconnected) => *is_last = true,
                Ok(Message::Stop) => {
                    sequences.fail_all("the server stops");
                    break Command::Stop;
                }
                Err(RecvTimeoutError::Timeout) => {
                    let passes = sequences.next_passes();
                    let released = sequences.take_released();
                    break match passes.is_empty() && released.is_empty() {
                        true => Command::Idle,
                        false => Command::Read(released, passes),
                    };
                }
            }
        };
        *locked(&queue.statistics) = sequences.statistics();
        command
    }

    /// Chooses after a pass.
    fn take(&mut self, pass: &Pass, logits: Tensor<2>) {
        let (places, choices): (Vec<_>, Vec<_>) = self.sequences.choices(pass).into_iter().unzip();
        let chosen = choose(logits, &choices);
        for ((place, choice), chosen) in places.into_iter().zip(choices).zip(chosen) {
            self.sequences.take(place, choice, chosen);
        }
    }
}
