//! Memory for whole weights that buckets take turns in, under ZeRO 3 on GPUs: whose weights are where. Pure.
//!
//! A bucket always has the same slot, so that what a graph has kept of its weights, a view of that memory, holds them
//! again once they are gathered again. Buckets of one size have twice as many slots as a pass uses at once, or as many
//! as there are of them: some are filled while others are used.

/// Who has which slot.
#[derive(Debug, Default)]
pub(super) struct Slots {
    /// By bucket; those whose weights stay have none.
    of: Vec<Option<usize>>,
    /// By slot: its size.
    sizes: Vec<usize>,
    /// By slot: the bucket whose weights are there or on their way.
    holds: Vec<Option<usize>>,
}

impl Slots {
    /// For buckets, in the order in which passes use them, given the size of each and how many of its kind are used at
    /// once.
    pub fn new(buckets: &[Option<(usize, usize)>]) -> Self {
        let mut slots = Self::default();
        // By size: the first of its slots, how many, and how many buckets have one.
        let mut kinds: Vec<(usize, usize, usize, usize)> = Vec::new();
        for bucket in buckets {
            let Some((size, _)) = *bucket else {
                slots.of.push(None);
                continue;
            };
            if !kinds.iter().any(|kind| kind.0 == size) {
                let same = || buckets.iter().flatten().filter(|bucket| bucket.0 == size);
                let at_once = same().map(|bucket| bucket.1).max().unwrap_or(1).max(1);
                let count = (2 * at_once).min(same().count());
                kinds.push((size, slots.sizes.len(), count, 0));
                slots.sizes.extend(std::iter::repeat_n(size, count));
            }
            let kind = kinds.iter_mut().find(|kind| kind.0 == size).expect("it was just added");
            slots.of.push(Some(kind.1 + kind.3 % kind.2));
            kind.3 += 1;
        }
        slots.holds = vec![None; slots.sizes.len()];
        slots
    }

    /// By slot.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// The bucket's slot, if it needs one.
    pub fn of(&self, bucket: usize) -> Option<usize> {
        self.of[bucket]
    }

    /// Whether nobody has the bucket's slot.
    pub fn is_free(&self, bucket: usize) -> bool {
        self.of[bucket].is_some_and(|slot| self.holds[slot].is_none())
    }

    /// Gives the bucket its slot; true if its weights have to be gathered into it.
    pub fn enter(&mut self, bucket: usize) -> bool {
        self.of[bucket].is_some_and(|slot| self.holds[slot].replace(bucket) != Some(bucket))
    }

    /// [`Slots::enter`] ahead of time; false too if one of `used`, which passes still read, has that slot.
    pub fn enter_ahead(&mut self, bucket: usize, used: &[usize]) -> bool {
        let is_taken = used.iter().any(|other| *other != bucket && self.of[*other] == self.of[bucket]);
        !is_taken && self.enter(bucket)
    }

    /// All weights are out of date.
    pub fn clear(&mut self) {
        self.holds.fill(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Embedding, five layers, head.
    fn model(at_once: usize) -> Slots {
        let layers = [(10, at_once); 5];
        Slots::new(&[&[(100, 1)], &layers[..], &[(101, 1)]].concat().into_iter().map(Some).collect::<Vec<_>>())
    }

    #[test]
    fn layers_take_turns() {
        let slots = |at_once| (0..7).flat_map(|bucket| model(at_once).of(bucket)).collect::<Vec<_>>();
        assert_eq!(slots(1), [0, 1, 2, 1, 2, 1, 3]);
        assert_eq!(model(1).sizes(), [100, 10, 10, 101]);
        assert_eq!(slots(2), [0, 1, 2, 3, 4, 1, 5]);
        assert_eq!(slots(4), [0, 1, 2, 3, 4, 5, 6], "no more slots than buckets");
    }

    /// Each bucket is gathered before its use and while the one before it is used; none is gathered over one in use.
    #[test]
    fn a_step_gathers_every_layer_ahead_of_its_use() {
        let mut slots = model(1);
        let passes: Vec<usize> = (0..7).chain((0..7).rev()).collect();
        let mut gathered = Vec::new();
        assert!(slots.enter(0), "the first has nothing before it");
        for (index, &bucket) in passes.iter().enumerate() {
            assert!(!slots.enter(bucket), "bucket {bucket} was gathered ahead");
            if let Some(&next) = passes.get(index + 1) {
                let before = slots.holds[slots.of(bucket).unwrap()];
                if slots.enter_ahead(next, &[bucket]) {
                    gathered.push(next);
                }
                assert_eq!(slots.holds[slots.of(bucket).unwrap()], before);
            }
        }
        // The last two layers and the head are still there for the backward pass, and so is the embedding.
        assert_eq!(gathered, [1, 2, 3, 4, 5, 6, 3, 2, 1]);
        slots.clear();
        assert!(slots.is_free(3) && slots.enter(3) && !slots.is_free(1), "layers 3 and 1 share a slot");
    }

    /// A layer's experts have slots of their own, or need none while the rest of the layer does.
    #[test]
    fn experts_come_beside_their_layer() {
        let with = |experts| {
            let layers = [Some((10, 1)), experts].repeat(4);
            Slots::new(&[&[Some((100, 1))], &layers[..]].concat())
        };
        let both = with(Some((30, 1)));
        let of = |slots: &Slots| (0..9).map(|bucket| slots.of(bucket)).collect::<Vec<_>>();
        assert_eq!(of(&both), [0, 1, 3, 2, 4, 1, 3, 2, 4].map(Some));
        let mut rest = with(None);
        let expected = [Some(0), Some(1), None, Some(2), None, Some(1), None, Some(2), None];
        assert_eq!(of(&rest), expected);
        assert!(!rest.enter(2) && !rest.is_free(2), "nothing is gathered for what stays");
        // Of one size, neighbours still never share a slot.
        let mut same = with(Some((10, 1)));
        assert_eq!(of(&same), [0, 1, 2, 1, 2, 1, 2, 1, 2].map(Some));
        assert!(same.enter(1) && same.enter(2) && !same.enter(1), "a layer and its experts are there at once");
        assert!(!same.enter_ahead(3, &[1, 2]), "and in use");
    }

    #[test]
    fn what_is_in_use_is_left_alone() {
        let mut slots = model(1);
        slots.enter(1);
        assert!(!slots.enter_ahead(3, &[1]), "bucket 1 is read from that slot");
        assert!(!slots.enter(1), "and still there");
        assert!(slots.enter_ahead(2, &[1]) && slots.enter_ahead(3, &[2]) && slots.enter(1));
    }
}
