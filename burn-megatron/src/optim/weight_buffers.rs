//! Which bucket's gathered weights are in which buffer, under ZeRO 3 on GPUs. Pure.
//!
//! A bucket always has the same buffer: a view of that memory that a graph has saved for backward holds the weights
//! again once they are gathered again. Buckets of one size share twice as many buffers as a pass uses at once (or as many
//! as there are buckets), so that some are filled while others are used.

/// The assignment of buckets to buffers.
#[derive(Debug, Default)]
pub(super) struct WeightBuffers {
    /// By bucket; `None` where weights are never released.
    of: Vec<Option<usize>>,
    /// By buffer: its size.
    sizes: Vec<usize>,
    /// By buffer: the bucket whose weights are in it or being gathered into it.
    holds: Vec<Option<usize>>,
}

impl WeightBuffers {
    /// For buckets, in the order in which passes use them, given the size of each and how many of its kind are used at
    /// once.
    pub fn new(buckets: &[Option<(usize, usize)>]) -> Self {
        let mut buffers = Self::default();
        // By size: the first of its buffers, how many, and how many buckets have one.
        let mut kinds: Vec<(usize, usize, usize, usize)> = Vec::new();
        for bucket in buckets {
            let Some((size, _)) = *bucket else {
                buffers.of.push(None);
                continue;
            };
            if !kinds.iter().any(|kind| kind.0 == size) {
                let same = || buckets.iter().flatten().filter(|bucket| bucket.0 == size);
                let at_once = same().map(|bucket| bucket.1).max().unwrap_or(1).max(1);
                let count = (2 * at_once).min(same().count());
                kinds.push((size, buffers.sizes.len(), count, 0));
                buffers.sizes.extend(std::iter::repeat_n(size, count));
            }
            let kind = kinds.iter_mut().find(|kind| kind.0 == size).expect("it was just added");
            buffers.of.push(Some(kind.1 + kind.3 % kind.2));
            kind.3 += 1;
        }
        buffers.holds = vec![None; buffers.sizes.len()];
        buffers
    }

    /// Sizes of the buffers.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// The bucket's buffer, if it needs one.
    pub fn of(&self, bucket: usize) -> Option<usize> {
        self.of[bucket]
    }

    /// Whether the bucket's buffer is free.
    pub fn is_free(&self, bucket: usize) -> bool {
        self.of[bucket].is_some_and(|buffer| self.holds[buffer].is_none())
    }

    /// Gives the bucket its buffer; true if its weights have to be gathered into it.
    pub fn enter(&mut self, bucket: usize) -> bool {
        self.of[bucket].is_some_and(|buffer| self.holds[buffer].replace(bucket) != Some(bucket))
    }

    /// [`WeightBuffers::enter`] ahead of time; false too if one of `used`, which passes still read, has that buffer.
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
    fn model(at_once: usize) -> WeightBuffers {
        let layers = [(10, at_once); 5];
        WeightBuffers::new(&[&[(100, 1)], &layers[..], &[(101, 1)]].concat().into_iter().map(Some).collect::<Vec<_>>())
    }

    #[test]
    fn layers_share_buffers_in_turn() {
        let buffers = |at_once| (0..7).flat_map(|bucket| model(at_once).of(bucket)).collect::<Vec<_>>();
        assert_eq!(buffers(1), [0, 1, 2, 1, 2, 1, 3]);
        assert_eq!(model(1).sizes(), [100, 10, 10, 101]);
        assert_eq!(buffers(2), [0, 1, 2, 3, 4, 1, 5]);
        assert_eq!(buffers(4), [0, 1, 2, 3, 4, 5, 6], "no more buffers than buckets");
    }

    /// Each bucket is gathered before its use and while the one before it is used; none is gathered over one in use.
    #[test]
    fn a_step_gathers_every_layer_ahead_of_its_use() {
        let mut buffers = model(1);
        let passes: Vec<usize> = (0..7).chain((0..7).rev()).collect();
        let mut gathered = Vec::new();
        assert!(buffers.enter(0), "the first has nothing before it");
        for (index, &bucket) in passes.iter().enumerate() {
            assert!(!buffers.enter(bucket), "bucket {bucket} was gathered ahead");
            if let Some(&next) = passes.get(index + 1) {
                let before = buffers.holds[buffers.of(bucket).unwrap()];
                if buffers.enter_ahead(next, &[bucket]) {
                    gathered.push(next);
                }
                assert_eq!(buffers.holds[buffers.of(bucket).unwrap()], before);
            }
        }
        // The last two layers and the head are still there for the backward pass, and so is the embedding.
        assert_eq!(gathered, [1, 2, 3, 4, 5, 6, 3, 2, 1]);
        buffers.clear();
        assert!(buffers.is_free(3) && buffers.enter(3) && !buffers.is_free(1), "layers 3 and 1 share a buffer");
    }

    /// The experts of a layer have their own buffers, or need none while the rest of the layer does.
    #[test]
    fn experts_have_other_buffers_than_their_layer() {
        let with = |experts| {
            let layers = [Some((10, 1)), experts].repeat(4);
            WeightBuffers::new(&[&[Some((100, 1))], &layers[..]].concat())
        };
        let both = with(Some((30, 1)));
        let of = |buffers: &WeightBuffers| (0..9).map(|bucket| buffers.of(bucket)).collect::<Vec<_>>();
        assert_eq!(of(&both), [0, 1, 3, 2, 4, 1, 3, 2, 4].map(Some));
        let mut rest = with(None);
        let expected = [Some(0), Some(1), None, Some(2), None, Some(1), None, Some(2), None];
        assert_eq!(of(&rest), expected);
        assert!(!rest.enter(2) && !rest.is_free(2), "nothing is gathered for what stays");
        // Of one size, neighbours still never share a buffer.
        let mut same = with(Some((10, 1)));
        assert_eq!(of(&same), [0, 1, 2, 1, 2, 1, 2, 1, 2].map(Some));
        assert!(same.enter(1) && same.enter(2) && !same.enter(1), "a layer and its experts are there at once");
        assert!(!same.enter_ahead(3, &[1, 2]), "and in use");
    }

    #[test]
    fn what_is_in_use_is_left_alone() {
        let mut buffers = model(1);
        buffers.enter(1);
        assert!(!buffers.enter_ahead(3, &[1]), "bucket 1 is read from that buffer");
        assert!(!buffers.enter(1), "and still there");
        assert!(buffers.enter_ahead(2, &[1]) && buffers.enter_ahead(3, &[2]) && buffers.enter(1));
    }
}
