//! Creates a rank's parameters and records what each of them is a slice of.

use std::collections::BTreeMap;
use std::ops::Range;

use backend_dist::collective::all_gather;
use backend_dist::comm::Group;
use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::{Axis, GridKind};
use backend_dist::ops::LOGITS_AT_ONCE;
use backend_dist::ops::fp8::{Fp8Linear, Fp8Recipe};
use backend_dist::random;
use backend_dist::shard::{HostTensor, Init, ParamSpec, Place, Registry, RegistryError, Section, Unit};
use burn::module::{Param, ParamId};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use thiserror::Error;

use crate::config::ConfigError;
use crate::fp8::Fp8Config;
use crate::layout::ModelLayoutError;
use crate::part::Part;
use crate::recompute::Recompute;

/// Where initial weights come from when they are not random.
pub trait WeightSource: Send + Sync {
    /// The values of the box `ranges` (one range per dimension) of the global tensor `name`, row-major. An empty box
    /// has no values but its tensor must exist.
    ///
    /// # Errors
    /// If the tensor does not exist, has another shape than `shape`, or cannot be read.
    fn read(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<f64>, BoxError>;
}

/// Global tensors in memory, by name.
impl WeightSource for BTreeMap<String, HostTensor> {
    fn read(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<f64>, BoxError> {
        let tensor = self.get(name).ok_or("there is no tensor of this name")?;
        if tensor.shape != shape {
            return Err(format!("its shape is {:?}, the model needs {shape:?}", tensor.shape).into());
        }
        Ok(tensor.read_box(ranges))
    }
}

/// Why a model cannot be built.
#[derive(Debug, Error)]
pub enum BuildError {
    /// The model's sizes contradict each other.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The model does not fit the layout.
    #[error(transparent)]
    Layout(#[from] ModelLayoutError),
    /// Two parameters have the same name.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// A weight could not be read from its source.
    #[error("weight `{name}`: {source}")]
    Weight {
        /// Global name.
        name: String,
        /// What the source says.
        source: BoxError,
    },
}

/// A rank's place in its tensor parallel group, as every parallel layer needs it.
#[derive(Clone, Debug)]
pub struct TensorParallel {
    /// The ranks that share each layer.
    pub group: Group,
    /// Activations between tensor parallel regions are cut along the sequence.
    pub sequence: bool,
    /// Where the group has a device link its exchanges run beside the matrix products.
    pub overlap: bool,
    /// Logits that a rank holds at a time, see [`positions_at_once`](backend_dist::ops::positions_at_once).
    pub logits_at_once: usize,
}

impl TensorParallel {
    /// Position and size, for sections.
    pub fn place(&self) -> Place {
        Place { rank: self.group.rank(), size: self.group.size() }
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// The smallest number of positions, at least `needed`, that can be cut along the sequence if it is.
    pub fn positions(&self, needed: usize) -> usize {
        if self.sequence { needed.next_multiple_of(self.size()) } else { needed }
    }

    /// Length of the sequence of which this rank has `rows` positions.
    pub fn sequence_length(&self, rows: usize) -> usize {
        if self.sequence { rows * self.size() } else { rows }
    }

    /// Which of the positions of a tensor parallel region this rank has, if it has `rows` of them.
    pub fn own_rows(&self, rows: usize) -> Range<usize> {
        let first = if self.sequence { rows * self.group.rank() } else { 0 };
        first..first + rows
    }
}

/// A rank's place among the ranks that together hold the routed experts of a layer.
#[derive(Clone, Debug)]
pub struct ExpertParallel {
    /// The ranks that hold all experts of a layer once, and the tokens that go to them: rank `ep.rank * etp.size + etp.rank`.
    pub group: Group,
    /// Place among the ranks that cut an expert into parts.
    pub etp: Place,
    /// Place among the ranks that divide the experts among themselves.
    pub ep: Place,
}

impl ExpertParallel {
    fn of(rank: &Rank) -> Self {
        let place = |axis, at| Place { rank: at, size: rank.mesh.axis_size(axis) };
        let (etp, ep) = (place(Axis::Etp, rank.coords.etp), place(Axis::Ep, rank.coords.ep));
        Self { group: rank.group(Axis::EtpEp), etp, ep }
    }

