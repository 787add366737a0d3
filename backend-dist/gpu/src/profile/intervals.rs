//! Sets of times as lists of half-open intervals `[start, end)`. Pure.

/// Start and end, in nanoseconds.
pub type Interval = (u64, u64);

/// The times that any of the intervals covers, ascending and without empty intervals.
pub fn union(intervals: impl IntoIterator<Item = Interval>) -> Vec<Interval> {
    let mut sorted: Vec<Interval> = intervals.into_iter().filter(|(start, end)| start < end).collect();
    sorted.sort_unstable();
    let mut out: Vec<Interval> = Vec::new();
    for (start, end) in sorted {
        match out.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => out.push((start, end)),
        }
    }
    out
}

/// Nanoseconds of a [`union`].
pub fn total(set: &[Interval]) -> u64 {
    set.iter().map(|(start, end)| end - start).sum()
}

/// Nanoseconds that `[start, end)` shares with a [`union`].
pub fn shared((start, end): Interval, set: &[Interval]) -> u64 {
    let first = set.partition_point(|(_, other)| *other <= start);
    let near = set[first..].iter().take_while(|(other, _)| *other < end);
    near.map(|(from, to)| (*to).min(end).saturating_sub((*from).max(start))).sum()
}

/// `[start, end)` without a [`union`].
pub fn without((start, end): Interval, set: &[Interval]) -> Vec<Interval> {
    let (mut out, mut at) = (Vec::new(), start);
    for &(from, to) in set.iter().filter(|(from, to)| *to > start && *from < end) {
        if from > at {
            out.push((at, from));
        }
        at = at.max(to);
    }
    if at < end {
        out.push((at, end));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unions_merge_what_touches() {
        assert_eq!(union([(5, 7), (0, 2), (2, 3), (6, 9), (4, 4)]), [(0, 3), (5, 9)]);
        assert_eq!(total(&union([(5, 7), (0, 2), (1, 3)])), 5);
        assert!(union([(3, 3), (4, 2)]).is_empty());
    }

    #[test]
    fn an_collective_is_hidden_where_kernels_run() {
        let kernels = union([(0, 10), (20, 30), (40, 50)]);
        for (collective, hidden) in
            [((5, 25), 10), ((10, 20), 0), ((0, 60), 30), ((41, 42), 1), ((60, 70), 0), ((29, 41), 2)]
        {
            assert_eq!(shared(collective, &kernels), hidden, "{collective:?}");
            let exposed = without(collective, &kernels);
            assert_eq!(total(&exposed), collective.1 - collective.0 - hidden, "{exposed:?}");
        }
        assert_eq!(without((5, 45), &kernels), [(10, 20), (30, 40)]);
        assert_eq!(without((12, 15), &kernels), [(12, 15)]);
        assert_eq!(without((22, 25), &kernels), []);
    }
}
