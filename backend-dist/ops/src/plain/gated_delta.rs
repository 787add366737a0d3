//! The steps between the GEMMs of the gated delta rule in chunks, in at least fp32. Sizes and orders of dimensions are those
//! of [state-space duality](super::ssd).

use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor as Float};

use super::ssd::gradients::{decays, summed};
use super::ssd::{
    Formulas, by_column, by_head, column_of, for_heads, from_columns, in_sequence, numbers, per_head, row_of, shares,
    wide, zeros,
};
use super::{add, dims, narrow, reshape, scale, sigmoid};
use crate::dtype::cast;
use crate::gated_delta::stages::{GateSums, GatedDeltaStages, Inputs, PassOperands, Passed, Systems, features};
use crate::kernels::LocalKernels;
use crate::ssd::stages::{Decays, Features, SsdShape};

/// Added to the squared length of queries and keys, as in transformers and flash-linear-attention.
const LENGTH_EPS: f64 = 1e-6;

impl<B: LocalKernels> GatedDeltaStages<B> for Formulas {
    fn units(x: &Float<B>, of: Features, factor: f64, shape: SsdShape) -> Float<B> {
        let x = by_head::<B>(wide::<B>(narrow::<B>(x.clone(), 2, of.first, of.end())), of.heads, shape);
        let lengths = lengths::<B>(&x);
        scale::<B>(B::float_div(x, lengths), factor)
    }

    fn systems([keys, queries]: &[Float<B>; 2], decays: &Decays<B>, inputs: &Inputs<B>, shape: SsdShape) -> Systems<B> {
        let shares = shares::<B>(decays, &inputs.steps, shape);
        let beta = beta::<B>(inputs, shape);
        let below = B::float_mul(for_heads::<B>(keys.clone(), shape), shares.clone());
        let inverse = match shape.chunk {
            // A token that is decoded, for which nothing is copied to the device.
            1 => shares.clone(),
            _ => inverse::<B>(B::float_mul(below, column_of::<B>(beta.clone())), shape.chunk),
        };
        let of_keys = B::float_neg(row_of::<B>(B::float_mul(beta.clone(), decays.since.clone())));
        Systems {
            of_values: B::float_mul(inverse.clone(), row_of::<B>(beta)),
            of_keys: B::float_mul(inverse.clone(), of_keys),
            inverse,
            weights: B::float_mul(for_heads::<B>(queries.clone(), shape), shares),
        }
    }

    fn pass(
        base: Float<B>,
        operands: &PassOperands<B>,
        decays: &Decays<B>,
        first: Option<&Float<B>>,
        [until, last]: [bool; 2],
        shape: SsdShape,
    ) -> Passed<B> {
        let recurrence = Recurrence::<B> {
            reads: operands.corrections.clone(),
            writes: keys_until::<B>(operands, decays, shape),
            base,
            summand: None,
        };
        let (in_front, values, state) = recurrence.run(first, decays, false, shape);
        let until =
            until.then(|| by_column::<B>(B::float_mul(values.clone(), column_of::<B>(decays.until.clone())), shape));
        let of_heads = [shape.samples, shape.heads, shape.head_dim, shape.state];
        Passed { in_front, values, until, last: last.then(|| reshape::<B>(state, of_heads)) }
    }

    fn answers([inside, before]: [Float<B>; 2], decays: &Decays<B>, x: &Float<B>, shape: SsdShape) -> Float<B> {
        let before = B::float_mul(from_columns::<B>(before, shape), column_of::<B>(decays.since.clone()));
        cast::<B>(in_sequence::<B>(B::float_add(inside, before), shape), x.dtype())
    }

    fn pass_grads(
        base: Float<B>,
        of_states: Float<B>,
        in_front: &Float<B>,
        operands: &PassOperands<B>,
        decays: &Decays<B>,
        shape: SsdShape,
    ) -> [Float<B>; 3] {
        let recurrence = Recurrence::<B> {
            reads: keys_until::<B>(operands, decays, shape),
            writes: operands.corrections.clone(),
            base,
            summand: Some(of_states),
        };
        let (of_behind, of_values, _) = recurrence.run(None, decays, true, shape);
        let along = summed::<B>(summed::<B>(B::float_mul(of_behind.clone(), in_front.clone()), 4), 3);
        [of_behind, of_values, along]
    }

    fn head_dots(by_head: &Float<B>, by_column: &Float<B>, shape: SsdShape) -> Float<B> {
        summed::<B>(B::float_mul(by_head.clone(), from_columns::<B>(by_column.clone(), shape)), 4)
    }