    /// Which of the layer's experts this rank holds: contiguous blocks, in the order of the ranks, as in Megatron-LM
    /// (`megatron/core/transformer/moe/moe_layer.py`, `local_expert_indices`).
    ///
    /// # Panics
    /// If the ranks do not divide the experts.
    pub fn local(&self, experts: usize) -> Range<usize> {
        let Place { rank, size } = self.ep;
        assert!(experts.is_multiple_of(size), "expert-parallel {size} does not divide {experts} experts");
        let count = experts / size;
        rank * count..(rank + 1) * count
    }
}

/// Creates parameters for one rank: random values that do not depend on the layout, or a source's values, under stable
/// ids, each recorded in the [`Registry`].
pub struct ParamBuilder<'a> {
    parallel: TensorParallel,
    experts: ExpertParallel,
    device: Device,
    dtype: FloatDType,
    seed: u64,
    source: Option<&'a dyn WeightSource>,
    fp32_norms: bool,
    part: Option<Part>,
    unit: Unit,
    recompute: Recompute,
    /// The recipe, and the layers that have it.
    fp8: Option<(Fp8Recipe, Range<usize>)>,
    /// That share the work of drawing: of dense parameters, and of experts.
    replicas: [Option<Group>; 2],
    expert_replicas: Group,
    /// All ranks that build the same layers.
    stage: Group,
    registry: Registry,
}

/// Elements of a section that are worth sharing the work of drawing them.
const SHARED: usize = 1 << 20;

impl<'a> ParamBuilder<'a> {
    /// Random parameters of `dtype` on the rank's device, tracked by autodiff. Equal seeds give equal global tensors
    /// in every layout.
    pub fn new(rank: &Rank, dtype: FloatDType, seed: u64) -> Self {
        Self {
            parallel: TensorParallel {
                group: rank.group(Axis::Tp),
                sequence: rank.mesh.layout().sequence_parallel(),
                overlap: true,
                logits_at_once: LOGITS_AT_ONCE,
            },
            experts: ExpertParallel::of(rank),
            device: rank.device.clone().autodiff(),
            dtype,
            seed,
            source: None,
            fp32_norms: false,
            part: None,
            unit: Unit::default(),
            recompute: Recompute::default(),
            fp8: None,
            replicas: [None, None],
            expert_replicas: rank.group(Axis::Edp),
            stage: rank.group(Axis::TpDpCp),
            registry: Registry::default(),
        }
    }

    /// The ranks of `replicas` build the same parameters at the same time and share the work of drawing random values, as
    /// those that hold the same experts do.
    pub fn with_replicas(mut self, replicas: Group) -> Self {
        // Between processes, drawing is quicker than sending.
        self.replicas = [replicas, self.expert_replicas.clone()]
            .map(|replicas| Some(replicas).filter(|replicas| replicas.size() > 1 && replicas.is_in_one_process()));
        self
    }

    /// Takes every value from `source` instead of random numbers.
    pub fn with_source(mut self, source: &'a dyn WeightSource) -> Self {
        self.source = Some(source);
        self
    }

    /// Only this part of the model is built, as a pipeline stage.
    pub fn with_part(mut self, part: Part) -> Self {
        self.part = Some(part);
        self
    }

    /// The part to build; `None` is the whole model.
    pub fn part(&self) -> Option<&Part> {
        self.part.as_ref()
    }

    /// The part to build of a model of `layers` layers.
    pub fn part_of(&self, layers: usize) -> Part {
        self.part.clone().unwrap_or_else(|| Part::whole(layers))
    }

    /// What is created from here on belongs to `unit`.
    pub fn begin(&mut self, unit: Unit) {
        self.unit = unit;
    }

    /// What [`begin`](Self::begin) began.
    pub fn unit(&self) -> Unit {
        self.unit
    }

    /// Creates parameters without autodiff, for evaluation and generation only.
    pub fn without_autodiff(mut self) -> Self {
        self.device = self.device.without_autodiff();
        self
    }

    /// Norms without a bias round to fp32 although the parameters are `f64`, as in Hugging Face transformers.
    pub fn with_fp32_norms(mut self) -> Self {
        self.fp32_norms = true;
        self
    }

    /// Whether [`ParamBuilder::with_fp32_norms`] was asked for.
    pub fn has_fp32_norms(&self) -> bool {
        self.fp32_norms
    }

    /// Layers drop what selective recomputation says and compute it again in the backward pass.
    pub fn with_recompute(mut self, recompute: &Recompute) -> Self {
        self.recompute = recompute.clone();
        self
    }

