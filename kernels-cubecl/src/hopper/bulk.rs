//! Asynchronous bulk reductions to global memory (`cp.reduce.async.bulk`), and values that the compiler does not hoist.
#![allow(missing_docs, reason = "the macros write public items without documentation")]

use cubecl::ir::dialect::matrix::WgmmaDescriptorOp;
use cubecl::ir::dialect::tma::WaitGroupReadOp;
use cubecl::ir::prelude::*;
use cubecl::ir::{CanMaterialize, HasSideEffects};
use cubecl::prelude::*;
use cubecl::wgmma::Swizzle;
use cubecl_llvm::shared::to_llvm::ToLLVMDialect;
use pliron_llvm::ops::InlineAsmOp;
use pliron_llvm::types::VoidType;

/// Four adjacent `f32`.
pub type Quad = Vector<f32, Const<4>>;

/// Adds numbers in shared memory to as many in global memory by TMA: each atomically, in no fixed order.
#[cube_op(name = "hopper.bulk_add")]
#[result_ty(none)]
#[op_traits(CanMaterialize, HasSideEffects)]
pub struct BulkAddOp {
    /// Pointer to the first number in global memory, a multiple of 16 bytes.
    pub to: Value,
    /// Address of the first number in shared memory, a multiple of 16.
    pub from: Value,
    /// Bytes.
    pub bytes: Value,
}

#[op_interface_impl]
impl ToLLVMDialect for BulkAddOp {
    fn rewrite(&self, ctx: &mut Context, rw: &mut DialectConversionRewriter, _: &OperandsInfo) -> Result<()> {
        let operands = vec![self.to(ctx), self.from(ctx), self.bytes(ctx)];
        let void = VoidType::get(ctx).into();
        let text =
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2; cp.async.bulk.commit_group;";
        let asm = InlineAsmOp::new(ctx, void, operands, text, "l,r,r,~{memory}", true);
        rw.insert_op(ctx, &asm);
        rw.replace_operation_with_values(ctx, self.get_operation(), vec![]);
        Ok(())
    }
}

/// Starts to add the `bytes` at shared address `from` to `to[index..]`. [`wait_for_reads`] waits until they have been
/// read.
#[cube]
pub fn bulk_add(to: &mut [Quad], index: usize, from: u32, bytes: u32) {
    let target = to.slice_mut(index, index + 1);
    start(target, from, bytes);
}

#[cube]
#[allow(unused_variables)]
fn start(target: &mut [Quad], from: u32, bytes: u32) {
    intrinsic!(|scope| {
        // SAFETY: the pointer was made from a reference to a value of `scope`, which is copied.
        let to = unsafe { *target.__expand_as_ptr_method(scope) }.value(scope);
        let [from, bytes] = [from, bytes].map(|x| x.read_value(scope));
        scope.register(&BulkAddOp::new(scope.ctx_mut(), to, from, bytes));
    })
}

/// Waits until TMA has read everything that this unit asked it to add or to store.
#[cube]
pub fn wait_for_reads() {
    intrinsic!(|scope| scope.register(&WaitGroupReadOp::new(scope.ctx_mut(), 0usize)))
}

/// Waits until TMA has read what this unit asked it to add or to store, but for the last `newer` groups.
#[cube]
#[allow(unused_variables)]
pub fn wait_for_older_reads(#[comptime] newer: usize) {
    intrinsic!(|scope| scope.register(&WaitGroupReadOp::new(scope.ctx_mut(), newer)))
}

/// The address of `tile` in shared memory, a multiple of 16.
#[cube]
pub fn address<E: CubePrimitive>(tile: &[E]) -> u32 {
    (descriptor(tile) as u32 & 0x3fff) << 4
}

/// A descriptor holds the address in units of 16 bytes in its lowest 14 bits.
#[cube]
#[allow(unused_variables)]
fn descriptor<E: CubePrimitive>(tile: &[E]) -> u64 {
    intrinsic!(|scope| {
        // SAFETY: the pointer was made from a reference to a value of `scope`, which is copied.
        let ptr = unsafe { *tile.__expand_as_ptr_method(scope) }.value(scope);
        let op = WgmmaDescriptorOp::new(scope.ctx_mut(), ptr, 16usize, 1024usize, Swizzle::B128);
        scope.register_with_result(&op).into()
    })
}

/// Its argument, in a way that the compiler computes what depends on it in place.
#[cube_op(name = "hopper.opaque")]
#[result_ty(same_as = input)]
#[op_traits(CanMaterialize, HasSideEffects)]
pub struct OpaqueOp {
    /// The argument.
    pub input: Value,
}

#[op_interface_impl]
impl ToLLVMDialect for OpaqueOp {
    fn rewrite(&self, ctx: &mut Context, rw: &mut DialectConversionRewriter, _: &OperandsInfo) -> Result<()> {
        let input = self.input(ctx);
        let ty = input.get_type(ctx);
        let asm = InlineAsmOp::new(ctx, ty, vec![input], "mov.b32 $0, $1;", "=r,r", true);
        rw.insert_op(ctx, &asm);
        let result = asm.get_result(ctx);
        rw.replace_operation_with_values(ctx, self.get_operation(), vec![result]);
        Ok(())
    }
}

/// `x`, in a way that what depends on it is not hoisted out of a loop, where it would hold registers.
#[cube]
pub fn opaque(x: u32) -> u32 {
    intrinsic!(|scope| {
        let x = x.read_value(scope);
        let op = OpaqueOp::new(scope.ctx_mut(), x);
        scope.register_with_result(&op).into()
    })
}

/// A descriptor that is [`opaque`].
#[cube]
pub fn opaque_descriptor(descriptor: u64) -> u64 {
    (descriptor & 0xffff_ffff_0000_0000) | opaque(descriptor as u32) as u64
}
