//! What LLVM calls to convert f32 to bf16 where the CPU has no instruction for it (no AVX512-BF16). Compilers bring it
//! along from GCC 13 on; CubeCL's cpu runtime looks it up in the running program, so the tests carry their own.

use half::bf16;

/// LLVM expects the bf16 in the lower half of a float's register.
#[unsafe(no_mangle)]
pub extern "C" fn __truncsfbf2(value: f32) -> f32 {
    f32::from_bits(bf16::from_f32(value).to_bits().into())
}

/// Keeps the function: nothing in the program calls it.
#[used]
static KEEP: extern "C" fn(f32) -> f32 = __truncsfbf2;
