//! Adapters next to the linear layers of tensor parallelism.
//!
//! The narrow activations between A and B, not the wide ones, are communicated. A column-parallel layer has A whole on
//! every rank, applied to the rank's positions; then the positions are gathered (or copied), and each rank has its rows
//! of B. A row-parallel layer has its columns of A, whose outputs are summed over the ranks (and scattered), and B whole.
//!
//! Outputs whose weights Hugging Face stores as one have one A, and of its B their rows.

use backend_dist::ops::{
    LinearOptions, Prologue, SharedInput, SwiGluNeighbours, add_linear, linear_with, low_rank_swiglu,
};
use backend_dist::shard::{Init, Section};
use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::blocks::Blocks;
use super::norms::{divided, merged, row_norms};
use super::plan::LayerAdapter;
use crate::layers::{LinearWeight, enter_tensor_parallel};
use crate::param::{ParamBuilder, Result, TensorParallel};

/// The global tensors of an adapter.
pub(super) fn named(layer: &str, part: &str) -> String {
    format!("{layer}.lora_{part}.weight")
}

/// peft's `kaiming_uniform_(a=√5)`: between `±1/√in`.
pub(super) fn init_a(inputs: usize) -> Init {
    let bound = 1.0 / (inputs as f64).sqrt();
    Init::Uniform { low: -bound, high: bound }
}

/// Adapters of outputs of a fused column-parallel layer, of one rank and scale.
#[derive(Module, Debug)]
pub(crate) struct ColumnAdapters {
    /// One after the other along the first dimension.
    a: Param<Tensor<2>>,
    /// Of each output with an adapter, the same.
    b: Param<Tensor<2>>,
    /// DoRA's, of each of these outputs.
    magnitude: Vec<Param<Tensor<1>>>,
    /// By output: its local features, and which A it reads.
    #[module(skip)]
    outputs: Vec<(usize, Option<usize>)>,
    /// Unless all outputs read one A.
    #[module(skip)]
    blocks: Option<Blocks>,
    #[module(skip)]
    rank: usize,
    #[module(skip)]
    scale: f64,
    /// The part of it by which `blocks` multiply.
    #[module(skip)]
    scale_of_b: f64,
    #[module(skip)]
    parallel: TensorParallel,
}

/// Name, features and shards of an output of a fused layer.
pub(crate) type ColumnOutput<'a> = (&'a str, usize, usize);

impl ColumnAdapters {
    /// The adapters of a layer with the weight `w`: those of one rank and scale together.
    pub fn new(
        params: &mut ParamBuilder,
        inputs: usize,
        outputs: &[ColumnOutput],
        w: &LinearWeight,
    ) -> Result<Vec<Self>> {
        let of_outputs: Vec<Option<LayerAdapter>> = outputs.iter().map(|(name, ..)| params.adapter_of(name)).collect();
        let is_like = |a: &LayerAdapter, b: &LayerAdapter| a.rank == b.rank && a.scale == b.scale;
        let mut kinds: Vec<&LayerAdapter> = Vec::new();
        for own in of_outputs.iter().flatten() {
            if !kinds.iter().any(|kind| is_like(kind, own)) {
                kinds.push(own);
            }
        }
        let of_kind = |kind: &&LayerAdapter| {
            let own = of_outputs.iter().map(|own| own.as_ref().filter(|own| is_like(kind, own)));
            let outputs: Vec<_> = outputs.iter().copied().zip(own).collect();
            Self::of_kind(params, inputs, &outputs, kind, w)
        };
        kinds.iter().map(of_kind).collect()
    }

    /// Those of the outputs that have one, all of one kind.
    fn of_kind(
        params: &mut ParamBuilder,
        inputs: usize,
        outputs: &[(ColumnOutput, Option<&LayerAdapter>)],
        LayerAdapter { rank, scale, dora, .. }: &LayerAdapter,
        w: &LinearWeight,
    ) -> Result<Self> {
        let (at, rank, scale) = (params.place(), *rank, *scale);
        let section = |name: &str, features: usize, parts: usize| {
            Section::split(format!("{name}.weight"), &[features, inputs], 0, parts, at).local_shape()[0]
        };
        let mut modules: Vec<&str> = Vec::new();
        let mut places = Vec::with_capacity(outputs.len());
        for ((name, features, parts), own) in outputs {
            let read = own.map(|own| {
                modules.iter().position(|known| *known == own.module).unwrap_or_else(|| {
                    modules.push(&own.module);
                    modules.len() - 1
                })
            });
            places.push((section(name, *features, *parts), read));
        }
        let with = || outputs.iter().filter(|(_, own)| own.is_some()).map(|(output, _)| output);
        let a = |module: &&str| (Section::replicated(named(module, "A"), &[rank, inputs], at), init_a(inputs));
        let a = params.adapter_on_sequence(modules.iter().map(a).collect())?;
        let b = with().map(|(name, features, parts)| {
            (Section::split(named(name, "B"), &[*features, rank], 0, *parts, at), Init::ZEROS)
        });
        let b = params.adapter(b.collect())?;
        let mut magnitude = Vec::new();
        if *dora {
            let norms = row_norms(w.plain(), None);
            let mut start = 0;
            for (((name, features, parts), _), (local, read)) in outputs.iter().zip(&places) {
                if read.is_some() {
                    let section = Section::split(named(name, "magnitude_vector"), &[*features], 0, *parts, at);
                    magnitude.push(params.adapter_of_values(section, norms.clone().narrow(0, start, *local), false)?);
                }
                start += local;
            }
        }
        let parallel = params.parallel().clone();
        // Half precision has powers of two exactly; what A gives is multiplied by other scales.
        let scale_of_b = if scale.log2().fract() == 0.0 { scale } else { 1.0 };
        let is_one = places.iter().all(|(_, read)| *read == Some(0));
        let blocks = (!is_one).then(|| Blocks::new(&places, [modules.len(), rank], scale_of_b, &b));
        Ok(Self { a, b, magnitude, outputs: places, blocks, rank, scale, scale_of_b, parallel })
    }

