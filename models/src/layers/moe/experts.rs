//! The routed experts that a rank holds: MLPs side by side.

use std::sync::Arc;

use backend_dist::ops::decode::FewTokens;
use backend_dist::ops::fp8::{self, ExpertSharding, Fp8Experts};
use backend_dist::ops::moe::{
    ClampedSwiGlu, ExpertActivation, ExpertPipeline, grouped_activated_linear, grouped_clamped_linear, grouped_linear,
    through_experts,
};
use backend_dist::shard::{Init, Section};
use burn::module::{Module, Param};
use burn::tensor::activation::{relu, silu};
use burn::tensor::{Int, Tensor};

use super::config::{ExpertKind, MoeConfig};
use crate::layers::LinearWeight;
use crate::lora::ExpertAdapters;
use crate::micro_batch::MicroBatch;
use crate::observer::ObservedInput;
use crate::param::{ParamBuilder, Result};
use crate::recompute;

/// What experts with biases have beyond their matrices.
#[derive(Module, Debug)]
struct Biases {
    /// `[experts · 2 intermediate]`: of gate and up of an expert, then of the next.
    gate_up: Param<Tensor<1>>,
    /// `[experts · hidden]`, whole on each of the ranks that share an expert.
    down: Param<Tensor<1>>,
    #[module(skip)]
    act: ClampedSwiGlu,
    /// How many ranks share an expert.
    ranks: usize,
}

impl Biases {
    fn new(params: &mut ParamBuilder, name: &str, config: &MoeConfig) -> Result<Option<Self>> {
        let MoeConfig { hidden, intermediate, experts, kind, .. } = *config;
        let ExpertKind::Clamped { alpha, limit } = kind else { return Ok(None) };
        let (etp, own) = (params.experts().etp, params.experts().local(experts));
        let first = |expert: usize, part: &str| {
            let name = format!("{name}.{expert}.{part}_proj.bias");
            (Section::split(name, &[intermediate], 0, etp.size, etp), Init::ZEROS)
        };
        let second = |expert: usize| {
            (Section::replicated(format!("{name}.{expert}.down_proj.bias"), &[hidden], etp), Init::ZEROS)
        };
        let gate_up = own.clone().flat_map(|expert| [first(expert, "gate"), first(expert, "up")]).collect();
        Ok(Some(Self {
            gate_up: params.expert_sections(gate_up)?,
            down: params.expert_shares(own.map(second).collect())?,
            act: ClampedSwiGlu { alpha, limit },
            ranks: etp.size,
        }))
    }

    /// Both biases, the second divided among the ranks that share an expert, which are added up.
    fn values(&self) -> [Tensor<1>; 2] {
        let down = self.down.val();
        [self.gate_up.val(), if self.ranks > 1 { down.mul_scalar((self.ranks as f64).recip()) } else { down }]
    }
}

/// `down_e(silu(gate_e x) up_e x)`, or what else [`ExpertKind`] says, for each of the rank's experts `e`, of which this
/// rank may hold some of the features.
#[derive(Module, Debug)]
pub(super) struct Experts {
    /// `[experts · 2 intermediate, hidden]`: gate and up of an expert, then of the next; half of it without gates.
    gate_up: LinearWeight,
    /// `[experts · hidden, intermediate]`.
    down: LinearWeight,
    biases: Option<Biases>,
    /// Without biases.
    #[module(skip)]
    act: ExpertActivation,
    adapters: Option<ExpertAdapters>,
    #[module(skip)]
    recompute_activation: bool,
    /// Of both layers.
    #[module(skip)]
    fp8: Option<[Fp8Experts; 2]>,
    /// By expert, of both layers, if their inputs are observed. Not of experts with biases, which files have as one tensor,
    /// or in FP8.
    #[module(skip)]
    observed: Vec<[ObservedInput; 2]>,
}

