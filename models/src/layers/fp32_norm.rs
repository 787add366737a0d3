//! RMSNorm as Hugging Face transformers computes it: rounded to fp32 whatever the model computes in.
//!
//! transformers casts to fp32 inside `LlamaRMSNorm` even where the model is double precision. The sum of squares is
//! then rounded in the order in which PyTorch adds on a CPU with AVX2 (`aten/src/ATen/native/cpu/SumKernel.cpp`).

/// Lanes of an AVX2 register.
const LANES: usize = 8;
/// Registers that PyTorch fills in turn.
const REGISTERS: usize = 4;
/// Levels of PyTorch's cascade: long sums are made of shorter ones.
const LEVELS: usize = 4;

/// `x / √(mean(x²) + eps)` of each `n` values.
pub(super) fn normalised(x: &[f64], n: usize, eps: f64) -> Vec<f64> {
    let mut out = Vec::with_capacity(x.len());
    for values in x.chunks_exact(n) {
        let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
        let squares: Vec<f32> = values.iter().map(|x| x * x).collect();
        let variance = sum(&squares) / n as f32;
        let inverse = (variance + eps as f32).sqrt().recip();
        out.extend(values.iter().map(|x| f64::from(x * inverse)));
    }
    out
}

type Register = [f32; LANES];

fn add(a: &mut Register, b: &Register) {
    for (a, b) in a.iter_mut().zip(b) {
        *a += b;
    }
}

/// The sum in PyTorch's order.
fn sum(values: &[f32]) -> f32 {
    let (registers, rest) = values.as_chunks::<LANES>();
    let (turns, last) = registers.as_chunks::<REGISTERS>();
    let mut sums = cascade(turns);
    for register in last {
        add(&mut sums[0], register);
    }
    let (first, others) = sums.split_at_mut(1);
    for other in others {
        add(&mut first[0], other);
    }
    rest.iter().chain(&sums[0]).fold(0.0, |total, value| total + value)
}

/// `multi_row_sum`: after every `step` turns the sums move up a level, after `step²` two levels, and so on.
fn cascade(turns: &[[Register; REGISTERS]]) -> [Register; REGISTERS] {
    let power = (turns.len().next_power_of_two().trailing_zeros() as usize / LEVELS).max(4);
    let step = 1 << power;
    let mut levels = [[[0.0; LANES]; REGISTERS]; LEVELS];
    let whole = turns.len() / step * step;
    for (index, turn) in turns[..whole].iter().enumerate() {
        add_all(&mut levels[0], turn);
        let done = index + 1;
        for level in 1..LEVELS {
            if !done.is_multiple_of(1 << (level * power)) {
                break;
            }
            let below = std::mem::take(&mut levels[level - 1]);
            add_all(&mut levels[level], &below);
        }
    }
    for turn in &turns[whole..] {
        add_all(&mut levels[0], turn);
    }
    let [mut total, higher @ ..] = levels;
    for level in &higher {
        add_all(&mut total, level);
    }
    total
}

fn add_all(a: &mut [Register; REGISTERS], b: &[Register; REGISTERS]) {
    for (a, b) in a.iter_mut().zip(b) {
        add(a, b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One value that swallows those which are added to it singly: which sums are formed first decides the result.
    #[test]
    fn values_are_added_in_pytorchs_order() {
        const BIG: f32 = 16_777_216.0;
        // Within a lane by turns of four registers, then register by register, then lane by lane.
        let mut values = vec![1.0; 64];
        values[0] = BIG;
        // Lane 0: register 0 swallows one of its turns; the sums of the other three registers are 2 each; the other
        // seven lanes give 8 each.
        assert_eq!(sum(&values), BIG + 6.0 + 56.0);
        // What fills no register is added first, before the lanes.
        assert_eq!(sum(&[1.0, 1.0, BIG]), BIG + 2.0);
        assert_eq!(sum(&[BIG, 1.0, 1.0]), BIG);
        // 32 turns: after 16 the sums move up, so later ones meet the big value together.
        let mut values = vec![1.0; 1024];
        values[0] = BIG;
        assert_eq!(sum(&values), BIG + 16.0 + 3.0 * 32.0 + 7.0 * 128.0);
    }

    #[test]
    fn close_to_the_exact_norm() {
        let x: Vec<f64> = (0..4096).map(|index| ((index * 7919) % 1000) as f64 / 300.0 - 1.7).collect();
        let scale = (x.iter().map(|x| x * x).sum::<f64>() / 4096.0 + 1e-5).sqrt();
        let found = normalised(&x, 4096, 1e-5);
        assert!(x.iter().zip(&found).all(|(x, y)| (x / scale - y).abs() < 1e-6));
    }
}
