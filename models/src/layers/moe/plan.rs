//! Which rows go where: the arithmetic of both dispatchers, on the host.
//!
//! Ranks are members of the group that holds all experts of the layer: member `p etp + j` has part `j` of the experts of
//! expert parallel rank `p`. A copy of a token goes to all members that hold a part of its expert.

use std::ops::Range;

use backend_dist::ops::moe::Splits;
use backend_dist::ops::moe::routing::{Order, Run, Starts};

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
    /// Neighbouring members whose tokens make one group of rows of an expert; an expert has a group for each such block.
    pub together: usize,
    /// Which piece of every member's experts, and how many there are.
    pub piece: [usize; 2],
}

impl Members {
    /// Number of members.
    pub fn count(&self) -> usize {
        self.etp * self.ep
    }

    /// The members with a piece of their experts, for each of `count` pieces.
    pub fn pieces(self, count: usize) -> impl Iterator<Item = Self> {
        (0..count).map(move |index| Self { piece: [index, count], ..self })
    }

    /// The experts of a member, or the piece of them.
    fn experts_of(&self, member: usize) -> Range<usize> {
        let each = self.experts / self.ep;
        let [piece, pieces] = self.piece;
        let bound = |piece| member / self.etp * each + each * piece / pieces;
        bound(piece)..bound(piece + 1)
    }

    /// The experts of this member, or the piece of them.
    pub fn own(&self) -> Range<usize> {
        self.experts_of(self.rank)
    }

    /// How `copies` of tokens stand that this member sends, if experts are cut into this many pieces and every member sends and
    /// receives something in each: [`sent_starts`] of all pieces without counts.
    pub fn order(&self, pieces: usize, copies: usize) -> Order {
        Order { parts: self.etp, each: self.experts / self.ep, pieces, count: copies * self.etp }
    }

    /// The groups of rows of this member: its experts, each with every block of members.
    fn groups(&self) -> Vec<(usize, Range<usize>)> {
        let blocks =
            |expert| (0..self.count()).step_by(self.together).map(move |first| (expert, first..first + self.together));
        self.own().flat_map(blocks).collect()
    }
}

/// A row to be made: the token that it is a copy of and its expert; `None` is a row of zeros.
pub(super) type Copy = Option<(usize, usize)>;

/// Rows that the experts of a rank compute, by expert, and of one expert by block of members.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Grouped<R> {
    /// Where each comes from.
    pub rows: R,
    /// Rows of each group.
    pub counts: Vec<usize>,
}

/// Rows of groups that are filled up to multiples of `multiple`, and at least one row in all.
fn filled(counts: impl Iterator<Item = usize>, multiple: usize) -> Vec<usize> {
    let mut counts: Vec<usize> = counts.map(|count| count.next_multiple_of(multiple)).collect();
    if counts.iter().all(|count| *count == 0) {
        counts[0] = multiple;
    }
    counts
}

/// Where each of the groups begins that follow each other.
fn starts(counts: &[usize]) -> Vec<usize> {
    let begin = |end: &mut usize, count: &usize| {
        *end += count;
        Some(*end - count)
    };
    counts.iter().scan(0, begin).collect()
}

/// How many rows each expert gets from a rank: its tokens there, or as many as it has room for.
pub(super) fn counts(choice: &Choice, experts: usize, pad_to: Option<usize>) -> Vec<usize> {
    choice.counts(experts).into_iter().map(|count| pad_to.map_or(count, |room| count.max(room))).collect()
}

/// The tokens of each expert with rows of zeros up to its count.
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

/// How many rows this rank sends and receives if member `m` sends `counts[m][e]` rows for expert `e`. Nobody sends or receives
/// nothing: a rank without rows sends itself one of zeros.
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

/// [`sent`] without the choice: where the rows of each expert begin.
pub(super) fn sent_starts(members: &Members, counts: &[usize], splits: &Splits) -> Starts {
    let (parts, experts) = (members.etp, members.experts);
    let mut rows = vec![None; parts * experts];
    for (member, start) in starts(&splits.send).into_iter().enumerate() {
        let own = members.experts_of(member);
        for (expert, inside) in own.clone().zip(starts(&counts[own])) {
            rows[member % parts * experts + expert] = Some(start + inside);
        }
    }
    Starts { rows, parts, each: experts / members.ep, room: None, count: splits.send.iter().sum() }
}

