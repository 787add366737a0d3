//! Loops compiled for the vector instructions found at run time.

use super::real::Real;

/// Interleaved partial sums of a reduction: a 512-bit register of f32, and the same on all machines, so that a sum does
/// not depend on the machine.
pub(super) const LANES: usize = 16;

/// Defines a function whose body is compiled three times, for AVX-512, AVX2 and the baseline, and chosen at run time.
/// Functions called by the body must be `#[inline(always)]` to be compiled for the same instructions.
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

                if $crate::flex::lanes::has_avx512() {
                    // SAFETY: the features were found.
                    return unsafe { avx512::<$E>($($arg),*) };
                }
                if $crate::flex::lanes::has_avx2() {
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

/// `Σ f(a)` in [`LANES`] interleaved partial sums.
#[inline(always)]
pub(super) fn sum<E: Real>(a: &[E], f: impl Fn(E) -> E) -> E {
    let mut lanes = [E::ZERO; LANES];
    let (a, a_rest) = a.as_chunks::<LANES>();
    for a in a {
        for i in 0..LANES {
            lanes[i] += f(a[i]);
        }
    }
    for (lane, &a) in lanes.iter_mut().zip(a_rest) {
        *lane += f(a);
    }
    fold(lanes, |a, b| a + b)
}

/// `Σ f(a, b)` over two slices of one length.
#[inline(always)]
pub(super) fn sum2<E: Real>(a: &[E], b: &[E], f: impl Fn(E, E) -> E) -> E {
    let mut lanes = [E::ZERO; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for i in 0..LANES {
            lanes[i] += f(a[i], b[i]);
        }
    }
    for ((lane, &a), &b) in lanes.iter_mut().zip(a_rest).zip(b_rest) {
        *lane += f(a, b);
    }
    fold(lanes, |a, b| a + b)
}

/// `Σ f(a, b, c)` over three slices of one length.
#[inline(always)]
pub(super) fn sum3<E: Real>(a: &[E], b: &[E], c: &[E], f: impl Fn(E, E, E) -> E) -> E {
    let mut lanes = [E::ZERO; LANES];
    let ((a, a_rest), (b, b_rest), (c, c_rest)) =
        (a.as_chunks::<LANES>(), b.as_chunks::<LANES>(), c.as_chunks::<LANES>());
    for ((a, b), c) in a.iter().zip(b).zip(c) {
        for i in 0..LANES {
            lanes[i] += f(a[i], b[i], c[i]);
        }
    }
    for (((lane, &a), &b), &c) in lanes.iter_mut().zip(a_rest).zip(b_rest).zip(c_rest) {
        *lane += f(a, b, c);
    }
    fold(lanes, |a, b| a + b)
}

/// The maximum, negative infinity for an empty slice. NaN is ignored.
#[inline(always)]
pub(super) fn max<E: Real>(a: &[E]) -> E {
    let larger = |a: E, b: E| if b > a { b } else { a };
    let mut lanes = [E::NEG_INFINITY; LANES];
    let (a, a_rest) = a.as_chunks::<LANES>();
    for a in a {
        for i in 0..LANES {
            lanes[i] = larger(lanes[i], a[i]);
        }
    }
    for (lane, &a) in lanes.iter_mut().zip(a_rest) {
        *lane = larger(*lane, a);
    }
    fold(lanes, larger)
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