impl Experts {
    /// The rank's experts under the global name `name`.
    pub fn new(params: &mut ParamBuilder, name: &str, config: &MoeConfig) -> Result<Self> {
        let MoeConfig { hidden, intermediate, experts, input, output, .. } = *config;
        let (etp, own) = (params.experts().etp, params.experts().local(experts));
        let first = |expert: usize, part: &str| {
            let name = format!("{name}.{expert}.{part}_proj.weight");
            (Section::split(name, &[intermediate, hidden], 0, etp.size, etp), input)
        };
        let second = |expert: usize| {
            let name = format!("{name}.{expert}.down_proj.weight");
            (Section::split(name, &[hidden, intermediate], 1, etp.size, etp), output)
        };
        // Biased experts have no FP8 kernels.
        let fp8 = match config.kind.has_biases() {
            false => {
                let sizes = [hidden, intermediate / etp.size];
                let of =
                    |layer: &str, sharding| params.fp8_experts(&format!("{name}.{layer}"), experts, sizes, sharding);
                of("gate_up", ExpertSharding::Outputs)?
                    .zip(of("down", ExpertSharding::Inputs)?)
                    .map(|(first, second)| [first, second])
            }
            true => None,
        };
        let parts = config.kind.first();
        let gate_up = own.clone().flat_map(|expert| parts.iter().map(move |part| (expert, *part)));
        let gate_up = params.expert_weight(gate_up.map(|(expert, part)| first(expert, part)).collect())?;
        let down = params.expert_weight(own.clone().map(second).collect())?;
        let biases = Biases::new(params, name, config)?;
        let observed = |expert: usize| {
            let of = |parts: &[&str]| {
                let names: Vec<String> = parts.iter().map(|part| format!("{name}.{expert}.{part}_proj")).collect();
                params.observed(names.iter().map(String::as_str))
            };
            Some([of(parts)?, of(&["down"])?])
        };
        let is_observable = biases.is_none() && fp8.is_none();
        let observed = own.filter(|_| is_observable).filter_map(observed).collect();
        let adapters =
            ExpertAdapters::new(params, name, [hidden, intermediate, experts], config.kind, [&gate_up, &down])?;
        Ok(Self {
            gate_up,
            down,
            biases,
            act: config.kind.between(),
            adapters,
            recompute_activation: params.recompute().selects(recompute::Module::MlpActivation),
            fp8,
            observed,
        })
    }

    /// Notes what each expert's tokens `x`, and its activations of `h` times the probabilities `p`, are like.
    fn observe(&self, x: &Tensor<2>, h: &Tensor<2>, p: &Tensor<1>, counts: &[usize]) {
        let mut before = 0;
        for ([first, second], count) in self.observed.iter().zip(counts).filter(|(_, count)| **count > 0) {
            let of = |x: &Tensor<2>| x.clone().narrow(0, before, *count);
            first.record_rows(of(x));
            let probabilities = p.clone().narrow(0, before, *count).reshape([*count, 1]).cast(h.dtype());
            second.record_rows(plain_activation(of(h), self.act) * probabilities);
            before += count;
        }
    }

    /// Both layers in FP8, if they are: then the tokens of different micro-batches are groups of their own in an
    /// expert.
    pub fn fp8(&self, batch: &MicroBatch) -> Option<[Fp8Experts; 2]> {
        self.fp8.as_ref().map(|layers| layers.each_ref().map(|layer| layer.in_pass(batch.pass_context())))
    }

    /// Whether they multiply in FP8.
    pub fn is_fp8(&self) -> bool {
        self.fp8.is_some()
    }

    /// What the tokens of a group must be a multiple of: 1 unless they multiply in FP8.
    pub fn row_multiple(&self) -> usize {
        self.fp8.as_ref().map_or(1, |[first, _]| first.multiple())
    }

    /// The experts' outputs for `x [tokens, hidden]`, `counts[e]` of them for expert `e` (in FP8 several groups for
    /// each expert), times the probabilities `p [tokens]`. The probabilities are multiplied with the activation, before
    /// the second layer, as in Megatron-LM (`megatron/core/transformer/moe/experts.py`).
    pub fn forward(&self, x: Tensor<2>, p: Tensor<1>, counts: &Arc<[usize]>, batch: &MicroBatch) -> Tensor<2> {
        let tracked = x.device().is_autodiff();
        let gate_up = self.gate_up.of_groups(tracked);
        let (adapters, fp8, again, act) =
            (self.adapters.as_ref(), self.fp8(batch), self.recompute_activation, self.act);
        let h = match &fp8 {
            Some([first, _]) => fp8::grouped_linear(x.clone(), gate_up.value, counts, first),
            None => grouped_linear(x.clone(), gate_up, counts, &batch.pass),
        };
        let h = match adapters {
            Some(adapters) => adapters.first(h, x.clone(), counts, &self.gate_up),
            None => h,
        };
        if !self.observed.is_empty() {
            self.observe(&x, &h, &p, counts);
        }
        let down = self.down.of_groups(tracked);
        if let Some(biases) = &self.biases {
            let (act, both) = (biases.act, biases.values());
            let bias = both[0].clone();
            let y = grouped_clamped_linear(h.clone(), p.clone(), down, both, act, counts, again, &batch.pass);
            return match adapters {
                Some(adapters) => adapters.down_of_clamped(y, (h, p), (bias, act), counts, again, &self.down),
                None => y,
            };
        }
        let y = match &fp8 {
            Some([_, second]) => {
                fp8::grouped_activated_linear(h.clone(), p.clone(), down.value, act, counts, again, second)
            }
            None => grouped_activated_linear(h.clone(), p.clone(), down, act, counts, again, &batch.pass),
        };
        match adapters {
            Some(adapters) => adapters.down(y, (h, p), act, counts, again, &self.down),
            None => y,
        }
    }

