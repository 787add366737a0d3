//! TMA stores of tiles from shared memory to a tensor, in groups that
//! [`wait_for_older_reads`](super::bulk::wait_for_older_reads) counts.
#![allow(missing_docs, reason = "the macros write public items without documentation")]

use super::bulk;
use cubecl::ir::dialect::tma::{CommitGroupOp, TmaStoreOp};
use cubecl::ir::prelude::*;
use cubecl::ir::{CanMaterialize, HasSideEffects};
use cubecl::prelude::*;
use cubecl_llvm::shared::to_llvm::ToLLVMDialect;
use pliron_llvm::ops::InlineAsmOp;
use pliron_llvm::types::VoidType;

/// Adds a tile to a box of an fp32 tensor, each number atomically.
#[cube_op(name = "hopper.add_tile")]
#[result_ty(none)]
#[op_traits(CanMaterialize, HasSideEffects)]
pub struct AddTileOp {
    /// The tensor map.
    pub map: Value,
    /// Address of the tile in shared memory, a multiple of 128.
    pub from: Value,
    /// Coordinates of the tile in the tensor, outermost first.
    pub z: Value,
    pub y: Value,
    pub x: Value,
}

#[op_interface_impl]
impl ToLLVMDialect for AddTileOp {
    fn rewrite(&self, ctx: &mut Context, rw: &mut DialectConversionRewriter, _: &OperandsInfo) -> Result<()> {
        let operands = vec![self.map(ctx), self.x(ctx), self.y(ctx), self.z(ctx), self.from(ctx)];
        let void = VoidType::get(ctx).into();
        let text = "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [$0, {$1, $2, $3}], [$4]; \
                    cp.async.bulk.commit_group;";
        let asm = InlineAsmOp::new(ctx, void, operands, text, "l,r,r,r,r,~{memory}", true);
        rw.insert_op(ctx, &asm);
        rw.replace_operation_with_values(ctx, self.get_operation(), vec![]);
        Ok(())
    }
}

/// Starts to add the tile at `from` to the box of `to` at `(z, y, x)`, as a group.
#[cube]
pub fn add_tile<O: Float>(from: &[u32], to: &mut TensorMap<O, Tiled>, z: i32, y: i32, x: i32) {
    let from = bulk::address(from);
    start_add(from, to, z, y, x);
}

#[cube]
#[allow(unused_variables)]
fn start_add<O: Float>(from: u32, to: &mut TensorMap<O, Tiled>, z: i32, y: i32, x: i32) {
    intrinsic!(|scope| {
        let (map, from) = (to.value(scope), from.read_value(scope));
        let [z, y, x] = [z, y, x].map(|at| at.read_value(scope));
        scope.register(&AddTileOp::new(scope.ctx_mut(), map, from, z, y, x));
    })
}

/// Starts to store the tile at `from` to the box of `to` at `(z, y, x)`, as a group.
#[cube]
#[allow(unused_variables)]
pub fn store_tile<O: Float>(from: &[u32], to: &mut TensorMap<O, Tiled>, z: i32, y: i32, x: i32) {
    intrinsic!(|scope| {
        // SAFETY: the pointer was made from a reference to a value of `scope`, which is copied.
        let from = unsafe { *from.__expand_as_ptr_method(scope) }.value(scope);
        let map = to.value(scope);
        let at = [z, y, x].map(|at| at.read_value(scope)).to_vec();
        scope.register(&TmaStoreOp::new(scope.ctx_mut(), from, map, at));
        scope.register(&CommitGroupOp::new(scope.ctx_mut()));
    })
}
