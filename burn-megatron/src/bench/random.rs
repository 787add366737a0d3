//! Random numbers by index, the same in every run.

/// From 0 to below 1.
pub(super) fn uniform(index: u64) -> f64 {
    (mix(index) >> 11) as f64 / (1u64 << 53) as f64
}

/// splitmix64's output function.
pub(super) fn mix(index: u64) -> u64 {
    let mut z = index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
