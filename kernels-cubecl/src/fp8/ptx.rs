//! `cvt.rn.satfinite.{e4m3x2, e5m2x2}.f32`; CubeCL's own casts use software arithmetic.
#![allow(missing_docs, reason = "the macros write public items without documentation")]

use super::Format;
use cubecl::ir::CanMaterialize;
use cubecl::ir::prelude::*;
use cubecl::prelude::*;
use cubecl_llvm::shared::to_llvm::ToLLVMDialect;
use pliron::builtin::types::{IntegerType, Signedness};
use pliron_llvm::ops::InlineAsmOp;

/// Defines the conversion of four `f32` to the bytes of a `u32`, the first in the lowest.
macro_rules! pack_four {
    ($(#[$doc:meta])* $op:ident, $name:literal, $instruction:literal) => {
        $(#[$doc])*
        #[cube_op(name = $name)]
        #[result_ty(fixed = IntegerType::get(ctx, 32, Signedness::Unsigned).into())]
        #[op_traits(CanMaterialize, cubecl::ir::Pure)]
        pub struct $op {
            /// The first number.
            pub a: Value,
            /// The second number.
            pub b: Value,
            /// The third number.
            pub c: Value,
            /// The fourth number.
            pub d: Value,
        }

        #[op_interface_impl]
        impl ToLLVMDialect for $op {
            fn rewrite(&self, ctx: &mut Context, rw: &mut DialectConversionRewriter, _: &OperandsInfo) -> Result<()> {
                let inputs = vec![self.a(ctx), self.b(ctx), self.c(ctx), self.d(ctx)];
                let ty = IntegerType::get(ctx, 32, Signedness::Signless).into();
                // The instruction puts its first source into the upper byte.
                let text = concat!(
                    "{ .reg .b16 low, high; ",
                    $instruction, " low, $2, $1; ",
                    $instruction, " high, $4, $3; ",
                    "mov.b32 $0, {low, high}; }"
                );
                let asm = InlineAsmOp::new(ctx, ty, inputs, text, "=r,f,f,f,f", false);
                rw.insert_op(ctx, &asm);
                let result = asm.get_result(ctx);
                rw.replace_operation_with_values(ctx, self.get_operation(), vec![result]);
                Ok(())
            }
        }
    };
}

pack_four!(
    /// Four numbers in e4m3.
    PackE4m3Op, "fp8.pack_e4m3", "cvt.rn.satfinite.e4m3x2.f32"
);
pack_four!(
    /// Four numbers in e5m2.
    PackE5m2Op, "fp8.pack_e5m2", "cvt.rn.satfinite.e5m2x2.f32"
);

/// The bits of four numbers, by the GPU's instruction.
#[cube]
#[allow(unused_variables)]
pub fn pack(a: f32, b: f32, c: f32, d: f32, #[comptime] format: Format) -> u32 {
    intrinsic!(|scope| {
        let (a, b) = (a.read_value(scope), b.read_value(scope));
        let (c, d) = (c.read_value(scope), d.read_value(scope));
        match format {
            Format::E4m3 => {
                let op = PackE4m3Op::new(scope.ctx_mut(), a, b, c, d);
                scope.register_with_result(&op).into()
            }
            Format::E5m2 => {
                let op = PackE5m2Op::new(scope.ctx_mut(), a, b, c, d);
                scope.register_with_result(&op).into()
            }
        }
    })
}
