//! The gated delta rule: kernels between cuBLASLt's GEMMs, which multiply 16-bit operands where the model has them.

use burn::backend::{Cube, DType, TensorMetadata};
use kernels_cubecl::pointwise::gated_delta::gates_gradient::{self, GateSums as SumHandles};
use kernels_cubecl::pointwise::gated_delta::states::{self, PassInputs, Passed as PassedHandles};
use kernels_cubecl::pointwise::gated_delta::{head_dots, inverse_gradient, systems, systems_gradient, units};
use kernels_cubecl::pointwise::ssd::{arrange, combine};

use super::ssd::{Kernels, ages_of, by_column, by_head, decay_handles, features, packed_steps, sizes, step_handles};
use super::{Float, are_floats, empty, launched, packed, part, work};
use crate::gated_delta::algorithm::{Answers, backward, forward};
use crate::gated_delta::node::{GatedDeltaKernels, Tensors};
use crate::gated_delta::stages::{self, GateSums, GatedDeltaStages, Inputs, PassOperands, Passed, Systems};
use crate::plain::ssd::Formulas;
use crate::ssd::node::PLAIN_CHUNK;
use crate::ssd::stages::{Decays, Features, SsdShape};

/// Positions of a chunk: a system's inverse stays in the shared memory of a few cubes.
const CHUNK: usize = 64;

impl GatedDeltaKernels for Cube {
    fn gated_delta(tensors: &Tensors<Self>, with_last: bool) -> Answers<Self> {
        if !has_kernels(tensors) {
            return forward::<Self, Formulas>(&tensors.inputs, with_last, tensors.shape(PLAIN_CHUNK));
        }
        let _noted = work::memory("gated delta rule", &tensors.inputs.x, |bytes| 16 * bytes);
        forward::<Self, Kernels>(&inputs_of(tensors), with_last, tensors.shape(CHUNK))
    }

    fn gated_delta_grads(tensors: &Tensors<Self>, grad: Float) -> [Float; 5] {
        if !has_kernels(tensors) {
            return backward::<Self, Formulas>(&tensors.inputs, grad, tensors.shape(PLAIN_CHUNK));
        }
        let _noted = work::memory("gated delta rule gradient", &tensors.inputs.x, |bytes| 48 * bytes);
        backward::<Self, Kernels>(&inputs_of(tensors), packed(grad), tensors.shape(CHUNK))
    }
}

fn has_kernels(tensors: &Tensors<Cube>) -> bool {
    let Inputs { x, beta, steps, .. } = &tensors.inputs;
    are_floats([x, beta, &steps.raw, &steps.bias, &steps.a_log])
        && sizes(tensors.shape(CHUNK)).has_delta_kernel(&x.client)
}

/// In the layout of the kernels.
fn inputs_of(tensors: &Tensors<Cube>) -> Inputs<Cube> {
    let Inputs { x, beta, steps, first } = tensors.inputs.clone();
    Inputs { x: packed(x), beta: packed(beta), steps: packed_steps(&steps), first: first.map(packed) }
}

fn pass_inputs<'a>(operands: &'a PassOperands<Cube>, decays: &'a Decays<Cube>) -> PassInputs<'a> {
    PassInputs {
        keys: &operands.keys.handle,
        corrections: &operands.corrections.handle,
        until: &decays.until.handle,
        since: &decays.since.handle,
    }
}

/// `[b, chunks, h, p, n]`.
fn states_of(shape: SsdShape) -> [usize; 5] {
    [shape.samples, shape.chunks(), shape.heads, shape.head_dim, shape.state]
}

/// `[b, chunks, heads or groups, chunk, chunk]`.
fn squares_of(heads: usize, shape: SsdShape) -> [usize; 5] {
    [shape.samples, shape.chunks(), heads, shape.chunk, shape.chunk]
}

/// Numbers `[b, chunks, h, chunk]`.
fn numbers_of(like: &Float, shape: SsdShape) -> Float {
    empty(like, [shape.samples, shape.chunks(), shape.heads, shape.chunk], DType::F32)
}

/// So many parts of sums for each head's chunk.
fn parts_of(like: &Float, parts: usize, shape: SsdShape) -> Float {
    empty(like, [parts, shape.samples * shape.chunks() * shape.heads], DType::F32)
}

