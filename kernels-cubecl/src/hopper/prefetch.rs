//! Lines of memory brought to the L2 cache before they are read.
#![allow(missing_docs, reason = "the macros write public items without documentation")]

use cubecl::ir::prelude::*;
use cubecl::ir::{CanMaterialize, HasSideEffects};
use cubecl::prelude::*;
use cubecl_llvm::LlvmTarget;
use cubecl_llvm::shared::to_llvm::ToLLVMDialect;
use cubecl_llvm::target::CtxTarget;
use pliron_llvm::ops::InlineAsmOp;
use pliron_llvm::types::VoidType;

/// The line that an address is in brought to the L2 cache. Nothing elsewhere than on an NVIDIA GPU.
#[cube_op(name = "hopper.prefetch_line")]
#[result_ty(none)]
#[op_traits(CanMaterialize, HasSideEffects)]
pub struct PrefetchLineOp {
    /// The address.
    pub at: Value,
}

#[op_interface_impl]
impl ToLLVMDialect for PrefetchLineOp {
    fn rewrite(&self, ctx: &mut Context, rw: &mut DialectConversionRewriter, _: &OperandsInfo) -> Result<()> {
        if ctx.target() == LlvmTarget::Nvptx {
            let at = self.at(ctx);
            let void = VoidType::get(ctx).into();
            let asm = InlineAsmOp::new(ctx, void, vec![at], "prefetch.global.L2 [$0];", "l", true);
            rw.insert_op(ctx, &asm);
        }
        rw.replace_operation_with_values(ctx, self.get_operation(), vec![]);
        Ok(())
    }
}

/// Starts to bring the 128 bytes around `of[index]` to the L2 cache.
#[cube]
pub fn prefetch_line<E: CubePrimitive>(of: &[E], index: usize) {
    let at = of.slice(index, index + 1);
    start(at);
}

#[cube]
#[allow(unused_variables)]
fn start<E: CubePrimitive>(at: &[E]) {
    intrinsic!(|scope| {
        let at = unsafe { *at.__expand_as_ptr_method(scope) }.value(scope);
        scope.register(&PrefetchLineOp::new(scope.ctx_mut(), at));
    })
}
