//! Frozen weights in few bits (QLoRA): which layouts their blocks allow, and a rank's part of them.
//!
//! A rank has the codes and scales of the whole matrix, so every layout computes what one device does. For that its part
//! is whole blocks; the mean and the 8-bit scales of NF4 are those of all blocks, which the ranks that share a matrix gather.

use backend_dist::comm::Group;
use backend_dist::mesh::Nearest;
use backend_dist::ops::blockwise::{Format, QuantizedWeight, Section as Part, Sizes, fp8, nf4, tables};
use backend_dist::shard::Section;
use burn::tensor::{DType, Device};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::{LoraError, linear_layers, of_expert};
use crate::names::{NameMap, is_router};

/// Linear layers that are whole on every rank ([`ReplicatedLinear`](crate::layers::ReplicatedLinear)), and stay as they are.
const WHOLE: [&str; 3] = ["q_a_proj", "kv_a_proj_with_mqa", "eh_proj"];

/// How the frozen weights of linear layers are stored, under an adapter or not, those of routed experts too. Embeddings,
/// the output layer, norms, routers and layers that are whole on every rank stay as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BaseFormat {
    /// NF4 with double quantisation, in blocks of 64 elements of a matrix row, as bitsandbytes.
    Nf4,
    /// E4M3 in blocks of 128 × 128 elements, as DeepSeek-V3.
    Fp8Block,
}

impl BaseFormat {
    /// The format of its blocks.
    pub fn format(self) -> Format {
        match self {
            Self::Nf4 => Format::Nf4,
            Self::Fp8Block => Format::Fp8,
        }
    }

    /// Elements of a row, and rows, that a rank's part of a sharded dimension must be a multiple of.
    fn blocks(self) -> [usize; 2] {
        match self {
            Self::Nf4 => [nf4::BLOCK, 1],
            Self::Fp8Block => [fp8::BLOCK, fp8::BLOCK],
        }
    }

    /// What every row's number of elements is a multiple of, sharded or not.
    fn columns(self) -> usize {
        match self {
            Self::Nf4 => nf4::BLOCK,
            Self::Fp8Block => 8,
        }
    }

    /// Whether all layers of a model with these names can be shared by `tp` tensor-parallel ranks, and an expert by `etp`.
    ///
    /// # Errors
    /// The first that cannot, with the nearest legal numbers of ranks.
    pub fn check(self, names: &NameMap, [tp, etp]: [usize; 2]) -> Result<(), LoraError> {
        for layer in linear_layers(names) {
            let is_whole = WHOLE.iter().any(|name| layer.ours.ends_with(name));
            if layer.theirs == "lm_head" || is_router(layer.theirs) || is_whole {
                continue;
            }
            let (key, ranks) = match of_expert(layer.ours) {
                Some(_) => ("expert-tensor-parallel", etp),
                None => ("tensor-parallel", tp),
            };
            let [rows, columns] = layer.shape;
            let inputs_are_shared = ["o_proj", "out_proj", "down_proj"].iter().any(|name| layer.ours.ends_with(name));
            // Ranks may share heads of keys and values; what they then have is checked when they are built.
            let is_shared = !layer.ours.ends_with("k_proj") && !layer.ours.ends_with("v_proj");
            let ([block, row_block], legal_columns) = (self.blocks(), columns.is_multiple_of(self.columns()));
            let legal = |tp: usize| match inputs_are_shared {
                true => tp == 1 || columns.is_multiple_of(tp * block),
                false => tp == 1 || !is_shared || rows.is_multiple_of(tp * row_block),
            };
            if !legal_columns {
                let what = format!("its {columns} inputs are not a multiple of {}", self.columns());
                return Err(LoraError::Base { layer: layer.ours.into(), what });
            }
            if !legal(ranks) {
                let what = format!(
                    "a rank's part of {rows} × {columns} is not whole blocks with {key} = {ranks}; nearest legal: {}",
                    Nearest::where_legal(ranks, 1024, legal)
                );
                return Err(LoraError::Base { layer: layer.ours.into(), what });
            }
        }
        Ok(())
    }
}

