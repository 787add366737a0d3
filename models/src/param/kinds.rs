//! The kinds of parameters: sharded or whole, applied to all positions, to a rank's own ones, or to its own heads.

use backend_dist::shard::{Init, ParamSpec, Section, Unit};
use burn::module::{Param, ParamId};
use burn::tensor::{FloatDType, Tensor};

use super::{ParamBuilder, Result, WeightSource};

/// A parameter's sections, one after the other, each with its distribution.
pub(super) type Sections = Vec<(Section, Init)>;
/// A parameter, or why there is none.
pub(super) type Created<const D: usize> = Result<Param<Tensor<D>>>;

impl ParamBuilder<'_> {
    /// A parameter made of sections, one after the other along the first dimension, each with its distribution.
    ///
    /// # Errors
    /// If the name of the first section is taken, or the source has no fitting values.
    pub fn sections<const D: usize>(&mut self, sections: Sections) -> Created<D> {
        self.create(sections, false)
    }

    /// A parameter made of sections of routed experts of the layer that [`begin`](Self::begin) began, this rank's own
    /// ones ([`local`](super::ExpertParallel::local)), sharded by the coordinate [`etp`](super::ExpertParallel::etp).
    ///
    /// # Panics
    /// Outside layers.
    pub fn expert_sections<const D: usize>(&mut self, sections: Sections) -> Created<D> {
        self.in_experts(|params| params.create(sections, false))
    }

    /// A parameter of sections of routed experts that are whole on each of the ranks that share an expert, of which
    /// each has a part of the gradient.
    ///
    /// # Panics
    /// Outside layers.
    pub fn expert_shares<const D: usize>(&mut self, sections: Sections) -> Created<D> {
        self.in_experts(|params| params.create(sections, true))
    }

    /// What `build` makes belongs to the routed experts of the layer that [`begin`](Self::begin) began.
    pub(super) fn in_experts<T>(&mut self, build: impl FnOnce(&mut Self) -> T) -> T {
        let unit = self.unit;
        self.unit = Unit::Experts(unit.layer().expect("experts are in a layer"));
        let built = build(self);
        self.unit = unit;
        built
    }

    /// State that is whole on every rank and that no gradient changes, `f32` unless the parameters are `f64`: stored
    /// with the weights in checkpoints, but unknown to the optimizer. Under adapters it is frozen as the weights are, and
    /// checkpoints do not have it.
    pub fn state<const D: usize>(&mut self, name: &str, shape: [usize; D], init: Init) -> Created<D> {
        let dtype = if self.dtype == FloatDType::F64 { FloatDType::F64 } else { FloatDType::F32 };
        let section = Section::replicated(name, &shape, self.place());
        let values: Tensor<D> = match self.shared(&[&section], dtype) {
            Some(shared) => shared,
            None => self.values(&section, init, dtype, self.source)?.reshape(shape),
        };
        let frozen = self.has_adapters();
        let spec = ParamSpec { unit: self.unit, trained: false, frozen, ..ParamSpec::new(vec![section], false) };
        let values = if self.device.is_autodiff() { Tensor::from_inner(values) } else { values };
        let param = Param::initialized(ParamId::from(spec.id), values.set_require_grad(false));
        self.registry.register(spec)?;
        Ok(param)
    }

    /// A parameter that is whole on every rank and applied to the whole sequence.
    pub fn replicated<const D: usize>(&mut self, name: &str, shape: [usize; D], init: Init) -> Created<D> {
        self.create(vec![(Section::replicated(name, &shape, self.place()), init)], false)
    }

    /// A parameter that is whole on every rank and applied where activations may be sharded along the sequence:
    /// norms, biases after a row-parallel layer, positions.
    pub fn on_sequence<const D: usize>(&mut self, name: &str, shape: [usize; D], init: Init) -> Created<D> {
        let sequence = self.parallel.sequence;
        self.create(vec![(Section::replicated(name, &shape, self.place()), init)], sequence)
    }

    /// [`on_sequence`](Self::on_sequence) of several global tensors, one after the other along the first dimension.
    pub fn on_sequence_sections<const D: usize>(&mut self, sections: Sections) -> Created<D> {
        self.create(sections, self.parallel.sequence)
    }

    /// A parameter that is whole on every rank and applied to each rank's own heads: every rank has the gradient of its
    /// heads only.
    pub fn on_heads<const D: usize>(&mut self, name: &str, shape: [usize; D], init: Init) -> Created<D> {
        self.create(vec![(Section::replicated(name, &shape, self.place()), init)], true)
    }

    fn create<const D: usize>(&mut self, sections: Sections, partial_gradient: bool) -> Created<D> {
        let trained = !self.freezes(&sections)?;
        let own: Vec<_> = sections.iter().map(|(section, _)| section).collect();
        match self.shared(&own, self.dtype).filter(|_| !(trained && self.device.is_autodiff())) {
            Some(shared) => {
                let sections = sections.into_iter().map(|(section, _)| section).collect();
                self.register(ParamSpec::new(sections, partial_gradient), shared, trained)
            }
            None => self.create_from(self.source, sections, partial_gradient, trained),
        }
    }

    /// A parameter whose values are a source's, if there is one.
    pub(super) fn create_from<const D: usize>(
        &mut self,
        source: Option<&dyn WeightSource>,
        sections: Sections,
        partial_gradient: bool,
        trained: bool,
    ) -> Created<D> {
        let values = |(section, init): &(Section, Init)| self.values(section, *init, self.dtype, source);
        let parts = sections.iter().map(values).collect::<Result<Vec<_>, _>>()?;
        let sections = sections.into_iter().map(|(section, _)| section).collect();
        self.assemble(sections, parts, partial_gradient, trained)
    }

    /// A parameter of the values of its sections, each in one dimension.
    pub(super) fn assemble<const D: usize>(
        &mut self,
        sections: Vec<Section>,
        parts: Vec<Tensor<1>>,
        partial_gradient: bool,
        trained: bool,
    ) -> Created<D> {
        let spec = ParamSpec::new(sections, partial_gradient);
        let shape: [usize; D] = spec.local_shape().try_into().expect("a parameter has the dimensions of its sections");
        let flat = if parts.len() == 1 { parts.into_iter().next() } else { Some(Tensor::cat(parts, 0)) };
        self.register(spec, flat.expect("a parameter has a section").reshape(shape), trained)
    }

    /// A parameter with this tensor, which is without autodiff.
    fn register<const D: usize>(&mut self, spec: ParamSpec, tensor: Tensor<D>, trained: bool) -> Created<D> {
        // Checkpoints of adapters do not have what is frozen under them.
        let frozen = !trained && self.has_adapters();
        let spec = ParamSpec { unit: self.unit, trained, frozen, ..spec };
        let tensor = match (self.device.is_autodiff(), trained) {
            (false, _) => tensor.set_require_grad(false),
            (true, false) => Tensor::from_inner(tensor).set_require_grad(false),
            (true, true) => Tensor::from_inner(tensor).require_grad(),
        };
        let param = Param::initialized(ParamId::from(spec.id), tensor);
        self.registry.register(spec)?;
        Ok(param)
    }
}
