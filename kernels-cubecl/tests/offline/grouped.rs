//! The products of groups.
use super::{buffer, compile, settings_of};
use half::bf16;
use kernels_cubecl::grouped::kernel::{SizesCompilationArg, UNITS, grouped};
use kernels_cubecl::grouped::{GroupedPlan, Onto, Product};
use kernels_cubecl::hopper::mma::Half;

fn sizes() -> SizesCompilationArg {
    SizesCompilationArg { tiles: (), columns: (), rows: (), features: (), steps: () }
}

/// Every product, to wherever its result goes.
fn plans() -> Vec<GroupedPlan> {
    let mut all = Vec::new();
    for element in [Half::Bf16, Half::F16] {
        let products = [Product::Forward, Product::InputGradient, Product::WeightGradient];
        for product in products {
            let wanted = match product {
                Product::WeightGradient => vec![Onto::Same, Onto::Wide, Onto::Added],
                _ => vec![Onto::Same],
            };
            for onto in wanted {
                let plans = [GroupedPlan::wide, GroupedPlan::roomy, GroupedPlan::paired, GroupedPlan::ahead];
                all.extend(plans.map(|plan| plan(product, element, onto)));
            }
        }
    }
    all
}

#[test]
fn grouped_products_overlap() {
    for plan in plans() {
        let (what, units) = (format!("{plan:?}"), settings_of(UNITS));
        let ptx = match plan.onto {
            Onto::Same => compile(&what, kernel!(grouped::Grouped<bf16>, units, ((), (), (), buffer(), sizes(), plan))),
            _ => compile(&what, kernel!(grouped::Grouped<f32>, units, ((), (), (), buffer(), sizes(), plan))),
        };
        // A step of 64 stands there once.
        assert_eq!(ptx.matches("wgmma.mma_async").count(), 4, "warpgroup MMAs of {plan:?}");
        for costly in [".local", "call", "div.rn"] {
            let line = ptx.lines().find(|line| line.trim_start().contains(costly) && !line.contains("//"));
            assert_eq!(line, None, "{plan:?} has an instruction that serialises its MMAs");
        }
        let panels = plan.width / if plan.onto == Onto::Same { 64 } else { 32 };
        let (stored, added) = if plan.onto == Onto::Added { (0, panels) } else { (panels, 0) };
        assert_eq!(ptx.matches("cp.async.bulk.tensor.3d.global").count(), stored, "stores of {plan:?}");
        let prefetches = ptx.matches("cp.async.bulk.prefetch.tensor.3d").count();
        assert_eq!(prefetches > 0, plan.ahead, "prefetches of {plan:?}");
        assert_eq!(ptx.matches("cp.reduce.async.bulk.tensor.3d").count(), added, "additions of {plan:?}");
    }
}
