//! The types in which the optimizer keeps its states, and where an element lies in its global tensor.

use super::flat::wide;
use super::layout::Unit;
use backend_dist::gpu::buffer::{self, BLOCK, Place};
use backend_dist::shard::stable_hash;
use burn::tensor::{DType, Tensor, TensorData};
use half::bf16;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The type of a moment or a main gradient. With `f64` weights every state is `f64`.
///
/// Moments in bf16 are computed in fp32 and rounded stochastically when they are stored: down or up, with the
/// probabilities that make the mean exact. Rounding to nearest, as Megatron-LM does it, loses every change of less than
/// half of the last digit: with `beta2 = 0.999` a second moment in bf16 could not decay, because a thousandth is less
/// than half of its last digit. The random bits are a function of the tensor's name, the element's global index and the
/// number of the update, so that every layout rounds alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StateDtype {
    /// fp32: 4 bytes an element.
    #[default]
    F32,
    /// bf16: 2 bytes an element.
    Bf16,
    /// 8 bits, and a scale for each block of 256 elements ([`backend_dist::gpu::buffer::Map`]): for both moments or none, not for gradients. Rounded to
    /// nearest, as in bitsandbytes and torchao; what is less than the step of a code is lost in the element, but a block's
    /// scale follows its greatest element.
    #[serde(rename = "8bit")]
    Bits8,
}

impl StateDtype {
    /// The value of its key.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Bits8 => "8bit",
        }
    }

    /// Bytes of a block of 256 elements.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4 * BLOCK,
            Self::Bf16 => 2 * BLOCK,
            Self::Bits8 => BLOCK + 4,
        }
    }

    /// The tensor type next to weights of type `param`, if the state is kept in one.
    pub(super) fn with(self, param: DType) -> DType {
        match (wide(param), self) {
            (DType::F32, Self::Bf16) => DType::BF16,
            (wide, _) => wide,
        }
    }
}

/// How the master weights of `bf16` weights are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MainParamsDtype {
    /// As fp32 copies: 4 bytes an element.
    #[default]
    F32,
    /// As the 16 bits that fp32 has and the bf16 weight has not (TransformerEngine's `store_param_remainders`): 2 bytes an
    /// element. Weight and remainder together are the fp32 master, bit for bit. One thing differs from fp32 copies: a
    /// master halfway between two bf16 numbers is rounded away from zero, not to the even one. CPU ranks keep fp32 copies
    /// and round the same way.
    Bf16Remainder,
}

impl MainParamsDtype {
    /// Bytes of an element, in addition to the weight.
    pub fn bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }
}

/// The types of an optimizer's states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateDtypes {
    /// First moment.
    pub exp_avg: StateDtype,
    /// Second moment.
    pub exp_avg_sq: StateDtype,
    /// Main gradients.
    pub main_grads: StateDtype,
    /// Master weights.
    pub main_params: MainParamsDtype,
}

impl StateDtypes {
    /// Whether moments next to weights of type `param` are in 8 bits.
    pub(super) fn in_blocks(&self, param: DType) -> bool {
        wide(param) == DType::F32 && self.exp_avg == StateDtype::Bits8 && self.exp_avg_sq == StateDtype::Bits8
    }

    /// Whether masters of weights of type `param` are weights with remainders.
    pub(super) fn splits(&self, param: DType) -> bool {
        param == DType::BF16 && self.main_params == MainParamsDtype::Bf16Remainder
    }
}

/// Where the elements `range` of a bucket, all of them of `unit`, lie in the unit's global tensor.
pub(super) fn place(unit: &Unit, range: &Range<usize>) -> Place {
    let section = &unit.section;
    let (block, stride, offset) = match &section.split {
        None => (unit.range.len(), 0, 0),
        Some(split) => {
            let inner: usize = section.global_shape[split.dim + 1..].iter().product();
            let local = split.padded / split.parts * inner;
            (local, section.global_shape[split.dim] * inner, split.part * local)
        }
    };
    let name = stable_hash(&section.name);
    Place {
        key: (name ^ (name >> 32)) as u32,
        first: (range.start - unit.range.start) as u32,
        block: block.max(1) as u32,
        stride: stride as u32,
        offset: offset as u32,
    }
}

/// fp32 values as bf16 weights of masters with remainders.
pub(super) fn weights_of(values: Tensor<1>) -> Tensor<1> {
    let (device, data) = (values.device(), values.into_data());
    let len = data.num_elements();
    let weights: Vec<bf16> = data.iter::<f32>().map(weight_of).collect();
    Tensor::from_data(TensorData::new(weights, [len]), (&device, DType::BF16))
}

/// The bf16 weight of an fp32 master with a remainder.
pub(super) fn weight_of(master: f32) -> bf16 {
    bf16::from_bits(buffer::split(master).0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use backend_dist::shard::{GroupPosition, Section};

    /// An element has the same random bits in a slice along any dimension as in the whole tensor.
    #[test]
    fn places_are_those_of_global_tensors() {
        let unit = |section: Section| {
            let range = 10..10 + section.local_len();
            Unit { slot: 0, section, range, decays: true, partial: None, matrix: false }
        };
        let shape = [3, 8, 2];
        let whole = unit(Section::replicated("w", &shape, GroupPosition { rank: 0, size: 1 }));
        let global: Vec<u32> = {
            let place = place(&whole, &whole.range);
            (0..48).map(|i| place.random(i, 5)).collect()
        };
        for (dim, padded) in [(0, 4), (1, 8), (2, 2)] {
            for rank in 0..2 {
                let section = Section::split_padded("w", &shape, dim, 2, padded, GroupPosition { rank, size: 2 });
                let expected = section.slice(&global);
                let unit = unit(section);
                for start in [0, 5] {
                    let place = place(&unit, &(10 + start..unit.range.end));
                    for (i, expected) in expected[start..].iter().enumerate().filter(|(_, word)| **word != 0) {
                        assert_eq!(place.random(i as u32, 5), *expected, "dim {dim} rank {rank} element {i}");
                    }
                }
            }
        }
        let other = unit(Section { name: "v".into(), ..whole.section.clone() });
        assert_ne!(place(&other, &other.range).random(0, 5), global[0]);
    }
}
