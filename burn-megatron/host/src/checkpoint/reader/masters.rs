//! Master weights that are saved as remainders of bf16 weights.

use std::ops::Range;

use kernels_cubecl::narrow::join;
use safetensors::Dtype;

use super::super::Kind;
use super::super::error::{CheckpointError, Result};
use super::super::names::MANIFEST;
use super::Checkpoint;

impl Checkpoint {
    /// Whether there is a tensor of this kind and name to [`read`](Checkpoint::read); master weights also where there are
    /// remainders of them.
    pub fn holds(&self, kind: Kind, name: &str) -> bool {
        self.tensor(kind, name).is_some() || self.is_joined(kind, name)
    }

    /// Whether these are master weights of which only remainders are stored.
    pub(super) fn is_joined(&self, kind: Kind, name: &str) -> bool {
        kind == Kind::Master && self.tensor(kind, name).is_none() && self.tensor(Kind::Remainder, name).is_some()
    }

    /// A box of fp32 master weights, from weights and remainders.
    pub(super) fn joined(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<(Dtype, Vec<u8>)> {
        let half = |kind: Kind, legal: Dtype| -> Result<Vec<u8>> {
            let (saved, bytes) = self.read(kind, name, shape, ranges)?;
            let what = || {
                let what = format!("holds `{kind}/{name}` in {saved}; remainders are of BF16 weights and are I16");
                CheckpointError::file(&self.path.join(MANIFEST), what)
            };
            if saved == legal { Ok(bytes) } else { Err(what()) }
        };
        let (weights, remainders) = (half(Kind::Weight, Dtype::BF16)?, half(Kind::Remainder, Dtype::I16)?);
        let word = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
        let pairs = weights.chunks_exact(2).zip(remainders.chunks_exact(2));
        let masters = pairs.flat_map(|(weight, remainder)| join(word(weight), word(remainder)).to_le_bytes());
        Ok((Dtype::F32, masters.collect()))
    }
}
