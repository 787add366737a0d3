//! AdamW over a flat bucket whose moments are in 8 bits ([`crate::narrow::dynamic`]), in one pass: a plane for a block.
use super::adamw::{AdamWStep, Parameters, next_moments, tensor_of};
use super::{CubeShape, F32x4, PointwiseError, buffer, check, cube::plane_greatest, flat::FloatType};
use crate::narrow::dynamic::{BLOCK, Map};
use crate::narrow::kernel::{self as narrow, Halves};
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

/// Vectors of a block.
const VECTORS: usize = BLOCK / 4;

/// The most parameters of a bucket: what is trained can be read from a checkpoint too.
const LEN: usize = u32::MAX as usize - BLOCK;

/// A moment of a bucket.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    /// A byte for each element.
    pub codes: &'a Handle,
    /// An fp32 number for each block.
    pub scales: &'a Handle,
}

/// The buffers of a bucket of `len` parameters. Zeros between tensors stay zeros.
#[derive(Clone, Copy, Debug)]
pub struct BlocksBucket<'a> {
    /// The parameters.
    pub parameters: Parameters<'a>,
    /// First moment, by [`Map::Signed`].
    pub first: Blocks<'a>,
    /// Second moment, by [`Map::Unsigned`].
    pub second: Blocks<'a>,
    /// Summed gradients in fp32 or bf16.
    pub gradient: (&'a Handle, FloatType),
    /// [`Map::words`], `u32`.
    pub maps: &'a Handle,
    /// One past the last element of each tensor and the gap after it, `u32`, ascending; the last is `len`.
    pub ends: &'a Handle,
    /// For each tensor 1 if it decays, else 0, `u32`.
    pub decays: &'a Handle,
    /// Tensors.
    pub tensors: usize,
    /// Parameters; a multiple of 256.
    pub len: usize,
}

/// Fills the shared tables; then all units of the cube have them.
#[cube]
fn load(maps: &[f32], tables: &mut Shared<[f32]>) {
    let mut at = UNIT_POS;
    while at < comptime![2 * narrow::MAP as u32] {
        tables[at as usize] = maps[at as usize];
        at += CUBE_DIM_X;
    }
    sync_cube();
}

#[cube(launch_unchecked)]
pub fn adamw_blocks_step<G: Float, W: Float>(
    master: &mut [F32x4],
    first: &mut [u32],
    second: &mut [u32],
    first_scales: &mut [f32],
    second_scales: &mut [f32],
    gradient: &[Vector<G, Const<4>>],
    weight: &mut [Vector<W, Const<4>>],
    halves: &mut [Halves],
    remainder: &mut [Halves],
    ends: &[u32],
    decays: &[u32],
    maps: &[f32],
    tensors: u32,
    blocks: u32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    step_size: f32,
    root_scale: f32,
    keep: f32,
    gradient_scale: f32,
    #[comptime] narrow_weight: bool,
    #[comptime] split: bool,
    #[comptime] cube: CubeShape,
) {
    let mut tables = Shared::<[f32]>::new_slice(comptime![2 * narrow::MAP]);
    load(maps, &mut tables);
    let plane = comptime![cube.plane];
    let block = CUBE_POS_X * comptime![cube.planes() as u32] + UNIT_POS / plane;
    // The blocks of a plane are its own, so that none of its units is left out of what the plane does together.
    if block < blocks {
        let own = comptime![VECTORS / cube.plane as usize];
        let vector = block * comptime![VECTORS as u32] + UNIT_POS % plane;
        let mut m = Array::<f32>::new(comptime![4 * own]);
        let mut v = Array::<f32>::new(comptime![4 * own]);
        let (m_scale, v_scale) = (first_scales[block as usize], second_scales[block as usize]);
        let mut most_m = 0.0f32;
        let mut most_v = 0.0f32;
        #[unroll(cube.plane > 1)]
        for j in 0..own {
            let at = vector + j as u32 * plane;
            let index = at as usize;
            let (grad, m_codes, v_codes) = (gradient[index], first[index], second[index]);
            let mut param =
                if comptime![split] { narrow::join_vector(halves[index], remainder[index]) } else { master[index] };
            // The tensor of the first element; the others may be in later tensors.
            let mut tensor = tensor_of(ends, tensors, at * 4);
            let mut rounded = Vector::<W, Const<4>>::empty();
            #[unroll]
            for i in 0..4usize {
                while ends[tensor as usize] <= at * 4 + comptime![i as u32] {
                    tensor += 1;
                }
                let keep = if decays[tensor as usize] == 1 { keep } else { 1.0f32.runtime() };
                let grad = f32::cast_from(grad.extract(i)) * gradient_scale;
                let before_m = narrow::decode(&tables, 0usize, m_codes, i, m_scale);
                let before_v = narrow::decode(&tables, narrow::MAP, v_codes, i, v_scale);
                let (next_m, next_v) = next_moments(before_m, before_v, grad, beta1, beta2);
                let next = param.extract(i) * keep - step_size * next_m / (next_v.sqrt() * root_scale + eps);
                m[4 * j + i] = next_m;
                v[4 * j + i] = next_v;
                most_m = max(most_m, next_m.abs());
                most_v = max(most_v, next_v);
                param.insert(i, next);
                rounded.insert(i, W::cast_from(next));
            }
            if comptime![split] {
                let (upper, lower) = narrow::split_vector(param);
                halves[index] = upper;
                remainder[index] = lower;
            } else {
                master[index] = param;
            }
            if comptime![narrow_weight] {
                weight[index] = rounded;
            }
        }
        let m_scale = narrow::scale_of(plane_greatest(most_m, cube));
        let v_scale = narrow::scale_of(plane_greatest(most_v, cube));
        let (m_inverse, v_inverse) = (narrow::inverse(m_scale), narrow::inverse(v_scale));
        #[unroll(cube.plane > 1)]
        for j in 0..own {
            let index = (vector + j as u32 * plane) as usize;
            let mut m_codes = 0u32;
            let mut v_codes = 0u32;
            #[unroll]
            for i in 0..4usize {
                let shift = comptime![8 * i as u32];
                m_codes |= narrow::encode(&tables, 0usize, m[4 * j + i] * m_inverse) << shift;
                v_codes |= narrow::encode(&tables, narrow::MAP, v[4 * j + i] * v_inverse) << shift;
            }
            first[index] = m_codes;
            second[index] = v_codes;
        }
        if UNIT_POS % plane == 0 {
            first_scales[block as usize] = m_scale;
            second_scales[block as usize] = v_scale;
        }
    }
}

