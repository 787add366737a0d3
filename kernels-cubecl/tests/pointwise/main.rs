//! The pointwise kernels on CubeCL's cpu runtime: no GPU is needed. A unit is a thread there and a plane a single unit;
//! `gpu_check pointwise` runs the same checks on a GPU, with cubes of 256 units.
#![cfg(feature = "cpu")]

/// Runs a check in fp32 and in bf16.
macro_rules! both {
    ($group:ident::$check:ident, $($argument:expr),*) => {{
        let client = client();
        let wide = $group::$check::<f32>(&client, $($argument),*);
        assert_eq!(wide + $group::$check::<bf16>(&client, $($argument),*), 0);
    }};
}

#[path = "checks/mod.rs"]
mod checks;
#[path = "../libcalls/mod.rs"]
mod libcalls;
mod optimizers;

use checks::{
    activation, blockwise, decode, draw, fused, gated_delta, latent, low_rank, moe, norm, recurrent, routing, rows,
    sinks, ssd, tokens,
};
use cubecl::prelude::*;
use cubecl_runtime::runtime::Runtime;
use half::bf16;
use kernels_cubecl::blockwise::Format;
use kernels_cubecl::decode::DecodeShape;
use kernels_cubecl::pointwise::{
    activation::Activation, columns::ColumnRange, convolution::ConvolutionShape, cross_entropy::LogitsShape,
    embedding::TableShape, gated_norm::GatedShape, head_norms::HeadsShape, latent::LatentShape, moe::SumRowsShape,
    normalize::NormalizeShape, rope::RopeShape, sinks::SinkShape, small_matrix::SmallMatrix, ssd::SsdShape,
};

fn client() -> Client {
    cubecl::cpu::CpuRuntime::client(&Default::default())
}

#[test]
fn products_of_halves() {
    both!(activation::gated, 5, 8);
    both!(activation::gated, 3, 1032);
}

/// The cpu runtime has no matrix instruction, so the kernels are refused here.
#[test]
fn low_rank_gemms() {
    both!(low_rank::add, [128, 256, 16]);
    both!(low_rank::swiglu, [128, 256, 32], true);
    both!(low_rank::gradients, [128, 256, 32], 1);
}

#[test]
fn matrices_in_few_bits() {
    both!(blockwise::dequantize, Format::Nf4);
    both!(blockwise::dequantize, Format::Fp8);
}

#[test]
fn activations_of_experts() {
    both!(moe::weighted, 5, 8);
    both!(moe::weighted, 3, 1032);
}

#[test]
fn biases_of_experts() {
    both!(moe::biases, 5, 8);
    both!(moe::biases, 39, 1032);
}

#[test]
fn sums_of_rows() {
    both!(moe::sum_rows, SumRowsShape { rows: 9, columns: 40, out: 13, terms: 1 });
    both!(moe::sum_rows, SumRowsShape { rows: 9, columns: 12, out: 5, terms: 3 });
    both!(moe::sum_rows, SumRowsShape { rows: 20, columns: 1, out: 33, terms: 2 });
    // More terms than are in flight at a time.
    both!(moe::sum_rows, SumRowsShape { rows: 20, columns: 8, out: 5, terms: 10 });
}

#[test]
fn routing_of_tokens() {
    assert_eq!(routing::all(&client()), 0);
}

#[test]
fn decode_steps() {
    let shape =
        DecodeShape { sequences: 3, heads: 4, kv_heads: 2, head_dim: 16, block_size: 4, pages: 65, max_blocks: 20 };
    both!(decode::step, shape, &[1, 77, 30], None, 0);
    both!(decode::step, shape, &[0, 80, 5], Some(9), 16);
    both!(
        decode::step,
        DecodeShape { heads: 3, kv_heads: 3, head_dim: 24, block_size: 5, ..shape },
        &[100, 2, 6],
        None,
        16
    );
    // More query heads of a key head than a cube takes.
    both!(decode::step, DecodeShape { heads: 6, kv_heads: 1, head_dim: 48, ..shape }, &[4, 3, 17], Some(100), 48);
    both!(draw::likeliest, 8);
    both!(draw::likeliest, 1032);
    both!(draw::draw, 8);
    both!(draw::draw, 1032);
    both!(draw::changes, 1024);
    both!(draw::likelihoods, 8);
    both!(draw::likelihoods, 1032);
    assert_eq!(decode::copies(&client(), [5, 2, 7]) + decode::copies(&client(), [1, 1, 1]), 0);
    both!(decode::few_rows, &[1], 12, 256);
    both!(decode::few_rows, &[6], 8, 768);
    both!(decode::few_rows, &[2, 0, 5, 1], 4, 256);
    both!(decode::gated_rows, 1, 16, 256);
    both!(decode::gated_rows, 3, 48, 2048);
    both!(decode::few_rows, &[0, 0, 2, 0, 0, 1, 0], 4, 256);
    assert!(!DecodeShape { heads: 5, ..shape }.has_kernel() && !DecodeShape { head_dim: 20, ..shape }.has_kernel());
}

