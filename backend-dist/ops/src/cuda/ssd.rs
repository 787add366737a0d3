//! Mamba-2's recurrence: kernels between cuBLASLt's GEMMs, which multiply 16-bit operands where the model has them.

use burn::backend::{Cube, DType, TensorMetadata};
use burn::tensor::Shape;
use burn_cubecl::tensor::CubeTensor;
use cubecl::server::Handle;
use kernels_cubecl::pointwise::ssd::combine::{self, CombineInputs};
use kernels_cubecl::pointwise::ssd::steps::{self, Decays as DecayHandles, StepInputs as StepHandles};
use kernels_cubecl::pointwise::ssd::steps_gradient::{self, Sums};
use kernels_cubecl::pointwise::ssd::{SsdShape as Sizes, arrange, pass, weights, weights_gradient};

use super::{Float, are_floats, empty, launched, packed, part, work};
use crate::plain::ssd::Formulas;
use crate::ssd::algorithm::{Answers, Gradients, backward, forward};
use crate::ssd::node::{PLAIN_CHUNK, SsdKernels, Tensors};
use crate::ssd::stages::{Combined, Decays, Features, InputSums, SsdShape, SsdStages, StepInputs};
use gpu::cuda::lt::{Operand, gemm};

/// Positions of a chunk: weights between positions and states are about as large then.
const CHUNK: usize = 128;

impl SsdKernels for Cube {
    fn ssd(tensors: &Tensors<Self>, first: Option<Float>) -> Answers<Self> {
        if !has_kernels(tensors) {
            let shape = tensors.shape(PLAIN_CHUNK);
            return forward::<Self, Formulas>(&tensors.steps, &tensors.inputs, first, shape);
        }
        let _noted = work::memory("state-space duality", &tensors.inputs.x, |bytes| 12 * bytes);
        let first = first.map(packed);
        forward::<Self, Kernels>(&packed_steps(&tensors.steps), &inputs_of(tensors), first, tensors.shape(CHUNK))
    }

    fn ssd_grads(tensors: &Tensors<Self>, in_front: &Float, grad: Float) -> Gradients<Self> {
        if !has_kernels(tensors) {
            let (steps, inputs, shape) = (&tensors.steps, &tensors.inputs, tensors.shape(PLAIN_CHUNK));
            return backward::<Self, Formulas>(steps, inputs, in_front, grad, shape);
        }
        let _noted = work::memory("state-space duality gradient", &tensors.inputs.x, |bytes| 30 * bytes);
        let (steps, inputs, shape) = (packed_steps(&tensors.steps), inputs_of(tensors), tensors.shape(CHUNK));
        backward::<Self, Kernels>(&steps, &inputs, in_front, packed(grad), shape)
    }
}

fn has_kernels(tensors: &Tensors<Cube>) -> bool {
    let (steps, inputs) = (&tensors.steps, &tensors.inputs);
    are_floats([&inputs.x, &steps.raw, &steps.bias, &steps.a_log, &inputs.skip])
        && sizes(tensors.shape(CHUNK)).has_kernel()
}

pub(super) fn sizes(shape: SsdShape) -> Sizes {
    let SsdShape { seq, samples, heads, groups, head_dim, state, chunk } = shape;
    Sizes { seq, samples, heads, groups, head_dim, state, chunk }
}

/// In the layout of the kernels.
pub(super) fn packed_steps(steps: &StepInputs<Cube>) -> StepInputs<Cube> {
    let StepInputs { raw, bias, a_log, ages, limits } = steps.clone();
    let [raw, bias, a_log] = [raw, bias, a_log].map(packed);
    StepInputs { raw, bias, a_log, ages: ages.map(packed), limits }
}

fn inputs_of(tensors: &Tensors<Cube>) -> Combined<Cube> {
    let Combined { x, skip } = tensors.inputs.clone();
    Combined { x: packed(x), skip: packed(skip) }
}

pub(super) fn step_handles(inputs: &StepInputs<Cube>) -> StepHandles<'_> {
    StepHandles {
        raw: &inputs.raw.handle,
        bias: &inputs.bias.handle,
        a_log: &inputs.a_log.handle,
        ages: ages_of(inputs),
        limits: inputs.limits.map(|limit| limit as f32),
    }
}

pub(super) fn ages_of(inputs: &StepInputs<Cube>) -> Option<&Handle> {
    inputs.ages.as_ref().map(|ages| &ages.handle)
}

pub(super) fn decay_handles(decays: &Decays<Cube>) -> DecayHandles<'_> {
    let Decays { steps, sums, until, since } = decays;
    DecayHandles { steps: &steps.handle, sums: &sums.handle, until: &until.handle, since: &since.handle }
}

