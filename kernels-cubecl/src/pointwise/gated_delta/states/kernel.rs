//! The recurrence over chunks, in shared memory.
use crate::pointwise::ssd::Form;
use crate::pointwise::{CubeShape, F32x4, Vec8, cube_sums};
use cubecl::prelude::*;

/// Most columns of a state that a cube takes: with head_dim 128, 32 heads have a cube for each of an H100's SMs.
const COLUMNS: u32 = 32;

/// What the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pass {
    /// Sizes.
    pub form: Form,
    /// From the last chunk to the first.
    pub backward: bool,
    /// There is a first state.
    pub begins: bool,
    /// The last state is written.
    pub ends: bool,
    /// The values times what stays of them until the end of their chunk are written too.
    pub until: bool,
}

impl Pass {
    fn columns(self) -> u32 {
        columns(self.form)
    }

    /// Vectors from one line of keys or of the state to the next: lines begin in different banks.
    fn line(self) -> u32 {
        self.form.state / 4 + 1
    }

    fn value_line(self) -> u32 {
        self.columns() / 4 + 1
    }
}

pub(super) fn columns(form: Form) -> u32 {
    form.head_dim.min(COLUMNS)
}

/// Shared memory of a cube.
pub(in crate::pointwise) fn shared_bytes(form: Form) -> usize {
    let pass = Pass { form, backward: true, begins: false, ends: false, until: false };
    let vectors = (2 * form.chunk + pass.columns()) * pass.line() + form.chunk * pass.value_line();
    16 * vectors as usize + 4 * CubeShape::GPU.scratch()
}

/// Eight numbers, times a factor, as two vectors of shared memory.
#[cube]
fn store<E: Float>(from: Vec8<E>, factor: f32, to: &mut Shared<[F32x4]>, at: u32) {
    #[unroll]
    for half in 0..2usize {
        let mut vector = F32x4::empty();
        #[unroll]
        for i in 0..4usize {
            vector.insert(i, f32::cast_from(from.extract(comptime![half * 4 + i])) * factor);
        }
        to[at as usize + half] = vector;
    }
}

/// `a · b`, added to `sum`.
#[cube]
fn dot(sum: f32, a: F32x4, b: F32x4) -> f32 {
    let products = a * b;
    sum + products.extract(0usize) + products.extract(1usize) + products.extract(2usize) + products.extract(3usize)
}

