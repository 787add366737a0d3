//! Dispatch of tokens to the ranks of their experts and back, after Megatron-LM's
//! `megatron/core/transformer/moe/token_dispatcher.py`. Copies that several ranks have made for one token are added in
//! a fixed order.

use std::sync::Arc;

use backend_dist::comm::Group;
use backend_dist::ops::moe::routing::{ExpertChoice, RowOrder};
use backend_dist::ops::moe::{
    ExpertChunk, ExpertPipeline, RowMap, Splits, all_to_all, gather_rows, is_faster_in_two_chunks,
};
use backend_dist::ops::tensor_parallel::{Partial, gather_from_sequence_parallel, reduce_scatter_to_sequence_parallel};
use burn::tensor::{Device, FloatDType, IntDType, Tensor};

use super::config::Dispatcher;
use super::decide::{Choices, DeviceChoice, Uncounted};
use super::experts::Experts;
use super::plan::{Copy, Grouped, Members, counts, in_turn, pick, picked_starts, sent, sent_starts, sort, splits};
use super::router::Routing;
use super::select::Choice;
use crate::layers::linear::pad_sequence;
use crate::micro_batch::MicroBatch;

/// The token dispatcher of a layer.
#[derive(Clone, Debug)]
pub(super) struct Dispatch {
    /// The ranks that hold all experts of the layer.
    pub group: Group,
    pub members: Members,
    pub how: Dispatcher,
    /// What an expert's number of tokens is padded to a multiple of.
    pub multiple: usize,
    /// All-to-alls are overlapped with the experts' GEMMs.
    pub overlap: bool,
    /// Into how many chunks a rank's experts are split for that. `None` leaves it to arithmetic.
    pub pieces: Option<usize>,
}

/// Copies of tokens for all members, and their probabilities.
struct Sent {
    /// From tokens to the copies.
    copies: RowMap,
    /// `[copies, hidden]`.
    x: Tensor<2>,
    /// `[copies, 1]`.
    p: Tensor<2>,
}

impl Sent {
    /// Of tokens `x [tokens, hidden]` and `probs [tokens, experts]`, and maps from tokens and from slots.
    fn new(x: Tensor<2>, probs: Tensor<2>, (copies, slot_map): (RowMap, RowMap)) -> Self {
        let (x, p) = (gather_rows(x, &copies), gather_rows(slots(probs), &slot_map));
        Self { copies, x, p }
    }
}

/// Copies that were made in an order which the counts may contradict.
pub(super) struct Early {
    order: RowOrder,
    sent: Sent,
}

impl Dispatch {
    /// The copies of tokens for other members, made before the host knows the counts. Their order follows from the
    /// counts on the device, their number from the number of tokens: the host learns later which member receives how
    /// many. It cannot know whether a chunk is empty for some member ([`Members::order`]); then the copies are made
    /// once more.
    pub fn early(&self, x: Tensor<2>, choice: Uncounted, experts: &Experts) -> Option<Early> {
        if self.how != Dispatcher::AllToAll || self.members.count() == 1 || choice.copies == 0 {
            return None;
        }
        let pieces = self.pieces(choice.copies * self.members.etp, &x, experts);
        let order = self.members.order(pieces.unwrap_or(1), choice.copies);
        let sent = Sent::new(x, choice.probs.clone(), choice.place(&order));
        Some(Early { order, sent })
    }

    /// For each of this rank's tokens `x [tokens, hidden]` the sum of its experts' outputs; this rank has `experts`,
    /// and `early` are copies that were [made](Self::early) before.
    pub fn through(
        &self,
        x: Tensor<2>,
        routing: Routing,
        early: Option<Early>,
        experts: &Experts,
        batch: &MicroBatch,
    ) -> Tensor<2> {
        match self.how {
            _ if self.members.count() == 1 => self.alone(x, routing, experts, batch),
            Dispatcher::AllToAll => self.by_all_to_all(x, routing, early, experts, batch),
            Dispatcher::AllGather => self.by_all_gather(x, routing, experts, batch),
        }
    }