/// Rows that a thread quantises at a time: whole blocks of either format.
const AT_ONCE: usize = 128;

/// A rank's sections of matrices, one after the other along the first dimension, while they are quantised.
pub(crate) struct Quantizer<'a> {
    base: BaseFormat,
    group: &'a Group,
    bytes: Vec<u8>,
    scales: Vec<f32>,
    parts: Vec<Part>,
}

impl<'a> Quantizer<'a> {
    /// None yet; `group` are the ranks that share layers.
    pub fn new(base: BaseFormat, group: &'a Group) -> Self {
        let scales = if base == BaseFormat::Nf4 { tables() } else { Vec::new() };
        Self { base, group, bytes: Vec::new(), scales, parts: Vec::new() }
    }

    /// Adds a section with its values. All ranks of the group call it together.
    ///
    /// # Errors
    /// If it is not whole blocks.
    pub fn add(&mut self, section: &Section, values: &[f32]) -> Result<(), LoraError> {
        let (local, refused) =
            (section.local_shape(), |what: String| LoraError::Base { layer: section.name.clone(), what });
        let (rows, columns) = (local[0], local[1]);
        let [block, row_block] = self.base.blocks();
        let whole = match section.split.filter(|split| split.parts > 1).map(|split| split.dim) {
            Some(0) => rows.is_multiple_of(row_block),
            Some(_) => columns.is_multiple_of(block),
            None => true,
        };
        if !whole || !columns.is_multiple_of(self.base.columns()) {
            return Err(refused(format!(
                "this rank's part, {rows} × {columns}, is not whole blocks of {block} elements"
            )));
        }
        let sizes = Sizes { rows, columns };
        let mut part = Part { codes: self.bytes.len(), scales: self.scales.len(), ..Part::whole(sizes) };
        match self.base {
            BaseFormat::Nf4 => {
                let of_parts: Vec<_> = values.par_chunks(AT_ONCE * columns).map(nf4::quantize_blocks).collect();
                let (codes, amax): (Vec<_>, Vec<_>) = of_parts.into_iter().unzip();
                let (codes, amax) = (codes.concat(), amax.concat());
                let (first, stride) = place(section);
                let scales = nf4::quantize_scales(&self.of_all_ranks(section, amax));
                let own = (0..rows).flat_map(|row| first + row * stride..first + row * stride + columns / nf4::BLOCK);
                self.bytes.extend(codes);
                part = Part {
                    amax: self.bytes.len(),
                    offset: scales.offset,
                    first_block: first,
                    row_blocks: stride,
                    ..part
                };
                self.bytes.extend(own.map(|block| scales.amax[block]));
                self.scales.extend(scales.nested);
            }
            BaseFormat::Fp8Block => {
                let rows_of = |values: &[f32]| Sizes { rows: values.len() / columns, columns };
                let of_parts = values.par_chunks(AT_ONCE * columns).map(|x| fp8::quantize(x, rows_of(x)));
                for (codes, scales) in of_parts.collect::<Vec<_>>() {
                    self.bytes.extend(codes);
                    self.scales.extend(scales);
                }
            }
        }
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        self.parts.push(part);
        Ok(())
    }

    /// The amax of all blocks of the matrix, of which this rank has some.
    fn of_all_ranks(&self, section: &Section, own: Vec<f32>) -> Vec<f32> {
        let Some(split) = section.split.filter(|split| split.parts > 1) else { return own };
        let of_ranks = self.group.all_gather_host(own);
        let parts: Vec<&Vec<f32>> = of_ranks.iter().step_by(section.copies).collect();
        match split.dim {
            0 => parts.into_iter().flatten().copied().collect(),
            _ => {
                let width = section.local_shape()[1] / nf4::BLOCK;
                let row = |row: usize| parts.iter().flat_map(move |part| &part[row * width..(row + 1) * width]);
                (0..section.local_shape()[0]).flat_map(row).copied().collect()
            }
        }
    }

