//! The checks, at sizes that need several cubes.
use crate::kernel_tests::pointwise::{
    activation, blockwise, decode, draw, fused, gated_delta as gated_delta_checks, latent, low_rank, moe, norm,
    optimizer, recurrent, routing, rows, sinks, ssd, tokens,
};
use cubecl::prelude::*;
use half::{bf16, f16};
use kernels_cubecl::blockwise::Format;
use kernels_cubecl::decode::DecodeShape;
use kernels_cubecl::pointwise::{
    activation::Activation, columns::ColumnRange, convolution::ConvolutionShape, cross_entropy::LogitsShape,
    embedding::TableShape, flat::FloatType, gated_norm::GatedShape, head_norms::HeadsShape, latent::LatentShape,
    moe::SumRowsShape, momentum::MomentumRule, normalize::NormalizeShape, rope::RopeShape, sinks::SinkShape,
    small_matrix::SmallMatrix, ssd::SsdShape,
};

/// Returns the number of results that are outside of their bounds.
pub type Check = fn(&Client) -> usize;

/// The checks and their names, which arguments select.
pub fn all() -> Vec<(&'static str, Check)> {
    vec![
        ("gated linear units", |c| activation::gated::<bf16>(c, 33, 1032) + activation::gated::<f32>(c, 5, 4104)),
        ("low rank", |c| {
            low_rank::add::<bf16>(c, [256, 512, 16])
                + low_rank::add::<f16>(c, [128, 256, 48])
                + low_rank::add::<f32>(c, [128, 256, 16])
                + low_rank::swiglu::<bf16>(c, [256, 512, 32], false)
                + low_rank::swiglu::<bf16>(c, [256, 512, 16], true)
                + low_rank::swiglu::<f16>(c, [128, 256, 16], false)
                + low_rank::gradients::<bf16>(c, [1040, 4096, 16], 1)
                + low_rank::gradients::<bf16>(c, [528, 2048, 16], 2)
                + low_rank::gradients::<f16>(c, [304, 1536, 32], 1)
                + low_rank::gradients::<bf16>(c, [272, 2304, 16], 1)
                + low_rank::gradients::<f16>(c, [272, 512, 16], 1)
                + low_rank::gradients::<bf16>(c, [272, 384, 32], 1)
                + low_rank::swiglu::<bf16>(c, [128, 256, 64], true)
                + low_rank::gradients::<bf16>(c, [16, 512, 32], 2)
        }),
        ("activations of experts", |c| {
            moe::weighted::<bf16>(c, 33, 1032) + moe::weighted::<bf16>(c, 5, 14_336) + moe::weighted::<f16>(c, 7, 24)
        }),
        ("biases of experts", |c| {
            moe::biases::<bf16>(c, 701, 2880) + moe::biases::<f16>(c, 7, 24) + moe::biases::<bf16>(c, 5, 5760)
        }),
        ("sums of token rows", |c| {
            let shape = |columns, terms| SumRowsShape { rows: 700, columns, out: 900, terms };
            moe::sum_rows::<bf16>(c, shape(4096, 1))
                + moe::sum_rows::<bf16>(c, shape(1000, 8))
                + moe::sum_rows::<f32>(c, shape(1, 2))
        }),
        ("routing", routing::all),
        ("NF4 and FP8 in blocks", |c| {
            blockwise::dequantize::<bf16>(c, Format::Nf4) + blockwise::dequantize::<f32>(c, Format::Fp8)
        }),
        ("decode", |c| {
            let shape = |heads, kv_heads, head_dim| {
                let (sequences, block_size, pages, max_blocks) = (3, 16, 781, 256);
                DecodeShape { sequences, heads, kv_heads, head_dim, block_size, pages, max_blocks }
            };
            decode::step::<bf16>(c, shape(32, 8, 128), &[4096, 1, 1000], None, 128)
                + decode::step::<bf16>(c, shape(32, 8, 64), &[17, 0, 3333], Some(1024), 64)
                + decode::step::<f16>(c, shape(16, 2, 80), &[9, 8, 7], None, 32)
                + decode::step::<bf16>(c, shape(8, 4, 256), &[300; 3], None, 0)
                + decode::step::<f32>(c, shape(6, 6, 192), &[300; 3], None, 192)
                + draw::likeliest::<bf16>(c, 128_256)
                + draw::likeliest::<f32>(c, 1000)
                + draw::draw::<bf16>(c, 128_256)
                + draw::draw::<f16>(c, 1000)
                + draw::draw::<f32>(c, 8)
                + draw::draw::<f32>(c, 50_280)
                + draw::changes::<bf16>(c, 128_256)
                + draw::changes::<f32>(c, 1032)
                + draw::likelihoods::<bf16>(c, 128_256)
                + draw::likelihoods::<f32>(c, 50_280)
                + decode::copies(c, [64, 8, 128])
                + decode::few_rows::<bf16>(c, &[1], 2048, 8192)
                + decode::few_rows::<f32>(c, &[3], 12, 768)
                + decode::few_rows::<f16>(c, &[4], 16_384, 2048)
                + decode::gated_rows::<bf16>(c, 1, 14_336, 4096)
                + decode::gated_rows::<f16>(c, 4, 5632, 2048)
                + decode::gated_rows::<bf16>(c, 3, 48, 768)
                + decode::few_rows::<bf16>(c, &[2, 0, 5, 1, 0, 17], 1536, 2048)
                + decode::few_rows::<bf16>(c, &[2, 0, 5, 1, 0, 9], 1536, 2048)
                + decode::few_rows::<f16>(c, &[0, 0, 3, 0, 1, 0], 768, 512)
                + decode::few_rows::<f16>(c, &[40, 0, 19], 1536, 768)
                + decode::few_rows::<bf16>(c, &[0, 0, 0, 0, 1, 0], 256, 512)
        }),
        ("gelu", |c| {
            let of = |kind| activation::element_wise::<bf16>(c, 10_008, kind);
            of(Activation::Gelu) + of(Activation::GeluTanh)
        }),
        ("squared relu", |c| {
            let kind = Activation::SquaredRelu;
            activation::element_wise::<bf16>(c, 10_008, kind) + activation::element_wise::<f16>(c, 4096, kind)
        }),
        ("fused softmax", |c| {
            let sizes = [(33, 512), (7, 64), (5, 4096), (3, 16384), (4, 1030), (2, 2047)];
            // Rows that share a plane.
            let short = [(1030, 2), (333, 6), (77, 24), (1001, 120), (50, 40)];
            let sizes = [&sizes[..], &short].concat();
            sizes
                .into_iter()
                .map(|(rows, columns)| fused::runs::<bf16>(c, "softmax", &fused::softmax(), rows, columns))
                .sum()
        }),
        ("fused norm", |c| {
            let sizes = [(33, 1024), (7, 96), (5, 4096), (3, 8192), (4, 1030), (333, 24), (70, 56)];
            sizes
                .map(|(rows, columns)| fused::runs::<bf16>(c, "norm of a sum", &fused::norm(), rows, columns))
                .iter()
                .sum()
        }),
        ("fused dropout", |c| {
            let columns = [1030, 1032, 1031, 1036];
            columns.map(|columns| fused::runs::<bf16>(c, "dropout", &fused::dropout(), 333, columns)).iter().sum()
        }),
        ("fused sums of rows", |c| {
            let sizes = [(8192, 1024), (5001, 772), (3, 4096), (16_001, 4), (40_000, 40), (700, 16_384), (2, 8)];
            let runs = |(rows, columns)| fused::runs::<bf16>(c, "sums", &fused::sums_of_rows(), rows, columns);
            sizes.into_iter().map(runs).sum()
        }),
        ("fused sums of broadcasts", |c| {
            let sizes = [(6000, 1024), (96, 16_384), (48_000, 4), (6, 12)];
            let runs = |(rows, columns)| fused::runs::<bf16>(c, "sums", &fused::sums_of_broadcasts(), rows, columns);
            sizes.into_iter().map(runs).sum()
        }),
        ("fused masks", |c| fused::runs::<bf16>(c, "masked", &fused::masked(), 384, 1032)),
        ("fused long rows", |c| {
            fused::runs::<bf16>(c, "of rows", &fused::of_rows(), 13, 128_256)
                + fused::runs::<bf16>(c, "of rows", &fused::of_rows(), 7, 33_001)
        }),
        ("fused functions", |c| fused::runs::<bf16>(c, "functions", &fused::functions(), 33, 1031)),
        ("dropout", |c| activation::dropout::<bf16>(c, 37, 2056)),
        ("rms norm", |c| {
            norm::rms_norm::<bf16>(c, 700, 4096)
                + norm::rms_norm::<bf16>(c, 33, 1000)
                + norm::rms_norm::<f16>(c, 5, 8192)
                + norm::rms_norm::<bf16>(c, 303, 16_384)
                + norm::rms_norm::<bf16>(c, 70_001, 128)
                + norm::rms_norm::<bf16>(c, 301, 24)
                + norm::rms_norm::<bf16>(c, 37, 256)
                + norm::rms_norm_with_sum::<bf16>(c, 701, 4096)
        }),
        ("head norms", |c| {
            let shape = HeadsShape { tokens: 301, heads: 32, kv_heads: 4, all_heads: 40, head_dim: 128 };
            norm::of_heads::<bf16>(c, shape)
                + norm::of_heads::<f16>(c, HeadsShape { head_dim: 64, ..shape })
                + norm::of_heads::<bf16>(c, HeadsShape { head_dim: 256, tokens: 3, ..shape })
                + norm::of_heads::<bf16>(
                    c,
                    HeadsShape { tokens: 7001, heads: 1, kv_heads: 1, all_heads: 3, head_dim: 8 },
                )
        }),
        ("layer norm", |c| {
            norm::layer_norm::<bf16>(c, 700, 1024)
                + norm::layer_norm::<bf16>(c, 33, 5000)
                + norm::layer_norm::<bf16>(c, 5, 8192)
                + norm::layer_norm::<bf16>(c, 1501, 768)
                + norm::layer_norm::<bf16>(c, 3001, 128)
                + norm::layer_norm_with_sum::<bf16>(c, 701, 4096)
                + norm::plans::<bf16>(c, 301, 4096)
                + norm::plans::<bf16>(c, 1501, 64)
        }),
        ("rope", |c| {
            let shape = RopeShape { rows: 37, batch: 3, heads: 10, all_heads: 12, head_dim: 128, rotated: 128 };
            tokens::rope::<bf16>(c, shape)
                + tokens::rope::<bf16>(c, RopeShape { head_dim: 64, rotated: 64, heads: 12, ..shape })
                + tokens::rope::<bf16>(c, RopeShape { head_dim: 192, rotated: 64, heads: 12, ..shape })
                + tokens::rope::<bf16>(c, RopeShape { head_dim: 256, rotated: 256, heads: 4, ..shape })
                + tokens::rope::<bf16>(c, RopeShape { head_dim: 80, rotated: 80, heads: 8, ..shape })
                + tokens::rope::<f16>(c, RopeShape { head_dim: 512, rotated: 512, heads: 5, ..shape })
        }),
        ("sinks", |c| {
            let shape = SinkShape { seq: 77, batch: 2, heads: 64, head_dim: 64, stride: 128 };
            sinks::of_attention::<bf16>(c, shape)
                + sinks::of_attention::<f16>(c, SinkShape { head_dim: 80, heads: 3, ..shape })
                + sinks::of_attention::<f32>(c, SinkShape { head_dim: 33, heads: 5, ..shape })
        }),
        ("latent keys", |c| {
            let shape = LatentShape { tokens: 74, batch: 2, heads: 128, rope_dim: 64, nope_dim: 128, value_dim: 128 };
            latent::keys::<bf16>(c, shape)
                + latent::keys::<bf16>(c, LatentShape { heads: 5, rope_dim: 48, nope_dim: 8, value_dim: 24, ..shape })
                + latent::keys::<f16>(c, LatentShape { tokens: 3, batch: 1, heads: 33, rope_dim: 16, ..shape })
                + latent::keys::<f32>(c, LatentShape { tokens: 1, batch: 1, heads: 1, rope_dim: 128, ..shape })
        }),
        ("column ranges", |c| {
            let of = ColumnRange { rows: 301, width: 2112, first: 1536, columns: 512 };
            latent::columns::<bf16>(c, of)
                + latent::columns::<bf16>(c, ColumnRange { rows: 3, first: 2104, columns: 8, ..of })
        }),
        ("convolution", |c| {
            let shape = |seq, samples, features| ConvolutionShape { seq, samples, features, kernel: 4 };
            recurrent::causal_convolution::<bf16>(c, shape(2048, 1, 4352), true, true)
                + recurrent::causal_convolution::<f32>(c, shape(333, 3, 4352), true, true)
                + recurrent::causal_convolution::<bf16>(c, shape(1001, 1, 72), false, false)
        }),
        ("gated norm", |c| {
            recurrent::gated_norm::<bf16>(c, GatedShape { rows: 333, groups: 1, features: 4096 })
                + recurrent::gated_norm::<f32>(c, GatedShape { rows: 70, groups: 8, features: 1032 })
                + recurrent::gated_norm::<f16>(c, GatedShape { rows: 9, groups: 1, features: 16_384 })
        }),
        ("state space duality", |c| {
            let shape = SsdShape { seq: 300, samples: 2, heads: 8, groups: 2, head_dim: 64, state: 128, chunk: 128 };
            let small = SsdShape { seq: 130, heads: 12, groups: 1, head_dim: 32, state: 24, chunk: 64, ..shape };
            ssd::recurrence::<bf16>(c, shape, true)
                + ssd::recurrence::<f32>(c, shape, true)
                + ssd::recurrence::<f32>(c, small, false)
                + ssd::recurrence::<f16>(c, small, true)
        }),
        ("gated delta", |c| {
            let shape = SsdShape { seq: 300, samples: 2, heads: 8, groups: 4, head_dim: 128, state: 128, chunk: 64 };
            let small = SsdShape { seq: 70, heads: 4, groups: 4, head_dim: 32, state: 64, chunk: 32, ..shape };
            gated_delta_checks::rule::<bf16>(c, shape, true)
                + gated_delta_checks::rule::<f32>(c, shape, true)
                + gated_delta_checks::rule::<f32>(c, small, false)
                + gated_delta_checks::rule::<f32>(c, SsdShape { state: 256, head_dim: 8, ..small }, true)
                + gated_delta_checks::rule::<f16>(c, small, true)
        }),
        ("cross entropy", |c| {
            let shape = LogitsShape { rows: 70, columns: 1064, valid: 1003, first_row: 5000 };
            let wide = LogitsShape { rows: 33, columns: 20_008, valid: 20_008, first_row: 0 };
            tokens::cross_entropy::<bf16>(c, shape) + tokens::cross_entropy::<bf16>(c, wide)
        }),
        ("embedding", |c| {
            let shape = TableShape { rows: 100, hidden: 2064, first_row: 50, ids: 2000 };
            let small = TableShape { rows: 9, hidden: 64, first_row: 0, ids: 3 };
            let many = TableShape { rows: 3000, hidden: 64, first_row: 50, ids: 9001 };
            // An id of more chunks than a cube has units.
            let one = TableShape { rows: 2, hidden: 64, first_row: 1, ids: 15_000 };
            tokens::embedding::<bf16>(c, shape)
                + tokens::embedding::<bf16>(c, small)
                + tokens::embedding::<bf16>(c, many)
                + tokens::embedding::<bf16>(c, one)
                + tokens::embedding::<f32>(c, shape)
        }),
        ("column sum", |c| {
            rows::column_sum::<bf16>(c, 3001, 1032)
                + rows::column_sum::<bf16>(c, 39, 24)
                + rows::column_sum::<bf16>(c, 1501, 4096)
        }),
        ("small matrices", |c| {
            let pairs = SmallMatrix { rows: 2, columns: 4, strides: [4, 1] };
            let back = SmallMatrix { rows: 4, columns: 2, strides: [1, 4] };
            rows::small_matrix::<bf16, bf16>(c, 40_004, pairs)
                + rows::small_matrix::<bf16, f32>(c, 40_004, back)
                + rows::small_matrix::<f16, f16>(c, 12, back)
                + rows::small_matrix::<f32, f32>(c, 1_002, pairs)
        }),
        ("normalize rows", |c| {
            let shape = NormalizeShape { rows: 1003, columns: 128, softmax: true };
            rows::normalize_rows(c, shape)
                + rows::normalize_rows(c, NormalizeShape { columns: 8, softmax: false, ..shape })
                + rows::normalize_rows(c, NormalizeShape { rows: 13, columns: 1000, softmax: true })
                + rows::normalize_rows(c, NormalizeShape { rows: 7, columns: 60, softmax: false })
        }),
        ("heads", |c| {
            rows::heads::<bf16>(c, [16, 512, 16, 64], 0)
                + rows::heads::<f32>(c, [3, 37, 5, 8], 8)
                + rows::heads::<bf16>(c, [1, 1, 7, 24], 16)
        }),
        ("bf16x3", |c| rows::split_bf16(c, 301, 128) + rows::split_bf16(c, 33, 8)),
        ("accumulate", |c| rows::accumulate::<bf16>(c, 100_000, 0) + rows::accumulate::<bf16>(c, 3001, 3)),
        ("slices", |c| rows::slices::<bf16>(c, 100_000, 7, 0) + rows::slices::<f32>(c, 3001, 3, 5)),
        ("runs", |c| rows::runs(c) + rows::copies(c)),
        ("squares", rows::squares),
        ("adamw", |c| {
            optimizer::adamw::<f32>(c, FloatType::F32)
                + optimizer::adamw::<bf16>(c, FloatType::Bf16)
                + optimizer::adamw::<f16>(c, FloatType::F16)
                + optimizer::adamw_in_16_bits(c)
                + optimizer::adamw_in_8_bits(c)
        }),
        ("sgd and lion", |c| {
            [MomentumRule::Plain, MomentumRule::Sum, MomentumRule::Nesterov, MomentumRule::Lion]
                .map(|rule| optimizer::momentum::<bf16>(c, rule, FloatType::Bf16))
                .into_iter()
                .sum()
        }),
        ("muon", |c| optimizer::muon(c, 10_000, 0, true) + optimizer::muon(c, 3001, 3, false)),
    ]
}
