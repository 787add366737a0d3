//! Initial values of a slice: read from the source, drawn on the GPU, or drawn on the host by all data-parallel ranks
//! together.

use std::ops::Range;

use backend_dist::collective::all_gather;
use backend_dist::mesh::GridKind;
use backend_dist::random;
use backend_dist::shard::{HostFloats, Init, Section, element, into_data};
use backend_dist::startup;
use burn::tensor::{DType, FloatDType, Tensor, TensorData};

use super::{BuildError, ParamBuilder, Result, WeightSource};

/// Elements of a section that are worth sharing the work of drawing them.
const SHARED: usize = 1 << 20;
/// Bytes of weights that wait in host memory for a GPU at most, besides the one that was read last.
const AHEAD: usize = 2 << 30;

impl ParamBuilder<'_> {
    /// The slice's values in one dimension, without autodiff: those of `source`, or random ones.
    pub(super) fn values(
        &self,
        section: &Section,
        init: Init,
        dtype: FloatDType,
        source: Option<&dyn WeightSource>,
    ) -> Result<Tensor<1>> {
        let Some(source) = source else { return Ok(self.drawn(section, init, dtype)) };
        let values = self.read(section, dtype, source)?;
        let bytes = values.bytes().len();
        self.ahead.set(self.ahead.get() + bytes);
        if self.ahead.get() > AHEAD {
            let synced = self.device.sync();
            synced.map_err(|error| BuildError::Weight { name: section.name.clone(), source: error.into() })?;
            self.ahead.set(bytes);
        }
        Ok(self.upload(into_data(values), dtype))
    }

    /// The slice's values of `source` on the host, with their padding.
    pub(super) fn read(&self, section: &Section, dtype: FloatDType, source: &dyn WeightSource) -> Result<HostFloats> {
        let read = source.read_stored(&section.name, &section.global_shape, &section.ranges());
        let values = read.map_err(|source| BuildError::Weight { name: section.name.clone(), source })?;
        startup::note_read(values.bytes().len());
        Ok(values.convert(element(dtype)).pad(section))
    }

    /// Random values: a GPU draws its own; on the host each data-parallel rank draws a part of a large slice.
    fn drawn(&self, section: &Section, init: Init, float: FloatDType) -> Tensor<1> {
        let (len, random) = (section.local_len(), !matches!(init, Init::Constant(_)));
        let (device, dtype) = (self.device.clone().without_autodiff(), DType::from(float));
        if let Some(values) = random::on_device(section, init, self.seed, &device, dtype) {
            return values;
        }
        let draw = |part: Range<usize>| self.upload(random::on_host(section, init, self.seed, part, dtype), float);
        let [dense, experts] = &self.dp_ranks;
        match if self.unit.grid() == GridKind::Dense { dense } else { experts } {
            Some(dp_ranks) if random && len >= SHARED && len.is_multiple_of(dp_ranks.size()) => {
                let part = len / dp_ranks.size();
                all_gather(draw(dp_ranks.rank() * part..(dp_ranks.rank() + 1) * part), 0, dp_ranks)
            }
            _ => draw(0..len),
        }
    }

    fn upload(&self, data: TensorData, dtype: FloatDType) -> Tensor<1> {
        Tensor::from_data(data, (&self.device.clone().without_autodiff(), DType::from(dtype)))
    }
}
