//! Random numbers: nothing but instructions that round exactly.
use super::{buffer, compile, settings};
use half::bf16;
use kernels_cubecl::random::kernel::draw_normal::DrawNormal;

#[test]
fn draws_compile_without_a_library() {
    let wide = kernel!(DrawNormal<f64>, settings(), (buffer(), (), (), (), (), (), (), (), (), (), (), true));
    let narrow = kernel!(DrawNormal<bf16>, settings(), (buffer(), (), (), (), (), (), (), (), (), (), (), false));
    for (name, ptx) in [("f64", compile("f64", wide)), ("bf16", compile("bf16", narrow))] {
        assert!(!ptx.contains(".approx") && !ptx.contains("call"), "{name} calls a library or rounds somehow");
        for exact in ["div.rn.f64", "sqrt.rn.f64", "fma.rn.f64"] {
            assert!(ptx.contains(exact), "{name} has no {exact}");
        }
        let spilled = ptx.lines().find(|line| line.trim_start().starts_with(".local"));
        assert_eq!(spilled, None, "{name} spills to local memory");
    }
}
