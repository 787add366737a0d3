//! Top-k, counts and permutation of tokens: a few bytes per token, so wide accesses are not needed.
use super::{buffer as b, registers_only, settings};
use kernels_cubecl::pointwise::CubeShape;
use kernels_cubecl::pointwise::moe::count::{count_chunks::CountChunks, scan_chunks::ScanChunks};
use kernels_cubecl::pointwise::moe::permute::{expand_runs::ExpandRuns, permute_tokens::PermuteTokens};
use kernels_cubecl::pointwise::moe::topk::{Selection, routing_mask::RoutingMask, topk_experts::TopkExperts};

#[test]
fn routing_compiles() {
    let plain = Selection { experts: 128, top_k: 8, groups: 1, top_groups: 1, biased: false };
    for selection in [plain, Selection { experts: 256, groups: 8, top_groups: 4, biased: true, ..plain }] {
        let kernel = kernel!(TopkExperts, settings(); b(), b(), b(), (), (), selection, CubeShape::GPU);
        registers_only("top-k", kernel);
    }
    registers_only("mask", kernel!(RoutingMask, settings(); b(), b(), (), 128, 8));
    registers_only("counts", kernel!(CountChunks, settings(); b(), b(), (), (), (), 8));
    registers_only("sums of counts", kernel!(ScanChunks, settings(); b(), b(), (), ()));
    for shards in [1, 2] {
        let kernel = kernel!(PermuteTokens, settings();
            b(), b(), b(), b(), b(), b(), b(), (), (), (), (), 128, 8, shards);
        registers_only("permutation", kernel);
    }
    registers_only("runs", kernel!(ExpandRuns, settings(); b(), b(), (), ()));
}
