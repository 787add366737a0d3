//! Random numbers: nothing but instructions that round exactly.
use super::{buffer, registers_only, settings};
use half::bf16;
use kernels_cubecl::random::kernel::draw_normal::DrawNormal;

#[test]
fn draws_compile_without_a_library() {
    let wide = kernel!(DrawNormal<f64>, settings(); buffer(), (), (), (), (), (), (), (), (), (), (), true);
    let narrow = kernel!(DrawNormal<bf16>, settings(); buffer(), (), (), (), (), (), (), (), (), (), (), false);
    for (name, ptx) in [("f64", registers_only("f64", wide)), ("bf16", registers_only("bf16", narrow))] {
        assert!(!ptx.contains(".approx") && !ptx.contains("call"), "{name} calls a library or rounds somehow");
        for exact in ["div.rn.f64", "sqrt.rn.f64", "fma.rn.f64"] {
            assert!(ptx.contains(exact), "{name} has no {exact}");
        }
    }
}