    fn inverse_grads(
        inverse: &Float<B>,
        [values, keys]: [Float<B>; 2],
        decays: &Decays<B>,
        inputs: &Inputs<B>,
        shape: SsdShape,
    ) -> [Float<B>; 3] {
        let beta = beta::<B>(inputs, shape);
        let keys = B::float_neg(B::float_mul(keys, row_of::<B>(decays.since.clone())));
        let column_sums = |of: &Float<B>| summed::<B>(B::float_mul(inverse.clone(), of.clone()), 3);
        let (of_values, of_keys) = (column_sums(&values), column_sums(&keys));
        let gradient = B::float_mul(B::float_add(values, keys), row_of::<B>(beta.clone()));
        [gradient, B::float_add(of_values, of_keys.clone()), B::float_mul(beta, of_keys)]
    }

    fn systems_grads(
        [systems, weights]: [Float<B>; 2],
        [keys, queries]: &[Float<B>; 2],
        decays: &Decays<B>,
        inputs: &Inputs<B>,
        [of_beta, of_sums]: [Float<B>; 2],
        shape: SsdShape,
    ) -> [Float<B>; 4] {
        let shares = shares::<B>(decays, &inputs.steps, shape);
        let beta = column_of::<B>(beta::<B>(inputs, shape));
        let below = blocks::<B>(shape.chunk, |row, column| column < row, &shares);
        // The gradient of the system is −Tᵀ (gradient of T) Tᵀ below its diagonal.
        let of_systems = B::float_neg(B::float_mul(B::float_mul(systems, shares.clone()), below));
        let of_weights = B::float_mul(weights, shares);
        let along = B::float_mul(of_systems.clone(), for_heads::<B>(keys.clone(), shape));
        let decayed = B::float_add(
            B::float_mul(along.clone(), beta.clone()),
            B::float_mul(of_weights.clone(), for_heads::<B>(queries.clone(), shape)),
        );
        // What a position sees has decayed by its sum of logarithms, what sees it by less.
        let of_decays = B::float_sub(summed::<B>(decayed.clone(), 4), summed::<B>(decayed, 3));
        let of_group = |x: Float<B>| {
            let size = dims(&x);
            let serves = shape.heads / shape.groups;
            summed::<B>(reshape::<B>(x, [size[0], size[1], shape.groups, serves, size[3], size[4]]), 3)
        };
        let of_keys = of_group(B::float_mul(of_systems, beta));
        [
            B::float_add(of_keys.clone(), B::float_transpose(of_keys)),
            of_group(of_weights),
            B::float_add(of_beta, summed::<B>(along, 4)),
            B::float_add(of_sums, of_decays),
        ]
    }

    fn input_grads(
        x: &Float<B>,
        queries: [Float<B>; 2],
        keys: [Float<B>; 4],
        values: Float<B>,
        factor: f64,
        shape: SsdShape,
    ) -> Float<B> {
        let [of_queries, of_keys, _] = features(shape);
        let of_units = |summands: Vec<Float<B>>, of: Features, factor: f64| {
            let sum = summands.into_iter().reduce(B::float_add).expect("there are several");
            let x = by_head::<B>(wide::<B>(narrow::<B>(x.clone(), 2, of.first, of.end())), of.heads, shape);
            let lengths = lengths::<B>(&x);
            let unit = B::float_div(x, lengths.clone());
            let along = B::sum_dim(B::float_mul(unit.clone(), sum.clone()), 4);
            scale::<B>(B::float_div(B::float_sub(sum, B::float_mul(unit, along)), lengths), factor)
        };
        let parts = [of_units(queries.into(), of_queries, factor), of_units(keys.into(), of_keys, 1.0), values];
        let parts = parts.map(|part| in_sequence::<B>(part, shape)).into();
        cast::<B>(B::float_cat(parts, 2), x.dtype())
    }

    fn gates_grads(inputs: &Inputs<B>, of: &Decays<B>, sums: GateSums<B>, shape: SsdShape) -> [Float<B>; 4] {
        let until = B::float_mul(of.until.clone(), sums.until);
        // The sum up to the last position is in all shares that are left behind the chunk.
        let (last, all) = (shape.chunk - 1, B::float_sub(sums.sums, until.clone()));
        let of_last = B::float_add(narrow::<B>(all.clone(), 3, last, last + 1), B::sum_dim(until, 3));
        let later = match last {
            0 => of_last,
            _ => B::float_cat(vec![narrow::<B>(all, 3, 0, last), of_last], 3),
        };
        let none = || zeros::<B>(dims(&later), &later);
        let combined = [none(), sums.since, none()];
        let [steps, bias, a_log, _] =
            decays::<B>(&inputs.steps, of, [later.clone(), none()], combined, sums.along, shape);
        let raw = sigmoid::<B>(wide::<B>(inputs.beta.clone()));
        let slope = B::float_mul(raw.clone(), add::<B>(B::float_neg(raw), 1.0));
        let of_beta = B::float_permute(sums.beta, &[1, 3, 0, 2]);
        let of_beta = reshape::<B>(of_beta, [shape.chunks() * shape.chunk, shape.samples, shape.heads]);
        let of_beta = B::float_mul(narrow::<B>(of_beta, 0, 0, shape.seq), slope);
        [cast::<B>(of_beta, inputs.beta.dtype()), steps, bias, a_log]
    }
}

