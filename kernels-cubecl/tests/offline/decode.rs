//! The kernels of a decode step.
use super::{buffer as b, compile, registers_only, settings, settings_of};
use half::bf16;
use kernels_cubecl::decode::attention::{Plan, split_attention::SplitAttention};
use kernels_cubecl::decode::draw::changes::{change::Change, keep::Keep};
use kernels_cubecl::decode::draw::kernel::draw_rows::DrawRows;
use kernels_cubecl::decode::draw::likelihoods::row_likelihoods::RowLikelihoods;
use kernels_cubecl::decode::few_rows;
use kernels_cubecl::decode::{DecodeShape, Rows, append::append_rows::AppendRows, merge::merge_splits::MergeSplits};
use kernels_cubecl::pointwise::CubeShape;

#[test]
fn attention_over_pages_reads_16_bytes_and_stays_in_registers() {
    for (heads, kv_heads, head_dim) in [(32, 8, 64), (32, 8, 128), (8, 4, 256), (12, 12, 192), (16, 2, 80)] {
        let (sequences, block_size, pages, max_blocks) = (64, 16, 4096, 512);
        let shape = DecodeShape { sequences, heads, kv_heads, head_dim, block_size, pages, max_blocks };
        let plan = Plan::new(shape, CubeShape::GPU);
        let kernel = kernel!(SplitAttention<bf16>, settings_of(plan.units);
            b(), b(), b(), b(), b(), b(), b(), (), (), (), (), (), plan);
        let ptx = registers_only(&format!("{plan:?}"), kernel);
        assert!(ptx.contains(".v4."), "{plan:?} has no access of 16 bytes");
    }
}

#[test]
fn linear_layers_of_few_rows_read_16_bytes_and_stay_in_registers() {
    for (features, rows, ahead, gated) in [(1, 1, 8, false), (2, 1, 4, true), (4, 1, 2, true), (4, 4, 2, true)] {
        let plan = few_rows::Plan { cube: CubeShape::GPU, features, rows, ahead, gated };
        let kernel = kernel!(few_rows::few_rows::FewRows<bf16>, settings();
            b(), b(), b(), b(), (), (), (), (), Rows::All, plan);
        let ptx = registers_only(&format!("{plan:?}"), kernel);
        assert!(ptx.contains(".v4."), "{plan:?} has no access of 16 bytes");
    }
}

#[test]
fn new_keys_and_merged_splits_compile() {
    for half in [0, 4, 8] {
        let append = kernel!(AppendRows<bf16>, settings();
            b(), b(), b(), b(), b(), b(), b(), (), (), (), (), 16, half, 16);
        assert!(registers_only(&format!("append {half}"), append).contains(".v4."));
    }
    compile("merge", kernel!(MergeSplits<bf16>, settings(); b(), b(), b(), (), (), 128));
}

#[test]
fn draws_read_16_bytes_and_stay_in_registers() {
    let cube = CubeShape { units: 1024, ..CubeShape::GPU };
    let kernel = kernel!(DrawRows<bf16>, settings_of(cube.units); b(), b(), b(), (), 13, cube);
    assert!(registers_only("draws", kernel).contains(".v4."));
    let likely = kernel!(RowLikelihoods<bf16>, settings_of(cube.units); b(), b(), b(), b(), (), (), cube);
    assert!(registers_only("likelihoods", likely).contains(".v4."));
    registers_only("changes", kernel!(Change, settings(); b(), b(), b(), ()));
    assert!(registers_only("tokens that may come", kernel!(Keep, settings(); b(), b(), b(), ())).contains(".v4."));
}