#[test]
fn activations() {
    for kind in [Activation::Gelu, Activation::GeluTanh, Activation::SquaredRelu] {
        both!(activation::element_wise, 1000, kind);
        both!(activation::element_wise, 8, kind);
    }
}

#[test]
fn fused_programs() {
    // Two units unroll a whole row, so rows are short here.
    for (rows, columns) in [(3, 64), (5, 24), (1, 7), (4, 34)] {
        both!(fused::runs, "softmax", &fused::softmax(), rows, columns);
        both!(fused::runs, "norm of a sum", &fused::norm(), rows, columns);
    }
    [7, 22, 12, 24].iter().for_each(|columns| both!(fused::runs, "dropout", &fused::dropout(), 5, *columns));
    both!(fused::runs, "functions", &fused::functions(), 3, 5);
    both!(fused::runs, "of rows", &fused::of_rows(), 5, 22);
    // Too long for registers.
    both!(fused::runs, "of rows", &fused::of_rows(), 3, 16_408);
    for (rows, columns) in [(7, 24), (600, 12), (2, 4)] {
        both!(fused::runs, "sums of rows", &fused::sums_of_rows(), rows, columns);
    }
    for (rows, columns) in [(24, 8), (600, 20)] {
        both!(fused::runs, "sums of broadcasts", &fused::sums_of_broadcasts(), rows, columns);
    }
    both!(fused::runs, "masked", &fused::masked(), 24, 40);
    both!(fused::runs, "masked", &fused::masked(), 6, 7);
}

#[test]
fn dropout() {
    both!(activation::dropout, 37, 72);
}

#[test]
fn rms_norm() {
    both!(norm::rms_norm, 7, 8);
    both!(norm::rms_norm, 33, 72);
    both!(norm::rms_norm_with_sum, 5, 24);
}

#[test]
fn norms_of_heads() {
    both!(norm::of_heads, HeadsShape { tokens: 5, heads: 4, kv_heads: 2, all_heads: 8, head_dim: 16 });
    both!(norm::of_heads, HeadsShape { tokens: 7, heads: 1, kv_heads: 1, all_heads: 3, head_dim: 8 });
    both!(norm::of_heads, HeadsShape { tokens: 1, heads: 2, kv_heads: 1, all_heads: 3, head_dim: 64 });
}

#[test]
fn layer_norm() {
    both!(norm::layer_norm, 7, 8);
    both!(norm::layer_norm, 33, 72);
    both!(norm::layer_norm_with_sum, 5, 24);
}

#[test]
fn norms_in_other_cubes() {
    both!(norm::plans, 7, 24);
}

#[test]
fn rope() {
    both!(tokens::rope, RopeShape { rows: 7, batch: 3, heads: 5, all_heads: 6, head_dim: 32, rotated: 32 });
    both!(tokens::rope, RopeShape { rows: 5, batch: 1, heads: 3, all_heads: 3, head_dim: 16, rotated: 16 });
    both!(tokens::rope, RopeShape { rows: 3, batch: 2, heads: 4, all_heads: 4, head_dim: 40, rotated: 16 });
    both!(tokens::rope, RopeShape { rows: 3, batch: 1, heads: 2, all_heads: 3, head_dim: 48, rotated: 32 });
    both!(tokens::rope, RopeShape { rows: 3, batch: 2, heads: 6, all_heads: 7, head_dim: 80, rotated: 80 });
    both!(tokens::rope, RopeShape { rows: 2, batch: 2, heads: 12, all_heads: 13, head_dim: 56, rotated: 48 });
}

#[test]
fn sinks_of_attention() {
    both!(sinks::of_attention, SinkShape { seq: 5, batch: 2, heads: 3, head_dim: 16, stride: 8 });
    both!(sinks::of_attention, SinkShape { seq: 7, batch: 1, heads: 2, head_dim: 9, stride: 7 });
    both!(sinks::of_attention, SinkShape { seq: 1, batch: 3, heads: 1, head_dim: 80, stride: 4 });
}

#[test]
fn latent_keys() {
    let shape = LatentShape { tokens: 6, batch: 2, heads: 5, rope_dim: 16, nope_dim: 8, value_dim: 24 };
    both!(latent::keys, shape);
    // More columns of the shared key than units, one head more than fits evenly.
    both!(latent::keys, LatentShape { tokens: 3, batch: 1, heads: 1, rope_dim: 48, nope_dim: 16, value_dim: 8 });
    both!(latent::keys, LatentShape { tokens: 1, batch: 1, heads: 7, rope_dim: 32, nope_dim: 8, value_dim: 8 });
}

#[test]
fn column_ranges() {
    both!(latent::columns, ColumnRange { rows: 7, width: 40, first: 8, columns: 24 });
    both!(latent::columns, ColumnRange { rows: 3, width: 16, first: 0, columns: 16 });
}