/// Where features lie in `x [s, b, width]`.
pub(super) fn features(x: &CubeTensor, of: Features, shape: SsdShape) -> arrange::Features {
    let width = x.meta.shape()[2];
    arrange::Features { width, first: of.first, heads: of.heads, groups: shape.groups, head_dim: of.each }
}

/// The kernels.
pub(super) struct Kernels;

impl SsdStages<Cube> for Kernels {
    fn wide_matmul(a: Float, b: Float) -> Float {
        let (mut shape, right) = (a.meta.shape().to_vec(), b.meta.shape().to_vec());
        let last = shape.len() - 1;
        shape[last] = right[last];
        gemm(Operand::batched(a), Operand::batched(b), Shape::from(shape), DType::F32)
    }

    fn decays(inputs: &StepInputs<Cube>, shape: SsdShape) -> Decays<Cube> {
        let raw = &inputs.raw;
        let numbers = || empty(raw, [shape.samples, shape.chunks(), shape.heads, shape.chunk], DType::F32);
        let decays = Decays { steps: numbers(), sums: numbers(), until: numbers(), since: numbers() };
        let (of, to) = (step_handles(inputs), decay_handles(&decays));
        launched("step sizes", by_float!(raw, E => steps::forward::<E>(&raw.client, of, to, sizes(shape))));
        decays
    }

    fn operand(x: &Float, of: Features, shape: SsdShape) -> Float {
        let by_head = empty(x, by_head(of, shape), x.dtype());
        let (from, to) = (features(x, of, shape), &by_head.handle);
        let done = by_float!(x, E => arrange::arrange::<E>(&x.client, &x.handle, &[], to, None, from, sizes(shape)));
        launched("operands", done);
        by_head
    }

    fn operands(x: &Float, of: Features, factors: &[&Float], shape: SsdShape) -> [Float; 2] {
        let (a, b) = (empty(x, by_head(of, shape), x.dtype()), empty(x, by_column(shape.chunk, shape), x.dtype()));
        let (from, factors) = (features(x, of, shape), factors.iter().map(|factor| &factor.handle).collect::<Vec<_>>());
        let (to, columns, client) = (&a.handle, Some(&b.handle), &x.client);
        let done =
            by_float!(x, E => arrange::arrange::<E>(client, &x.handle, &factors, to, columns, from, sizes(shape)));
        launched("operands", done);
        [a, b]
    }

    fn weights(scores: &Float, decays: &Decays<Cube>, inputs: &StepInputs<Cube>, shape: SsdShape) -> Float {
        let (raw, chunk) = (&inputs.raw, shape.chunk);
        let weights = empty(raw, [shape.samples, shape.chunks(), shape.heads, chunk, chunk], raw.dtype());
        let (of, ages, to) = ([&decays.steps.handle, &decays.sums.handle], ages_of(inputs), &weights.handle);
        let scores = &scores.handle;
        let done = by_float!(raw, E => weights::forward::<E>(&raw.client, scores, of, ages, to, sizes(shape)));
        launched("decayed scores", done);
        weights
    }

    fn states(
        summands: Float,
        decays: &Decays<Cube>,
        inputs: &Combined<Cube>,
        first: Option<Float>,
        shape: SsdShape,
    ) -> [Float; 2] {
        let (x, columns) = (&inputs.x, shape.inner() / shape.groups);
        let in_front = empty(x, by_column(shape.state, shape), x.dtype());
        let last = empty(x, [shape.samples, shape.groups, shape.state, columns], DType::F32);
        let (from, first) = ([&summands.handle, &decays.since.handle], first.as_ref().map(|first| &first.handle));
        let (to, last_to, client) = (&in_front.handle, Some(&last.handle), &x.client);
        let done = by_float!(x, E => pass::forward::<E>(client, from, first, to, last_to, sizes(shape)));
        launched("states of chunks", done);
        [in_front, last]
    }

    fn combine(answers: [Float; 2], decays: &Decays<Cube>, inputs: &Combined<Cube>, shape: SsdShape) -> Float {
        let x = &inputs.x;
        let y = empty(x, [shape.seq, shape.samples, shape.inner()], x.dtype());
        let (answers, since) = (answers.each_ref().map(|answer| &answer.handle), &decays.since.handle);
        let (of, to) = ([&x.handle, &inputs.skip.handle], &y.handle);
        let done = by_float!(x, E => combine::forward::<E>(&x.client, answers, since, Some(of), to, sizes(shape)));
        launched("answers", done);
        y
    }

