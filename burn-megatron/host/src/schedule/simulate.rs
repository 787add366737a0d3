//! Plays a schedule with given durations.

use super::{Action, Fault, Input, Pass, Schedule, Span, Ticks, Timeline, Transfer, Work};
use std::collections::{HashMap, VecDeque};

/// How long things take. Reductions and the step take no time here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Forward pass of each stage.
    pub forward: Vec<Ticks>,
    /// Input gradient of each stage.
    pub backward_input: Vec<Ticks>,
    /// Weight gradients of each stage. A whole backward takes both.
    pub backward_weight: Vec<Ticks>,
    /// One tensor from rank to rank.
    pub transfer: Ticks,
}

impl Costs {
    /// The same for every stage, and transfers that take no time.
    pub fn uniform(stages: usize, forward: Ticks, backward_input: Ticks, backward_weight: Ticks) -> Self {
        Self::per_layer(&vec![1; stages], forward, backward_input, backward_weight)
    }

    /// In proportion to the layers of each stage, and transfers that take no time.
    pub fn per_layer(layers: &[usize], forward: Ticks, backward_input: Ticks, backward_weight: Ticks) -> Self {
        let times = |ticks: Ticks| layers.iter().map(|&layers| (layers as Ticks).saturating_mul(ticks)).collect();
        Self {
            forward: times(forward),
            backward_input: times(backward_input),
            backward_weight: times(backward_weight),
            transfer: 0,
        }
    }

    /// With transfers that take so long.
    pub fn with_transfer(mut self, transfer: Ticks) -> Self {
        self.transfer = transfer;
        self
    }

    /// How long a pass of a stage takes.
    pub fn pass(&self, pass: Pass, stage: usize) -> Ticks {
        match pass {
            Pass::Forward => self.forward[stage],
            Pass::BackwardInput => self.backward_input[stage],
            Pass::BackwardWeight => self.backward_weight[stage],
            Pass::Backward => self.backward_input[stage].saturating_add(self.backward_weight[stage]),
        }
    }
}

/// What a transfer does to the ranks at its ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// Nothing: it overlaps with the passes and the other transfers, and only the pass that needs the tensor waits.
    Overlapped,
    /// It overlaps with the passes, once it is sent, its receive is posted, and what was sent from rank to rank before
    /// is there: one NCCL stream for each ordered pair of ranks.
    Posted,
    /// It overlaps with the passes, but the transfers of a rank wait for each other, in the order of its list: one NCCL
    /// stream per rank, filled ahead of time.
    InOrder,
    /// Both ranks stop for each other and for the transfer, one transfer at a time.
    Blocking,
}

