//! The parts of numpy that Megatron's sample order depends on, bit for bit.

const N: usize = 624;
const M: usize = 397;

/// `numpy.random.RandomState(seed)`: the Mersenne Twister MT19937 (Matsumoto and Nishimura, 1998), and what Megatron's
/// datasets draw from it.
pub struct RandomState {
    key: [u32; N],
    position: usize,
}

impl RandomState {
    /// Seeds the generator as numpy does for one integer (`init_genrand`).
    pub fn new(seed: u32) -> Self {
        let mut key = [0; N];
        key[0] = seed;
        for i in 1..N {
            let previous: u32 = key[i - 1];
            key[i] = 1_812_433_253u32.wrapping_mul(previous ^ (previous >> 30)).wrapping_add(i as u32);
        }
        Self { key, position: N }
    }

    /// The next 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.position == N {
            self.refill();
        }
        let mut y = self.key[self.position];
        self.position += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    fn refill(&mut self) {
        for i in 0..N {
            let y = (self.key[i] & 0x8000_0000) | (self.key[(i + 1) % N] & 0x7fff_ffff);
            let twist = if y & 1 == 1 { 0x9908_b0df } else { 0 };
            self.key[i] = self.key[(i + M) % N] ^ (y >> 1) ^ twist;
        }
        self.position = 0;
    }

    /// A number in `0..=max`, by drawing under the smallest covering bit mask until one fits.
    fn interval(&mut self, max: u32) -> u32 {
        let mask = u32::MAX.checked_shr(max.leading_zeros()).unwrap_or(0);
        loop {
            let value = self.next_u32() & mask;
            if value <= max {
                return value;
            }
        }
    }

    /// `RandomState.shuffle` of a one-dimensional array.
    ///
    /// # Panics
    /// For more than 2³² items; numpy draws 64 bits there.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            let max = u32::try_from(i).expect("at most 2^32 items are shuffled");
            items.swap(i, self.interval(max) as usize);
        }
    }

    /// `RandomState.random()`: uniform in `[0, 1)`, of 53 random bits.
    pub fn uniform(&mut self) -> f64 {
        let (high, low) = (self.next_u32() >> 5, self.next_u32() >> 6);
        (f64::from(high) * 67_108_864.0 + f64::from(low)) / 9_007_199_254_740_992.0
    }

    /// `RandomState.randint(0, high)`.
    ///
    /// # Panics
    /// If `high` is 0.
    pub fn below(&mut self, high: u32) -> u32 {
        // numpy draws nothing where there is one number to draw.
        if high == 1 { 0 } else { self.interval(high - 1) }
    }

    /// `RandomState.choice(n, p=shares)`: an index below the number of shares, whose sum is 1.
    pub fn choice(&mut self, shares: &[f64]) -> usize {
        let sums: Vec<f64> = shares.iter().scan(0.0, |sum, share| Some((*sum += share, *sum).1)).collect();
        let drawn = self.uniform();
        sums.iter().filter(|sum| **sum / sums[sums.len() - 1] <= drawn).count()
    }

    /// `RandomState.geometric(p)` for p below 1/3: how many trials the first success takes.
    pub fn geometric(&mut self, p: f64) -> u64 {
        (((-self.uniform()).ln_1p()) / (1.0 - p).ln()).ceil() as u64
    }
}

/// The numbers of `count` samples: epochs of `items`, each in an order of its own that follows from the seed.
pub fn epochs(items: usize, count: usize, seed: u32) -> Vec<u32> {
    let (mut random, mut order) = (RandomState::new(seed), Vec::with_capacity(count));
    while order.len() < count {
        let mut epoch: Vec<u32> = (0..items as u32).collect();
        random.shuffle(&mut epoch);
        order.extend(epoch);
    }
    order.truncate(count);
    order
}