/// β by head; padding has zero.
fn beta<B: LocalKernels>(inputs: &Inputs<B>, shape: SsdShape) -> Float<B> {
    per_head::<B>(sigmoid::<B>(wide::<B>(inputs.beta.clone())), shape)
}

/// Of each head's features.
fn lengths<B: LocalKernels>(x: &Float<B>) -> Float<B> {
    let squares = B::sum_dim(B::float_mul(x.clone(), x.clone()), 4);
    B::float_sqrt(add::<B>(squares, LENGTH_EPS))
}

/// Keys by head, times what is left of a position behind its chunk.
fn keys_until<B: LocalKernels>(operands: &PassOperands<B>, decays: &Decays<B>, shape: SsdShape) -> Float<B> {
    B::float_mul(for_heads::<B>(operands.keys.clone(), shape), column_of::<B>(decays.until.clone()))
}

/// One chunk after the other: `values = base + reads Sᵀ`, and `S ← stays S + valuesᵀ writes + summand`.
struct Recurrence<B: Backend> {
    reads: Float<B>,
    writes: Float<B>,
    base: Float<B>,
    summand: Option<Float<B>>,
}

impl<B: LocalKernels> Recurrence<B> {
    /// The states in front of chunks, or behind them if `backward`, the values, and the state in the end.
    fn run(
        self,
        first: Option<&Float<B>>,
        decays: &Decays<B>,
        backward: bool,
        shape: SsdShape,
    ) -> (Float<B>, Float<B>, Float<B>) {
        let (count, one) = (shape.chunks(), [shape.samples, 1, shape.heads, shape.head_dim, shape.state]);
        let stays = column_of::<B>(narrow::<B>(decays.since.clone(), 3, shape.chunk - 1, shape.chunk));
        let mut state = match first {
            Some(first) => reshape::<B>(cast::<B>(first.clone(), self.base.dtype()), one),
            None => zeros::<B>(one, &self.base),
        };
        let (mut states, mut values) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for step in 0..count {
            let c = if backward { count - 1 - step } else { step };
            let of = |x: &Float<B>| narrow::<B>(x.clone(), 1, c, c + 1);
            let answers = B::matmul(of(&self.reads), B::float_transpose(state.clone()));
            let value = B::float_add(of(&self.base), answers);
            let written = B::matmul(B::float_transpose(value.clone()), of(&self.writes));
            let next = B::float_add(B::float_mul(state.clone(), of(&stays)), written);
            states.push(std::mem::replace(
                &mut state,
                match &self.summand {
                    Some(summand) => B::float_add(next, of(summand)),
                    None => next,
                },
            ));
            values.push(value);
        }
        if backward {
            states.reverse();
            values.reverse();
        }
        (B::float_cat(states, 1), B::float_cat(values, 1), state)
    }
}

/// `(I + L)⁻¹` with `L` what `lower [.., chunk, chunk]` has below the diagonal, by blocks of twice the size in each step: that
/// of `[[A, 0], [C, B]]` is `[[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]]`. A sum of powers of `L` would cancel digits where keys are alike.
fn inverse<B: LocalKernels>(lower: Float<B>, chunk: usize) -> Float<B> {
    let eye = blocks::<B>(chunk, |row, column| row == column, &lower);
    let mut inverse = B::float_add(zeros::<B>(dims(&lower), &lower), eye);
    let mut block = 1;
    while block < chunk {
        // The lower left block of each block of twice the size on the diagonal.
        let below = blocks::<B>(
            chunk,
            |row, column| {
                row / (2 * block) == column / (2 * block) && row / block % 2 == 1 && (column / block).is_multiple_of(2)
            },
            &lower,
        );
        let below = B::matmul(B::float_mul(lower.clone(), below), inverse.clone());
        inverse = B::float_sub(inverse.clone(), B::matmul(inverse, below));
        block *= 2;
    }
    inverse
}

/// 1 in some places of a square, else 0: `[1, 1, 1, chunk, chunk]`.
fn blocks<B: Backend>(chunk: usize, is_there: impl Fn(usize, usize) -> bool, like: &Float<B>) -> Float<B> {
    let values = (0..chunk * chunk).map(|at| f64::from(u8::from(is_there(at / chunk, at % chunk)))).collect();
    numbers::<B>(values, [1, 1, 1, chunk, chunk], like)
}
