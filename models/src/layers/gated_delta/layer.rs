//! The layer around the rule; every rank has some of the heads.

use backend_dist::ops::{GatedDeltaHeads, GatedDeltaInputs, gated_delta, gated_delta_with_states, split};
use backend_dist::shard::{Init, Section};
use burn::module::{Module, Param};
use burn::tensor::activation::silu;
use burn::tensor::{DType, Tensor};

use crate::layers::linear::{ColumnParallelLinear, LinearConfig, Output};
use crate::layers::norm::{Norm, NormKind};
use crate::layers::paged::RecurrentState;
use crate::layers::recurrent::{Borders, Features, HeadParallel, Mixed, Recurrence, convolve, tail};
use crate::layers::row_linear::RowParallelLinear;
use crate::micro_batch::MicroBatch;
use crate::param::{ParamBuilder, Result};

/// The rates of forgetting that a layer begins with, uniform between the ends, as in transformers (`_init_weights` of
/// `modeling_qwen3_next.py`).
const RATES: Init = Init::LogOfUniform { low: 0.01, high: 16.0 };

/// Sizes of a Gated DeltaNet layer.
#[derive(Clone, Copy, Debug)]
pub struct GatedDeltaConfig {
    /// Features in and out.
    pub hidden: usize,
    /// Heads of queries and keys; each serves `value_heads / key_heads` value heads.
    pub key_heads: usize,
    /// Heads of values, each with a state.
    pub value_heads: usize,
    /// Features of a query or key head.
    pub key_dim: usize,
    /// Features of a value head.
    pub value_dim: usize,
    /// Positions that the convolution sees.
    pub kernel: usize,
    /// Epsilon of the output's norm.
    pub norm_eps: f64,
    /// Distribution of the projections of the input.
    pub input: Init,
    /// Distribution of the projection onto the residual stream.
    pub output: Init,
}

impl GatedDeltaConfig {
    /// Features of all queries, keys and values: what is convolved.
    pub fn features(&self) -> [usize; 3] {
        let keys = self.key_heads * self.key_dim;
        [keys, keys, self.value_heads * self.value_dim]
    }
}

/// A Gated DeltaNet layer. A rank holds its key heads and the value heads that they serve.
#[derive(Module, Debug)]
pub struct GatedDeltaNet {
    /// Queries, keys, values, the output's gate, and for each value head β and α before their functions.
    input: ColumnParallelLinear,
    /// `[features of queries, keys and values, 1, kernel]`.
    convolution: Param<Tensor<3>>,
    /// Logarithm of each head's rate of forgetting.
    a_log: Param<Tensor<1>>,
    dt_bias: Param<Tensor<1>>,
    norm: Norm,
    output: RowParallelLinear,
    /// Of this rank.
    #[module(skip)]
    of: GatedDeltaHeads,
}

impl GatedDeltaNet {
    /// A layer under the global name `name`.
    pub fn new(params: &mut ParamBuilder, name: &str, config: &GatedDeltaConfig) -> Result<Self> {
        let GatedDeltaConfig { hidden, key_heads, value_heads, key_dim, value_dim, kernel, .. } = *config;
        let (ranks, [keys, _, values]) = (params.place().size, config.features());
        let named = ["q_proj", "k_proj", "v_proj", "z_proj", "b_proj", "a_proj"].map(|part| format!("{name}.{part}"));
        let features = [keys, keys, values, values, value_heads, value_heads];
        let outputs: Vec<Output> =
            named.iter().zip(features).map(|(name, features)| Output { name, features, parts: ranks }).collect();
        let linear = |init| LinearConfig { bias: false, init };
        let input = ColumnParallelLinear::new(params, hidden, &outputs, linear(config.input))?;
        let place = params.place();
        // PyTorch's distribution and shape of a convolution's weights; three dimensions, so no optimizer takes them for a
        // matrix.
        let bound = (kernel as f64).sqrt().recip();
        let taps = ["q_conv", "k_conv", "v_conv"].into_iter().zip(config.features()).map(|(part, features)| {
            let section = Section::split(format!("{name}.{part}"), &[features, 1, kernel], 0, ranks, place);
            (section, Init::Uniform { low: -bound, high: bound })
        });
        let convolution = params.sections(taps.collect())?;
        let of_heads = |params: &mut ParamBuilder, part: &str, init| {
            let section = Section::split(format!("{name}.{part}"), &[value_heads], 0, ranks, place);
            params.sections(vec![(section, init)])
        };
        Ok(Self {
            input,
            convolution,
            a_log: of_heads(params, "A_log", RATES)?,
            dt_bias: of_heads(params, "dt_bias", Init::ONES)?,
            norm: Norm::of_heads(params, &format!("{name}.norm"), value_dim, NormKind::Rms, config.norm_eps)?,
            output: RowParallelLinear::new(params, &format!("{name}.o_proj"), values, hidden, linear(config.output))?,
            of: GatedDeltaHeads { key_heads: key_heads / ranks, value_heads: value_heads / ranks, key_dim, value_dim },
        })
    }
}

