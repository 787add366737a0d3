//! Flat arrays in place: copies and sums between types, sums of squares.
use super::cube::cube_sums;
use super::{CubeShape, F32x4, MOST, PointwiseError, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

/// Elements of a chunk of [`squares`].
pub const CHUNK: usize = 1 << 16;

/// The float types of flat arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FloatType {
    /// 32 bits.
    F32,
    /// 16 bits, 8 of them exponent.
    Bf16,
    /// 16 bits, 5 of them exponent.
    F16,
}

impl FloatType {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }
}

/// Elements of a buffer, `start..start + len` of the elements that `handle` holds.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// The buffer.
    pub handle: &'a Handle,
    /// Its type.
    pub float: FloatType,
    /// The first element.
    pub start: usize,
    /// Number of elements.
    pub len: usize,
}

impl Run<'_> {
    /// The run as a buffer of its own, after a check that it lies within the handle.
    fn handle(&self, name: &'static str) -> Result<Handle, PointwiseError> {
        let size = self.float.size();
        let (found, expected) = (self.handle.size_in_used(), ((self.start + self.len) * size) as u64);
        match found < expected {
            true => Err(PointwiseError::Buffer { name, found, expected }),
            false => Ok(self.handle.clone().offset_start((self.start * size) as u64)),
        }
    }

    /// Where the run begins, in bytes of memory.
    fn address(&self) -> usize {
        self.handle.offset_start.unwrap_or(0) as usize + self.start * self.float.size()
    }
}

#[cube(launch_unchecked)]
pub fn write_run<S: Float, T: Float, N: Size>(
    source: &[Vector<S, N>],
    target: &mut [Vector<T, N>],
    vectors: u32,
    #[comptime] adds: bool,
) {
    let at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if at < vectors {
        let index = at as usize;
        let value = Vector::<T, N>::cast_from(source[index]);
        if comptime![adds] {
            target[index] = target[index] + value;
        } else {
            target[index] = value;
        }
    }
}

/// A cube for each chunk; every unit sums every n-th element of the chunk.
#[cube(launch_unchecked)]
pub fn chunk_squares<E: Float>(
    values: &[E],
    starts: &[u32],
    lens: &[u32],
    sums: &mut [f32],
    first: u32,
    #[comptime] cube: CubeShape,
) {
    let mut scratch = Shared::<[f32]>::new_slice(comptime![cube.scratch()]);
    let chunk = CUBE_POS_X as usize;
    let end = starts[chunk] + lens[chunk];
    let mut at = starts[chunk] + UNIT_POS;
    let mut a = 0.0f32;
    let mut b = 0.0f32;
    // Four loads are in flight at a time.
    while at + 3 * CUBE_DIM_X < end {
        let index = at as usize;
        let x = f32::cast_from(values[index]);
        let y = f32::cast_from(values[index + CUBE_DIM_X as usize]);
        let z = f32::cast_from(values[index + 2 * CUBE_DIM_X as usize]);
        let w = f32::cast_from(values[index + 3 * CUBE_DIM_X as usize]);
        a += x * x + y * y;
        b += z * z + w * w;
        at += 4 * CUBE_DIM_X;
    }
    while at < end {
        let x = f32::cast_from(values[at as usize]);
        a += x * x;
        at += CUBE_DIM_X;
    }
    let (a, b) = cube_sums(a, b, &mut scratch, 0u32, cube);
    if UNIT_POS == 0 {
        sums[first as usize + chunk] = a + b;
    }
}

/// Copies items `from..from + len` of `source` to `to..` of `target`, with all units of the cube. Four loads of each
/// are in flight at a time.
#[cube]
fn copy_items<T: CubePrimitive>(source: &[T], target: &mut [T], from: u32, to: u32, len: u32) {
    let mut at = UNIT_POS;
    while at + 3 * CUBE_DIM_X < len {
        let mut held = Array::<T>::new(4usize);
        #[unroll]
        for k in 0..4usize {
            held[k] = source[(from + at + comptime![k as u32] * CUBE_DIM_X) as usize];
        }
        #[unroll]
        for k in 0..4usize {
            target[(to + at + comptime![k as u32] * CUBE_DIM_X) as usize] = held[k];
        }
        at += 4 * CUBE_DIM_X;
    }
    while at < len {
        target[(to + at) as usize] = source[(from + at) as usize];
        at += CUBE_DIM_X;
    }
}

/// A cube for each chunk. `wide_source` and `wide_target` are the same arrays in whole vectors, for chunks of whole
/// vectors; without `wide` they are not accessed.
#[cube(launch_unchecked)]
pub fn copy_chunks(
    source: &[f32],
    target: &mut [f32],
    wide_source: &[F32x4],
    wide_target: &mut [F32x4],
    from: &[u32],
    to: &[u32],
    lens: &[u32],
    #[comptime] wide: bool,
) {
    let chunk = CUBE_POS_X as usize;
    let (from, to, len) = (from[chunk], to[chunk], lens[chunk]);
    if comptime![wide] {
        if (from | to | len) % 4 == 0 {
            copy_items(wide_source, wide_target, from / 4, to / 4, len / 4);
        } else {
            copy_items(source, target, from, to, len);
        }
    } else {
        copy_items(source, target, from, to, len);
    }
}

