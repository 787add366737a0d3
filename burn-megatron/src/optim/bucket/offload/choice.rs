//! Which buckets have their states in host memory. Pure.

/// Of buckets with states of so many bytes, those in host memory: about `share` of all bytes, `most` at most. Spread
/// evenly, so that copies of theirs overlap with updates of the others.
pub fn choose(sizes: &[usize], share: f64, most: usize) -> Vec<bool> {
    let total: usize = sizes.iter().sum();
    let share = share.min(most as f64 / total.max(1) as f64);
    let (mut seen, mut taken) = (0, 0);
    let takes = |size: &usize| {
        seen += size;
        let takes = (taken + size / 2) as f64 <= share * seen as f64 && taken + size <= most && *size > 0;
        taken += if takes { *size } else { 0 };
        takes
    };
    sizes.iter().map(takes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_spread_evenly() {
        let of = |share, most| choose(&[10; 8], share, most).into_iter().map(usize::from).collect::<Vec<_>>();
        assert_eq!(of(1.0, 1000), [1; 8]);
        assert_eq!(of(0.5, 1000), [1, 0, 1, 0, 1, 0, 1, 0]);
        assert_eq!(of(0.25, 1000), [0, 1, 0, 0, 0, 1, 0, 0]);
        assert_eq!(of(0.0, 1000), [0; 8]);
        assert_eq!(of(1.0, 40), of(0.5, 1000), "half of it has room");
        assert_eq!(of(1.0, 9), [0; 8]);
    }

    #[test]
    fn no_more_than_there_is_room_for_and_within_half_a_bucket_of_the_share() {
        let sizes = [700, 50, 50, 0, 50, 50, 50, 50, 700];
        for (share, most) in [(1.0, usize::MAX), (0.6, 1200), (1.0, 1000), (0.3, 500), (0.9, 60)] {
            let chosen = choose(&sizes, share, most);
            let taken: usize = sizes.iter().zip(&chosen).filter(|(_, takes)| **takes).map(|(size, _)| size).sum();
            assert!(taken <= most, "{share} {most}");
            assert!(taken as f64 <= share * 1700.0 + 350.0, "{share} {most}: {taken}");
            assert!(share < 1.0 || most < 1700 || taken == 1700);
            assert!(!chosen[3], "nothing has no states");
        }
    }
}
