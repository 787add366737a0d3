//! Small lists in which every two options meet: covering arrays of strength two. Pure.
//!
//! Most failures need one or two options together (Kuhn, Wallace, Gallo 2004, "Software fault interactions and
//! implications for software testing"), and a list of all combinations is too long to run for every model.

use std::collections::HashSet;

/// The option of each kind that a layout has; every layout has as many.
pub(super) type Options = Vec<u16>;

/// Two options of different kinds.
type Pair = ([u16; 2], [u16; 2]);

fn pairs(options: &Options) -> impl Iterator<Item = Pair> {
    let numbered = |(kind, option): (usize, &u16)| [kind as u16, *option];
    let all: Vec<[u16; 2]> = options.iter().enumerate().map(numbered).collect();
    (0..all.len()).flat_map(move |second| {
        let all = all.clone();
        (0..second).map(move |first| (all[first], all[second]))
    })
}

/// The indices of those in `all` that add pairs to what is `covered`: together they have every pair that any of `all`
/// has. Those that add most come first.
pub(super) fn cover(all: &[Options], covered: &[Options]) -> Vec<usize> {
    let mut seen: HashSet<Pair> = covered.iter().flat_map(pairs).collect();
    let kinds = all.first().map_or(0, Vec::len);
    let (mut taken, mut least) = (Vec::new(), kinds * kinds.saturating_sub(1) / 2);
    while least > 0 {
        for (index, options) in all.iter().enumerate() {
            if pairs(options).filter(|pair| !seen.contains(pair)).take(least).count() == least {
                seen.extend(pairs(options));
                taken.push(index);
            }
        }
        least /= 2;
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All combinations of `levels` that are `legal`.
    fn combinations(levels: &[u16], legal: impl Fn(&Options) -> bool) -> Vec<Options> {
        let extend = |list: Vec<Options>, count: &u16| -> Vec<Options> {
            let with = |options: &Options| (0..*count).map(|option| [&options[..], &[option]].concat()).collect();
            list.iter().flat_map::<Vec<Options>, _>(with).collect()
        };
        levels.iter().fold(vec![Vec::new()], extend).into_iter().filter(legal).collect()
    }

    fn assert_covers(all: &[Options], most: usize) {
        let taken = cover(all, &[]);
        let covered: HashSet<Pair> = taken.iter().flat_map(|index| pairs(&all[*index])).collect();
        assert_eq!(covered, all.iter().flat_map(pairs).collect());
        assert!(taken.len() <= most, "{} of {}", taken.len(), all.len());
        assert!(cover(all, &taken.iter().map(|index| all[*index].clone()).collect::<Vec<_>>()).is_empty());
    }

    /// Nine combinations are the fewest for four kinds of three options, 13 are fewer than a sixth of all.
    #[test]
    fn few_combinations_have_every_pair() {
        assert_covers(&combinations(&[3, 3, 3, 3], |_| true), 13);
        assert_covers(&combinations(&[2, 4, 3, 2, 5], |_| true), 30);
        assert!(cover(&[], &[]).is_empty());
    }

    /// A pair that no legal combination has is not asked for.
    #[test]
    fn illegal_combinations_are_not_taken() {
        let legal = |options: &Options| !(options[0] == 1 && options[1] == 2) && options[2] + options[3] != 3;
        let all = combinations(&[3, 3, 3, 3], legal);
        assert_covers(&all, 16);
        let forbidden: Pair = ([0, 1], [1, 2]);
        assert!(cover(&all, &[]).iter().all(|index| pairs(&all[*index]).all(|pair| pair != forbidden)));
    }
}
