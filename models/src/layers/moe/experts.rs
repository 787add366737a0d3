//! The routed experts that a rank holds: SwiGLU MLPs side by side.

use std::sync::Arc;

use backend_dist::ops::fp8::{self, ExpertSharding, Fp8Experts};
use backend_dist::ops::moe::{ExpertPipeline, grouped_linear, grouped_swiglu_linear, through_experts};
use backend_dist::shard::Section;
use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::config::MoeConfig;
use crate::micro_batch::MicroBatch;
use crate::param::{BuildError, ParamBuilder};
use crate::recompute;

/// `down_e(silu(gate_e x) up_e x)` for each of the rank's experts `e`, of which this rank may hold some of the
/// features.
#[derive(Module, Debug)]
pub(super) struct Experts {
    /// `[experts · 2 intermediate, hidden]`: gate and up of an expert, then of the next.
    gate_up: Param<Tensor<2>>,
    /// `[experts · hidden, intermediate]`.
    down: Param<Tensor<2>>,
    #[module(skip)]
    recompute_activation: bool,
    /// Of both layers.
    #[module(skip)]
    fp8: Option<[Fp8Experts; 2]>,
}

impl Experts {
    /// The rank's experts under the global name `name`.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn new(params: &mut ParamBuilder, name: &str, config: &MoeConfig) -> Result<Self, BuildError> {
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
        let fp8 = match [hidden, intermediate / etp.size].iter().all(|size| size.is_multiple_of(fp8::MULTIPLE)) {
            true => {
                let of = |layer: &str, sharding| params.fp8_experts(&format!("{name}.{layer}"), experts, sharding);
                of("gate_up", ExpertSharding::Outputs)?
                    .zip(of("down", ExpertSharding::Inputs)?)
                    .map(|(first, second)| [first, second])
            }
            false => None,
        };
        let gate_up = own.clone().flat_map(|expert| [first(expert, "gate"), first(expert, "up")]).collect();
        Ok(Self {
            gate_up: params.expert_sections(gate_up)?,
            down: params.expert_sections(own.map(second).collect())?,
            recompute_activation: params.recompute().selects(recompute::Module::MlpActivation),
            fp8,
        })
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

    /// The experts' outputs for `x [tokens, hidden]`, `counts[e]` of them for expert `e` (in FP8 several groups for
    /// each expert), times the probabilities `p [tokens]`. The probabilities are multiplied with the activation, before
    /// the second layer, as in Megatron-LM (`megatron/core/transformer/moe/experts.py`).
    pub fn forward(&self, x: Tensor<2>, p: Tensor<1>, counts: &Arc<[usize]>, batch: &MicroBatch) -> Tensor<2> {
        if let Some([first, second]) = &self.fp8(batch) {
            let x = fp8::grouped_linear(x, self.gate_up.val(), counts, first);
            let (down, again) = (self.down.val(), self.recompute_activation);
            return fp8::grouped_swiglu_linear(x, p, down, counts, again, second);
        }
        let x = grouped_linear(x, self.gate_up.val(), counts, &batch.pass);
        grouped_swiglu_linear(x, p, self.down.val(), counts, self.recompute_activation, &batch.pass)
    }

    /// The output of its expert, on whichever rank, for each token of `x [tokens, hidden]`, with probabilities
    /// `p [tokens, 1]`. All-to-alls are overlapped with the GEMMs.
    pub fn through(&self, x: Tensor<2>, p: Tensor<2>, pipeline: &Arc<ExpertPipeline>) -> Tensor<2> {
        through_experts(x, p, [self.gate_up.val(), self.down.val()], pipeline, self.recompute_activation)
    }

    /// Features outside and inside.
    pub fn features(&self) -> [usize; 2] {
        [self.gate_up.dims()[1], self.down.dims()[1]]
    }
}