/// Writes source elements to the target, or with `adds` adds them, in the target's type. Both runs must have the same
/// length and not overlap. Reads and writes 16 or 8 bytes at a time if both runs begin at whole vectors of four.
///
/// # Errors
/// If a run is not within its buffer, or lengths differ.
pub fn write(client: &Client, source: Run, target: Run, adds: bool) -> Result<(), PointwiseError> {
    if source.len != target.len {
        let (found, expected) = (source.len as u64, target.len as u64);
        return Err(PointwiseError::Buffer { name: "source, in elements,", found, expected });
    }
    if target.len == 0 {
        return Ok(());
    }
    let aligned = |run: &Run| run.address().is_multiple_of(4 * run.float.size()) && run.len.is_multiple_of(4);
    let width = if aligned(&source) && aligned(&target) { 4 } else { 1 };
    let vectors = target.len / width;
    check("target", vectors, 1, MOST)?;
    let from = buffer("source", &source.handle("source")?, vectors, width * source.float.size())?;
    let to = buffer("target", &target.handle("target")?, vectors, width * target.float.size())?;
    let cube = CubeShape::of(client);
    let (dim, count, vectors) = (cube.dim(), cube.line(vectors), vectors as u32);
    macro_rules! launch {
        ($source:ty, $target:ty) => {
            // SAFETY: both buffers hold `vectors` vectors of `width` elements; other units do nothing.
            unsafe {
                write_run::launch_unchecked::<$source, $target>(client, count, dim, width, from, to, vectors, adds)
            }
        };
    }
    use FloatType::{Bf16, F16, F32};
    match (source.float, target.float) {
        (F32, F32) => launch!(f32, f32),
        (F32, Bf16) => launch!(f32, bf16),
        (F32, F16) => launch!(f32, f16),
        (Bf16, F32) => launch!(bf16, f32),
        (Bf16, Bf16) => launch!(bf16, bf16),
        (Bf16, F16) => launch!(bf16, f16),
        (F16, F32) => launch!(f16, f32),
        (F16, Bf16) => launch!(f16, bf16),
        (F16, F16) => launch!(f16, f16),
    }
    Ok(())
}

/// Chunks of fp32 elements, for sums of squares.
#[derive(Clone, Copy, Debug)]
pub struct Chunks<'a> {
    /// First element of each chunk, `u32`.
    pub starts: &'a Handle,
    /// Elements of each, `u32`.
    pub lens: &'a Handle,
    /// Number of chunks.
    pub count: usize,
    /// One past the last element of all chunks.
    pub end: usize,
}

/// The sum of squares of each chunk of the array `values`, in fp32, written to `sums` from element `first` on. The same
/// bits every time.
///
/// # Errors
/// If the array is in fp16 or ends before a chunk does, or `sums` is too short.
pub fn squares(
    client: &Client,
    (values, float): (&Handle, FloatType),
    chunks: Chunks,
    sums: &Handle,
    first: usize,
) -> Result<(), PointwiseError> {
    if chunks.count == 0 {
        return Ok(());
    }
    check("values", chunks.end, 1, MOST)?;
    let values = buffer("values", values, chunks.end, float.size())?;
    let starts = buffer("starts", chunks.starts, chunks.count, 4)?;
    let lens = buffer("lens", chunks.lens, chunks.count, 4)?;
    let sums = buffer("sums", sums, first + chunks.count, 4)?;
    let (cube, count) = (CubeShape::of(client), CubeCount::Static(chunks.count as u32, 1, 1));
    let (dim, first) = (cube.dim(), first as u32);
    macro_rules! launch {
        ($float:ty) => {
            // SAFETY: chunks end within `values`, as the caller guarantees, and each cube writes only its own sum.
            unsafe {
                chunk_squares::launch_unchecked::<$float>(client, count, dim, values, starts, lens, sums, first, cube)
            }
        };
    }
    match float {
        FloatType::F32 => launch!(f32),
        FloatType::Bf16 => launch!(bf16),
        FloatType::F16 => return Err(PointwiseError::Float { name: "values", found: float }),
    }
    Ok(())
}

/// Chunks of fp32 elements to copy, best of at most [`CHUNK`] elements.
#[derive(Clone, Copy, Debug)]
pub struct Copies<'a> {
    /// First element of each chunk in the source, `u32`.
    pub from: &'a Handle,
    /// First element of each in the target, `u32`.
    pub to: &'a Handle,
    /// Elements of each, `u32`.
    pub lens: &'a Handle,
    /// Number of chunks.
    pub count: usize,
    /// One past the last element of all chunks in source and target.
    pub ends: [usize; 2],
}

/// Copies chunks of the fp32 array `source` to `target`, in one launch.
///
/// # Errors
/// If an array ends before a chunk does.
pub fn copy(client: &Client, source: &Handle, target: &Handle, copies: Copies) -> Result<(), PointwiseError> {
    if copies.count == 0 {
        return Ok(());
    }
    let [source_end, target_end] = copies.ends;
    check("source", source_end, 1, MOST)?;
    check("target", target_end, 1, MOST)?;
    let wide = [source, target].iter().all(|handle| handle.offset_start.unwrap_or(0).is_multiple_of(16));
    let vectors = |name, handle, end: usize| buffer(name, handle, end / 4, 16);
    let (wide_source, wide_target) = (vectors("source", source, source_end)?, vectors("target", target, target_end)?);
    let (source, target) = (buffer("source", source, source_end, 4)?, buffer("target", target, target_end, 4)?);
    let table = |name, handle| buffer(name, handle, copies.count, 4);
    let (from, to, lens) = (table("from", copies.from)?, table("to", copies.to)?, table("lens", copies.lens)?);
    let (count, dim) = (CubeCount::Static(copies.count as u32, 1, 1), CubeShape::of(client).dim());
    // SAFETY: chunks end within both arrays, as the caller guarantees, and each is copied in one of the two forms.
    unsafe {
        launch_kernel!(copy_chunks, client, count, dim; source, target, wide_source, wide_target, from, to, lens; wide)
    };
    Ok(())
}
