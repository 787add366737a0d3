//! The launches of a backward pass.
use super::joint_gradient::{self, JointGradientPlan};
use super::joint_sum;
use super::key_gradient::{self, KeyGradientPlan};
use super::query_gradient::{self, QueryGradientPlan};
use super::{AttentionError, AttentionShape, Extras, Tensor4, Variant};
use super::{UNITS, delta, drop_keys, flat, grid, maps, sizes, starts};
use crate::hopper::mma::{Half, ROWS};
use crate::tiling::{KEY_ROWS, QUERY_ROWS};
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

/// What the forward pass was given and left behind, for [`backward`].
#[derive(Clone, Copy, Debug)]
pub struct Saved<'a> {
    /// Queries.
    pub q: &'a Tensor4,
    /// Keys.
    pub k: &'a Tensor4,
    /// Values.
    pub v: &'a Tensor4,
    /// Output.
    pub out: &'a Tensor4,
    /// Log-sum-exp, as [`forward`](super::forward()) writes it.
    pub lse: &'a Handle,
}

/// Where [`backward`] writes.
#[derive(Clone, Copy, Debug)]
pub struct Gradients<'a> {
    /// Gradient of the queries.
    pub q: &'a Tensor4,
    /// Gradient of the keys.
    pub k: &'a Tensor4,
    /// Gradient of the values.
    pub v: &'a Tensor4,
}

/// The kernels of a backward pass.
#[derive(Clone, Debug)]
pub struct BackwardPlan {
    /// For the gradient of the queries.
    pub queries: QueryGradientPlan,
    /// For the gradients of the keys and values.
    pub keys: Vec<KeyGradientPlan>,
}

impl BackwardPlan {
    /// What was fastest on an H200.
    pub fn fastest(variant: Variant) -> Self {
        Self { queries: QueryGradientPlan::fastest(variant), keys: KeyGradientPlan::fastest(variant) }
    }
}

/// What both kernels of the backward pass read for each query.
#[derive(Clone, Debug)]
pub struct Sums {
    /// Minus the log-sum-exp in powers of two and `Σ out · out_gradient`, fp32 `[2, batch, heads, padded_queries]`.
    sums: Handle,
    /// Keys of dropout, `u32` of the same shape.
    drop_keys: Option<Handle>,
}

/// The gradients of `q`, `k` and `v`, given that of the output. For ring attention `out` and `lse` are those of the whole
/// ring.
///
/// Where there is a kernel for all three at once it is taken, and the last bits of the queries' gradients differ from call to
/// call; [`Extras::deterministic`] prevents that.
pub fn backward(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    extras: &Extras,
    saved: Saved,
    out_gradient: &Tensor4,
    gradients: Gradients,
) -> Result<(), AttentionError> {
    let variant = Variant::of(shape, extras);
    let sums = row_sums(client, shape, extras, saved.out, out_gradient, saved.lse)?;
    if let Some(plan) = JointGradientPlan::fastest(variant).filter(|_| !extras.deterministic) {
        return joint_gradients(client, shape, scale, extras, saved, out_gradient, &sums, gradients, plan);
    }
    let plan = BackwardPlan::fastest(variant);
    query_gradients(client, shape, scale, extras, saved, out_gradient, &sums, gradients.q, plan.queries)?;
    let kv = (gradients.k, gradients.v);
    key_gradients(client, shape, scale, extras, saved, out_gradient, &sums, kv, &plan.keys)
}

