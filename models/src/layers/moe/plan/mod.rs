//! Which token goes where: the arithmetic of both dispatchers, on the host.
//!
//! Ranks are members of the group that holds all experts of the layer: member `p etp + j` has part `j` of the experts
//! of expert parallel rank `p`. A copy of a token goes to all members that hold a part of its expert.

#[cfg(test)]
mod tests;

use std::ops::Range;

use backend_dist::ops::moe::Splits;
use backend_dist::ops::moe::routing::{RowOrder, RowStarts, Run};

use super::select::Choice;

/// The members of a layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Members {
    /// Members that share an expert.
    pub etp: usize,
    /// Members that divide the experts.
    pub ep: usize,
    /// Experts of the layer.
    pub experts: usize,
    /// This member.
    pub rank: usize,
    /// Neighbouring members whose tokens make one group of an expert's tokens; an expert has a group for each such
    /// block.
    pub together: usize,
    /// Which chunk of every member's experts, and how many there are.
    pub piece: [usize; 2],
}

impl Members {
    /// Number of members.
    pub fn count(&self) -> usize {
        self.etp * self.ep
    }

    /// The members with a chunk of their experts, for each of `count` chunks.
    pub fn pieces(self, count: usize) -> impl Iterator<Item = Self> {
        (0..count).map(move |index| Self { piece: [index, count], ..self })
    }

    /// The experts of a member, or the chunk of them.
    fn experts_of(&self, member: usize) -> Range<usize> {
        let each = self.experts / self.ep;
        let [piece, pieces] = self.piece;
        let bound = |piece| member / self.etp * each + each * piece / pieces;
        bound(piece)..bound(piece + 1)
    }

    /// The experts of this member, or the chunk of them.
    pub fn own(&self) -> Range<usize> {
        self.experts_of(self.rank)
    }

    /// The order of the `copies` of tokens that this member sends, if experts are split into this many chunks and every
    /// member sends and receives something in each: [`sent_starts`] of all chunks without counts.
    pub fn order(&self, pieces: usize, copies: usize) -> RowOrder {
        RowOrder { shards: self.etp, each: self.experts / self.ep, chunks: pieces, count: copies * self.etp }
    }

    /// The groups of tokens of this member: its experts, each with every block of members.
    fn groups(&self) -> Vec<(usize, Range<usize>)> {
        let blocks =
            |expert| (0..self.count()).step_by(self.together).map(move |first| (expert, first..first + self.together));
        self.own().flat_map(blocks).collect()
    }
}

/// A copy to be made: its token and its expert; `None` is padding, which is zero.
pub(super) type Copy = Option<(usize, usize)>;

/// Copies of tokens for the experts of a rank, by expert, and of one expert by block of members.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Grouped<R> {
    /// Where each comes from.
    pub rows: R,
    /// Copies in each group, padding included.
    pub counts: Vec<usize>,
}

/// Sizes of groups that are padded to multiples of `multiple`, at least one copy in all.
fn filled(counts: impl Iterator<Item = usize>, multiple: usize) -> Vec<usize> {
    let mut counts: Vec<usize> = counts.map(|count| count.next_multiple_of(multiple)).collect();
    if counts.iter().all(|count| *count == 0) {
        counts[0] = multiple;
    }
    counts
}

/// Where each of the consecutive groups begins.
fn starts(counts: &[usize]) -> Vec<usize> {
    let begin = |end: &mut usize, count: &usize| {
        *end += count;
        Some(*end - count)
    };
    counts.iter().scan(0, begin).collect()
}

/// How many copies each expert receives from a rank: its tokens there, or as many as it is padded to.
pub(super) fn counts(choice: &Choice, experts: usize, pad_to: Option<usize>) -> Vec<usize> {
    choice.counts(experts).into_iter().map(|count| pad_to.map_or(count, |room| count.max(room))).collect()
}

/// The tokens of each expert, padded to its count.
fn padded(choice: &Choice, counts: &[usize]) -> Vec<Vec<Copy>> {
    let by_expert = choice.by_expert(counts.len()).into_iter().enumerate();
    by_expert
        .map(|(expert, tokens)| {
            let mut rows: Vec<Copy> = tokens.into_iter().map(|token| Some((token, expert))).collect();
            rows.resize(counts[expert], None);
            rows
        })
        .collect()
}

/// How many copies this rank sends and receives if member `m` sends `counts[m][e]` of them to expert `e`. Every rank
/// sends and receives something: one without copies sends itself padding.
pub(super) fn splits(members: &Members, counts: &[Vec<usize>]) -> Splits {
    let of = |from: usize, to: usize| counts[from][members.experts_of(to)].iter().sum();
    let mut send: Vec<usize> = (0..members.count()).map(|to| of(members.rank, to)).collect();
    let mut receive: Vec<usize> = (0..members.count()).map(|from| of(from, members.rank)).collect();
    if receive.iter().all(|rows| *rows == 0) || send.iter().all(|rows| *rows == 0) {
        send[members.rank] += 1;
        receive[members.rank] += 1;
    }
    Splits { send, receive }
}