    /// Whether a decode step of so many copies can leave the experts' numbers of tokens on the device.
    pub fn decodes(&self, copies: usize) -> bool {
        if !self.can_overlap() || self.is_fp8() || self.act != ExpertActivation::SwiGlu {
            return false;
        }
        let (w, few) = (self.gate_up.value(false), self.few(copies));
        let has_kernel = |sizes| few.has_kernel(sizes, w.dtype(), &w.device());
        has_kernel(self.gate_up.dims()) && has_kernel(self.down.dims())
    }

    /// [`forward`](Self::forward) of a decode step's tokens `x [tokens, hidden]`, one row for each of their copies.
    pub fn decode(&self, x: Tensor<2>, p: Tensor<1>, slots: Tensor<2, Int>) -> Tensor<2> {
        let few = self.few(slots.dims()[0]);
        few.swiglu_linear(few.linear(x, self.gate_up.value(false), slots.clone()), p, self.down.value(false), slots)
    }

    fn few(&self, copies: usize) -> FewTokens {
        FewTokens { copies, experts: self.gate_up.dims()[0] / (2 * self.down.dims()[1]) }
    }

    /// The output of its expert, on whichever rank, for each token of `x [tokens, hidden]`, with probabilities
    /// `p [tokens, 1]`. All-to-alls are overlapped with the GEMMs.
    pub fn through(&self, x: Tensor<2>, p: Tensor<2>, pipeline: &Arc<ExpertPipeline>) -> Tensor<2> {
        through_experts(x, p, [self.gate_up.value(false), self.down.value(false)], pipeline, self.recompute_activation)
    }

    /// What they compute between their layers.
    pub fn activation(&self) -> ExpertActivation {
        self.act
    }

    /// Whether all-to-alls can be overlapped with the experts' GEMMs. Observed inputs are those of [`forward`](Self::forward).
    pub fn can_overlap(&self) -> bool {
        let plain = self.biases.is_none() && self.adapters.is_none() && self.gate_up.stored().is_none();
        plain && self.observed.is_empty()
    }

    /// Features outside and inside.
    pub fn features(&self) -> [usize; 2] {
        [self.gate_up.dims()[1], self.down.dims()[1]]
    }
}

/// What experts compute between their layers, of `h [tokens, inputs in]`.
fn plain_activation(h: Tensor<2>, act: ExpertActivation) -> Tensor<2> {
    match act {
        ExpertActivation::SwiGlu => {
            let halves = h.chunk(2, 1);
            silu(halves[0].clone()) * halves[1].clone()
        }
        ExpertActivation::SquaredRelu => {
            let x = relu(h);
            x.clone() * x
        }
    }
}

#[cfg(test)]
mod tests {
    use backend_dist::launch::Rank;
    use backend_dist::shard::Unit;
    use burn::tensor::{Device, FloatDType};

    use super::*;
    use crate::layers::moe::{Dispatcher, RouterConfig};
    use crate::observer::{InputObserver, Moments};

    /// Their inputs are seen by [`Experts::forward`] alone.
    #[test]
    fn observed_experts_are_not_overlapped() {
        let can_overlap = |observed| {
            let observer = InputObserver::new(Moments::Squares, observed);
            let rank = Rank::single(Device::flex());
            let mut params = ParamBuilder::new(&rank, FloatDType::F32, 1).with_observer(observer);
            params.begin(Unit::Layer(0));
            let config = MoeConfig {
                hidden: 4,
                intermediate: 4,
                experts: 2,
                kind: ExpertKind::SwiGlu,
                router: RouterConfig::new(1),
                capacity: None,
                dispatcher: Dispatcher::AllToAll,
                shared: None,
                input: Init::ZEROS,
                output: Init::ZEROS,
            };
            Experts::new(&mut params, "layers.0.mlp.experts", &config).unwrap().can_overlap()
        };
        assert_eq!([0..1, 1..2].map(can_overlap), [false, true]);
    }
}
