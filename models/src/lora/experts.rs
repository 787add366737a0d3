//! Adapters of routed experts: one A and one B for each expert, which the grouped GEMMs multiply with its tokens.
//!
//! The ranks that share an expert all have its tokens, and their outputs are summed after the layer. So a rank has its
//! rows of gate's and up's B and its columns of down's A; the other halves are whole on each, with a part of their
//! gradients on each. Nothing is communicated but what the experts communicate, and for DoRA's norms of down's rows, of
//! which each rank has some columns, one number a row.

use std::sync::Arc;

use backend_dist::comm::Group;
use backend_dist::ops::moe::{
    ClampedSwiGlu, ExpertActivation, grouped_activated_linear, grouped_clamped_linear, grouped_linear,
};
use backend_dist::ops::{PassContext, embedding, matmul, sum_dim};
use backend_dist::shard::{Init, Section};
use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor, TensorData};
use layouts::sizes::EXPERT_WIDTH;

use super::layers::{init_a, named};
use super::norms::{divided, squares, summed};
use super::plan::LayerAdapter;
use crate::layers::LinearWeight;
use crate::layers::moe::ExpertKind;
use crate::param::{ParamBuilder, Result};

/// The adapters of a layer's experts.
#[derive(Module, Debug)]
pub(crate) struct ExpertAdapters {
    /// Of gate and up, which read the same input; of up alone without gates.
    first: Option<Adapters>,
    down: Option<Adapters>,
}

/// The adapters of one grouped GEMM, whose outputs are one or two of equal width.
#[derive(Module, Debug)]
struct Adapters {
    /// `[experts · adapters · rank, in]`: those of an expert, then of the next; of one adapter where all outputs read it.
    a: Param<Tensor<2>>,
    /// `[experts · out, rank]` by output, where it has an adapter.
    b: Vec<Option<Param<Tensor<2>>>>,
    dora: Option<Dora>,
    #[module(skip)]
    experts: usize,
    /// All outputs read one A, because a file has their matrices as one.
    #[module(skip)]
    one_a: bool,
    #[module(skip)]
    rank: usize,
    #[module(skip)]
    scale: f64,
}

/// What DoRA has beyond A and B.
#[derive(Module, Debug)]
struct Dora {
    /// `[experts · out]` by output, where it has an adapter.
    magnitude: Vec<Option<Param<Tensor<1>>>>,
    /// `‖W‖²` of the columns that this rank has, `[experts, outputs · out]`, at least in fp32.
    #[module(skip)]
    squares: Tensor<2>,
    /// The ranks that have columns each.
    #[module(skip)]
    group: Option<Group>,
}

impl ExpertAdapters {
    /// The adapters of the experts under the global name `name`, whose matrices are `gate_up` and `down_w`; `None` if they
    /// have none.
    pub fn new(
        params: &mut ParamBuilder,
        name: &str,
        [hidden, intermediate, experts]: [usize; 3],
        kind: ExpertKind,
        [gate_up, down_w]: [&LinearWeight; 2],
    ) -> Result<Option<Self>> {
        let first = Adapters::new(params, (name, experts), kind.first(), [intermediate, hidden], (0, gate_up))?;
        let down = Adapters::new(params, (name, experts), &["down"], [hidden, intermediate], (1, down_w))?;
        Ok((first.is_some() || down.is_some()).then_some(Self { first, down }))
    }

    /// Gate and up from `base`, what the weight `w` makes of `x [tokens, hidden]`, the tokens of each expert one after the
    /// other.
    pub fn first(&self, base: Tensor<2>, x: Tensor<2>, counts: &[usize], w: &LinearWeight) -> Tensor<2> {
        let Some(adapters) = self.first.as_ref() else { return base };
        let counts = adapters.counts(counts);
        let low = grouped_linear(x, adapters.a(), &counts, &PassContext::default());
        adapters.add(base, low, &counts, w)
    }

    /// The experts' outputs from `base`, what the weight `w` makes of the first layer's output `x` behind `act` and
    /// probabilities `p [tokens]`. The activation is recomputed: its gradient is linear in that of its output.
    pub fn down(
        &self,
        base: Tensor<2>,
        (x, p): (Tensor<2>, Tensor<1>),
        act: ExpertActivation,
        counts: &[usize],
        recompute: bool,
        w: &LinearWeight,
    ) -> Tensor<2> {
        let Some(adapters) = self.down.as_ref() else { return base };
        let counts = adapters.counts(counts);
        let low = grouped_activated_linear(x, p, adapters.a(), act, &counts, recompute, &PassContext::default());
        adapters.add(base, low, &counts, w)
    }

