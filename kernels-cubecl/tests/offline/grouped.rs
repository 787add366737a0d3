//! The grouped GEMMs.
use super::{buffer, compile, settings_of};
use half::bf16;
use kernels_cubecl::fp8::Format;
use kernels_cubecl::grouped::fp8::kernel::grouped_fp8;
use kernels_cubecl::grouped::fp8::{Fp8Plan, Scaling, Sums};
use kernels_cubecl::grouped::kernel::{SizesCompilationArg, UNITS, grouped};
use kernels_cubecl::grouped::{Epilogue, Gemm, GroupedPlan};
use kernels_cubecl::hopper::mma::Half;

fn sizes() -> SizesCompilationArg {
    SizesCompilationArg { tiles: (), columns: (), rows: (), features: (), steps: () }
}

/// Every GEMM with every epilogue.
fn plans() -> Vec<GroupedPlan> {
    let mut all = Vec::new();
    for element in [Half::Bf16, Half::F16] {
        let gemms = [Gemm::Forward, Gemm::InputGradient, Gemm::WeightGradient];
        for gemm in gemms {
            let epilogues = match gemm {
                Gemm::WeightGradient => vec![Epilogue::InputType, Epilogue::Fp32, Epilogue::AddFp32],
                Gemm::InputGradient => vec![Epilogue::InputType],
                Gemm::Forward => vec![Epilogue::InputType, Epilogue::Biased],
            };
            for epilogue in epilogues {
                let plans = [GroupedPlan::wide, GroupedPlan::narrow, GroupedPlan::wide_staging, GroupedPlan::paired];
                all.extend(plans.map(|plan| plan(gemm, element, epilogue)));
            }
        }
    }
    all
}

#[test]
fn grouped_gemms_overlap() {
    for plan in plans() {
        let (what, units) = (format!("{plan:?}"), settings_of(UNITS));
        let ptx = match plan.epilogue {
            Epilogue::InputType | Epilogue::Biased => compile(
                &what,
                kernel!(grouped::Grouped<bf16>, units; (), (), (), buffer(), buffer(), buffer(), sizes(), plan),
            ),
            _ => compile(
                &what,
                kernel!(grouped::Grouped<f32>, units; (), (), (), buffer(), buffer(), buffer(), sizes(), plan),
            ),
        };
        // The MMAs of one step, with an inner dimension of 64.
        assert_eq!(ptx.matches("wgmma.mma_async").count(), 4, "warpgroup MMAs of {plan:?}");
        for costly in [".local", "call", "div.rn"] {
            let line = ptx.lines().find(|line| line.trim_start().contains(costly) && !line.contains("//"));
            assert_eq!(line, None, "{plan:?} has an instruction that serialises its MMAs");
        }
        let panels = plan.width / if matches!(plan.epilogue, Epilogue::InputType | Epilogue::Biased) { 64 } else { 32 };
        let (stored, added) = if plan.epilogue == Epilogue::AddFp32 { (0, panels) } else { (panels, 0) };
        assert_eq!(ptx.matches("cp.async.bulk.tensor.3d.global").count(), stored, "stores of {plan:?}");
        assert_eq!(ptx.matches("cp.reduce.async.bulk.tensor.3d").count(), added, "additions of {plan:?}");
    }
}

#[test]
fn grouped_gemms_in_fp8_overlap() {
    let groups = [Sums::Fast, Sums::Exact].map(|sums| (Gemm::Forward, (Scaling::Groups, sums), Epilogue::InputType));
    let blocks = (Gemm::Forward, (Scaling::Blocks, Sums::Exact), Epilogue::InputType);
    let gradients = [Scaling::Groups, Scaling::Blocks].into_iter().flat_map(|scaling| {
        let of = |epilogue| (Gemm::WeightGradient, (scaling, Sums::Exact), epilogue);
        [of(Epilogue::Fp32), of(Epilogue::AddFp32)]
    });
    for (gemm, how, epilogue) in groups.into_iter().chain([blocks]).chain(gradients) {
        for formats in [[Format::E4m3; 2], [Format::E5m2, Format::E4m3]] {
            let plan = Fp8Plan::new(gemm, formats, how, (Half::Bf16, epilogue));
            let (what, units, b) = (format!("{plan:?}"), settings_of(UNITS), buffer);
            macro_rules! ptx {
                ($out:ty) => {
                    compile(
                        &what,
                        kernel!(grouped_fp8::GroupedFp8<$out>, units; (), (), (), (), (), b(), b(), b(), b(), sizes(), plan),
                    )
                };
            }
            let ptx = if epilogue == Epilogue::InputType { ptx!(bf16) } else { ptx!(f32) };
            // The MMAs of one step, with an inner dimension of 128.
            let kinds = formats.map(|format| if format == Format::E4m3 { "e4m3" } else { "e5m2" });
            let instruction = format!("k32.f32.{}.{}", kinds[0], kinds[1]);
            assert_eq!(ptx.matches(&instruction).count(), 4, "warpgroup MMAs of {plan:?}");
            for costly in [".local", "call", "div.rn"] {
                let line = ptx.lines().find(|line| line.trim_start().contains(costly) && !line.contains("//"));
                assert_eq!(line, None, "{plan:?} has an instruction that serialises its MMAs");
            }
        }
    }
}