    /// The sections on a device, as `dtype` where they are used.
    pub fn finish(mut self, dtype: DType, device: &Device) -> QuantizedWeight {
        // A tensor keeps what a vector has allocated.
        self.bytes.shrink_to_fit();
        self.scales.shrink_to_fit();
        QuantizedWeight::new(self.base.format(), (self.bytes, self.scales), self.parts, dtype, device)
    }
}

/// The number of a section's first NF4 block in its matrix, and the blocks of a row of that.
fn place(section: &Section) -> (usize, usize) {
    let (ranges, stride) = (section.ranges(), section.global_shape[1] / nf4::BLOCK);
    (ranges[0].start * stride + ranges[1].start / nf4::BLOCK, stride)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeepSeekV3Config, LlamaConfig, MixtralConfig, MixtralVariant, ModelConfig};

    fn experts(variant: MixtralVariant) -> NameMap {
        let (hidden_size, intermediate_size, head_dim) = (256, 384, 32);
        MixtralConfig { variant, hidden_size, intermediate_size, head_dim, ..MixtralConfig::tiny() }.hf_names()
    }

    #[test]
    fn layouts_that_cut_blocks_are_refused_with_the_nearest() {
        let config = crate::sized! { LlamaConfig::tiny();
            hidden_size: 256, intermediate_size: 384, num_attention_heads: 8, num_key_value_heads: 2, head_dim: 32
        };
        let names = config.hf_names();
        assert_eq!([1, 2].map(|tp| BaseFormat::Nf4.check(&names, [tp, tp])), [Ok(()), Ok(())]);
        let refused = BaseFormat::Nf4.check(&names, [4, 1]).unwrap_err().to_string();
        assert!(refused.contains("down_proj") && refused.contains("nearest legal: 3, 6"), "{refused}");
        let refused = BaseFormat::Fp8Block.check(&names, [2, 1]).unwrap_err().to_string();
        assert!(refused.contains("384") && refused.contains("nearest legal: 1, 3"), "{refused}");
        let experts = MixtralConfig { hidden_size: 256, intermediate_size: 384, ..MixtralConfig::tiny() }.hf_names();
        assert_eq!(BaseFormat::Nf4.check(&experts, [1, 2]), Ok(()));
        let refused = BaseFormat::Nf4.check(&experts, [1, 4]).unwrap_err().to_string();
        assert!(refused.contains("experts.0.down_proj") && refused.contains("expert-tensor-parallel = 4"), "{refused}");
        let odd = LlamaConfig { hidden_size: 96, ..config };
        let refused = BaseFormat::Nf4.check(&odd.hf_names(), [1, 1]).unwrap_err().to_string();
        assert!(refused.contains("its 96 inputs are not a multiple of 64"), "{refused}");
    }

    /// Routers, the gate of a shared expert, and projections to the latents of attention are whole on every rank.
    #[test]
    fn layers_that_no_rank_shares_refuse_no_layout() {
        assert_eq!(BaseFormat::Nf4.check(&experts(MixtralVariant::Qwen2Moe), [2, 1]), Ok(()));
        assert_eq!(BaseFormat::Fp8Block.check(&experts(MixtralVariant::GptOss), [2, 1]), Ok(()));
        let latent = crate::sized! { DeepSeekV3Config::tiny();
            intermediate_size: 256, moe_intermediate_size: 256, qk_nope_head_dim: 32, qk_rope_head_dim: 32,
            v_head_dim: 32
        };
        assert_eq!(BaseFormat::Fp8Block.check(&latent.hf_names(), [2, 1]), Ok(()));
    }

    /// gpt-oss has the experts of a layer in one tensor.
    #[test]
    fn a_layout_that_cuts_blocks_of_stacked_experts_is_refused() {
        let names = experts(MixtralVariant::GptOss);
        assert_eq!(BaseFormat::Nf4.check(&names, [1, 3]), Ok(()));
        let refused = BaseFormat::Nf4.check(&names, [1, 4]).unwrap_err().to_string();
        assert!(refused.contains("experts.0.down_proj") && refused.contains("expert-tensor-parallel = 4"), "{refused}");
        assert!(refused.contains("nearest legal: 3, 6"), "{refused}");
    }
}
