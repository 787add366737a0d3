//! Linear layers sharded over the tensor parallel ranks by columns of the weight (row-parallel), whose sum over the ranks is
//! added to the residual stream.

use backend_dist::comm::Group;
use backend_dist::ops::fp8::{Fp8Linear, KnownAmax, ToldGradient};
use backend_dist::ops::tensor_parallel::{Partial, reduce_from_tensor_parallel};
use backend_dist::ops::{
    LinearOptions, OutputCollective, Prologue, Residual, SharedInput, SwiGluNeighbours, linear_with,
};
use backend_dist::shard::{Init, Section};
use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::linear::{LinearConfig, with_bias};
use super::linear_weight::LinearWeight;
use super::norm::Norm;
use crate::lora::{RowAdapter, apply};
use crate::micro_batch::MicroBatch;
use crate::observer::ObservedInput;
use crate::param::{ParamBuilder, Result, TensorParallel};

/// `[s, b, in/tp] -> [s, b, out]`; under sequence parallelism the output is `[s/tp, b, out]`. The bias is added after
/// the sum over the ranks.
#[derive(Module, Debug)]
pub struct RowParallelLinear {
    weight: LinearWeight,
    bias: Option<Param<Tensor<1>>>,
    adapter: Option<RowAdapter>,
    #[module(skip)]
    observed: Option<ObservedInput>,
    #[module(skip)]
    parallel: TensorParallel,
    #[module(skip)]
    fp8: Option<Fp8Linear>,
}

impl RowParallelLinear {
    /// A layer from `inputs` to `outputs` features under the global name `name`.
    pub fn new(
        params: &mut ParamBuilder,
        name: &str,
        inputs: usize,
        outputs: usize,
        config: LinearConfig,
    ) -> Result<Self> {
        let at = params.place();
        let section = Section::split(format!("{name}.weight"), &[outputs, inputs], 1, at.size, at);
        let weight = params.linear_weight(vec![(section, config.init)])?;
        let bias = || params.on_sequence(&format!("{name}.bias"), [outputs], Init::ZEROS);
        let bias = config.bias.then(bias).transpose()?;
        let adapter = RowAdapter::new(params, name, [inputs, outputs], &weight)?;
        let (observed, fp8) = (params.observed([name].into_iter()), params.fp8_linear(name));
        Ok(Self { weight, bias, adapter, observed, parallel: params.parallel().clone(), fp8 })
    }

    /// The sum over the ranks, whole or this rank's part of the sequence, for the input `prologue(x)`, which
    /// with `recompute` is recomputed in the backward pass.
    pub fn forward<const D: usize>(
        &self,
        x: Tensor<D>,
        prologue: Prologue,
        recompute: bool,
        batch: &MicroBatch,
    ) -> Tensor<3> {
        self.leaving(exit(&self.parallel), self.reads(batch), x, prologue, recompute, batch)
    }

    /// The same for a decode step: what the ranks have of the sum, where nothing but the addition to the residual stream
    /// follows, so that both are one operation.
    pub(super) fn summand<const D: usize>(&self, x: Tensor<D>, prologue: Prologue) -> Summand {
        let (batch, group) = (&MicroBatch::default(), &self.parallel.group);
        let is_plain = self.bias.is_none() && self.adapter.is_none() && !self.parallel.sequence;
        match is_plain && group.size() > 1 {
            true => {
                let y = self.leaving(OutputCollective::None, self.reads(batch), x, prologue, false, batch);
                Summand::Partial(Partial::new(y), group.clone())
            }
            false => Summand::Whole(self.forward(x, prologue, false, batch)),
        }
    }

