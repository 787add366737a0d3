//! Both dispatchers on small examples, against each other and by hand.

use super::*;

const WHOLE: [usize; 2] = [0, 1];

fn choice(experts: &[&[usize]]) -> Choice {
    let mut choice = Choice::none(experts.len(), 2);
    experts.iter().enumerate().for_each(|(token, of)| choice.set(token, of.iter().copied()));
    choice
}

/// Two expert parallel ranks of two members each, four experts; the members' choices.
fn four() -> (Vec<Choice>, Vec<Vec<usize>>, impl Fn(usize) -> Members) {
    let choices =
        vec![choice(&[&[0, 2], &[0, 1]]), choice(&[&[2, 3], &[]]), choice(&[&[], &[]]), choice(&[&[1, 2], &[0, 3]])];
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

/// The copies of a choice that begin where `starts` says.
fn placed(choice: &Choice, starts: &RowStarts) -> Vec<Copy> {
    let mut rows = vec![None; starts.count];
    let experts = starts.rows.len() / starts.shards;
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
        // The third member has no tokens and sends itself padding.
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
