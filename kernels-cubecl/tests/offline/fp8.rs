//! The FP8 kernels: converted by the GPU's instruction, nothing outside registers and tiles.
use super::{buffer as b, registers_only, settings};
use cubecl_runtime::kernel::CubeKernel;
use half::bf16;
use kernels_cubecl::fp8::{Codec, Format, amax, blocks, cast, groups, transpose};
use kernels_cubecl::pointwise::CubeShape;

fn check(what: &str, kernel: impl CubeKernel, conversion: Option<&str>) {
    let ptx = registers_only(what, kernel);
    if let Some(conversion) = conversion {
        assert!(ptx.contains(conversion), "{what} does not convert by {conversion}");
    }
}

#[test]
fn fp8_kernels_compile() {
    let conversions = [(Format::E4m3, "cvt.rn.satfinite.e4m3x2.f32"), (Format::E5m2, "cvt.rn.satfinite.e5m2x2.f32")];
    for (format, instruction) in conversions {
        for (codec, found) in [(Codec::Instruction, Some(instruction)), (Codec::Arithmetic, None)] {
            let flat = kernel!(cast::cast_flat::CastFlat<bf16>, settings(); b(), b(), b(), (), format, codec);
            check("cast", flat, found);
            let dense = [false, true].map(|with_rows| (with_rows, true, false));
            let groups = [(true, false, true), (false, true, true), (true, true, true)];
            for (with_rows, with_columns, grouped) in dense.into_iter().chain(groups) {
                let tiles = kernel!(cast::cast_tiles::CastTiles<bf16>, settings();
                    b(), b(), b(), b(), b(), (), (), with_rows, with_columns, grouped, format, codec);
                check("cast and transpose", tiles, found);
            }
        }
    }
    let gpu = CubeShape::GPU;
    for (format, instruction) in conversions {
        for (with_rows, with_columns) in [(true, false), (false, true), (true, true)] {
            for square in [false, true] {
                let blocks = kernel!(blocks::cast_blocks::CastBlocks<bf16>, settings();
                    b(), b(), b(), b(), b(), (), (), (), (), (), with_rows, with_columns, square, format, Codec::Instruction, gpu);
                check("cast by blocks", blocks, Some(instruction));
            }
        }
    }
    check("amax", kernel!(amax::cube_maxima::CubeMaxima<bf16>, settings(); b(), b(), (), (), gpu), None);
    check("parts of groups", kernel!(groups::part_maxima::PartMaxima<bf16>, settings(); b(), b(), b(), gpu), None);
    check("maxima of groups", kernel!(groups::group_maxima::GroupMaxima, settings(); b(), b(), b(), (), gpu), None);
    check("greatest part", kernel!(amax::greatest_part::GreatestPart, settings(); b(), b(), (), gpu), None);
    check("scale", kernel!(amax::write_scale::WriteScale, settings(); b(), b(), b(), (), (), ()), None);
    check("transpose", kernel!(transpose::transpose_tiles::TransposeTiles, settings(); b(), b(), (), ()), None);
}
