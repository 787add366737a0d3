//! Warpgroup MMA (`wgmma`) on plain register arrays.
//!
//! CubeCL's own `Accumulator` waits for every MMA in flight before one can be read. A flash attention loop reads the
//! scores while P V still runs, so these functions leave commit, wait and pinning of registers to the caller:
//! 1. write the registers, [`pin`] them, [`fence`];
//! 2. issue MMAs, [`commit`] them as one group;
//! 3. [`wait`] until at most `n` newer groups run, [`pin`] the registers again, read them.
//!
//! ptxas serialises the MMAs of a kernel that calls a function (a full-precision division is one), that spills
//! registers, or that leaves a loop of MMAs which may run zero times or is nested in another loop. `ptxas -c
//! -arch=sm_90a -v` reports it (C7504 to C7518), without `-c` it does not; `tests/offline` looks for the causes. CubeCL
//! has the driver link its kernels, and in that mode ptxas also ignores `setmaxnreg`.
use cubecl::ir::dialect::matrix::{
    WgmmaCommitGroupOp, WgmmaDescriptorOp, WgmmaFenceOp, WgmmaFenceOperandOp, WgmmaOp, WgmmaWaitGroupOp,
};
use cubecl::ir::{pliron::builtin::attributes::TypeAttr, pliron::value::Value, types::MatrixShape};
use cubecl::prelude::*;
use cubecl::wgmma::{Major, Swizzle, WgmmaTileLayout};
use cubecl::{e4m3, e5m2};
use half::{bf16, f16};

use crate::fp8::Format;

/// Rows of one warpgroup MMA.
pub const ROWS: usize = 64;
/// Type of the operands of an MMA.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Half {
    /// `bf16`.
    #[default]
    Bf16,
    /// IEEE half precision.
    F16,
}

/// Elements of the inner dimension one MMA on 16-bit numbers reads.
pub const STEP: usize = 16;
/// Bytes of a line of a tile: every tile consists of panels of this width, swizzled over it.
pub const PANEL_BYTES: usize = 128;
/// Elements of a line.
pub const PANEL: usize = PANEL_BYTES / 2;

/// Two adjacent 16-bit numbers: the unit the kernels move. Named bf16, it also carries the bits of fp16 numbers.
pub type Pair = Vector<bf16, Const<2>>;

/// A tile whose inner (MMA K) dimension is contiguous: `rows` lines of `k` elements.
pub fn k_major(rows: usize, k: usize) -> WgmmaTileLayout {
    WgmmaTileLayout { major: Major::K, swizzle: Swizzle::B128, rows, k }
}

/// A tile whose outer dimension is contiguous: `k` lines of `rows` elements.
pub fn mn_major(rows: usize, k: usize) -> WgmmaTileLayout {
    WgmmaTileLayout { major: Major::MN, swizzle: Swizzle::B128, rows, k }
}

/// Offset of the sub-tile at `(row, k)` from the descriptor of `layout`'s tile.
pub fn advance(layout: WgmmaTileLayout, row: usize, k: usize) -> u64 {
    (layout.byte_offset(row, k, 2) / 16) as u64
}

/// The descriptor of `tile`, which starts at a multiple of 1024 bytes in shared memory.
#[cube]
#[allow(unused_variables)]
pub fn descriptor(tile: &[Pair], #[comptime] layout: WgmmaTileLayout) -> u64 {
    intrinsic!(|scope| {
        // SAFETY: the pointer was made from a reference to a value of `scope`, which is copied.
        let ptr = unsafe { *tile.__expand_as_ptr_method(scope) }.value(scope);
        let (leading, stride) = (layout.leading_byte_offset(), layout.stride_byte_offset());
        let op = WgmmaDescriptorOp::new(scope.ctx_mut(), ptr, leading, stride, layout.swizzle);
        scope.register_with_result(&op).into()
    })
}

fn issue(scope: &Scope, acc: Value, a: Value, b: Value, n: usize, a_major: Major, b_major: Major, half: Half) {
    let elem = TypeAttr::new(match half {
        Half::Bf16 => bf16::__expand_as_type(scope),
        Half::F16 => f16::__expand_as_type(scope),
    });
    let shape = MatrixShape { m: ROWS, n, k: STEP };
    scope.register(&WgmmaOp::new(scope.ctx_mut(), a, b, acc, elem.clone(), elem, shape, a_major, b_major));
}

