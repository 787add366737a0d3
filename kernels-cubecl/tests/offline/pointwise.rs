//! The memory-bound kernels: 16 bytes an access, and nothing of a unit's outside its registers.
use super::{buffer, compile, hopper, settings};
use cubecl_runtime::kernel::CubeKernel;
use half::{bf16, f16};
use kernels_cubecl::pointwise::{
    adamw, cross_entropy, dropout, embedding, flat, gelu, layer_norm, rms_norm, rope, swiglu,
};

fn check(what: &str, kernel: impl CubeKernel) {
    let ptx = compile(what, kernel);
    assert!(ptx.contains(".v4.") || ptx.contains(".v8."), "{what} has no access of 16 bytes");
    let spilled = ptx.lines().find(|line| line.trim_start().starts_with(".local"));
    assert_eq!(spilled, None, "{what} keeps numbers in memory");
}

#[test]
fn rope_compiles() {
    for half in [4, 8] {
        let (b, s) = (buffer, settings());
        let kernel = rope::rotate::Rotate::<bf16>::new(
            s,
            hopper(),
            Default::default(),
            b(),
            b(),
            b(),
            b(),
            (),
            (),
            (),
            (),
            half,
        );
        check("rope", kernel);
    }
}

#[test]
fn cross_entropy_compiles() {
    let b = buffer;
    let device = || (settings(), hopper());
    let (s, d) = device();
    check("maximum", cross_entropy::row_maximum::RowMaximum::<bf16>::new(s, d, Default::default(), b(), b(), (), ()));
    let (s, d) = device();
    check(
        "sums",
        cross_entropy::row_sums::RowSums::<f16>::new(s, d, Default::default(), b(), b(), b(), b(), (), (), ()),
    );
    let in_place = || cubecl::prelude::BufferCompilationArg { inplace: Some(0) };
    for target in [b(), in_place()] {
        let (s, d) = device();
        let kernel = cross_entropy::gradient::Gradient::<bf16>::new(
            s,
            d,
            Default::default(),
            b(),
            b(),
            b(),
            b(),
            target,
            (),
            (),
            (),
        );
        check("gradient of the logits", kernel);
    }
}

#[test]
fn the_embedding_compiles() {
    let b = buffer;
    let device = || (settings(), hopper());
    let (s, d) = device();
    check("gather", embedding::gather::Gather::new(s, d, Default::default(), b(), b(), b(), (), (), ()));
    let (s, d) = device();
    compile("count", embedding::count_equals::CountEquals::new(s, d, Default::default(), b(), b(), (), (), ()));
    let (s, d) = device();
    check(
        "sum in fp32",
        embedding::sum_equals::SumEquals::<bf16, f32>::new(
            s,
            d,
            Default::default(),
            b(),
            b(),
            b(),
            b(),
            (),
            (),
            (),
            true,
        ),
    );
    let (s, d) = device();
    check(
        "sum in bf16",
        embedding::sum_equals::SumEquals::<bf16, bf16>::new(
            s,
            d,
            Default::default(),
            b(),
            b(),
            b(),
            b(),
            (),
            (),
            (),
            false,
        ),
    );
}

#[test]
fn swiglu_compiles() {
    let b = buffer;
    let (s, d) = (settings(), hopper());
    check("swiglu", swiglu::swiglu_forward::SwigluForward::<bf16>::new(s, d, Default::default(), b(), b(), ()));
    let (s, d) = (settings(), hopper());
    check(
        "swiglu gradient",
        swiglu::swiglu_backward::SwigluBackward::<bf16>::new(s, d, Default::default(), b(), b(), b(), ()),
    );
}

#[test]
fn gelu_compiles() {
    let b = buffer;
    for tanh in [false, true] {
        let (s, d) = (settings(), hopper());
        check("gelu", gelu::gelu_forward::GeluForward::<bf16>::new(s, d, Default::default(), b(), b(), (), tanh));
        let (s, d) = (settings(), hopper());
        check(
            "gelu gradient",
            gelu::gelu_backward::GeluBackward::<bf16>::new(s, d, Default::default(), b(), b(), b(), (), tanh),
        );
    }
}

#[test]
fn norms_compile() {
    let b = buffer;
    for vectors in [1, 8] {
        let (s, d) = (settings(), hopper());
        let kernel = rms_norm::rms_norm_forward::RmsNormForward::<f16>::new(
            s,
            d,
            Default::default(),
            b(),
            b(),
            b(),
            (),
            (),
            vectors,
        );
        check("rms norm", kernel);
        let (s, d) = (settings(), hopper());
        let kernel = rms_norm::rms_norm_backward::RmsNormBackward::<bf16>::new(
            s,
            d,
            Default::default(),
            b(),
            b(),
            b(),
            b(),
            b(),
            (),
            (),
            (),
            vectors,
        );
        check("rms norm gradient", kernel);
    }
    for vectors in [1, 4] {
        let (s, d) = (settings(), hopper());
        let kernel = layer_norm::layer_norm_forward::LayerNormForward::<bf16>::new(
            s,
            d,
            Default::default(),
            b(),
            b(),
            b(),
            b(),
            (),
            (),
            vectors,
        );
        check("layer norm", kernel);
        let (s, d) = (settings(), hopper());
        let kernel = layer_norm::layer_norm_backward::LayerNormBackward::<bf16>::new(
            s,
            d,
            Default::default(),
            b(),
            b(),
            b(),
            b(),
            b(),
            (),
            (),
            (),
            vectors,
        );
        check("layer norm gradient", kernel);
    }
}

#[test]
fn dropout_compiles() {
    let b = buffer;
    let (s, d) = (settings(), hopper());
    check("dropout", dropout::drop_out::DropOut::<bf16>::new(s, d, Default::default(), b(), b(), b(), (), (), (), ()));
}

#[test]
fn adamw_compiles_for_all_weights() {
    macro_rules! kernel {
        ($weight:ty, $narrow:literal) => {{
            let b = buffer;
            adamw::adamw_step::AdamwStep::<$weight>::new(
                settings(),
                hopper(),
                Default::default(),
                b(),
                b(),
                b(),
                b(),
                b(),
                b(),
                b(),
                (),
                (),
                (),
                (),
                (),
                (),
                (),
                (),
                (),
                $narrow,
            )
        }};
    }
    check("AdamW, bf16 weights", kernel!(bf16, true));
    check("AdamW, f16 weights", kernel!(f16, true));
    let ptx = compile("AdamW", kernel!(f32, false));
    assert_eq!(ptx.matches("st.global").count(), 3, "masters and moments are written, and nothing else");
}

#[test]
fn flat_writes_and_squares_compile() {
    let b = buffer;
    for adds in [false, true] {
        let (s, d) = (settings(), hopper());
        let kernel = flat::write_run::WriteRun::<bf16, f32>::new(s, d, Default::default(), b(), b(), (), 4, adds);
        check("sum", kernel);
        let (s, d) = (settings(), hopper());
        let kernel = flat::write_run::WriteRun::<f32, bf16>::new(s, d, Default::default(), b(), b(), (), 4, adds);
        check("rounding", kernel);
        let (s, d) = (settings(), hopper());
        let kernel = flat::write_run::WriteRun::<f16, f32>::new(s, d, Default::default(), b(), b(), (), 1, adds);
        compile("sum of single elements", kernel);
    }
    let (s, d) = (settings(), hopper());
    compile("squares", flat::chunk_squares::ChunkSquares::new(s, d, Default::default(), b(), b(), b(), b(), ()));
}
