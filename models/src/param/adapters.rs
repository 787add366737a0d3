//! Parameters of low-rank adapters. While there are adapters, all other parameters are frozen.

use std::sync::Arc;

use backend_dist::comm::Group;
use backend_dist::ops::blockwise::QuantizedWeight;
use backend_dist::shard::{Init, Section};
use burn::tensor::{DType, FloatDType, Tensor};

use super::kinds::{Created, Sections};
use super::{ParamBuilder, Result, WeightSource};
use crate::layers::LinearWeight;
use crate::lora::{BaseFormat, LayerAdapter, LoraPlan, Quantizer};

/// Which layers have adapters, and where these have their values from.
pub(super) struct Adapters<'a> {
    plan: Arc<LoraPlan>,
    source: Option<&'a dyn WeightSource>,
}

impl<'a> ParamBuilder<'a> {
    /// The layers of `plan` have adapters, which are trained; everything else is frozen. Values of the adapters are
    /// those of `source`; without one, those that peft starts with, under which the model computes what it does
    /// without adapters.
    pub fn with_lora(mut self, plan: &Arc<LoraPlan>, source: Option<&'a dyn WeightSource>) -> Self {
        self.lora = Some(Adapters { plan: plan.clone(), source });
        self
    }

    /// The frozen weights of linear layers are stored in few bits, while there are adapters; `None` stores them as all
    /// parameters.
    pub fn with_base(mut self, base: Option<BaseFormat>) -> Self {
        self.base = base;
        self
    }

    /// The weight of a linear layer, made of sections one after the other.
    ///
    /// # Errors
    /// As [`ParamBuilder::sections`], and if sections in few bits are not whole blocks.
    pub(crate) fn linear_weight(&mut self, sections: Sections) -> Result<LinearWeight> {
        match self.stored(&sections, &self.parallel.group)? {
            Some(stored) => Ok(stored.into()),
            None => Ok(self.sections(sections)?.into()),
        }
    }

    /// The matrices of this rank's routed experts, as [`ParamBuilder::linear_weight`].
    ///
    /// # Panics
    /// Outside layers.
    pub(crate) fn expert_weight(&mut self, sections: Sections) -> Result<LinearWeight> {
        match self.stored(&sections, &self.experts().parts)? {
            Some(stored) => Ok(stored.into()),
            None => Ok(self.expert_sections(sections)?.into()),
        }
    }

    /// Sections in few bits, if frozen weights are; `group` are the ranks that share each.
    fn stored(&self, sections: &[(Section, Init)], group: &Group) -> Result<Option<QuantizedWeight>> {
        let Some(base) = self.base.filter(|_| self.has_adapters()) else { return Ok(None) };
        let mut quantizer = Quantizer::new(base, group);
        for (section, init) in sections {
            let values = match self.source {
                Some(source) => self.read(section, FloatDType::F32, source)?.into_f32(),
                None => {
                    let values = self.values(section, *init, FloatDType::F32, None)?.into_data();
                    values.try_into_vec().expect("values were asked for in f32")
                }
            };
            quantizer.add(section, &values)?;
        }
        Ok(Some(quantizer.finish(DType::from(self.dtype), &self.device)))
    }

    /// Whether there are adapters, so that other parameters are frozen.
    pub(super) fn has_adapters(&self) -> bool {
        self.lora.is_some()
    }

    /// The adapter of the layer of our name, if it has one.
    pub(crate) fn adapter_of(&self, layer: &str) -> Option<LayerAdapter> {
        self.lora.as_ref().and_then(|lora| lora.plan.of_layer(layer))
    }

    /// A parameter of an adapter, made of sections one after the other.
    pub(crate) fn adapter<const D: usize>(&mut self, sections: Sections) -> Created<D> {
        self.create_adapter(sections, false)
    }

    /// The same, applied where activations may be sharded along the sequence.
    pub(crate) fn adapter_on_sequence<const D: usize>(&mut self, sections: Sections) -> Created<D> {
        self.create_adapter(sections, self.parallel.sequence)
    }

    /// A parameter of adapters of this rank's routed experts, as [`ParamBuilder::expert_sections`]; with `is_whole` as
    /// [`ParamBuilder::expert_shares`].
    ///
    /// # Panics
    /// Outside layers.
    pub(crate) fn expert_adapter<const D: usize>(&mut self, sections: Sections, is_whole: bool) -> Created<D> {
        self.in_experts(|params| params.create_adapter(sections, is_whole))
    }

    /// A parameter of routed experts that starts with these values of its sections, one after the other, as
    /// [`ParamBuilder::expert_adapter`].
    ///
    /// # Panics
    /// Outside layers.
    pub(crate) fn expert_adapter_of_values(
        &mut self,
        sections: Vec<Section>,
        values: Tensor<1>,
        is_whole: bool,
    ) -> Created<1> {
        if self.lora.as_ref().is_some_and(|lora| lora.source.is_some()) {
            return self.expert_adapter(sections.into_iter().map(|section| (section, Init::ONES)).collect(), is_whole);
        }
        let values = values.cast(DType::from(self.dtype));
        self.in_experts(|params| params.assemble(sections, vec![values], is_whole, true))
    }

    /// A parameter that starts with these values of its section, unless the adapters have a source.
    pub(crate) fn adapter_of_values(&mut self, section: Section, values: Tensor<1>, on_sequence: bool) -> Created<1> {
        let source = self.lora.as_ref().and_then(|lora| lora.source);
        let values = match source {
            Some(_) => self.values(&section, Init::ONES, self.dtype, source)?,
            None => values.cast(DType::from(self.dtype)),
        };
        self.assemble(vec![section], vec![values], on_sequence && self.parallel.sequence, true)
    }

    fn create_adapter<const D: usize>(&mut self, sections: Sections, partial_gradient: bool) -> Created<D> {
        let source = self.lora.as_ref().and_then(|lora| lora.source);
        self.create_from(source, sections, partial_gradient, true)
    }
}