    /// What the layer and a [`low_rank_swiglu`](backend_dist::ops::low_rank_swiglu) before it tell each other.
    pub(super) fn behind_swiglu(&self, batch: &MicroBatch) -> SwiGluNeighbours {
        let hand_overs = batch.hand_overs();
        SwiGluNeighbours {
            output_amax: self.fp8.as_ref().filter(|fp8| fp8.reads_amax()).map(|_| KnownAmax::new(hand_overs)),
            readers: self.adapter.is_some().then(|| SharedInput::added_by_writer(hand_overs)),
            ..SwiGluNeighbours::default()
        }
    }

    /// The same for the output `x` of that operation.
    pub(super) fn of_swiglu(&self, x: Tensor<3>, before: SwiGluNeighbours, batch: &MicroBatch) -> Tensor<3> {
        let fp8 = self.fp8.clone().map(|fp8| before.output_amax.into_iter().fold(fp8, Fp8Linear::with_input_amax));
        let reads = (fp8, before.readers.unwrap_or_else(|| SharedInput::new(batch.hand_overs())));
        self.leaving(exit(&self.parallel), reads, x, Prologue::None, false, batch)
    }

    /// What the layer reads its input as, if nothing before it knows of the layer.
    fn reads(&self, batch: &MicroBatch) -> (Option<Fp8Linear>, SharedInput) {
        (self.fp8.clone(), SharedInput::new(batch.hand_overs()))
    }

    fn leaving<const D: usize>(
        &self,
        exit: OutputCollective,
        (fp8, shared): (Option<Fp8Linear>, SharedInput),
        x: Tensor<D>,
        prologue: Prologue,
        recompute: bool,
        batch: &MicroBatch,
    ) -> Tensor<3> {
        if let Some(observed) = &self.observed {
            observed.record(apply(prologue.clone(), x.clone(), batch));
        }
        let bias = self.bias.as_ref().map(Param::val);
        let (overlap, pass) = (self.parallel.overlap, batch.pass_context());
        let stored = self.weight.stored();
        let weight = self.weight.value(x.device().is_autodiff());
        if let Some(adapter) = &self.adapter {
            let x = apply(prologue, x, batch);
            let shared_input = Some(shared.clone());
            let (fp8, told) = fp8.map(|fp8| ToldGradient::of(fp8, &pass)).unzip();
            let options = LinearOptions { exit, overlap, fp8, stored, shared_input, pass, ..Default::default() };
            let base = linear_with(x.clone(), Prologue::None, weight, None, options);
            return with_bias(adapter.add(base, (x, shared), &self.weight, told), self.bias.as_ref());
        }
        let options = LinearOptions { exit, recompute, overlap, fp8, stored, pass, ..Default::default() };
        linear_with(x, prologue, weight, bias, options)
    }
}

/// What is added to the residual stream in a decode step.
pub(crate) enum Summand {
    /// The same on all ranks.
    Whole(Tensor<3>),
    /// What the ranks of the group sum up to.
    Partial(Partial<3>, Group),
}

impl Summand {
    /// The residual stream with it, which `norm` reads next, and the weight `next` behind that.
    pub fn onto(self, x: Residual, norm: &Norm, next: Option<Tensor<2>>) -> Residual {
        let norm = norm.prologue(x.dtype());
        match self {
            Self::Whole(whole) => x.plus(whole, norm),
            Self::Partial(partial, group) => x.plus_sum(partial, &group, norm, next),
        }
    }

    /// Normalised, if `norm` is there.
    pub fn normed(self, norm: &Norm) -> Self {
        if norm.is_some() { Self::Whole(norm.forward(self.whole())) } else { self }
    }

    /// On all ranks.
    fn whole(self) -> Tensor<3> {
        match self {
            Self::Whole(x) => x,
            Self::Partial(x, group) => reduce_from_tensor_parallel(x, &group),
        }
    }
}

/// How the summands of the ranks leave a linear layer that computes from some of the inputs on each rank.
fn exit(parallel: &TensorParallel) -> OutputCollective {
    let group = parallel.group.clone();
    if parallel.sequence { OutputCollective::ReduceScatter(group) } else { OutputCollective::AllReduce(group) }
}