    fn alone(&self, x: Tensor<2>, routing: Routing, experts: &Experts, batch: &MicroBatch) -> Tensor<2> {
        let Routing { choice, probs, pad_to } = routing;
        let tokens = x.dims()[0];
        let ((copies, p), counts) = match choice {
            Choices::Host(choice) => {
                let Grouped { rows, counts } = pick(&self.members, &[(choice, pad_to)], tokens, self.multiple);
                (self.maps(tokens, &rows, &x.device()), counts)
            }
            Choices::Device(choice) => {
                let Grouped { rows, counts } = picked_starts(&self.members, &[choice.counts(pad_to)], self.multiple);
                (choice.place(rows), counts)
            }
        };
        let y = experts.forward(gather_rows(x, &copies), flat(gather_rows(slots(probs), &p)), &counts.into(), batch);
        gather_rows(y, &copies.reversed())
    }

    fn by_all_to_all(
        &self,
        x: Tensor<2>,
        routing: Routing,
        early: Option<Early>,
        experts: &Experts,
        batch: &MicroBatch,
    ) -> Tensor<2> {
        let Routing { choice, probs, pad_to } = routing;
        let (tokens, device) = (x.dims()[0], x.device());
        let own = match &choice {
            Choices::Host(choice) => counts(choice, self.members.experts, pad_to),
            Choices::Device(choice) => choice.counts(pad_to),
        };
        let counts = self.group.all_gather_host(own);
        let rows = counts.iter().flatten().sum::<usize>() * self.members.etp / self.members.count();
        let overlapped = self.pieces(rows, &x, experts);
        let pieces: Vec<(Members, Splits)> =
            self.members.pieces(overlapped.unwrap_or(1)).map(|members| (members, splits(&members, &counts))).collect();
        let own = &counts[self.members.rank];
        let sent = match choice {
            Choices::Host(choice) => {
                let sent = |(members, splits): &(Members, Splits)| sent(members, &choice, own, splits);
                Sent::new(x, probs, self.maps(tokens, &pieces.iter().flat_map(sent).collect::<Vec<_>>(), &device))
            }
            Choices::Device(choice) => {
                let starts = in_turn(pieces.iter().map(|(members, splits)| sent_starts(members, own, splits)));
                match early {
                    Some(early) if early.order.starts(own) == starts => early.sent,
                    _ => Sent::new(x, probs, choice.place(starts)),
                }
            }
        };
        let sort = |(members, splits): &(Members, Splits)| {
            let Grouped { rows, counts } = sort(members, &counts, splits, self.multiple);
            (([splits.received(), counts.iter().sum()], rows), counts)
        };
        let (runs, groups): (Vec<_>, Vec<Vec<usize>>) = pieces.iter().map(sort).unzip();
        let maps = RowMap::of_runs(&runs, &device);
        let piece = |(((members, splits), by_expert), counts): (((Members, Splits), RowMap), Vec<usize>)| ExpertChunk {
            splits,
            by_expert,
            experts: members.own().len(),
            counts: counts.into(),
        };
        let mut pieces: Vec<ExpertChunk> = pieces.into_iter().zip(maps).zip(groups).map(piece).collect();
        let (group, Sent { copies, x, p }) = (self.group.clone(), sent);
        if overlapped.is_some() {
            let (act, fp8, pass) = (experts.activation(), experts.fp8(batch), batch.pass_context());
            let pipeline = Arc::new(ExpertPipeline { group, chunks: pieces, act, fp8, pass });
            return gather_rows(experts.through(x, p, &pipeline), &copies.reversed());
        }
        let ExpertChunk { splits, by_expert, counts, .. } = pieces.remove(0);
        let there = |x: Tensor<2>| gather_rows(all_to_all(x, &splits.send, &splits.receive, &group), &by_expert);
        let (x, p) = (there(x), there(p));
        let y = gather_rows(experts.forward(x, flat(p), &counts, batch), &by_expert.reversed());
        gather_rows(all_to_all(y, &splits.receive, &splits.send, &group), &copies.reversed())
    }

