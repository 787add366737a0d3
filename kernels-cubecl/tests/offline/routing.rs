//! The choice of experts and the places of rows: a few bytes for each token, so nothing wants wide accesses.
use super::{buffer as b, registers_only, settings};
use kernels_cubecl::pointwise::CubeShape;
use kernels_cubecl::pointwise::experts::choose::{
    Selection, choose_experts::ChooseExperts, spread_choice::SpreadChoice,
};
use kernels_cubecl::pointwise::experts::count::{count_chunks::CountChunks, scan_chunks::ScanChunks};
use kernels_cubecl::pointwise::experts::place::{place_copies::PlaceCopies, spread_runs::SpreadRuns};

#[test]
fn routing_compiles() {
    let plain = Selection { experts: 128, top_k: 8, groups: 1, top_groups: 1, biased: false };
    for how in [plain, Selection { experts: 256, groups: 8, top_groups: 4, biased: true, ..plain }] {
        let kernel = kernel!(ChooseExperts, settings(), (b(), b(), b(), (), (), how, CubeShape::GPU));
        registers_only("choice", kernel);
    }
    registers_only("mask", kernel!(SpreadChoice, settings(), (b(), b(), (), 128, 8)));
    registers_only("counts", kernel!(CountChunks, settings(), (b(), b(), (), (), (), 8)));
    registers_only("sums of counts", kernel!(ScanChunks, settings(), (b(), b(), (), ())));
    for parts in [1, 2] {
        let kernel =
            kernel!(PlaceCopies, settings(), (b(), b(), b(), b(), b(), b(), b(), (), (), (), (), 128, 8, parts));
        registers_only("places", kernel);
    }
    registers_only("runs", kernel!(SpreadRuns, settings(), (b(), b(), (), ())));
}