/// First step of [`backward`]: what it needs of each query.
pub fn row_sums(
    client: &Client,
    shape: &AttentionShape,
    extras: &Extras,
    out: &Tensor4,
    out_gradient: &Tensor4,
    lse: &Handle,
) -> Result<Sums, AttentionError> {
    shape.check(client, extras)?;
    out.check("out", shape.out_shape())?;
    out_gradient.check("out_gradient", shape.out_shape())?;
    shape.check_statistics("lse", lse)?;
    let sums = client.empty(2 * 4 * shape.statistics_len());
    let quads = |tensor: &Tensor4| {
        // SAFETY: `Tensor4::check` compared the extent of the tensor with the size of its buffer.
        unsafe { BufferArg::from_raw_parts(tensor.handle.clone(), tensor.extent() / 4) }
    };
    let [by_out, by_gradient] = [out.strides, out_gradient.strides].map(|s| s.map(|s| (s / 4) as u32));
    let blocks = shape.padded_queries() as u32 / delta::ROWS;
    let launch = match extras.element {
        Half::Bf16 => delta::delta::launch_unchecked::<bf16>,
        Half::F16 => delta::delta::launch_unchecked::<f16>,
    };
    // SAFETY: the kernel reads rows that exist and writes the padded rows that `sums` has room for.
    unsafe {
        launch(
            client,
            CubeCount::Static(blocks, shape.heads as u32, shape.batch as u32),
            CubeDim::new_1d(32 * delta::ROWS),
            quads(out),
            quads(out_gradient),
            flat(lse, shape.statistics_len()),
            flat(&sums, 2 * shape.statistics_len()),
            shape.queries as u32,
            shape.padded_queries() as u32,
            by_out[0],
            by_out[1],
            by_out[2],
            by_gradient[0],
            by_gradient[1],
            by_gradient[2],
            shape.value_dim,
        );
    }
    let drop_keys = extras.dropout.map(|dropout| drop_keys(client, shape, &dropout));
    Ok(Sums { sums, drop_keys })
}

fn check_saved(
    client: &Client,
    shape: &AttentionShape,
    extras: &Extras,
    saved: &Saved,
    out_gradient: &Tensor4,
) -> Result<(), AttentionError> {
    shape.check(client, extras)?;
    saved.q.check("q", shape.query_shape())?;
    saved.k.check("k", shape.key_shape())?;
    saved.v.check("v", shape.value_shape())?;
    out_gradient.check("out_gradient", shape.out_shape())
}

/// Second step of [`backward`]: the gradient of the queries.
#[allow(clippy::too_many_arguments)]
pub fn query_gradients(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    extras: &Extras,
    saved: Saved,
    out_gradient: &Tensor4,
    sums: &Sums,
    gradient: &Tensor4,
    plan: QueryGradientPlan,
) -> Result<(), AttentionError> {
    check_saved(client, shape, extras, &saved, out_gradient)?;
    gradient.check("q_gradient", shape.query_shape())?;
    let longest = extras.packed.map(|packed| packed.longest_query);
    let (sequences, blocks) = grid(shape, extras, longest, shape.queries, QUERY_ROWS);
    let len = 2 * shape.statistics_len();
    let (query_starts, key_starts) = starts(extras, &sums.sums);
    // SAFETY: the tensor maps bound every access but those to the statistics, whose rows are padded to whole blocks and which
    // the kernel bounds itself when sequences are packed.
    unsafe {
        query_gradient::query_gradient::launch_unchecked(
            client,
            CubeCount::Static(shape.heads as u32, sequences, blocks),
            CubeDim::new_1d(UNITS),
            maps::load(saved.q, ROWS),
            maps::load(saved.k, plan.block),
            maps::load(saved.v, plan.block),
            maps::load(out_gradient, ROWS),
            flat(&sums.sums, len),
            flat(sums.drop_keys.as_ref().unwrap_or(&sums.sums), len),
            query_starts,
            key_starts,
            maps::store(gradient, plan.variant.packed),
            sizes(shape, extras),
            scale,
            plan,
        );
    }
    Ok(())
}