impl GatedDeltaStages<Cube> for Kernels {
    fn units(x: &Float, of: Features, scale: f64, shape: SsdShape) -> Float {
        let units = empty(x, by_head(of, shape), x.dtype());
        let (from, to, scale) = (features(x, of, shape), &units.handle, scale as f32);
        let done = by_float!(x, E => units::forward::<E>(&x.client, &x.handle, to, from, scale, sizes(shape)));
        launched("queries and keys of length one", done);
        units
    }

    fn systems(scores: &[Float; 2], decays: &Decays<Cube>, inputs: &Inputs<Cube>, shape: SsdShape) -> Systems<Cube> {
        let x = &inputs.x;
        let [inverse, of_values, of_keys, weights] =
            [(); 4].map(|()| empty(x, squares_of(shape.heads, shape), x.dtype()));
        let (scores, beta) = (scores.each_ref().map(|of| &of.handle), &inputs.beta.handle);
        let (decays, ages) = ([&decays.sums.handle, &decays.since.handle], ages_of(&inputs.steps));
        let to = [&inverse, &of_values, &of_keys, &weights].map(|of| &of.handle);
        let done = by_float!(x, E => systems::forward::<E>(&x.client, scores, beta, decays, ages, to, sizes(shape)));
        launched("triangular systems", done);
        Systems { inverse, of_values, of_keys, weights }
    }

    fn pass(
        base: Float,
        operands: &PassOperands<Cube>,
        decays: &Decays<Cube>,
        first: Option<&Float>,
        [until, last]: [bool; 2],
        shape: SsdShape,
    ) -> Passed<Cube> {
        let (in_front, values) =
            (empty(&base, states_of(shape), base.dtype()), empty(&base, base.shape(), base.dtype()));
        let until = until.then(|| empty(&base, by_column(shape.chunk, shape), base.dtype()));
        let last = last.then(|| empty(&base, [shape.samples, shape.heads, shape.head_dim, shape.state], DType::F32));
        let to = PassedHandles {
            in_front: &in_front.handle,
            values: &values.handle,
            values_until: until.as_ref().map(|until| &until.handle),
            last: last.as_ref().map(|last| &last.handle),
        };
        let (from, first) = (pass_inputs(operands, decays), first.map(|first| &first.handle));
        let done =
            by_float!(base, E => states::forward::<E>(&base.client, from, &base.handle, first, to, sizes(shape)));
        launched("states of chunks", done);
        Passed { in_front, values, until, last }
    }

    fn answers([inside, before]: [Float; 2], decays: &Decays<Cube>, x: &Float, shape: SsdShape) -> Float {
        let y = empty(x, [shape.seq, shape.samples, shape.inner()], x.dtype());
        let (from, since, to) = ([&inside.handle, &before.handle], &decays.since.handle, &y.handle);
        let done = by_float!(x, E => combine::forward::<E>(&x.client, from, since, None, to, sizes(shape)));
        launched("answers", done);
        y
    }

    fn pass_grads(
        base: Float,
        of_states: Float,
        in_front: &Float,
        operands: &PassOperands<Cube>,
        decays: &Decays<Cube>,
        shape: SsdShape,
    ) -> [Float; 3] {
        let of_behind = empty(&base, states_of(shape), base.dtype());
        let of_values = empty(&base, base.shape(), base.dtype());
        let along = parts_of(&base, sizes(shape).state_parts(), shape);
        let (inputs, from) = (pass_inputs(operands, decays), [&base.handle, &of_states.handle, &in_front.handle]);
        let to = [&of_behind.handle, &of_values.handle, &along.handle];
        let done = by_float!(base, E => states::backward::<E>(&base.client, inputs, from, to, sizes(shape)));
        launched("gradients of states", done);
        [of_behind, of_values, along]
    }

    fn head_dots(by_head: &Float, by_column: &Float, shape: SsdShape) -> Float {
        let (client, dots) = (&by_head.client, numbers_of(by_head, shape));
        let (from, to) = ([&by_head.handle, &by_column.handle], &dots.handle);
        launched(
            "dot products of heads",
            by_float!(by_head, E => head_dots::dots::<E>(client, from, to, sizes(shape))),
        );
        dots
    }