/// `acc += a * b` in FP8, with both tiles in shared memory and K-major: 64 rows of `a`, `n` of `b`, and as many bytes of the
/// inner dimension as [`mma`] reads, twice as many numbers.
#[cube]
#[allow(unused_variables)]
pub fn mma_fp8(
    acc: &mut Array<f32>,
    a: u64,
    b: u64,
    #[comptime] n: usize,
    #[comptime] a_format: Format,
    #[comptime] b_format: Format,
) {
    intrinsic!(|scope| {
        let (a, b) = (a.read_value(scope), b.read_value(scope));
        let elem = |format| {
            TypeAttr::new(match format {
                Format::E4m3 => e4m3::__expand_as_type(scope),
                Format::E5m2 => e5m2::__expand_as_type(scope),
            })
        };
        let (shape, elems) = (MatrixShape { m: ROWS, n, k: 2 * STEP }, [elem(a_format), elem(b_format)]);
        let [a_elem, b_elem] = elems;
        let acc = acc.__extract_list(scope);
        scope.register(&WgmmaOp::new(scope.ctx_mut(), a, b, acc, a_elem, b_elem, shape, Major::K, Major::K))
    })
}

/// `acc += a * b` with both tiles in shared memory: 64 rows of `a`, `n` of `b`, 16 of the inner dimension.
#[cube]
#[allow(unused_variables)]
pub fn mma(
    acc: &mut Array<f32>,
    a: u64,
    b: u64,
    #[comptime] n: usize,
    #[comptime] a_major: Major,
    #[comptime] b_major: Major,
    #[comptime] half: Half,
) {
    intrinsic!(|scope| {
        let (a, b) = (a.read_value(scope), b.read_value(scope));
        issue(scope, acc.__extract_list(scope), a, b, n, a_major, b_major, half)
    })
}

/// `acc += a * b` with `a` in registers: four registers of two numbers, laid out as an accumulator's 16 columns.
#[cube]
#[allow(unused_variables)]
pub fn mma_registers(
    acc: &mut Array<f32>,
    a: &Array<u32>,
    b: u64,
    #[comptime] n: usize,
    #[comptime] b_major: Major,
    #[comptime] half: Half,
) {
    intrinsic!(|scope| {
        let b = b.read_value(scope);
        let a = a.read_value(scope);
        issue(scope, acc.__extract_list(scope), a, b, n, Major::K, b_major, half)
    })
}

/// Keeps every access to `registers` on its side of this point.
#[cube]
#[allow(unused_variables)]
pub fn pin<E: CubePrimitive>(registers: &mut Array<E>) {
    intrinsic!(|scope| {
        let registers = registers.__extract_list(scope);
        scope.register(&WgmmaFenceOperandOp::new(scope.ctx_mut(), registers))
    })
}

/// Orders the register writes so far before the MMAs to come.
#[cube]
pub fn fence() {
    intrinsic!(|scope| scope.register(&WgmmaFenceOp::new(scope.ctx_mut())))
}

/// Makes one group of the MMAs issued since the last commit.
#[cube]
pub fn commit() {
    intrinsic!(|scope| scope.register(&WgmmaCommitGroupOp::new(scope.ctx_mut())))
}

/// Waits until at most `newer` committed groups are still running.
#[cube]
#[allow(unused_variables)]
pub fn wait(#[comptime] newer: usize) {
    intrinsic!(|scope| scope.register(&WgmmaWaitGroupOp::new(scope.ctx_mut(), newer)))
}

/// Sets the first `len` registers to `value`.
#[cube]
pub fn fill(registers: &mut Array<f32>, value: f32, #[comptime] len: usize) {
    #[unroll]
    for i in 0..len {
        registers[i] = value;
    }
}

/// The two numbers that [`pack`] has packed.
#[cube]
pub fn unpack(pair: u32, #[comptime] half: Half) -> (f32, f32) {
    let both = if comptime![half == Half::F16] {
        Vector::<f32, Const<2>>::cast_from(Vector::<f16, Const<2>>::reinterpret(pair))
    } else {
        Vector::<f32, Const<2>>::cast_from(Pair::reinterpret(pair))
    };
    (both.extract(0usize), both.extract(1usize))
}

/// Two numbers rounded to 16 bits, `low` in the lower half of the register.
#[cube]
pub fn pack(low: f32, high: f32, #[comptime] half: Half) -> u32 {
    let mut pair = Vector::<f32, Const<2>>::empty();
    pair.insert(0usize, low);
    pair.insert(1usize, high);
    if comptime![half == Half::F16] {
        u32::reinterpret(Vector::<f16, Const<2>>::cast_from(pair))
    } else {
        u32::reinterpret(Pair::cast_from(pair))
    }
}