#[cube(launch_unchecked)]
pub fn encode_blocks(
    values: &[F32x4],
    scales: &[f32],
    codes: &mut [u32],
    maps: &[f32],
    vectors: u32,
    #[comptime] map: usize,
) {
    let mut tables = Shared::<[f32]>::new_slice(comptime![2 * narrow::MAP]);
    load(maps, &mut tables);
    let at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if at < vectors {
        let value = values[at as usize];
        let inverse = narrow::inverse(scales[(at / comptime![VECTORS as u32]) as usize]);
        let mut word = 0u32;
        #[unroll]
        for i in 0..4usize {
            word |= narrow::encode(&tables, map, value.extract(i) * inverse) << comptime![8 * i as u32];
        }
        codes[at as usize] = word;
    }
}

/// Writes the codes of `len` fp32 `values` of blocks with these scales, by a map.
///
/// # Errors
/// If a buffer is too short, or `len` is no multiple of 256.
pub fn encode(
    client: &Client,
    values: &Handle,
    to: Blocks<'_>,
    (map, maps): (Map, &Handle),
    len: usize,
) -> Result<(), PointwiseError> {
    check("len", len, BLOCK, LEN)?;
    let (cube, vectors) = (CubeShape::of(client), len / 4);
    let (values, codes) = (buffer("values", values, vectors, 16)?, buffer("codes", to.codes, vectors, 4)?);
    let (scales, maps) = (buffer("scales", to.scales, len / BLOCK, 4)?, buffer("maps", maps, 2 * narrow::MAP, 4)?);
    let first = if map == Map::Signed { 0 } else { narrow::MAP };
    // SAFETY: units past the last vector do nothing.
    unsafe {
        launch_kernel!(encode_blocks, client, cube.line(vectors), cube.dim();
            values, scales, codes, maps; vectors as u32; first)
    };
    Ok(())
}

/// One step of AdamW with decoupled weight decay over all parameters of the bucket.
///
/// # Errors
/// If a buffer is too short, `len` is no multiple of 256, or the gradient is in fp16.
pub fn step(client: &Client, bucket: BlocksBucket<'_>, k: &AdamWStep) -> Result<(), PointwiseError> {
    check("len", bucket.len, BLOCK, LEN)?;
    check("tensors", bucket.tensors, 1, bucket.len)?;
    let (cube, vectors, blocks) = (CubeShape::of(client), bucket.len / 4, bucket.len / BLOCK);
    let (gradient, of_gradient) = bucket.gradient;
    if of_gradient == FloatType::F16 {
        return Err(PointwiseError::Float { name: "gradient", found: of_gradient });
    }
    let gradient = buffer("gradient", gradient, vectors, 4 * of_gradient.size())?;
    let codes = |name, of: Blocks<'_>| buffer(name, of.codes, vectors, 4);
    let (first, second) = (codes("first", bucket.first)?, codes("second", bucket.second)?);
    let scales = |name, of: Blocks<'_>| buffer(name, of.scales, blocks, 4);
    let (first_scales, second_scales) = (scales("first", bucket.first)?, scales("second", bucket.second)?);
    let ends = buffer("ends", bucket.ends, bucket.tensors, 4)?;
    let decays = buffer("decays", bucket.decays, bucket.tensors, 4)?;
    let maps = buffer("maps", bucket.maps, 2 * narrow::MAP, 4)?;
    let (float, split) = bucket.parameters.form();
    let [master, halves, remainder, weight] = bucket.parameters.buffers(vectors)?;
    macro_rules! launch {
        ($gradient:ty, $weight:ty) => {
            // SAFETY: planes past the last block do nothing, and the caller's `ends` reach `len`.
            unsafe {
                launch_kernel!(adamw_blocks_step<$gradient, $weight>, client, cube.line(blocks * cube.plane as usize),
                    cube.dim();
                    master, first, second, first_scales, second_scales, gradient, weight, halves, remainder, ends,
                    decays, maps;
                    bucket.tensors as u32, blocks as u32, k.beta1, k.beta2, k.eps, k.step_size, k.root_scale, k.keep,
                    k.gradient_scale; float != FloatType::F32 && !split, split, cube)
            }
        };
    }
    match (of_gradient, float) {
        (FloatType::Bf16, FloatType::F32) => launch!(bf16, f32),
        (FloatType::Bf16, FloatType::Bf16) => launch!(bf16, bf16),
        (FloatType::Bf16, FloatType::F16) => launch!(bf16, f16),
        (_, FloatType::F32) => launch!(f32, f32),
        (_, FloatType::Bf16) => launch!(f32, bf16),
        (_, FloatType::F16) => launch!(f32, f16),
    }
    Ok(())
}