/// A cube takes some columns of a head's state, for all chunks. In shared memory a state's column is a line, and of its
/// `4 n` columns those `n` apart are neighbours.
#[cube(launch_unchecked)]
pub fn chunk_states<E: Float>(
    keys: &[Vec8<E>],
    corrections: &[Vec8<E>],
    base: &[E],
    until: &[f32],
    since: &[f32],
    addend: &[f32],
    in_front: &[E],
    states: &mut [E],
    values: &mut [E],
    values_until: &mut [E],
    last: &mut [f32],
    along: &mut [f32],
    samples: u32,
    chunks: u32,
    #[comptime] pass: Pass,
    #[comptime] cube: CubeShape,
) {
    let (chunk, n, p) = comptime![(pass.form.chunk, pass.form.state, pass.form.head_dim)];
    let (columns, line, value_line) = comptime![(pass.columns(), pass.line(), pass.value_line())];
    let (apart, vectors) = comptime![(columns / 4, n / 4)];
    let mut key_tile = Shared::<[F32x4]>::new_slice(comptime![(chunk * line) as usize]);
    let mut correction_tile = Shared::<[F32x4]>::new_slice(comptime![(chunk * line) as usize]);
    let mut state = Shared::<[F32x4]>::new_slice(comptime![(columns * line) as usize]);
    let mut value_tile = Shared::<[F32x4]>::new_slice(comptime![(chunk * value_line) as usize]);
    let mut scratch = Shared::<[f32]>::new_slice(comptime![cube.scratch()]);
    let (heads, groups, serves) = comptime![(pass.form.heads, pass.form.groups, pass.form.serves())];
    let (sample, head) = (CUBE_POS_X / heads, CUBE_POS_X % heads);
    let first = CUBE_POS_Y * columns;
    let mut item = UNIT_POS;
    while item < comptime![columns * vectors] {
        let (j, k) = (item / vectors, item % vectors);
        let mut vector = F32x4::new(0.0);
        if comptime![pass.begins] {
            #[unroll]
            for i in 0..4usize {
                vector.insert(i, addend[((CUBE_POS_X * p + first + j) * n + 4 * k) as usize + i]);
            }
        }
        state[(j * line + k) as usize] = vector;
        item += comptime![cube.units];
    }
    sync_cube();
    for step in 0..chunks {
        let mut c = step;
        if comptime![pass.backward] {
            c = chunks - 1 - step;
        }
        let block = sample * chunks + c;
        let of_head = block * heads + head;
        let of_group = block * groups + head / serves;
        let mut item = UNIT_POS;
        while item < comptime![chunk * n / 8] {
            let (l, v) = (item / comptime![n / 8], item % comptime![n / 8]);
            let stays = until[(of_head * chunk + l) as usize];
            let key = keys[(of_group * comptime![chunk * n / 8] + item) as usize];
            let correction = corrections[(of_head * comptime![chunk * n / 8] + item) as usize];
            store::<E>(key, stays, &mut key_tile, l * line + 2 * v);
            store::<E>(correction, 1.0, &mut correction_tile, l * line + 2 * v);
            item += comptime![cube.units];
        }
        let of_state = (of_head * p + first) * n;
        let mut share = 0.0f32;
        let mut item = UNIT_POS;
        while item < comptime![columns * vectors] {
            let (j, k) = (item / vectors, item % vectors);
            let vector = state[(j * line + k) as usize];
            let at = (of_state + j * n + 4 * k) as usize;
            #[unroll]
            for i in 0..4usize {
                states[at + i] = E::cast_from(vector.extract(i));
                if comptime![pass.backward] {
                    share += vector.extract(i) * f32::cast_from(in_front[at + i]);
                }
            }
            item += comptime![cube.units];
        }
        if comptime![pass.backward] {
            let (share, _) = cube_sums(share, 0.0, &mut scratch, step % 2, cube);
            if UNIT_POS == 0 {
                along[(CUBE_POS_Y * samples * chunks * heads + of_head) as usize] = share;
            }
        }
        sync_cube();
        // Two positions and four columns for each unit.
        let mut item = UNIT_POS;
        while item < comptime![chunk / 2 * apart] {
            let (l, t) = (item / apart * 2, item % apart);
            let mut sums = Array::<f32>::new(8usize);
            #[unroll]
            for i in 0..8usize {
                sums[i] = 0.0f32;
            }
            for k in 0..vectors {
                #[unroll]
                for row in 0..2u32 {
                    let at = ((l + row) * line + k) as usize;
                    let mut reads = correction_tile[at];
                    if comptime![pass.backward] {
                        reads = key_tile[at];
                    }
                    #[unroll]
                    for i in 0..4u32 {
                        let slot = comptime![(row * 4 + i) as usize];
                        sums[slot] = dot(sums[slot], reads, state[((t + comptime![i * apart]) * line + k) as usize]);
                    }
                }
            }
            #[unroll]
            for row in 0..2u32 {
                let l = l + row;
                let mut vector = F32x4::empty();
                let stays = until[(of_head * chunk + l) as usize];
                #[unroll]
                for i in 0..4u32 {
                    let j = first + t + comptime![i * apart];
                    let at = ((of_head * chunk + l) * p + j) as usize;
                    let value = f32::cast_from(base[at]) + sums[comptime![(row * 4 + i) as usize]];
                    values[at] = E::cast_from(value);
                    if comptime![pass.until] {
                        let column = ((of_group * chunk + l) * serves + head % serves) * p + j;
                        values_until[column as usize] = E::cast_from(value * stays);
                    }
                    vector.insert(comptime![i as usize], value);
                }
                value_tile[(l * value_line + t) as usize] = vector;
            }
            item += comptime![cube.units];
        }
        sync_cube();
        // Four columns and four features of a key for each unit.
        let left = since[(of_head * chunk + comptime![chunk - 1]) as usize];
        let mut item = UNIT_POS;
        while item < comptime![vectors * apart] {
            let (k, t) = (item / apart, item % apart);
            let mut sums = Array::<F32x4>::new(4usize);
            #[unroll]
            for i in 0..4u32 {
                let column = t + comptime![i * apart];
                let mut sum = state[(column * line + k) as usize] * F32x4::new(left);
                if comptime![pass.backward] {
                    #[unroll]
                    for x in 0..4usize {
                        let more = sum.extract(x) + addend[(of_state + column * n + 4 * k) as usize + x];
                        sum.insert(x, more);
                    }
                }
                sums[comptime![i as usize]] = sum;
            }
            for l in 0..chunk {
                let at = (l * line + k) as usize;
                let mut writes = key_tile[at];
                if comptime![pass.backward] {
                    writes = correction_tile[at];
                }
                let vector = value_tile[(l * value_line + t) as usize];
                #[unroll]
                for i in 0..4usize {
                    sums[i] = sums[i] + writes * F32x4::new(vector.extract(i));
                }
            }
            #[unroll]
            for i in 0..4u32 {
                state[((t + comptime![i * apart]) * line + k) as usize] = sums[comptime![i as usize]];
            }
            item += comptime![cube.units];
        }
        sync_cube();
    }
    if comptime![pass.ends] {
        let mut item = UNIT_POS;
        while item < comptime![columns * vectors] {
            let (j, k) = (item / vectors, item % vectors);
            let vector = state[(j * line + k) as usize];
            #[unroll]
            for i in 0..4usize {
                last[((CUBE_POS_X * p + first + j) * n + 4 * k) as usize + i] = vector.extract(i);
            }
            item += comptime![cube.units];
        }
    }
}