    /// Whether exchanges of tensor parallelism run beside the matrix products where they can, as they do without this
    /// (Megatron's `--tp-comm-overlap`).
    pub fn with_tp_comm_overlap(mut self, overlap: bool) -> Self {
        self.parallel.overlap = overlap;
        self
    }

    /// Output layers compute losses with about this many logits at a time, [`LOGITS_AT_ONCE`] without this.
    pub fn with_logits_at_once(mut self, logits: usize) -> Self {
        self.parallel.logits_at_once = logits;
        self
    }

    /// What [`ParamBuilder::with_recompute`] asked for; nothing without it.
    pub fn recompute(&self) -> &Recompute {
        &self.recompute
    }

    /// Linear layers of the blocks multiply in FP8, in a model of `layers` blocks.
    pub fn with_fp8(mut self, fp8: &Fp8Config, layers: usize) -> Self {
        self.fp8 = fp8.recipe().map(|recipe| (recipe, fp8.layers(layers)));
        self
    }

    /// The FP8 side of the linear layer `name` of what [`ParamBuilder::begin`] began.
    pub fn fp8_linear(&self, name: &str) -> Option<Fp8Linear> {
        let (recipe, layers) = self.fp8.as_ref()?;
        let inside = matches!(self.unit, Unit::Layer(layer) if layers.contains(&layer));
        inside.then(|| Fp8Linear::new(name, *recipe, self.parallel.group.clone()))
    }

    /// The tensor parallel group that layers are built for.
    pub fn parallel(&self) -> &TensorParallel {
        &self.parallel
    }

    /// The ranks that routed experts are built for.
    pub fn experts(&self) -> &ExpertParallel {
        &self.experts
    }

    /// All ranks of the pipeline stage, with their parts of layers and samples.
    pub fn stage(&self) -> &Group {
        &self.stage
    }

    /// Place of this rank in the tensor parallel group.
    pub fn place(&self) -> Place {
        self.parallel.place()
    }

    /// The device parameters are created on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The element type of the parameters.
    pub fn dtype(&self) -> FloatDType {
        self.dtype
    }

    /// A parameter made of sections, one after the other along the first dimension, each with its distribution.
    ///
    /// # Errors
    /// If the name of the first section is taken, or the source has no fitting values.
    pub fn sections<const D: usize>(&mut self, sections: Vec<(Section, Init)>) -> Result<Param<Tensor<D>>, BuildError> {
        self.create(sections, false)
    }

    /// A parameter made of sections of routed experts of the layer that [`begin`](Self::begin) began, this rank's own ones
    /// ([`ExpertParallel::local`]), cut over the place [`ExpertParallel::etp`].
    ///
    /// # Errors
    /// As [`ParamBuilder::sections`].
    ///
    /// # Panics
    /// Outside layers.
    pub fn expert_sections<const D: usize>(
        &mut self,
        sections: Vec<(Section, Init)>,
    ) -> Result<Param<Tensor<D>>, BuildError> {
        let unit = self.unit;
        self.unit = Unit::Experts(unit.layer().expect("experts are in a layer"));
        let param = self.create(sections, false);
        self.unit = unit;
        param
    }

    /// State that is whole on every rank and that no gradient changes, `f32` unless the parameters are `f64`: kept with the
    /// weights in checkpoints, but unknown to the optimizer.
    ///
    /// # Errors
    /// As [`ParamBuilder::sections`].
    pub fn state<const D: usize>(
        &mut self,
        name: &str,
        shape: [usize; D],
        init: Init,
    ) -> Result<Param<Tensor<D>>, BuildError> {
        let dtype = if self.dtype == FloatDType::F64 { FloatDType::F64 } else { FloatDType::F32 };
        let section = Section::replicated(name, &shape, self.place());
        let values = self.values(&section, init, dtype)?;
        let spec = ParamSpec { unit: self.unit, trained: false, ..ParamSpec::new(vec![section], false) };
        let values = if self.device.is_autodiff() { Tensor::from_inner(values) } else { values };
        let param = Param::initialized(ParamId::from(spec.id), values.reshape(shape).set_require_grad(false));
        self.registry.register(spec)?;
        Ok(param)
    }

    /// A parameter that is whole on every rank and applied to the whole sequence.
    ///
    /// # Errors
    /// As [`ParamBuilder::sections`].
    pub fn replicated<const D: usize>(
        &mut self,
        name: &str,
        shape: [usize; D],
        init: Init,
    ) -> Result<Param<Tensor<D>>, BuildError> {
        self.create(vec![(Section::replicated(name, &shape, self.place()), init)], false)
    }