impl Recurrence for GatedDeltaNet {
    fn projections(&self) -> (&ColumnParallelLinear, &RowParallelLinear) {
        (&self.input, &self.output)
    }

    fn mix(&self, projected: Tensor<3>, state: Option<RecurrentState>, batch: &MicroBatch, with_state: bool) -> Mixed {
        let GatedDeltaHeads { key_heads, value_heads, key_dim, value_dim } = self.of;
        let ([seq, samples, _], dtype) = (projected.dims(), projected.dtype());
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let of_keys = Features { heads: key_heads, each: key_dim };
        let of_values = Features { heads: value_heads, each: value_dim };
        let (features, steps) = ([of_keys, of_keys, of_values], [Features { each: 1, ..of_values }; 2]);
        let values = value_heads * value_dim;
        let [convolved, gate, of_steps] = split(projected, [self.of.width(), values, 2 * value_heads]);
        let (ranks, borders) = (HeadParallel::of(batch), Borders::of(batch, seq));
        let [convolved, of_steps] = ranks.enter([convolved, of_steps], features, steps);
        // From here on the rank's heads, at all positions.
        let [key_heads, value_heads] = [key_heads, value_heads].map(|heads| ranks.share(heads));
        let of = GatedDeltaHeads { key_heads, value_heads, ..self.of };
        let [beta, dt] = split(of_steps, [value_heads; 2]);
        let (before, seen) = state.map(|state| (state.heads, state.convolution)).unzip();
        let weight = ranks.own(self.convolution.val(), features);
        let behind = with_state.then(|| tail(convolved.clone(), seen.clone(), weight.dims()[2]));
        let of_heads = |weight: &Param<Tensor<1>>| ranks.own(weight.val(), [steps[0]]);
        let inputs = GatedDeltaInputs {
            ages: borders.as_ref().map(|borders| borders.ages(&convolved.device())),
            x: convolve(convolved, weight, None, seen, borders.as_ref()),
            beta,
            dt,
            dt_bias: of_heads(&self.dt_bias),
            a_log: of_heads(&self.a_log),
        };
        let (answers, last) = match with_state {
            true => {
                let (answers, last) = gated_delta_with_states(inputs, of, before);
                (answers, Some(last))
            }
            false => (gated_delta(inputs, of), None),
        };
        // As transformers: rounded before the norm, and after the gate.
        let answers = ranks.leave(answers.unsqueeze_dim(2)).reshape([seq, samples, self.of.value_heads, value_dim]);
        let answers = self.norm.forward(answers);
        let gate = silu(gate.cast(wide)).reshape([seq, samples, self.of.value_heads, value_dim]);
        let of = (answers.cast(wide) * gate).cast(dtype).reshape([seq, samples, values]);
        (of, last.zip(behind).map(|(heads, convolution)| RecurrentState { heads, convolution }))
    }
}