/// What this rank sends, in the order of the members, their experts and its tokens.
pub(super) fn sent(members: &Members, choice: &Choice, counts: &[usize], splits: &Splits) -> Vec<Copy> {
    let by_expert = padded(choice, counts);
    let part = |(member, rows): (usize, &usize)| {
        let mut part = by_expert[members.experts_of(member)].concat();
        part.resize(*rows, None);
        part
    };
    splits.send.iter().enumerate().flat_map(part).collect()
}

/// [`sent`] without the choice: where the copies for each expert begin.
pub(super) fn sent_starts(members: &Members, counts: &[usize], splits: &Splits) -> RowStarts {
    let (parts, experts) = (members.etp, members.experts);
    let mut rows = vec![None; parts * experts];
    for (member, start) in starts(&splits.send).into_iter().enumerate() {
        let own = members.experts_of(member);
        for (expert, inside) in own.clone().zip(starts(&counts[own])) {
            rows[member % parts * experts + expert] = Some(start + inside);
        }
    }
    RowStarts { rows, shards: parts, each: experts / members.ep, capacity: None, count: splits.send.iter().sum() }
}

/// The copies of all chunks, one chunk after the other.
pub(super) fn in_turn(pieces: impl Iterator<Item = RowStarts>) -> RowStarts {
    let add = |mut all: RowStarts, piece: RowStarts| {
        let moved = piece.rows.into_iter().map(|row| row.map(|row| all.count + row)).collect::<Vec<_>>();
        all.rows.iter_mut().zip(moved).for_each(|(all, row)| *all = all.or(row));
        all.count += piece.count;
        all
    };
    pieces.reduce(add).expect("experts have a piece")
}

/// The received copies by expert, and inside an expert by sender.
pub(super) fn sort(
    members: &Members,
    counts: &[Vec<usize>],
    Splits { receive, .. }: &Splits,
    multiple: usize,
) -> Grouped<Vec<Run>> {
    let (own, begins) = (members.own(), starts(receive));
    let groups = members.groups();
    let rows = |(expert, block): &(usize, Range<usize>)| counts[block.clone()].iter().map(|from| from[*expert]).sum();
    let filled = filled(groups.iter().map(rows), multiple);
    let mut runs = Vec::new();
    for ((expert, block), mut to) in groups.into_iter().zip(starts(&filled)) {
        for (from, begin) in counts[block.clone()].iter().zip(&begins[block]) {
            let from_row = begin + from[own.start..expert].iter().sum::<usize>();
            runs.push(Run { to, from: from_row, len: from[expert] });
            to += from[expert];
        }
    }
    Grouped { rows: runs, counts: filled }
}

/// Copies for this rank's experts out of all members' tokens: each member has room for `tokens`, one after the other.
/// With every choice comes the number of tokens that its experts are padded to.
pub(super) fn pick(
    members: &Members,
    choices: &[(Choice, Option<usize>)],
    tokens: usize,
    multiple: usize,
) -> Grouped<Vec<Copy>> {
    let rows = |(choice, pad_to): &(Choice, Option<usize>)| padded(choice, &counts(choice, members.experts, *pad_to));
    let by_member: Vec<Vec<Vec<Copy>>> = choices.iter().map(rows).collect();
    let group = |(expert, block): (usize, Range<usize>)| -> Vec<Copy> {
        let rows = block.flat_map(|member| {
            by_member[member][expert]
                .iter()
                .map(move |row| row.map(|(token, expert)| (member * tokens + token, expert)))
        });
        rows.collect()
    };
    let groups: Vec<Vec<Copy>> = members.groups().into_iter().map(group).collect();
    let counts = filled(groups.iter().map(Vec::len), multiple);
    let fill = |(mut group, count): (Vec<Copy>, &usize)| {
        group.resize(*count, None);
        group
    };
    Grouped { rows: groups.into_iter().zip(&counts).flat_map(fill).collect(), counts }
}

/// [`pick`] without the choices: where the copies for each of this rank's experts begin, if member `m` has
/// `counts[m][e]` for expert `e`, without padding but for the last member's. All members are one block.
pub(super) fn picked_starts(members: &Members, counts: &[Vec<usize>], multiple: usize) -> Grouped<RowStarts> {
    let own = members.own();
    debug_assert_eq!(members.together, members.count(), "a place is counted over all members");
    let of_expert = |expert: usize| counts.iter().map(|from| from[expert]).sum();
    let filled = filled(own.clone().map(of_expert), multiple);
    let mut rows = vec![None; members.experts];
    own.zip(starts(&filled)).for_each(|(expert, start)| rows[expert] = Some(start));
    let starts = RowStarts { rows, shards: 1, each: members.experts, capacity: None, count: filled.iter().sum() };
    Grouped { rows: starts, counts: filled }
}