    /// A parameter that is whole on every rank and applied where activations are cut along the sequence, if they are:
    /// norms, biases after a row-parallel layer, positions.
    ///
    /// # Errors
    /// As [`ParamBuilder::sections`].
    pub fn on_sequence<const D: usize>(
        &mut self,
        name: &str,
        shape: [usize; D],
        init: Init,
    ) -> Result<Param<Tensor<D>>, BuildError> {
        let sequence = self.parallel.sequence;
        self.create(vec![(Section::replicated(name, &shape, self.place()), init)], sequence)
    }

    /// [`on_sequence`](Self::on_sequence) of several global tensors, one after the other along the first dimension.
    ///
    /// # Errors
    /// As [`ParamBuilder::sections`].
    pub fn on_sequence_sections<const D: usize>(
        &mut self,
        sections: Vec<(Section, Init)>,
    ) -> Result<Param<Tensor<D>>, BuildError> {
        self.create(sections, self.parallel.sequence)
    }

    /// A parameter that is whole on every rank and applied to each rank's own heads: every rank has the gradient of its
    /// heads only.
    ///
    /// # Errors
    /// As [`ParamBuilder::sections`].
    pub fn on_heads<const D: usize>(
        &mut self,
        name: &str,
        shape: [usize; D],
        init: Init,
    ) -> Result<Param<Tensor<D>>, BuildError> {
        self.create(vec![(Section::replicated(name, &shape, self.place()), init)], true)
    }

    /// Everything that was created so far, in order; the builder starts anew.
    pub fn take_registry(&mut self) -> Registry {
        std::mem::take(&mut self.registry)
    }

    fn create<const D: usize>(
        &mut self,
        sections: Vec<(Section, Init)>,
        partial_gradient: bool,
    ) -> Result<Param<Tensor<D>>, BuildError> {
        let parts = sections
            .iter()
            .map(|(section, init)| self.values(section, *init, self.dtype))
            .collect::<Result<Vec<_>, _>>()?;
        let spec = ParamSpec::new(sections.into_iter().map(|(section, _)| section).collect(), partial_gradient);
        let spec = ParamSpec { unit: self.unit, ..spec };
        let shape: [usize; D] = spec.local_shape().try_into().expect("a parameter has the dimensions of its sections");
        let flat = if parts.len() == 1 { parts.into_iter().next() } else { Some(Tensor::cat(parts, 0)) };
        let tensor: Tensor<D> = flat.expect("a parameter has a section").reshape(shape);
        let tensor = if self.device.is_autodiff() { Tensor::from_inner(tensor).require_grad() } else { tensor };
        let param = Param::initialized(ParamId::from(spec.id), tensor);
        self.registry.register(spec)?;
        Ok(param)
    }

    /// The slice's values in one dimension, without autodiff.
    fn values(&self, section: &Section, init: Init, dtype: FloatDType) -> Result<Tensor<1>, BuildError> {
        let Some(source) = self.source else { return Ok(self.drawn(section, init, dtype)) };
        let read = source.read(&section.name, &section.global_shape, &section.ranges());
        let values = read.map_err(|source| BuildError::Weight { name: section.name.clone(), source })?;
        Ok(self.upload(TensorData::new(section.pad(&values), [section.local_len()]), dtype))
    }

    /// Random values: a GPU draws its own; on the host each replica draws a part of a large slice.
    fn drawn(&self, section: &Section, init: Init, float: FloatDType) -> Tensor<1> {
        let (len, random) = (section.local_len(), !matches!(init, Init::Constant(_)));
        let (device, dtype) = (self.device.clone().without_autodiff(), DType::from(float));
        if let Some(values) = random::on_device(section, init, self.seed, &device, dtype) {
            return values;
        }
        let draw = |part: Range<usize>| self.upload(random::on_host(section, init, self.seed, part, dtype), float);
        let [dense, experts] = &self.replicas;
        match if self.unit.grid() == GridKind::Dense { dense } else { experts } {
            Some(replicas) if random && len >= SHARED && len.is_multiple_of(replicas.size()) => {
                let part = len / replicas.size();
                all_gather(draw(replicas.rank() * part..(replicas.rank() + 1) * part), 0, replicas)
            }
            _ => draw(0..len),
        }
    }

    fn upload(&self, data: TensorData, dtype: FloatDType) -> Tensor<1> {
        Tensor::from_data(data, (&self.device.clone().without_autodiff(), DType::from(dtype)))
    }
}
