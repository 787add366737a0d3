//! Softmax as Hugging Face transformers computes a router's: in fp32 whatever the model computes in.
//!
//! transformers casts a router's logits to fp32 even where the model is double precision. Exponentials are those of
//! Sleef (`xexpf` in `src/libm/sleefsimdsp.c`, with fused multiply-add), and sums have the order of PyTorch on a CPU
//! with AVX-512 (`aten/src/ATen/native/cpu/SoftMaxKernel.cpp`, `aten/src/ATen/cpu/vec/functional_base.h`).

/// Lanes of a register.
const LANES: usize = 16;

/// The softmax of each `n` values, in fp32.
pub(in crate::layers) fn softmax(logits: &[f64], n: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(logits.len());
    for values in logits.chunks_exact(n) {
        let values: Vec<f32> = values.iter().map(|&logit| logit as f32).collect();
        let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let powers: Vec<f32> = values.iter().map(|logit| exp(logit - largest)).collect();
        let inverse = sum(&powers).recip();
        out.extend(powers.iter().map(|power| power * inverse));
    }
    out
}

/// The sum in PyTorch's order: register by register, then by halves; the rest, which fills no register, one after the
/// other.
fn sum(values: &[f32]) -> f32 {
    let (registers, rest) = values.as_chunks::<LANES>();
    let Some((first, others)) = registers.split_first() else { return rest.iter().fold(0.0, |sum, value| sum + value) };
    let mut lanes = *first;
    for register in others.iter().map(|register| register.as_slice()).chain([rest]) {
        lanes.iter_mut().zip(register).for_each(|(lane, value)| *lane += value);
    }
    let mut width = LANES / 2;
    while width > 0 {
        (0..width).for_each(|lane| lanes[lane] += lanes[lane + width]);
        width /= 2;
    }
    lanes[0]
}

/// Sleef's exponential, to one unit in the last place.
pub(in crate::layers) fn exp(x: f32) -> f32 {
    const LN_2_HIGH: f32 = 0.693_145_75;
    const LN_2_LOW: f32 = 1.428_606_8e-6;
    const COEFFICIENTS: [f32; 5] = [0.001_393_043_6, 0.008_333_361, 0.041_666_485, 0.166_666_67, 0.5];
    if x < -104.0 {
        return 0.0;
    }
    let quotient = (x * std::f32::consts::LOG2_E).round_ties_even();
    let rest = quotient.mul_add(-LN_2_LOW, quotient.mul_add(-LN_2_HIGH, x));
    let series = COEFFICIENTS.iter().fold(0.000_198_527_62, |sum: f32, term| sum.mul_add(rest, *term));
    let power = 1.0 + (rest * rest).mul_add(series, rest);
    // In two steps, for results that are not normal numbers.
    let half = quotient as i32 >> 1;
    let two_to = |exponent: i32| f32::from_bits(((exponent + 127) as u32) << 23);
    power * two_to(half) * two_to(quotient as i32 - half)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_are_within_a_unit_in_the_last_place() {
        for index in 0..20_000 {
            let x = -(index as f32) / 200.0;
            let exact = f64::from(x).exp();
            let unit = f64::from((exact as f32).next_up() - exact as f32);
            assert!((f64::from(exp(x)) - exact).abs() <= unit, "{x}");
        }
        assert_eq!((exp(0.0), exp(-105.0)), (1.0, 0.0));
    }

    /// One value that swallows those which are added to it singly: which sums are formed first decides the result.
    #[test]
    fn values_are_added_in_pytorchs_order() {
        const BIG: f32 = 16_777_216.0;
        let mut values = [1.0; 16];
        values[0] = BIG;
        // BIG + 1 is BIG; then two, four and eight others at once.
        assert_eq!(sum(&values), BIG + 14.0);
        // A second register swallows one of its lanes.
        assert_eq!(sum(&[&values[..], &[1.0; 16]].concat()), BIG + 30.0);
        // What fills no register is added one after the other.
        assert_eq!(sum(&[BIG, 1.0, 1.0]), BIG);
    }

    #[test]
    fn close_to_the_exact_softmax() {
        let logits: Vec<f64> = (0..36).map(|index| f64::from((index * 7) % 11) / 3.0 - 2.0).collect();
        for (values, found) in logits.chunks(12).zip(softmax(&logits, 12).chunks(12)) {
            let sum: f64 = values.iter().map(|logit| logit.exp()).sum();
            assert!(values.iter().zip(found).all(|(logit, p)| (logit.exp() / sum - f64::from(*p)).abs() < 1e-7));
        }
    }
}
