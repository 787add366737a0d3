//! The kernels of a decode step.
use super::{buffer as b, compile, registers_only, settings, settings_of};
use half::bf16;
use kernels_cubecl::decode::attention::{Plan, split_attention::SplitAttention};
use kernels_cubecl::decode::{DecodeShape, append::append_rows::AppendRows, merge::merge_splits::MergeSplits};
use kernels_cubecl::pointwise::CubeShape;

#[test]
fn attention_over_pages_reads_16_bytes_and_stays_in_registers() {
    for (heads, kv_heads, head_dim) in [(32, 8, 64), (32, 8, 128), (8, 4, 256), (12, 12, 192), (16, 2, 80)] {
        let (sequences, block_size, pages, max_blocks) = (64, 16, 4096, 512);
        let shape = DecodeShape { sequences, heads, kv_heads, head_dim, block_size, pages, max_blocks };
        let plan = Plan::new(shape, CubeShape::GPU);
        let kernel = kernel!(
            SplitAttention<bf16>,
            settings_of(plan.units),
            (b(), b(), b(), b(), b(), b(), b(), (), (), (), (), (), plan)
        );
        let ptx = registers_only(&format!("{plan:?}"), kernel);
        assert!(ptx.contains(".v4."), "{plan:?} has no access of 16 bytes");
    }
}

#[test]
fn new_keys_and_merged_splits_compile() {
    let append = kernel!(AppendRows<bf16>, settings(), (b(), b(), b(), b(), b(), (), (), (), (), 16, 16));
    assert!(compile("append", append).contains(".v4."));
    compile("merge", kernel!(MergeSplits<bf16>, settings(), (b(), b(), b(), (), (), 128)));
}
