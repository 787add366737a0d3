//! Loops compiled for the vector instructions found at run time.

use super::real::Real;

/// Partial sums kept apart in a reduction: enough for two 512-bit registers of f32, and a fixed number, so that a sum
/// does not depend on the machine.
const LANES: usize = 32;

/// Defines a function whose body is compiled three times, for AVX-512, AVX2 and the baseline, and chosen at run time.
/// What the body calls must be `#[inline(always)]` to be compiled along.
macro_rules! vectorized {
    ($(#[$meta:meta])* fn $name:ident<$E:ident>($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        pub(super) fn $name<$E: Real>($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body<$E: Real>($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512<$E: Real>($($arg: $ty),*) $(-> $ret)? {
                    body::<$E>($($arg),*)
                }

                #[target_feature(enable = "avx2,fma")]
                fn avx2<$E: Real>($($arg: $ty),*) $(-> $ret)? {
                    body::<$E>($($arg),*)
                }

                if $crate::ops::flex::lanes::has_avx512() {
                    // SAFETY: the features were found.
                    return unsafe { avx512::<$E>($($arg),*) };
                }
                if $crate::ops::flex::lanes::has_avx2() {
                    // SAFETY: the features were found.
                    return unsafe { avx2::<$E>($($arg),*) };
                }
            }
            body::<$E>($($arg),*)
        }
    };
}
pub(super) use vectorized;

#[cfg(target_arch = "x86_64")]
pub(super) fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && has_avx2()
}

#[cfg(target_arch = "x86_64")]
pub(super) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// `Σ f(i)` for `i` below `n`, in [`LANES`] interleaved partial sums.
#[inline(always)]
pub(super) fn sum<E: Real>(n: usize, f: impl Fn(usize) -> E) -> E {
    let mut lanes = [E::ZERO; LANES];
    let whole = n / LANES * LANES;
    let mut start = 0;
    while start < whole {
        for (lane, total) in lanes.iter_mut().enumerate() {
            *total += f(start + lane);
        }
        start += LANES;
    }
    let mut total = E::ZERO;
    for i in whole..n {
        total += f(i);
    }
    fold(lanes, |a, b| a + b) + total
}

/// The largest element, negative infinity for none. NaN is passed over.
#[inline(always)]
pub(super) fn max<E: Real>(x: &[E]) -> E {
    let larger = |a: E, b: E| if b > a { b } else { a };
    let mut lanes = [E::NEG_INFINITY; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, value);
        }
    }
    chunks.remainder().iter().fold(fold(lanes, larger), |a, &b| larger(a, b))
}

/// Combines the lanes in a tree.
#[inline(always)]
fn fold<E: Real>(mut lanes: [E; LANES], f: impl Fn(E, E) -> E) -> E {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = f(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}