    /// The same behind a clamped activation of `x` with its bias.
    pub fn down_of_clamped(
        &self,
        base: Tensor<2>,
        (x, p): (Tensor<2>, Tensor<1>),
        (bias, act): (Tensor<1>, ClampedSwiGlu),
        counts: &[usize],
        recompute: bool,
        w: &LinearWeight,
    ) -> Tensor<2> {
        let Some(adapters) = self.down.as_ref() else { return base };
        let (counts, a) = (adapters.counts(counts), adapters.a());
        let none = Tensor::zeros([a.dims()[0]], (&bias.device(), bias.dtype()));
        let pass = PassContext::default();
        let low = grouped_clamped_linear(x, p, a, [bias, none], act, &counts, recompute, &pass);
        adapters.add(base, low, &counts, w)
    }
}

impl Adapters {
    /// Adapters of matrices `[out, in]` of the experts, of which `dim` is divided among the ranks that share an expert;
    /// the rank's are `w`.
    fn new(
        params: &mut ParamBuilder,
        (name, experts): (&str, usize),
        parts: &[&str],
        [outputs, inputs]: [usize; 2],
        (dim, w): (usize, &LinearWeight),
    ) -> Result<Option<Self>> {
        let (etp, own) = (params.experts().etp, params.experts().local(experts));
        let layer = |expert: usize, part: &str| format!("{name}.{expert}.{part}_proj");
        let names: Vec<String> = parts.iter().map(|part| layer(own.start, part)).collect();
        let of_parts: Vec<Option<LayerAdapter>> = names.iter().map(|name| params.adapter_of(name)).collect();
        let Some(LayerAdapter { rank, scale, dora, .. }) = of_parts.iter().flatten().next().cloned() else {
            return Ok(None);
        };
        let has: Vec<bool> = of_parts.iter().map(Option::is_some).collect();
        let section = |name: String, shape: [usize; 2], is_divided: bool| match is_divided {
            true => Section::split(name, &shape, dim, etp.size, etp),
            false => Section::replicated(name, &shape, etp),
        };
        let with: Vec<&str> = parts.iter().zip(&has).filter(|(_, has)| **has).map(|(part, _)| *part).collect();
        let of_layers = own.clone().flat_map(|expert| with.iter().map(move |part| layer(expert, part)));
        let mut modules: Vec<String> = of_layers.filter_map(|layer| Some(params.adapter_of(&layer)?.module)).collect();
        modules.dedup();
        let one_a = modules.len() < own.len() * with.len();
        let a = |module: String| (section(named(&module, "A"), [rank, inputs], dim == 1), init_a(inputs));
        let a = params.expert_adapter(modules.into_iter().map(a).collect(), dim == 0)?;
        let b = parts.iter().zip(&has).map(|(part, has)| {
            let b = |expert| (section(named(&layer(expert, part), "B"), [outputs, rank], dim == 0), Init::ZEROS);
            has.then(|| params.expert_adapter(own.clone().map(b).collect(), dim == 1)).transpose()
        });
        let b = b.collect::<Result<_, _>>()?;
        let mut adapters = Self { a, b, dora: None, experts: own.len(), one_a, rank, scale };
        if dora {
            let group = Some(params.experts().parts.clone()).filter(|_| dim == 1);
            let squares = squares(w.plain(), own.len());
            let norms = summed(squares.clone(), group.as_ref()).sqrt();
            let features = norms.dims()[1] / parts.len();
            let mut magnitude = Vec::with_capacity(parts.len());
            for (index, (part, has)) in parts.iter().zip(&has).enumerate() {
                let name = |expert| named(&layer(expert, part), "magnitude_vector");
                let section = |expert| match dim {
                    0 => Section::split(name(expert), &[outputs], 0, etp.size, etp),
                    _ => Section::replicated(name(expert), &[outputs], etp),
                };
                let values = norms.clone().narrow(1, index * features, features).reshape([own.len() * features]);
                let new = || params.expert_adapter_of_values(own.clone().map(section).collect(), values, dim == 1);
                magnitude.push(has.then(new).transpose()?);
            }
            adapters.dora = Some(Dora { magnitude, squares, group });
        }
        Ok(Some(adapters))
    }

    /// The outputs from `base`, those of the weight `w`, and those of A, `low`.
    fn add(&self, base: Tensor<2>, low: Tensor<2>, counts: &Arc<[usize]>, w: &LinearWeight) -> Tensor<2> {
        let sum = base + self.widen(low, counts);
        match &self.dora {
            None => sum,
            Some(dora) => sum * of_tokens(self.factors(dora, w), counts),
        }
    }