/// The rows of all pieces, one piece after the other.
pub(super) fn in_turn(pieces: impl Iterator<Item = Starts>) -> Starts {
    let add = |mut all: Starts, piece: Starts| {
        let moved = piece.rows.into_iter().map(|row| row.map(|row| all.count + row)).collect::<Vec<_>>();
        all.rows.iter_mut().zip(moved).for_each(|(all, row)| *all = all.or(row));
        all.count += piece.count;
        all
    };
    pieces.reduce(add).expect("experts have a piece")
}

/// The received rows by expert, and inside an expert by sender.
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

/// Rows of this rank's experts out of all members' tokens, of which each has room for `tokens`, one member after the other. With
/// every choice comes how many rows its experts are filled up to.
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

/// [`pick`] without the choices: where the rows of each of this rank's experts begin, if member `m` has `counts[m][e]` rows for
/// expert `e`, all of them tokens but for the last member's. All members are one block.
pub(super) fn picked_starts(members: &Members, counts: &[Vec<usize>], multiple: usize) -> Grouped<Starts> {
    let own = members.own();
    debug_assert_eq!(members.together, members.count(), "a place is counted over all members");
    let of_expert = |expert: usize| counts.iter().map(|from| from[expert]).sum();
    let filled = filled(own.clone().map(of_expert), multiple);
    let mut rows = vec![None; members.experts];
    own.zip(starts(&filled)).for_each(|(expert, start)| rows[expert] = Some(start));
    let starts = Starts { rows, parts: 1, each: members.experts, room: None, count: filled.iter().sum() };
    Grouped { rows: starts, counts: filled }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: [usize; 2] = [0, 1];

    fn choice(experts: &[&[usize]]) -> Choice {
        let mut choice = Choice::none(experts.len(), 2);
        experts.iter().enumerate().for_each(|(token, of)| choice.set(token, of.iter().copied()));
        choice
    }

    /// Two expert parallel ranks of two members each, four experts; the members' choices.
    fn four() -> (Vec<Choice>, Vec<Vec<usize>>, impl Fn(usize) -> Members) {
        let choices = vec![
            choice(&[&[0, 2], &[0, 1]]),
            choice(&[&[2, 3], &[]]),
            choice(&[&[], &[]]),
            choice(&[&[1, 2], &[0, 3]]),
        ];
        let counts = choices.iter().map(|choice| counts(choice, 4, None)).collect();
        (choices, counts, |rank| Members { etp: 2, ep: 2, experts: 4, rank, together: 4, piece: WHOLE })
    }

    /// What a member sends.
    fn sending(members: &Members, choice: &Choice, counts: &[Vec<usize>]) -> (Vec<Copy>, Splits) {
        let splits = splits(members, counts);
        (sent(members, choice, &counts[members.rank], &splits), splits)
    }

    #[test]
    fn what_one_sends_another_receives() {
        let (choices, counts, members) = four();
        let all: Vec<_> = (0..4).map(|rank| sending(&members(rank), &choices[rank], &counts)).collect();
        for from in 0..4 {
            for to in 0..4 {
                assert_eq!(all[from].1.send[to], all[to].1.receive[from], "{from} to {to}");
            }
        }
        let first = [Some((0, 0)), Some((1, 0)), Some((1, 1))];
        assert_eq!(all[0].0, [&first[..], &first, &[Some((0, 2))], &[Some((0, 2))]].concat());
        // The third rank has no tokens.
        assert_eq!((&all[2].0[..], &all[2].1.send[..]), (&[None][..], &[0, 0, 1, 0][..]));
    }

    #[test]
    fn both_dispatchers_give_an_expert_the_same_rows_in_the_same_order() {
        let (choices, counts, members) = four();
        for (rank, together) in (0..4).flat_map(|rank| [4, 2, 1].map(|together| (rank, together))) {
            let members = Members { together, ..members(rank) };
            let sent: Vec<_> =
                (0..4).map(|from| sending(&Members { rank: from, ..members }, &choices[from], &counts)).collect();
            let received: Vec<Copy> = (0..4)
                .flat_map(|from| {
                    let start: usize = sent[from].1.send[..rank].iter().sum();
                    let rows = sent[from].0[start..start + sent[from].1.send[rank]].iter();
                    rows.map(move |row| row.map(|(token, expert)| (from * 2 + token, expert)))
                })
                .collect();
            let sorted = sort(&members, &counts, &sent[rank].1, 4);
            let mut rows = vec![None; sorted.counts.iter().sum()];
            for Run { to, from, len } in sorted.rows {
                rows[to..to + len].copy_from_slice(&received[from..from + len]);
            }
            let all: Vec<_> = choices.iter().map(|choice| (choice.clone(), None)).collect();
            let picked = pick(&members, &all, 2, 4);
            assert_eq!((rows, &sorted.counts), (picked.rows, &picked.counts), "rank {rank}");
            assert_eq!(sorted.counts.len(), 2 * 4 / together);
        }
    }

    #[test]
    fn rows_of_a_block_are_filled_up_by_themselves() {
        let (_, counts, members) = four();
        let members = Members { together: 2, ..members(2) };
        let sorted = sort(&members, &counts, &splits(&members, &counts), 4);
        // Expert 2 has two tokens of the first two members and one of the others, expert 3 one of each.
        assert_eq!(sorted.counts, [4, 4, 4, 4]);
        let ends: Vec<usize> = sorted.rows.iter().filter(|run| run.len > 0).map(|run| run.to).collect();
        assert_eq!(ends, [0, 1, 4, 8, 12]);
    }

    /// The rows of a choice that begin where `starts` says.
    fn placed(choice: &Choice, starts: &Starts) -> Vec<Copy> {
        let mut rows = vec![None; starts.count];
        let experts = starts.rows.len() / starts.parts;
        for (place, start) in starts.rows.iter().enumerate().filter_map(|(place, start)| Some((place, (*start)?))) {
            let expert = place % experts;
            let tokens = &choice.by_expert(experts)[expert];
            tokens.iter().enumerate().for_each(|(rank, token)| rows[start + rank] = Some((*token, expert)));
        }
        rows
    }

    #[test]
    fn counts_say_where_rows_begin() {
        let (choices, counts, members) = four();
        let list = choices.iter().flat_map(|choice| choice.clone().into_list()).collect();
        let all = Choice::from_list(2, list);
        let pairs: Vec<_> = choices.iter().map(|choice| (choice.clone(), None)).collect();
        for rank in 0..4 {
            let (rows, splits) = sending(&members(rank), &choices[rank], &counts);
            assert_eq!(placed(&choices[rank], &sent_starts(&members(rank), &counts[rank], &splits)), rows, "{rank}");
            let (found, picked) = (picked_starts(&members(rank), &counts, 3), pick(&members(rank), &pairs, 2, 3));
            assert_eq!((placed(&all, &found.rows), found.counts), (picked.rows, picked.counts), "{rank}");
        }
    }

    #[test]
    fn pieces_have_each_row_once_and_their_starts_say_where() {
        let (choices, counts, members) = four();
        for rank in 0..4 {
            let (choice, own) = (&choices[rank], &counts[rank]);
            let pieces: Vec<Members> = members(rank).pieces(2).collect();
            let sent = |members: &Members| sending(members, choice, &counts);
            let rows: Vec<Copy> = pieces.iter().flat_map(|members| sent(members).0).collect();
            let starts = in_turn(pieces.iter().map(|members| sent_starts(members, own, &sent(members).1)));
            assert_eq!(placed(choice, &starts), rows, "{rank}");
            // The third member has no tokens and sends itself a row of zeros.
            let order = members(rank).order(2, own.iter().sum());
            assert_eq!(order.starts(own) == starts, rank != 2, "{rank}");
            let sorted = |rows: Vec<Copy>| {
                let mut rows: Vec<(usize, usize)> = rows.into_iter().flatten().collect();
                rows.sort_unstable();
                rows
            };
            assert_eq!(sorted(rows), sorted(sent(&members(rank)).0), "{rank}");
            let of_pieces: Vec<Range<usize>> = pieces.iter().map(Members::own).collect();
            let whole = members(rank).own();
            assert_eq!(of_pieces, [whole.start..whole.start + 1, whole.start + 1..whole.end], "{rank}");
        }
    }

    #[test]
    fn experts_are_filled_up_to_their_room() {
        let members = Members { etp: 1, ep: 1, experts: 2, rank: 0, together: 1, piece: WHOLE };
        let choice = choice(&[&[1]]);
        assert_eq!(counts(&choice, 2, Some(2)), [2, 2]);
        let picked = pick(&members, &[(choice, Some(2))], 1, 1);
        assert_eq!(picked, Grouped { rows: vec![None, None, Some((0, 1)), None], counts: vec![2, 2] });
    }

    #[test]
    fn there_is_always_a_row() {
        let members = Members { etp: 1, ep: 1, experts: 2, rank: 0, together: 1, piece: WHOLE };
        let picked = pick(&members, &[(choice(&[&[]]), None)], 1, 3);
        assert_eq!(picked, Grouped { rows: vec![None; 3], counts: vec![3, 0] });
    }
}