    fn weights_grads(
        grad: Float,
        scores: &Float,
        decays: &Decays<Cube>,
        inputs: &StepInputs<Cube>,
        shape: SsdShape,
    ) -> [Float; 3] {
        let (chunk, client) = (shape.chunk, &grad.client);
        let numbers = [shape.samples, shape.chunks(), shape.heads, chunk];
        let parts = sizes(shape).parts(client)[0];
        let of_scores = empty(&grad, [shape.samples, shape.chunks(), shape.groups, chunk, chunk], grad.dtype());
        let later = empty(&grad, numbers, DType::F32);
        let earlier = empty(&grad, [parts, numbers.into_iter().product()], DType::F32);
        let (from, of) = ([&grad.handle, &scores.handle], [&decays.steps.handle, &decays.sums.handle]);
        let (ages, to) = (ages_of(inputs), [&of_scores.handle, &later.handle, &earlier.handle]);
        let done = by_float!(grad, E => weights_gradient::backward::<E>(client, from, of, ages, to, sizes(shape)));
        launched("gradients of decayed scores", done);
        [of_scores, later, earlier]
    }

    fn states_grads(in_front: &Float, grad: Float, decays: &Decays<Cube>, shape: SsdShape) -> [Float; 2] {
        let client = &grad.client;
        let parts = sizes(shape).parts(client)[1];
        let of_summands = empty(in_front, in_front.shape(), in_front.dtype());
        let along = empty(&grad, [parts, shape.samples * shape.chunks() * shape.heads], DType::F32);
        let from = [&in_front.handle, &grad.handle, &decays.since.handle];
        let to = [&of_summands.handle, &along.handle];
        let done = by_float!(in_front, E => pass::backward::<E>(client, from, to, sizes(shape)));
        launched("gradients of states", done);
        [of_summands, along]
    }

    fn combine_grads(
        grad: &Float,
        sums: InputSums<Cube>,
        decays: &Decays<Cube>,
        inputs: &Combined<Cube>,
        shape: SsdShape,
    ) -> (Float, [Float; 3]) {
        let (x, client, sizes) = (&inputs.x, &grad.client, sizes(shape));
        let dx = empty(x, x.shape(), x.dtype());
        let combined =
            [(); 3].map(|()| empty(x, [shape.samples, shape.chunks(), shape.heads, shape.chunk], DType::F32));
        let from = CombineInputs {
            dy: &grad.handle,
            x: &x.handle,
            before: &sums.before.handle,
            inside: &sums.inside.handle,
            taken: &sums.taken.handle,
            skip: &inputs.skip.handle,
        };
        let (of, to) = ([&decays.steps.handle, &decays.until.handle], combined.each_ref().map(|sum| &sum.handle));
        let done = by_float!(x, E => combine::backward::<E>(client, from, of, &dx.handle, to, sizes));
        launched("gradients of x", done);
        for (of, summands) in shape.grouped().into_iter().zip([&sums.b, &sums.c]) {
            let (of, summands) = (features(x, of, shape), summands.each_ref().map(|summand| &summand.handle));
            launched(
                "gradients of B and C",
                by_float!(x, E => arrange::add::<E>(client, &summands, &dx.handle, of, sizes)),
            );
        }
        (dx, combined)
    }

    fn decays_grads(
        inputs: &StepInputs<Cube>,
        decays: &Decays<Cube>,
        [later, earlier]: [Float; 2],
        combined: [Float; 3],
        along: Float,
        shape: SsdShape,
    ) -> [Float; 4] {
        let raw = &inputs.raw;
        let of_raw = empty(raw, raw.shape(), raw.dtype());
        let of_heads = empty(raw, [3, shape.heads], DType::F32);
        let sums = Sums {
            later: &later.handle,
            earlier: &earlier.handle,
            combined: combined.each_ref().map(|sum| &sum.handle),
            along: &along.handle,
        };
        let (of, decays, to) = (step_handles(inputs), decay_handles(decays), [&of_raw.handle, &of_heads.handle]);
        let done = by_float!(raw, E => steps_gradient::backward::<E>(&raw.client, of, decays, sums, to, sizes(shape)));
        launched("gradients of step sizes", done);
        let of = |at: usize| part(&of_heads, at * shape.heads, [shape.heads]);
        [of_raw, of(0), of(1), of(2)]
    }
}

pub(super) fn by_head(of: Features, shape: SsdShape) -> [usize; 5] {
    [shape.samples, shape.chunks(), of.heads, shape.chunk, of.each]
}

pub(super) fn by_column(rows: usize, shape: SsdShape) -> [usize; 5] {
    [shape.samples, shape.chunks(), shape.groups, rows, shape.inner() / shape.groups]
}