    /// Whether an output is a sum without further factors.
    pub fn is_sum(&self) -> bool {
        self.magnitude.is_empty()
    }

    /// What A makes of the layer's input `x`, the rank's positions of it, and all B: their GEMM is added.
    fn low_and_b(&self, x: (Tensor<3>, SharedInput)) -> (Tensor<3>, Tensor<2>) {
        let low = enter_tensor_parallel(narrow(x, &self.a), &self.parallel);
        match &self.blocks {
            Some(blocks) => (scaled(low, self.scale / self.scale_of_b), self.scaled_b(blocks)),
            None => (scaled(low, self.scale), self.b.val()),
        }
    }

    /// `silu(gate) up` of the layer's outputs `[gate | up]` from `base`, as [`add`](Self::add).
    pub fn swiglu(&self, base: Tensor<3>, x: (Tensor<3>, SharedInput), neighbours: SwiGluNeighbours) -> Tensor<3> {
        let (low, b) = match self.outputs[..] {
            // Each half reads its own part of what A gives; kernels take sixteens.
            [(_, Some(0)), (_, Some(1))] if self.rank.is_multiple_of(16) => {
                let low = enter_tensor_parallel(narrow(x, &self.a), &self.parallel);
                (scaled(low, self.scale), self.b.val())
            }
            _ => self.low_and_b(x),
        };
        low_rank_swiglu(base, low, b, neighbours)
    }

    /// The layer's output from `base = x wᵀ` without bias, for the layer's input `x`, the rank's positions of it.
    pub fn add(&self, base: Tensor<3>, x: (Tensor<3>, SharedInput), w: &LinearWeight) -> Tensor<3> {
        let (low, b) = self.low_and_b(x);
        let sum = add_linear(base, low, b, None);
        if self.magnitude.is_empty() { sum } else { sum * self.factors(w).unsqueeze() }
    }

    /// The weight `w` of a layer with one output, and its adapter.
    ///
    /// # Panics
    /// If there are several outputs.
    pub fn merged(&self, w: Tensor<2>) -> Tensor<2> {
        assert_eq!(self.outputs.len(), 1, "one output has one matrix A and one B");
        let whole = merged(w, self.a.val(), self.b.val(), self.scale);
        match self.magnitude.first() {
            Some(magnitude) => {
                let factors = divided(magnitude.val(), row_norms(whole.clone(), None));
                whole * factors.unsqueeze_dim(1)
            }
            None => whole,
        }
    }

    /// All B as one matrix `[features, adapters rank]`, scaled: each has its own rows and columns, elsewhere it is zero. One
    /// GEMM then reads and writes the wide output once.
    fn scaled_b(&self, blocks: &Blocks) -> Tensor<2> {
        let spread = blocks.of(self.b.val());
        let width = spread.dims()[1];
        if self.outputs.iter().all(|(_, adapter)| adapter.is_some()) {
            return spread;
        }
        let (mut start, place) = (0, (spread.device(), spread.dtype()));
        let rows = self.outputs.iter().map(|(features, adapter)| match adapter {
            None => Tensor::zeros([*features, width], (&place.0, place.1)),
            Some(_) => {
                start += features;
                spread.clone().narrow(0, start - features, *features)
            }
        });
        Tensor::cat(rows.collect(), 0)
    }

    /// `m / ‖W + s B A‖` of the rank's features, 1 where there is no adapter.
    fn factors(&self, w: &LinearWeight) -> Tensor<1> {
        let w = w.plain();
        let (mut start, mut start_of_b, device) = (0, 0, self.b.val().device());
        let mut magnitudes = self.magnitude.iter();
        let factor = |(features, adapter): &(usize, Option<usize>)| {
            let w = w.clone().narrow(0, start, *features);
            start += features;
            match adapter {
                None => Tensor::ones([*features], (&device, w.dtype())),
                Some(index) => {
                    let a = self.a.val().inner().narrow(0, index * self.rank, self.rank);
                    let b = self.b.val().inner().narrow(0, start_of_b, *features);
                    start_of_b += features;
                    let whole = merged(w, a, b, self.scale);
                    let magnitude = magnitudes.next().expect("every output with an adapter has one");
                    divided(magnitude.val(), row_norms(whole, None))
                }
            }
        };
        let all: Vec<Tensor<1>> = self.outputs.iter().map(factor).collect();
        if all.len() == 1 { all.into_iter().next().expect("one") } else { Tensor::cat(all, 0) }
    }
}

pub(super) fn scaled(low: Tensor<3>, scale: f64) -> Tensor<3> {
    if scale == 1.0 { low } else { low.mul_scalar(scale) }
}

/// `x Aᵀ` of an input that the layer's own GEMM reads too.
pub(super) fn narrow((x, shared): (Tensor<3>, SharedInput), a: &Param<Tensor<2>>) -> Tensor<3> {
    let options = LinearOptions { shared_input: Some(shared), ..LinearOptions::default() };
    linear_with(x, Prologue::None, a.val(), None, options)
}
