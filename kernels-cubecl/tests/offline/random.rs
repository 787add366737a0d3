//! Random numbers: nothing but instructions that round exactly.
use super::{buffer, compile, hopper, settings};
use half::bf16;
use kernels_cubecl::random::kernel::draw_normal::DrawNormal;

#[test]
fn draws_compile_without_a_library() {
    let (s, d, b) = (settings, hopper, buffer);
    let scalars = ();
    let wide = DrawNormal::<f64>::new(
        s(),
        d(),
        Default::default(),
        b(),
        scalars,
        scalars,
        scalars,
        scalars,
        scalars,
        scalars,
        scalars,
        scalars,
        scalars,
        scalars,
        true,
    );
    let narrow = DrawNormal::<bf16>::new(
        s(),
        d(),
        Default::default(),
        b(),
        scalars,
        scalars,
        scalars,
        scalars,
        scalars,
        scalars,
        scalars,
        scalars,
        scalars,
        scalars,
        false,
    );
    for (name, ptx) in [("f64", compile("f64", wide)), ("bf16", compile("bf16", narrow))] {
        assert!(!ptx.contains(".approx") && !ptx.contains("call"), "{name} calls a library or rounds somehow");
        for exact in ["div.rn.f64", "sqrt.rn.f64", "fma.rn.f64"] {
            assert!(ptx.contains(exact), "{name} has no {exact}");
        }
        let spilled = ptx.lines().find(|line| line.trim_start().starts_with(".local"));
        assert_eq!(spilled, None, "{name} keeps numbers in memory");
    }
}
