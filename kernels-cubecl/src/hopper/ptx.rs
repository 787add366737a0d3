//! PTX instructions without a function in CubeCL, each an operation of its own that the LLVM backend emits as inline
//! assembly. The functions of one number also exist for CubeCL's cpu runtime; the others fail there.
#![allow(missing_docs, reason = "the macros write public items without documentation")]

use cubecl::ir::CanMaterialize;
use cubecl::ir::prelude::*;
use cubecl::prelude::*;
use cubecl_llvm::LlvmTarget;
use cubecl_llvm::shared::intrinsic::call_intrinsic;
use cubecl_llvm::shared::to_llvm::ToLLVMDialect;
use cubecl_llvm::target::CtxTarget;
use pliron::builtin::attributes::FPSingleAttr;
use pliron::builtin::types::FP32Type;
use pliron_llvm::attributes::FastmathFlagsAttr;
use pliron_llvm::llvm_attrs::{LlvmAttrValue, LlvmAttributesAttr};
use pliron_llvm::op_interfaces::FloatBinArithOpWithFastMathFlags;
use pliron_llvm::ops::{ConstantOp, FDivOp, InlineAsmOp};
use pliron_llvm::types::VoidType;

/// Defines an operation that is one `f32 -> f32` instruction on a GPU, and its form elsewhere.
macro_rules! unary {
    ($(#[$doc:meta])* $op:ident, $name:literal, $instruction:literal, $elsewhere:expr) => {
        $(#[$doc])*
        #[cube_op(name = $name)]
        #[result_ty(same_as = input)]
        #[op_traits(CanMaterialize, cubecl::ir::Pure)]
        pub struct $op {
            /// The argument.
            pub input: Value,
        }

        #[op_interface_impl]
        impl ToLLVMDialect for $op {
            fn rewrite(&self, ctx: &mut Context, rw: &mut DialectConversionRewriter, _: &OperandsInfo) -> Result<()> {
                let input = self.input(ctx);
                let ty = FP32Type::get(ctx).into();
                let result = if ctx.target() == LlvmTarget::Nvptx {
                    let asm = InlineAsmOp::new(ctx, ty, vec![input], concat!($instruction, " $0, $1;"), "=f,f", false);
                    rw.insert_op(ctx, &asm);
                    asm.get_result(ctx)
                } else {
                    $elsewhere(ctx, rw, input)
                };
                rw.replace_operation_with_values(ctx, self.get_operation(), vec![result]);
                Ok(())
            }
        }
    };
}

fn power(ctx: &mut Context, rw: &mut DialectConversionRewriter, x: Value) -> Value {
    let ty = FP32Type::get(ctx).into();
    call_intrinsic(ctx, rw, "llvm.exp2.f32", ty, vec![x])
}

fn logarithm(ctx: &mut Context, rw: &mut DialectConversionRewriter, x: Value) -> Value {
    let ty = FP32Type::get(ctx).into();
    call_intrinsic(ctx, rw, "llvm.log2.f32", ty, vec![x])
}

fn divide_one(ctx: &mut Context, rw: &mut DialectConversionRewriter, x: Value) -> Value {
    let one = ConstantOp::new(ctx, Box::new(FPSingleAttr::from(1.0)));
    rw.insert_op(ctx, &one);
    let one = one.get_result(ctx);
    let quotient = FDivOp::new_with_fast_math_flags(ctx, one, x, FastmathFlagsAttr::default());
    rw.insert_op(ctx, &quotient);
    quotient.get_result(ctx)
}

/// The square root's reciprocal.
fn divide_by_root(ctx: &mut Context, rw: &mut DialectConversionRewriter, x: Value) -> Value {
    let ty = FP32Type::get(ctx).into();
    let root = call_intrinsic(ctx, rw, "llvm.sqrt.f32", ty, vec![x]);
    divide_one(ctx, rw, root)
}

unary!(
    /// The reciprocal of the square root of an `f32`.
    RsqrtOp, "hopper.rsqrt", "rsqrt.approx.ftz.f32", divide_by_root
);
unary!(
    /// The base-2 exponential of an `f32`.
    Exp2Op, "hopper.exp2", "ex2.approx.ftz.f32", power
);
unary!(
    /// The base-2 logarithm of an `f32`.
    Log2Op, "hopper.log2", "lg2.approx.ftz.f32", logarithm
);

unary!(
    /// The reciprocal of an `f32`.
    ReciprocalOp, "hopper.reciprocal", "rcp.approx.ftz.f32", divide_one
);

/// `1 / x` in one instruction (1 ulp). A full-precision division is a function call, and ptxas serialises the warpgroup
/// MMAs of a kernel with calls.
#[cube]
pub fn reciprocal(x: f32) -> f32 {
    intrinsic!(|scope| {
        let x = x.read_value(scope);
        let op = ReciprocalOp::new(scope.ctx_mut(), x);
        scope.register_with_result(&op).into()
    })
}

/// `1 / √x` in one instruction (2 ulp).
#[cube]
pub fn rsqrt(x: f32) -> f32 {
    intrinsic!(|scope| {
        let x = x.read_value(scope);
        let op = RsqrtOp::new(scope.ctx_mut(), x);
        scope.register_with_result(&op).into()
    })
}

/// `2^x` in one instruction (2 ulp; results under the smallest normal number are zero).
#[cube]
pub fn exp2(x: f32) -> f32 {
    intrinsic!(|scope| {
        let x = x.read_value(scope);
        let op = Exp2Op::new(scope.ctx_mut(), x);
        scope.register_with_result(&op).into()
    })
}

/// `log2(x)` in one instruction (absolute error 2^-22 near 1, 1 ulp elsewhere).
#[cube]
pub fn log2(x: f32) -> f32 {
    intrinsic!(|scope| {
        let x = x.read_value(scope);
        let op = Log2Op::new(scope.ctx_mut(), x);
        scope.register_with_result(&op).into()
    })
}

/// Registers a statement without operands that units execute together.
fn statement(scope: &Scope, text: &str) {
    let void = VoidType::get(scope.ctx_mut()).into();
    let asm = InlineAsmOp::new(scope.ctx_mut(), void, vec![], text, "~{memory}", true);
    let mut attributes = LlvmAttributesAttr::new();
    attributes.set("convergent", LlvmAttrValue::Unit);
    asm.set_attr_llvm_inline_asm_attrs(scope.ctx_mut(), attributes);
    scope.register(&asm);
}

/// Waits at named barrier `id` (1 to 15; 0 is the cube's) until `units` units have arrived there or wait.
#[cube]
pub fn named_barrier_sync(#[comptime] id: u32, #[comptime] units: u32) {
    intrinsic!(|scope| statement(scope, &format!("bar.sync {id}, {units};")))
}

/// Arrives at named barrier `id` without waiting.
#[cube]
pub fn named_barrier_arrive(#[comptime] id: u32, #[comptime] units: u32) {
    intrinsic!(|scope| statement(scope, &format!("bar.arrive {id}, {units};")))
}

/// Ends the kernel with an error.
#[cube]
pub fn trap() {
    intrinsic!(|scope| statement(scope, "trap;"))
}