    /// Into how many chunks every member's experts are split to overlap the all-to-alls with them; `None` if they are
    /// not overlapped. `sent` is the mean number of copies that a member sends, so all members compute the same.
    /// Scales of experts in FP8 may be shared with ranks of other groups, which have other counts, and each chunk
    /// communicates its own scales: then the number of chunks is fixed.
    fn pieces(&self, sent: usize, x: &Tensor<2>, experts: &Experts) -> Option<usize> {
        let (members, features, most) = (self.members.count(), experts.features(), self.members.own().len());
        if !self.overlap || self.pieces.is_some() {
            return self.pieces.filter(|_| self.overlap).map(|pieces| pieces.min(most));
        }
        let bytes = sent * features[0] * x.dtype().size() / members * (members - 1);
        (most > 1 && (experts.is_fp8() || is_faster_in_two_chunks(bytes, features))).then_some(2)
    }

    fn by_all_gather(&self, x: Tensor<2>, routing: Routing, experts: &Experts, batch: &MicroBatch) -> Tensor<2> {
        let Routing { choice, probs, pad_to } = routing;
        let [tokens, hidden] = x.dims();
        let Gathered { each, copies, p, counts } = match choice {
            Choices::Host(choice) => self.gather_on_host(choice, pad_to, &x.device()),
            Choices::Device(choice) => self.gather_on_device(&choice, tokens),
        };
        let gathered = |x: Tensor<2>| gather_from_sequence_parallel(pad_sequence(x, each), &self.group);
        let (x, probs) = (gathered(x), gathered(probs));
        let y = experts.forward(gather_rows(x, &copies), flat(gather_rows(slots(probs), &p)), &counts.into(), batch);
        let y = Partial::new(gather_rows(y, &copies.reversed()));
        reduce_scatter_to_sequence_parallel(y, &self.group).slice([0..tokens, 0..hidden])
    }

    fn gather_on_host(&self, choice: Choice, pad_to: Option<usize>, device: &Device) -> Gathered {
        let top_k = choice.top_k();
        let all = self.group.all_gather_host((choice.into_list(), pad_to));
        let all: Vec<(Choice, Option<usize>)> =
            all.into_iter().map(|(list, pad_to)| (Choice::from_list(top_k, list), pad_to)).collect();
        let each = all.iter().map(|(choice, _)| choice.tokens()).max().expect("a group has members");
        let Grouped { rows, counts } = pick(&self.members, &all, each, self.multiple);
        let (copies, p) = self.maps(each * self.members.count(), &rows, device);
        Gathered { each, copies, p, counts }
    }

    fn gather_on_device(&self, choice: &DeviceChoice, tokens: usize) -> Gathered {
        let all = self.group.all_gather_host((choice.counts(None), tokens));
        let (counts, all): (Vec<Vec<usize>>, Vec<usize>) = all.into_iter().unzip();
        let each = all.into_iter().max().expect("a group has members");
        // As floats, which hold the number of an expert exactly; zero is no expert.
        let list = (choice.chosen.table() + 1).cast(FloatDType::F32);
        let list = gather_from_sequence_parallel(pad_sequence(list, each), &self.group).cast(IntDType::I32) - 1;
        let Grouped { rows, counts } = picked_starts(&self.members, &counts, self.multiple);
        let chosen = ExpertChoice::of(list, self.members.experts);
        let (copies, p) = chosen.place(&chosen.count(1), &rows);
        Gathered { each, copies, p, counts }
    }

    /// From tokens to copies, and from the probabilities of tokens and experts, one below the other, to copies.
    fn maps(&self, tokens: usize, rows: &[Copy], device: &Device) -> (RowMap, RowMap) {
        let experts = self.members.experts;
        let copies: Vec<Option<usize>> = rows.iter().map(|row| row.map(|(token, _)| token)).collect();
        let slots: Vec<Option<usize>> =
            rows.iter().map(|row| row.map(|(token, expert)| token * experts + expert)).collect();
        (RowMap::picking(tokens, &copies, device), RowMap::picking(tokens * experts, &slots, device))
    }
}

/// The tokens of all members that a rank's experts take; each member has room for `each`.
struct Gathered {
    each: usize,
    copies: RowMap,
    p: RowMap,
    /// Tokens of each expert, padding included.
    counts: Vec<usize>,
}

/// `[tokens, experts]` as one column.
fn slots(probs: Tensor<2>) -> Tensor<2> {
    let [tokens, experts] = probs.dims();
    probs.reshape([tokens * experts, 1])
}

fn flat(column: Tensor<2>) -> Tensor<1> {
    let [rows, _] = column.dims();
    column.reshape([rows])
}
