//! Barriers in an array, for rings of tiles whose stage is known only when the kernel runs.
#![allow(missing_docs, reason = "the macros write public items without documentation")]

use cubecl::ir::prelude::*;
use cubecl::ir::types::PointerType;
use cubecl::ir::types::barrier::{BarrierLevel, BarrierType};
use cubecl::ir::{AddressSpace, CanMaterialize, Pure};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;
use cubecl_llvm::shared::to_llvm::ToLLVMDialect;

/// A word of shared memory used as a barrier.
#[cube_op(name = "hopper.barrier_at")]
#[result_ty(fixed = barrier_pointer(ctx))]
#[op_traits(CanMaterialize, Pure)]
pub struct BarrierAtOp {
    /// Pointer to the word.
    pub word: Value,
}

fn barrier_pointer(ctx: &mut Context) -> TypeHandle {
    let barrier = BarrierType::get(ctx, BarrierLevel::Cube).into();
    PointerType::get(ctx, barrier, AddressSpace::Shared).into()
}

#[op_interface_impl]
impl ToLLVMDialect for BarrierAtOp {
    fn rewrite(&self, ctx: &mut Context, rw: &mut DialectConversionRewriter, _: &OperandsInfo) -> Result<()> {
        let word = self.word(ctx);
        rw.replace_operation_with_values(ctx, self.get_operation(), vec![word]);
        Ok(())
    }
}

/// The barrier in `words[index]`. CubeCL can declare single barriers only.
#[cube]
pub fn barrier_at(words: &[u64], index: usize) -> Shared<Barrier> {
    let word = words.slice(index, index + 1);
    as_barrier(word)
}

#[cube]
#[allow(unused_variables)]
fn as_barrier(word: &[u64]) -> Shared<Barrier> {
    intrinsic!(|scope| {
        // SAFETY: the pointer was made from a reference to a value of `scope`, which is copied.
        let word = unsafe { *word.__expand_as_ptr_method(scope) }.value(scope);
        let op = BarrierAtOp::new(scope.ctx_mut(), word);
        scope.register_with_result(&op).into()
    })
}