    fn inverse_grads(
        inverse: &Float,
        scaled: [Float; 2],
        decays: &Decays<Cube>,
        inputs: &Inputs<Cube>,
        shape: SsdShape,
    ) -> [Float; 3] {
        let client = &inverse.client;
        let gradient = empty(inverse, inverse.shape(), inverse.dtype());
        let (of_beta, slopes) = (numbers_of(inverse, shape), numbers_of(inverse, shape));
        let (scaled, gates) = (scaled.each_ref().map(|of| &of.handle), [&inputs.beta.handle, &decays.since.handle]);
        let (from, to) = (&inverse.handle, [&gradient.handle, &of_beta.handle, &slopes.handle]);
        let done =
            by_float!(inverse, E => inverse_gradient::backward::<E>(client, from, scaled, gates, to, sizes(shape)));
        launched("gradients of inverses", done);
        [gradient, of_beta, slopes]
    }

    fn systems_grads(
        grads: [Float; 2],
        scores: &[Float; 2],
        decays: &Decays<Cube>,
        inputs: &Inputs<Cube>,
        [of_beta, sums]: [Float; 2],
        shape: SsdShape,
    ) -> [Float; 4] {
        let x = &inputs.x;
        let [of_keys, of_queries] = [(); 2].map(|()| empty(x, squares_of(shape.groups, shape), x.dtype()));
        let (from, scores) = (grads.each_ref().map(|of| &of.handle), scores.each_ref().map(|of| &of.handle));
        let (gates, ages) = ([&inputs.beta.handle, &decays.sums.handle], ages_of(&inputs.steps));
        let to = [&of_keys, &of_queries, &of_beta, &sums].map(|of| &of.handle);
        let (client, sizes) = (&x.client, sizes(shape));
        let done = by_float!(x, E => systems_gradient::backward::<E>(client, from, scores, gates, ages, to, sizes));
        launched("gradients of triangular systems", done);
        [of_keys, of_queries, of_beta, sums]
    }

    fn input_grads(
        x: &Float,
        queries: [Float; 2],
        keys: [Float; 4],
        values: Float,
        scale: f64,
        shape: SsdShape,
    ) -> Float {
        let dx = empty(x, x.shape(), x.dtype());
        let (client, to, sizes) = (&x.client, &dx.handle, sizes(shape));
        let [of_queries, of_keys, of_values] = stages::features(shape).map(|of| features(x, of, shape));
        let queries = queries.each_ref().map(|of| &of.handle);
        let keys = keys.each_ref().map(|of| &of.handle);
        let done = by_float!(x, E => {
            let of_units = |summands, of, scale| units::backward::<E>(client, &x.handle, summands, to, of, scale, sizes);
            of_units(&queries, of_queries, scale as f32)
                .and_then(|()| of_units(&keys, of_keys, 1.0))
                .and_then(|()| arrange::add::<E>(client, &[&values.handle], to, of_values, sizes))
        });
        launched("gradients of queries, keys and values", done);
        dx
    }

    fn gates_grads(inputs: &Inputs<Cube>, decays: &Decays<Cube>, sums: GateSums<Cube>, shape: SsdShape) -> [Float; 4] {
        let (raw, beta) = (&inputs.steps.raw, &inputs.beta);
        let [of_raw, of_beta] = [raw, beta].map(|of| empty(of, of.shape(), of.dtype()));
        let of_heads = empty(raw, [2, shape.heads], DType::F32);
        let sums = SumHandles {
            beta: &sums.beta.handle,
            sums: &sums.sums.handle,
            until: &sums.until.handle,
            since: &sums.since.handle,
            along: &sums.along.handle,
        };
        let (from, decays, to) =
            (step_handles(&inputs.steps), decay_handles(decays), [&of_raw.handle, &of_beta.handle, &of_heads.handle]);
        let (client, beta, sizes) = (&raw.client, &beta.handle, sizes(shape));
        let done = by_float!(raw, E => gates_gradient::backward::<E>(client, from, beta, decays, sums, to, sizes));
        launched("gradients of gates", done);
        [of_beta, of_raw, part(&of_heads, 0, [shape.heads]), part(&of_heads, shape.heads, [shape.heads])]
    }
}