/// Third step of [`backward`]: the gradients of the keys and values, in one or two launches.
#[allow(clippy::too_many_arguments)]
pub fn key_gradients(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    extras: &Extras,
    saved: Saved,
    out_gradient: &Tensor4,
    sums: &Sums,
    (k_gradient, v_gradient): (&Tensor4, &Tensor4),
    plans: &[KeyGradientPlan],
) -> Result<(), AttentionError> {
    check_saved(client, shape, extras, &saved, out_gradient)?;
    k_gradient.check("k_gradient", shape.key_shape())?;
    v_gradient.check("v_gradient", shape.value_shape())?;
    let longest = extras.packed.map(|packed| packed.longest_key);
    let (sequences, blocks) = grid(shape, extras, longest, shape.keys, KEY_ROWS);
    let drop_keys = sums.drop_keys.as_ref().unwrap_or(&sums.sums);
    for &plan in plans {
        let (query_starts, key_starts) = starts(extras, &sums.sums);
        // SAFETY: the tensor maps bound every access.
        unsafe {
            key_gradient::key_gradient::launch_unchecked(
                client,
                CubeCount::Static(shape.kv_heads as u32, sequences, blocks),
                CubeDim::new_1d(UNITS),
                maps::load(saved.q, plan.block),
                maps::load(saved.k, ROWS),
                maps::load(saved.v, ROWS),
                maps::load(out_gradient, plan.block),
                maps::statistics(shape, &sums.sums, plan.line(), f32::elem_type_native()),
                maps::statistics(shape, drop_keys, plan.line(), u32::elem_type_native()),
                query_starts,
                key_starts,
                maps::store(k_gradient, plan.variant.packed),
                maps::store(v_gradient, plan.variant.packed),
                sizes(shape, extras),
                scale,
                plan,
            );
        }
    }
    Ok(())
}

/// Second and last step of [`backward`] where one kernel computes all gradients.
#[allow(clippy::too_many_arguments)]
pub fn joint_gradients(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    extras: &Extras,
    saved: Saved,
    out_gradient: &Tensor4,
    sums: &Sums,
    gradients: Gradients,
    plan: JointGradientPlan,
) -> Result<(), AttentionError> {
    check_saved(client, shape, extras, &saved, out_gradient)?;
    gradients.q.check("q_gradient", shape.query_shape())?;
    gradients.k.check("k_gradient", shape.key_shape())?;
    gradients.v.check("v_gradient", shape.value_shape())?;
    let (sequences, key_blocks) = grid(shape, extras, None, shape.keys, KEY_ROWS);
    let parts = joint_sum::len(shape.statistics_len());
    let q_sum = client.empty(4 * parts);
    // SAFETY: the buffer has just been made with this size.
    let q_sums = || unsafe { BufferArg::from_raw_parts(q_sum.clone(), parts / 4) };
    let gather = match extras.element {
        Half::Bf16 => joint_sum::gather::launch_unchecked::<bf16>,
        Half::F16 => joint_sum::gather::launch_unchecked::<f16>,
    };
    let query_blocks = (shape.padded_queries() / joint_gradient::BLOCK) as u32;
    let [by_row, by_batch, by_head] = gradients.q.strides.map(|stride| (stride / 8) as u32);
    // SAFETY: the tensor maps bound every access but those to the parts, which have a place for every padded row and for one
    // block more; `gather` writes rows that exist.
    unsafe {
        joint_sum::clear::launch_unchecked(
            client,
            CubeCount::Static((parts / 4).div_ceil(8 * UNITS as usize).min(1 << 16) as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            q_sums(),
        );
        joint_gradient::joint_gradient::launch_unchecked(
            client,
            CubeCount::Static(shape.kv_heads as u32, sequences, key_blocks),
            CubeDim::new_1d(UNITS),
            maps::load(saved.q, joint_gradient::BLOCK),
            maps::load(saved.k, ROWS),
            maps::load(saved.v, ROWS),
            maps::load(out_gradient, joint_gradient::BLOCK),
            maps::statistics(shape, &sums.sums, joint_gradient::BLOCK, f32::elem_type_native()),
            q_sums(),
            maps::store(gradients.k, false),
            maps::store(gradients.v, false),
            sizes(shape, extras),
            scale,
            plan,
        );
        gather(
            client,
            CubeCount::Static(query_blocks, shape.heads as u32, sequences),
            CubeDim::new_1d(UNITS),
            q_sums(),
            BufferArg::from_raw_parts(gradients.q.handle.clone(), gradients.q.extent() / 8),
            shape.queries as u32,
            query_blocks,
            by_row,
            by_batch,
            by_head,
            scale,
        );
    }
    Ok(())
}