#[test]
fn convolutions() {
    let shape = ConvolutionShape { seq: 37, samples: 2, features: 24, kernel: 4 };
    both!(recurrent::causal_convolution, shape, true, true);
    both!(recurrent::causal_convolution, ConvolutionShape { seq: 16, features: 8, ..shape }, false, false);
    // A sequence shorter than the kernel, and other kernels.
    both!(recurrent::causal_convolution, ConvolutionShape { seq: 2, samples: 1, ..shape }, true, false);
    both!(recurrent::causal_convolution, ConvolutionShape { kernel: 2, ..shape }, false, true);
    assert!(!ConvolutionShape { features: 12, ..shape }.has_kernel());
}

#[test]
fn gated_norms() {
    both!(recurrent::gated_norm, GatedShape { rows: 19, groups: 2, features: 24 });
    both!(recurrent::gated_norm, GatedShape { rows: 3, groups: 1, features: 8 });
    assert!(!GatedShape { rows: 3, groups: 1, features: 12 }.has_kernel());
}

#[test]
fn state_space_duality() {
    let shape = SsdShape { seq: 21, samples: 2, heads: 4, groups: 2, head_dim: 8, state: 8, chunk: 8 };
    both!(ssd::recurrence, shape, true);
    // One chunk, and whole chunks of one group.
    both!(ssd::recurrence, SsdShape { seq: 5, samples: 1, groups: 1, ..shape }, false);
    both!(ssd::recurrence, SsdShape { seq: 32, heads: 8, groups: 1, head_dim: 16, chunk: 16, ..shape }, true);
    assert!(
        !SsdShape { heads: 3, groups: 1, ..shape }.has_kernel() && !SsdShape { head_dim: 24, ..shape }.has_kernel()
    );
}

#[test]
fn gated_delta_rule() {
    let shape = SsdShape { seq: 21, samples: 2, heads: 4, groups: 2, head_dim: 8, state: 8, chunk: 8 };
    both!(gated_delta::rule, shape, true);
    // One chunk, a key head for each value head, and whole chunks of one key head.
    both!(gated_delta::rule, SsdShape { seq: 5, samples: 1, groups: 4, ..shape }, false);
    both!(gated_delta::rule, SsdShape { seq: 32, groups: 1, head_dim: 64, state: 16, chunk: 16, ..shape }, true);
    assert!(
        !SsdShape { state: 24, ..shape }.has_delta_kernel(&client())
            && !SsdShape { chunk: 128, ..shape }.has_delta_kernel(&client())
    );
}

/// As [`gated_delta_rule`], at the published size of a head and of a chunk.
#[test]
fn gated_delta_rule_with_heads_of_128() {
    let shape = SsdShape { seq: 100, samples: 1, heads: 4, groups: 2, head_dim: 128, state: 128, chunk: 64 };
    assert_eq!(gated_delta::rule::<f32>(&client(), shape, true), 0);
}

#[test]
fn cross_entropy() {
    both!(tokens::cross_entropy, LogitsShape { rows: 21, columns: 104, valid: 99, first_row: 500 });
    both!(tokens::cross_entropy, LogitsShape { rows: 3, columns: 8, valid: 8, first_row: 0 });
}

#[test]
fn embedding() {
    both!(tokens::embedding, TableShape { rows: 19, hidden: 24, first_row: 5, ids: 41 });
    both!(tokens::embedding, TableShape { rows: 9, hidden: 64, first_row: 0, ids: 3 });
    // Ids over a few chunks of 16 tokens, and over many.
    both!(tokens::embedding, TableShape { rows: 9, hidden: 8, first_row: 2, ids: 331 });
}

#[test]
fn column_sum() {
    both!(rows::column_sum, 39, 24);
    both!(rows::column_sum, 137, 16);
    both!(rows::column_sum, 1, 8);
}

#[test]
fn small_matrices() {
    for (rows, columns) in [(2, 4), (4, 2), (2, 2), (4, 4)] {
        for strides in [[columns, 1], [1, rows], [columns + 3, 1], [0, 1]] {
            let of = SmallMatrix { rows, columns, strides };
            assert_eq!(rows::small_matrix::<f32, f32>(&client(), 20, of), 0);
            assert_eq!(rows::small_matrix::<bf16, f32>(&client(), 36, of), 0);
            assert!(!of.has_kernel(3) && !SmallMatrix { rows: 8, ..of }.has_kernel(20));
        }
    }
}

#[test]
fn normalize_rows() {
    for softmax in [false, true] {
        for (rows, columns) in [(5, 8), (1, 1), (4, 33)] {
            assert_eq!(rows::normalize_rows(&client(), NormalizeShape { rows, columns, softmax }), 0);
        }
    }
}

#[test]
fn split_bf16() {
    assert_eq!(rows::split_bf16(&client(), 5, 24) + rows::split_bf16(&client(), 1, 8), 0);
}

#[test]
fn heads_apart_and_together() {
    both!(rows::heads, [2, 5, 3, 8], 0);
    both!(rows::heads, [1, 7, 2, 24], 8);
}
