//! Adapters of routed experts: one A and one B for each expert, which the grouped GEMMs multiply with its tokens.
//!
//! The ranks that share an expert all have its tokens, and their outputs are summed after the layer. So a rank has its
//! rows of gate's and up's B and its columns of down's A; the other halves are whole on each, with a part of their
//! gradients on each. Nothing is communicated but what the experts communicate.

use std::sync::Arc;

use backend_dist::ops::PassContext;
use backend_dist::ops::moe::{grouped_linear, grouped_swiglu_linear};
use backend_dist::shard::{Init, Section};
use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::layers::{init_a, named};
use crate::param::{BuildError, ParamBuilder};

/// Rows of a group's matrix that the grouped GEMM of GPUs takes multiples of. A is padded with zeros to so many: without
/// that kernel every expert would be several launches.
pub const WIDTH: usize = 64;

/// The adapters of a layer's experts.
#[derive(Module, Debug)]
pub(crate) struct ExpertAdapters {
    /// Of gate and up, which read the same input.
    first: Option<Adapters>,
    down: Option<Adapters>,
}

/// The adapters of one grouped GEMM, whose outputs are one or two of equal width.
#[derive(Module, Debug)]
struct Adapters {
    /// `[experts · adapters · rank, in]`: those of an expert, then of the next.
    a: Param<Tensor<2>>,
    /// `[experts · out, rank]` by output, where it has an adapter.
    b: Vec<Option<Param<Tensor<2>>>>,
    #[module(skip)]
    experts: usize,
    #[module(skip)]
    rank: usize,
    #[module(skip)]
    scale: f64,
}

impl ExpertAdapters {
    /// The adapters of the experts under the global name `name`; `None` if they have none.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn new(
        params: &mut ParamBuilder,
        name: &str,
        [hidden, intermediate, experts]: [usize; 3],
    ) -> Result<Option<Self>, BuildError> {
        let first = Adapters::new(params, (name, experts), &["gate", "up"], [intermediate, hidden], 0)?;
        let down = Adapters::new(params, (name, experts), &["down"], [hidden, intermediate], 1)?;
        Ok((first.is_some() || down.is_some()).then_some(Self { first, down }))
    }

    /// What is added to gate and up of `x [tokens, hidden]`, the tokens of each expert one after the other.
    pub fn first(&self, x: Tensor<2>, counts: &[usize]) -> Option<Tensor<2>> {
        let adapters = self.first.as_ref()?;
        let counts = adapters.counts(counts);
        Some(adapters.widen(grouped_linear(x, adapters.a(), &counts, &PassContext::default()), &counts))
    }

    /// What is added to the experts' outputs of `x [tokens, 2 intermediate] = [gate | up]` and probabilities
    /// `p [tokens]`. The activation is recomputed: its gradient is linear in that of its output.
    pub fn down(&self, (x, p): (Tensor<2>, Tensor<1>), counts: &[usize], recompute: bool) -> Option<Tensor<2>> {
        let adapters = self.down.as_ref()?;
        let counts = adapters.counts(counts);
        let low = grouped_swiglu_linear(x, p, adapters.a(), &counts, recompute, &PassContext::default());
        Some(adapters.widen(low, &counts))
    }
}

impl Adapters {
    /// Adapters of matrices `[out, in]` of the experts, of which `dim` is divided among the ranks that share an expert.
    fn new(
        params: &mut ParamBuilder,
        (name, experts): (&str, usize),
        parts: &[&str],
        [outputs, inputs]: [usize; 2],
        dim: usize,
    ) -> Result<Option<Self>, BuildError> {
        let (etp, own) = (params.experts().etp, params.experts().local(experts));
        let layer = |expert: usize, part: &str| format!("{name}.{expert}.{part}_proj");
        let names: Vec<String> = parts.iter().map(|part| layer(own.start, part)).collect();
        let Some(config) = params.lora_of(names.iter().map(String::as_str)) else { return Ok(None) };
        let (rank, scale) = (config.rank, config.scale());
        let has: Vec<bool> = names.iter().map(|name| params.has_adapter(name)).collect();
        let section = |name: String, shape: [usize; 2], is_divided: bool| match is_divided {
            true => Section::split(name, &shape, dim, etp.size, etp),
            false => Section::replicated(name, &shape, etp),
        };
        let with: Vec<&str> = parts.iter().zip(&has).filter(|(_, has)| **has).map(|(part, _)| *part).collect();
        let names = own.clone().flat_map(|expert| with.iter().map(move |part| (expert, *part)));
        let a = |(expert, part)| (section(named(&layer(expert, part), "A"), [rank, inputs], dim == 1), init_a(inputs));
        let a = params.expert_adapter(names.map(a).collect(), dim == 0)?;
        let b = parts.iter().zip(&has).map(|(part, has)| {
            let b = |expert| (section(named(&layer(expert, part), "B"), [outputs, rank], dim == 0), Init::ZEROS);
            has.then(|| params.expert_adapter(own.clone().map(b).collect(), dim == 1)).transpose()
        });
        let b = b.collect::<Result<_, _>>()?;
        Ok(Some(Self { a, b, experts: own.len(), rank, scale }))
    }

    /// Tokens of each expert, whose groups are neighbours where it has several.
    fn counts(&self, counts: &[usize]) -> Arc<[usize]> {
        counts.chunks(counts.len() / self.experts).map(|groups| groups.iter().sum()).collect()
    }

    /// Columns of the narrow activations that are not padding.
    fn narrow(&self) -> usize {
        self.b.iter().flatten().count() * self.rank
    }

    /// All A of an expert and zeros, `[experts · width, in]`.
    fn a(&self) -> Tensor<2> {
        let (a, narrow) = (self.a.val(), self.narrow());
        let padding = narrow.next_multiple_of(WIDTH) - narrow;
        if padding == 0 {
            return a;
        }
        let [_, inputs] = a.dims();
        let zeros = Tensor::zeros([self.experts, padding, inputs], (&a.device(), a.dtype()));
        let padded = Tensor::cat(vec![a.reshape([self.experts, narrow, inputs]), zeros], 1);
        padded.reshape([self.experts * (narrow + padding), inputs])
    }

    /// `s x Bᵀ` of each expert.
    fn widen(&self, low: Tensor<2>, counts: &Arc<[usize]>) -> Tensor<2> {
        let width = low.dims()[1];
        grouped_linear(low.mul_scalar(self.scale), self.b(width), counts, &PassContext::default())
    }

    /// All B of an expert as one matrix of `width` columns: each has its own rows and columns, elsewhere it is zero.
    fn b(&self, width: usize) -> Tensor<2> {
        let like = self.b.iter().flatten().next().expect("there is an adapter").val();
        if self.b.len() == 1 && width == self.rank {
            return like;
        }
        let features = like.dims()[0] / self.experts;
        let zeros = |columns: usize| {
            (columns > 0).then(|| Tensor::<3>::zeros([self.experts, features, columns], (&like.device(), like.dtype())))
        };
        let mut before = 0;
        let matrix = |own: &Option<Param<Tensor<2>>>| {
            let own = own.as_ref().map(|own| own.val().reshape([self.experts, features, self.rank]));
            let (left, columns) = (before, if own.is_some() { self.rank } else { 0 });
            before += columns;
            let parts = [zeros(left), own, zeros(width - left - columns)];
            Tensor::cat(parts.into_iter().flatten().collect(), 2)
        };
        let rows: Vec<Tensor<3>> = self.b.iter().map(matrix).collect();
        let outputs = rows.len();
        Tensor::cat(rows, 1).reshape([self.experts * outputs * features, width])
    }
}
