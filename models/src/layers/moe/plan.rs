//! Which rows go where: the arithmetic of both dispatchers, on the host.
//!
//! Ranks are members of the group that holds all experts of the layer: member `p etp + j` has part `j` of the experts of
//! expert parallel rank `p`. A copy of a token goes to all members that hold a part of its expert.

use std::ops::Range;

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
}

impl Members {
    /// Number of members.
    pub fn count(&self) -> usize {
        self.etp * self.ep
    }

    /// The experts of a member.
    fn experts_of(&self, member: usize) -> Range<usize> {
        let each = self.experts / self.ep;
        let first = member / self.etp * each;
        first..first + each
    }

    /// The experts of this member.
    pub fn own(&self) -> Range<usize> {
        self.experts_of(self.rank)
    }
}

/// A row to be made: the token that it is a copy of and its expert; `None` is a row of zeros.
pub(super) type Copy = Option<(usize, usize)>;

/// Rows that a rank sends, in the order of the members, their experts and its tokens.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Sent {
    pub rows: Vec<Copy>,
    /// Rows for each member.
    pub splits: Vec<usize>,
}

/// Rows that the experts of a rank compute, by expert.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Grouped<R> {
    /// Where each comes from.
    pub rows: Vec<Option<R>>,
    /// Rows of each expert.
    pub counts: Vec<usize>,
}

impl<R> Grouped<R> {
    /// The groups, each filled up to a multiple of `multiple`, and at least one row.
    fn of(groups: impl Iterator<Item = Vec<Option<R>>>, multiple: usize) -> Self {
        let (mut rows, mut counts) = (Vec::new(), Vec::new());
        for mut group in groups {
            let count = group.len().next_multiple_of(multiple);
            group.resize_with(count, || None);
            rows.append(&mut group);
            counts.push(count);
        }
        if rows.is_empty() {
            rows.resize_with(multiple, || None);
            counts[0] = multiple;
        }
        Self { rows, counts }
    }
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

/// What this rank sends, and how many rows it receives from each member, if member `m` sends `counts[m][e]` rows for expert
/// `e`. Nobody sends or receives nothing: a rank without rows sends itself one of zeros.
pub(super) fn send(members: &Members, choice: &Choice, counts: &[Vec<usize>]) -> (Sent, Vec<usize>) {
    let by_expert = padded(choice, &counts[members.rank]);
    let mut parts: Vec<Vec<Copy>> =
        (0..members.count()).map(|member| by_expert[members.experts_of(member)].concat()).collect();
    let mut receive: Vec<usize> = counts.iter().map(|from| from[members.own()].iter().sum()).collect();
    if receive.iter().all(|rows| *rows == 0) || parts.iter().all(Vec::is_empty) {
        parts[members.rank].push(None);
        receive[members.rank] += 1;
    }
    let splits = parts.iter().map(Vec::len).collect();
    (Sent { rows: parts.concat(), splits }, receive)
}

/// The received rows by expert, and inside an expert by sender.
pub(super) fn sort(members: &Members, counts: &[Vec<usize>], receive: &[usize], multiple: usize) -> Grouped<usize> {
    let starts: Vec<usize> = receive
        .iter()
        .scan(0, |end, rows| {
            *end += rows;
            Some(*end - rows)
        })
        .collect();
    let own = members.own();
    let group = |expert: usize| {
        let rows = counts.iter().zip(&starts).flat_map(|(from, start)| {
            let first = start + from[own.start..expert].iter().sum::<usize>();
            (first..first + from[expert]).map(Some)
        });
        rows.collect()
    };
    Grouped::of(own.clone().map(group), multiple)
}

/// Rows of this rank's experts out of all members' tokens, of which each has room for `tokens`, one member after the other. With
/// every choice comes how many rows its experts are filled up to.
pub(super) fn pick(
    members: &Members,
    choices: &[(Choice, Option<usize>)],
    tokens: usize,
    multiple: usize,
) -> Grouped<(usize, usize)> {
    let rows = |(choice, pad_to): &(Choice, Option<usize>)| padded(choice, &counts(choice, members.experts, *pad_to));
    let by_member: Vec<Vec<Vec<Copy>>> = choices.iter().map(rows).collect();
    let group = |expert: usize| {
        let rows = by_member.iter().enumerate().flat_map(|(member, by_expert)| {
            by_expert[expert].iter().map(move |row| row.map(|(token, expert)| (member * tokens + token, expert)))
        });
        rows.collect()
    };
    Grouped::of(members.own().map(group), multiple)
}

#[cfg(test)]
mod tests {
    use super::*;

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
        (choices, counts, |rank| Members { etp: 2, ep: 2, experts: 4, rank })
    }

    #[test]
    fn what_one_sends_another_receives() {
        let (choices, counts, members) = four();
        let all: Vec<(Sent, Vec<usize>)> = (0..4).map(|rank| send(&members(rank), &choices[rank], &counts)).collect();
        for from in 0..4 {
            for to in 0..4 {
                assert_eq!(all[from].0.splits[to], all[to].1[from], "{from} to {to}");
            }
        }
        let first = [Some((0, 0)), Some((1, 0)), Some((1, 1))];
        assert_eq!(all[0].0.rows, [&first[..], &first, &[Some((0, 2))], &[Some((0, 2))]].concat());
        // The third rank has no tokens.
        assert_eq!((&all[2].0.rows[..], &all[2].0.splits[..]), (&[None][..], &[0, 0, 1, 0][..]));
    }

    #[test]
    fn both_dispatchers_give_an_expert_the_same_rows_in_the_same_order() {
        let (choices, counts, members) = four();
        for rank in 0..4 {
            let members = members(rank);
            let sent: Vec<Sent> =
                (0..4).map(|from| send(&Members { rank: from, ..members }, &choices[from], &counts).0).collect();
            let receive = send(&members, &choices[rank], &counts).1;
            let received: Vec<Option<(usize, usize)>> = (0..4)
                .flat_map(|from| {
                    let start: usize = sent[from].splits[..rank].iter().sum();
                    let rows = sent[from].rows[start..start + sent[from].splits[rank]].iter();
                    rows.map(move |row| row.map(|(token, expert)| (from * 2 + token, expert)))
                })
                .collect();
            let sorted = sort(&members, &counts, &receive, 4);
            let rows: Vec<_> = sorted.rows.iter().map(|row| row.and_then(|row| received[row])).collect();
            let all: Vec<_> = choices.iter().map(|choice| (choice.clone(), None)).collect();
            let picked = pick(&members, &all, 2, 4);
            assert_eq!((rows, &sorted.counts), (picked.rows, &picked.counts), "rank {rank}");
        }
    }

    #[test]
    fn experts_are_filled_up_to_their_room() {
        let members = Members { etp: 1, ep: 1, experts: 2, rank: 0 };
        let choice = choice(&[&[1]]);
        assert_eq!(counts(&choice, 2, Some(2)), [2, 2]);
        let picked = pick(&members, &[(choice, Some(2))], 1, 1);
        assert_eq!(picked, Grouped { rows: vec![None, None, Some((0, 1)), None], counts: vec![2, 2] });
    }

    #[test]
    fn there_is_always_a_row() {
        let members = Members { etp: 1, ep: 1, experts: 2, rank: 0 };
        let picked = pick(&members, &[(choice(&[&[]]), None)], 1, 3);
        assert_eq!(picked, Grouped { rows: vec![None; 3], counts: vec![3, 0] });
    }
}
