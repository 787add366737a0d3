//! The 64-bit Mersenne Twister, as C++'s `std::mt19937_64` (Nishimura 2000; [rand.predef] of the C++ standard).

const N: usize = 312;
const M: usize = 156;

pub(super) struct Mersenne64 {
    state: [u64; N],
    position: usize,
}

impl Mersenne64 {
    pub fn new(seed: u64) -> Self {
        let mut state = [seed; N];
        for i in 1..N {
            let previous = state[i - 1];
            state[i] = 6_364_136_223_846_793_005u64.wrapping_mul(previous ^ (previous >> 62)).wrapping_add(i as u64);
        }
        Self { state, position: N }
    }

    pub fn next_u64(&mut self) -> u64 {
        if self.position == N {
            self.refill();
        }
        let mut x = self.state[self.position];
        self.position += 1;
        x ^= (x >> 29) & 0x5555_5555_5555_5555;
        x ^= (x << 17) & 0x71d6_7fff_eda6_0000;
        x ^= (x << 37) & 0xfff7_eee0_0000_0000;
        x ^ (x >> 43)
    }

    fn refill(&mut self) {
        for i in 0..N {
            let y = (self.state[i] & 0xffff_ffff_8000_0000) | (self.state[(i + 1) % N] & 0x7fff_ffff);
            let twist = if y & 1 == 1 { 0xb502_6f5a_a966_19e9 } else { 0 };
            self.state[i] = self.state[(i + M) % N] ^ (y >> 1) ^ twist;
        }
        self.position = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ten_thousandth_output_is_that_of_the_standard() {
        let mut random = Mersenne64::new(5489);
        assert_eq!((0..10_000).map(|_| random.next_u64()).last(), Some(9_981_545_732_273_789_042));
    }
}