/// Plays the lists to their end.
///
/// # Errors
/// [`Fault::Deadlock`] with what every rank waits for.
pub fn simulate(schedule: &Schedule, costs: &Costs, link: Link) -> Result<Timeline, Fault> {
    let mut play = Play {
        schedule,
        costs,
        link,
        ranks: schedule.ranks.iter().map(|list| Vec::with_capacity(list.len())).collect(),
        queues: schedule.ranks.iter().map(|list| Queue::new(list)).collect(),
        sent: vec![None; schedule.tags()],
        posted: vec![None; schedule.tags()],
        pairs: HashMap::new(),
        arrival: vec![None; schedule.tags()],
        done: Done::new(schedule),
    };
    loop {
        let mut moved = false;
        for rank in 0..schedule.ranks.len() {
            while play.advance(rank) || play.carry(rank) {
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let waiting: Vec<_> = (0..schedule.ranks.len()).filter_map(|rank| Some((rank, play.next(rank)?))).collect();
    if waiting.is_empty() { Ok(Timeline { ranks: play.ranks }) } else { Err(Fault::Deadlock { waiting }) }
}

/// When the passes of each rank ended.
struct Done {
    micro_batches: usize,
    chunks: usize,
    ends: Vec<Option<Ticks>>,
}

impl Done {
    fn new(schedule: &Schedule) -> Self {
        let (micro_batches, chunks) = (schedule.spec.micro_batches, schedule.placement().chunks());
        Self { micro_batches, chunks, ends: vec![None; schedule.ranks.len() * chunks * 4 * micro_batches] }
    }

    fn end(&mut self, rank: usize, work: Work) -> &mut Option<Ticks> {
        let index = (rank * self.chunks + work.chunk) * 4 + work.pass as usize;
        &mut self.ends[index * self.micro_batches + work.micro_batch]
    }
}

/// The transfers of a rank in the order of its list, and when the last one carried ended.
struct Queue {
    transfers: Vec<Transfer>,
    next: usize,
    free: Ticks,
}

impl Queue {
    fn new(list: &[Action]) -> Self {
        let transfers = list.iter().filter_map(|action| match action {
            Action::Send(transfer) | Action::Recv(transfer) => Some(*transfer),
            _ => None,
        });
        Self { transfers: transfers.collect(), next: 0, free: 0 }
    }

    fn head(&self) -> Option<Transfer> {
        self.transfers.get(self.next).copied()
    }
}

/// Tags of what was sent from one rank to another and is not there yet, and when the last one arrived.
#[derive(Default)]
struct Pair {
    tags: VecDeque<usize>,
    free: Ticks,
}

struct Play<'a> {
    schedule: &'a Schedule,
    costs: &'a Costs,
    link: Link,
    ranks: Vec<Vec<Span>>,
    queues: Vec<Queue>,
    /// By tag, when the sender had the tensor.
    sent: Vec<Option<Ticks>>,
    /// By tag, when the receiver had a buffer for it.
    posted: Vec<Option<Ticks>>,
    /// By sender and receiver.
    pairs: HashMap<(usize, usize), Pair>,
    /// By tag, when the tensor is at its receiver.
    arrival: Vec<Option<Ticks>>,
    done: Done,
}

impl Play<'_> {
    fn next(&self, rank: usize) -> Option<Action> {
        self.schedule.ranks[rank].get(self.ranks[rank].len()).copied()
    }

    /// When the rank ended its last action.
    fn clock(&self, rank: usize) -> Ticks {
        self.ranks[rank].last().map_or(0, |span| span.end)
    }

    fn record(&mut self, rank: usize, action: Action, start: Ticks, end: Ticks) {
        self.ranks[rank].push(Span { action, start, end });
    }

    /// Plays the next action of a rank, if what it waits for is there.
    fn advance(&mut self, rank: usize) -> bool {
        let Some(action) = self.next(rank) else { return false };
        let now = self.clock(rank);
        match action {
            Action::Compute(work) => {
                let Some(start) = self.ready(rank, work) else { return false };
                let start = start.max(now);
                let end =
                    start.saturating_add(self.costs.pass(work.pass, self.schedule.placement().stage(rank, work.chunk)));
                *self.done.end(rank, work) = Some(end);
                self.record(rank, action, start, end);
            }
            Action::Send(transfer) if self.link == Link::Blocking => return self.meet(rank, transfer),
            Action::Send(transfer) => {
                self.sent[transfer.tag] = Some(now);
                match self.link {
                    Link::Overlapped => self.arrival[transfer.tag] = Some(now.saturating_add(self.costs.transfer)),
                    Link::Posted => {
                        self.pairs.entry((rank, transfer.peer)).or_default().tags.push_back(transfer.tag);
                        self.settle((rank, transfer.peer));
                    }
                    _ => {}
                }
                self.record(rank, action, now, now);
            }
            // A blocking receive is played with its send.
            Action::Recv(_) if self.link == Link::Blocking => return false,
            Action::Recv(transfer) if self.link == Link::Posted => {
                self.posted[transfer.tag] = Some(now);
                self.settle((transfer.peer, rank));
                self.record(rank, action, now, now);
            }
            Action::Recv(_) | Action::ReduceGrads { .. } | Action::Step => self.record(rank, action, now, now),
        }
        true
    }

    /// When the tensors of a pass are there; `None` as long as nobody knows.
    fn ready(&mut self, rank: usize, work: Work) -> Option<Ticks> {
        let forward = Work { pass: Pass::Forward, ..work };
        match work.pass {
            Pass::BackwardWeight => return *self.done.end(rank, Work { pass: Pass::BackwardInput, ..work }),
            Pass::Forward => {}
            Pass::Backward | Pass::BackwardInput => _ = (*self.done.end(rank, forward))?,
        }
        match self.schedule.input(rank, work) {
            None => Some(0),
            Some(Input::Local(source)) if source.pass == Pass::Forward => *self.done.end(rank, source),
            // Of the pass before, which may be split in two or not, the input's gradient is needed.
            Some(Input::Local(source)) => {
                let ends =
                    [Pass::Backward, Pass::BackwardInput].map(|pass| *self.done.end(rank, Work { pass, ..source }));
                ends.into_iter().flatten().next()
            }
            Some(Input::Remote(transfer)) => self.arrival[transfer.tag],
        }
    }

    /// The next transfer in the queue of a rank, if it is also the next in the queue of its peer.
    fn carry(&mut self, rank: usize) -> bool {
        let Some(transfer) = self.queues[rank].head().filter(|_| self.link == Link::InOrder) else { return false };
        let peer = transfer.peer;
        let Some(sent) = self.sent[transfer.tag] else { return false };
        if self.queues[peer].head().is_none_or(|other| other.tag != transfer.tag) {
            return false;
        }
        let end = sent.max(self.queues[rank].free).max(self.queues[peer].free).saturating_add(self.costs.transfer);
        self.arrival[transfer.tag] = Some(end);
        for rank in [rank, peer] {
            self.queues[rank].next += 1;
            self.queues[rank].free = end;
        }
        true
    }

    /// What of a pair's transfers both ends are there for, one after the other.
    fn settle(&mut self, pair: (usize, usize)) {
        let Some(Pair { tags, free }) = self.pairs.get_mut(&pair) else { return };
        while let Some(&tag) = tags.front()
            && let (Some(sent), Some(posted)) = (self.sent[tag], self.posted[tag])
        {
            *free = sent.max(posted).max(*free).saturating_add(self.costs.transfer);
            self.arrival[tag] = Some(*free);
            tags.pop_front();
        }
    }

    /// A transfer of which both ends are there.
    fn meet(&mut self, rank: usize, transfer: Transfer) -> bool {
        let peer = transfer.peer;
        let Some(other @ Action::Recv(receive)) = self.next(peer) else { return false };
        if receive.tag != transfer.tag {
            return false;
        }
        let start = self.clock(rank).max(self.clock(peer));
        let end = start.saturating_add(self.costs.transfer);
        self.arrival[transfer.tag] = Some(end);
        self.record(rank, Action::Send(transfer), start, end);
        self.record(peer, other, start, end);
        true
    }
}