/// `numpy.sum` of float64: pairwise, in blocks of at most 128 that are added in eight lanes.
pub fn sum(values: &[f64]) -> f64 {
    match values.len() {
        0..8 => values.iter().sum(),
        8..=128 => {
            let (blocks, rest) = values.as_chunks::<8>();
            let mut lanes = blocks[0];
            for block in &blocks[1..] {
                for (lane, value) in lanes.iter_mut().zip(block) {
                    *lane += value;
                }
            }
            let [a, b, c, d, e, f, g, h] = lanes;
            rest.iter().fold(((a + b) + (c + d)) + ((e + f) + (g + h)), |total, value| total + value)
        }
        n => {
            let half = n / 2 - (n / 2) % 8;
            sum(&values[..half]) + sum(&values[half..])
        }
    }
}

/// Megatron's `normalize`: every weight divided by [`sum`].
pub fn normalize(weights: &[f64]) -> Vec<f64> {
    let total = sum(weights);
    weights.iter().map(|weight| weight / total).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn first_outputs_are_those_of_the_reference_implementation() {
        // mt19937ar with init_genrand(5489), the published default seed; its 10,000th output is 4123659995 (C++
        // standard, [rand.predef]).
        let mut random = RandomState::new(5489);
        let outputs: Vec<u32> = (0..10_000).map(|_| random.next_u32()).collect();
        assert_eq!(outputs[0], 3_499_211_612);
        assert_eq!(outputs[9_999], 4_123_659_995);
    }

    #[test]
    fn shuffle_and_sum_are_numpys() {
        // numpy 2.4.6: x = arange(n); RandomState(seed).shuffle(x)
        let shuffled = |seed, n: usize| {
            let mut items: Vec<usize> = (0..n).collect();
            RandomState::new(seed).shuffle(&mut items);
            items
        };
        assert_eq!(shuffled(1234, 10), [7, 2, 9, 1, 0, 8, 4, 5, 6, 3]);
        assert_eq!(shuffled(u32::MAX, 9), [5, 1, 8, 7, 0, 6, 4, 2, 3]);
        assert_eq!(shuffled(77, 1000)[..8], [156, 112, 198, 972, 328, 38, 446, 585]);
        // sum([1/1, .., 1/300]), whose last digit the order of additions decides.
        let values: Vec<f64> = (1..=300).map(|k| 1.0 / f64::from(k)).collect();
        assert_eq!(sum(&values), 6.282663880299504);
        assert_ne!(values.iter().sum::<f64>(), 6.282663880299504);
    }

    #[test]
    fn draws_are_numpys() {
        // numpy 2.4.6, RandomState(5): twelve times geometric(0.2), random(), randint(0, 1), randint(0, 97), and
        // choice([0, 1, 2], p=[.5, .3, .2]).
        let mut random = RandomState::new(5);
        let drawn: Vec<u64> = (0..12).map(|_| random.geometric(0.2)).collect();
        assert_eq!(drawn, [2, 10, 2, 12, 4, 5, 7, 4, 2, 1, 1, 7]);
        assert_eq!(random.uniform(), 0.441_309_222_895_953_1);
        assert_eq!([random.below(1), random.below(97)], [0, 75]);
        assert_eq!(random.choice(&[0.5, 0.3, 0.2]), 1);
    }

    proptest! {
        #[test]
        fn shuffle_is_a_permutation_decided_by_the_seed(seed: u32, size in 0usize..300) {
            let mut items: Vec<usize> = (0..size).collect();
            RandomState::new(seed).shuffle(&mut items);
            let mut again: Vec<usize> = (0..size).collect();
            RandomState::new(seed).shuffle(&mut again);
            prop_assert_eq!(&items, &again);
            items.sort_unstable();
            prop_assert_eq!(items, (0..size).collect::<Vec<_>>());
        }

        #[test]
        fn sum_is_close_to_the_plain_sum(values in prop::collection::vec(0.0f64..1.0, 0..400)) {
            let plain: f64 = values.iter().sum();
            prop_assert!((sum(&values) - plain).abs() <= 1e-12 * plain.max(1.0));
        }
    }
}