    /// `m / ‖W + s B A‖` of every row of the experts' matrices, `[experts · outputs · out]`, 1 where there is no adapter.
    /// The square of the norm is `‖W‖² + 2 s B · W Aᵀ + s² B · B A Aᵀ`, so that no matrix as large as `W` is made.
    fn factors(&self, dora: &Dora, w: &LinearWeight) -> Tensor<1> {
        let (w, experts, rank, outputs) = (w.plain(), self.experts, self.rank, self.b.len());
        let ([rows, inputs], dtype) = (w.dims(), w.dtype());
        let (features, wide) = (rows / experts / outputs, dora.squares.dtype());
        let w = w.reshape([experts, rows / experts, inputs]);
        let a = self.a.val().inner().reshape([experts, self.narrow(), inputs]);
        let mut factors = Vec::with_capacity(outputs);
        for (index, (b, magnitude)) in self.b.iter().zip(&dora.magnitude).enumerate() {
            let (Some(b), Some(magnitude)) = (b, magnitude) else {
                factors.push(Tensor::ones([experts, features], (&self.a.val().device(), dtype)));
                continue;
            };
            let b = b.val().inner().reshape([experts, features, rank]);
            let a = a.clone().narrow(1, self.before(index), rank);
            let (start, of) = (index * features, |x: Tensor<3>| sum_dim(x.cast(wide) * b.clone().cast(wide), 2));
            let cross = of(matmul(w.clone().narrow(1, start, features), a.clone().swap_dims(1, 2)));
            let square = of(matmul(b.clone(), matmul(a.clone(), a.swap_dims(1, 2))));
            let added = cross.mul_scalar(2.0 * self.scale) + square.mul_scalar(self.scale * self.scale);
            let squares = dora.squares.clone().narrow(1, start, features) + added.reshape([experts, features]);
            let norms = summed(squares, dora.group.as_ref()).sqrt().reshape([experts * features]);
            factors.push(divided(magnitude.val(), norms).reshape([experts, features]));
        }
        let all = if outputs == 1 { factors.remove(0) } else { Tensor::cat(factors, 1) };
        all.reshape([rows])
    }

    /// Tokens of each expert, whose groups are neighbours where it has several.
    fn counts(&self, counts: &[usize]) -> Arc<[usize]> {
        counts.chunks(counts.len() / self.experts).map(|groups| groups.iter().sum()).collect()
    }

    /// Columns of the narrow activations that are not padding.
    fn narrow(&self) -> usize {
        if self.one_a { self.rank } else { self.b.iter().flatten().count() * self.rank }
    }

    /// Columns of the narrow activations before those that an output reads.
    fn before(&self, output: usize) -> usize {
        if self.one_a { 0 } else { self.b[..output].iter().flatten().count() * self.rank }
    }

    /// All A of an expert and zeros, `[experts · width, in]`.
    fn a(&self) -> Tensor<2> {
        let (a, narrow) = (self.a.val(), self.narrow());
        let padding = narrow.next_multiple_of(EXPERT_WIDTH) - narrow;
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

    /// All B of an expert as one matrix of `width` columns: each has its own rows, and the columns of its A, elsewhere it is
    /// zero.
    fn b(&self, width: usize) -> Tensor<2> {
        let like = self.b.iter().flatten().next().expect("there is an adapter").val();
        if self.b.len() == 1 && width == self.rank {
            return like;
        }
        let features = like.dims()[0] / self.experts;
        let zeros = |columns: usize| {
            (columns > 0).then(|| Tensor::<3>::zeros([self.experts, features, columns], (&like.device(), like.dtype())))
        };
        let matrix = |(index, own): (usize, &Option<Param<Tensor<2>>>)| {
            let own = own.as_ref().map(|own| own.val().reshape([self.experts, features, self.rank]));
            let (left, columns) = (self.before(index), if own.is_some() { self.rank } else { 0 });
            let parts = [zeros(left), own, zeros(width - left - columns)];
            Tensor::cat(parts.into_iter().flatten().collect(), 2)
        };
        let rows: Vec<Tensor<3>> = self.b.iter().enumerate().map(matrix).collect();
        let outputs = rows.len();
        Tensor::cat(rows, 1).reshape([self.experts * outputs * features, width])
    }
}

/// For each token the row of its expert, of `values [experts · features]`.
fn of_tokens(values: Tensor<1>, counts: &[usize]) -> Tensor<2> {
    let (features, tokens) = (values.dims()[0] / counts.len(), counts.iter().sum::<usize>());
    let of_each = |(expert, count): (usize, &usize)| std::iter::repeat_n(expert as i64, *count);
    let experts: Vec<i64> = counts.iter().enumerate().flat_map(of_each).collect();
    let experts = Tensor::from_data(TensorData::new(experts, [tokens, 1]), (&values.device(), DType::I64));
    embedding(values.reshape([counts.len(), features]), experts, 0).reshape([tokens, features])
}
