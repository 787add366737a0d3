//! The FP8 kernels: converted by the GPU's instruction, nothing outside registers and tiles.
use super::{buffer, compile, hopper, settings};
use cubecl_runtime::kernel::CubeKernel;
use half::bf16;
use kernels_cubecl::fp8::{Codec, Format, amax, cast, groups, transpose};
use kernels_cubecl::pointwise::CubeShape;

fn check(what: &str, kernel: impl CubeKernel, conversion: Option<&str>) {
    let ptx = compile(what, kernel);
    let spilled = ptx.lines().find(|line| line.trim_start().starts_with(".local"));
    assert_eq!(spilled, None, "{what} spills to local memory");
    if let Some(conversion) = conversion {
        assert!(ptx.contains(conversion), "{what} does not convert by {conversion}");
    }
}

#[test]
fn fp8_kernels_compile() {
    let b = buffer;
    let device = || (settings(), hopper());
    let conversions = [(Format::E4m3, "cvt.rn.satfinite.e4m3x2.f32"), (Format::E5m2, "cvt.rn.satfinite.e5m2x2.f32")];
    for (format, instruction) in conversions {
        for (codec, found) in [(Codec::Instruction, Some(instruction)), (Codec::Arithmetic, None)] {
            let (s, d) = device();
            let flat =
                cast::cast_flat::CastFlat::<bf16>::new(s, d, Default::default(), b(), b(), b(), (), format, codec);
            check("cast", flat, found);
            let dense = [false, true].map(|with_rows| (with_rows, true, false));
            let groups = [(true, false, true), (false, true, true), (true, true, true)];
            for (with_rows, with_columns, grouped) in dense.into_iter().chain(groups) {
                let (s, d) = device();
                let tiles = cast::cast_tiles::CastTiles::<bf16>::new(
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
                    with_rows,
                    with_columns,
                    grouped,
                    format,
                    codec,
                );
                check("cast and transpose", tiles, found);
            }
        }
    }
    let (s, d) = device();
    check(
        "amax",
        amax::cube_maxima::CubeMaxima::<bf16>::new(s, d, Default::default(), b(), b(), (), (), CubeShape::GPU),
        None,
    );
    let (s, d) = device();
    let parts = groups::part_maxima::PartMaxima::<bf16>::new(s, d, Default::default(), b(), b(), b(), CubeShape::GPU);
    check("parts of groups", parts, None);
    let (s, d) = device();
    let maxima = groups::group_maxima::GroupMaxima::new(s, d, Default::default(), b(), b(), b(), (), CubeShape::GPU);
    check("maxima of groups", maxima, None);
    let (s, d) = device();
    check(
        "greatest part",
        amax::greatest_part::GreatestPart::new(s, d, Default::default(), b(), b(), (), CubeShape::GPU),
        None,
    );
    let (s, d) = device();
    check("scale", amax::write_scale::WriteScale::new(s, d, Default::default(), b(), b(), b(), (), (), ()), None);
    let (s, d) = device();
    check(
        "transpose",
        transpose::transpose_tiles::TransposeTiles::new(s, d, Default::default(), b(), b(), (), ()),
        None,
    );
}
