//! The layer around the recurrence; every rank has some of the heads.

use backend_dist::ops::{SsdHeads, SsdInputs, split, ssd, ssd_with_states};
use backend_dist::shard::{Init, Section};
use burn::module::{Module, Param};
use burn::tensor::Tensor;

use crate::layers::linear::{ColumnParallelLinear, LinearConfig, Output};
use crate::layers::paged::RecurrentState;
use crate::layers::projection_norm::ProjectionNorm;
use crate::layers::recurrent::{Borders, Features, HeadParallel, Mixed, Recurrence, convolve, tail};
use crate::layers::row_linear::RowParallelLinear;
use crate::micro_batch::MicroBatch;
use crate::param::{ParamBuilder, Result};

/// The rates of forgetting that a layer begins with, uniform between the ends: `A_init_range` of mamba_ssm's `Mamba2` and
/// of Megatron-LM. transformers numbers the heads instead, so that the last of 128 would forget at a rate of 128.
const RATES: Init = Init::LogOfUniform { low: 1.0, high: 16.0 };
/// The step sizes that a layer begins with, uniform in their logarithm: `dt_min` and `dt_max` of mamba_ssm and
/// Megatron-LM, `time_step_min` and `time_step_max` of transformers. None is as small as their floor, 1e-4.
const STEPS: Init = Init::SoftplusLogUniform { low: 0.001, high: 0.1 };

/// Sizes of a Mamba-2 layer.
#[derive(Clone, Copy, Debug)]
pub struct Mamba2MixerConfig {
    /// Features in and out.
    pub hidden: usize,
    /// Heads, each with a state.
    pub heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Groups of heads that share B and C, and over whose features the output is normalised.
    pub groups: usize,
    /// Features of B and of C in a group, N.
    pub state: usize,
    /// Positions that the convolution sees.
    pub kernel: usize,
    /// The convolution has a bias.
    pub conv_bias: bool,
    /// Smallest and largest step size Δ, after softplus.
    pub step_limit: [f64; 2],
    /// Epsilon of the output's norm.
    pub norm_eps: f64,
    /// The projections of the input.
    pub input: LinearConfig,
    /// The projection onto the residual stream.
    pub output: LinearConfig,
}

impl Mamba2MixerConfig {
    /// Features of all heads.
    pub fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    /// The names of what is convolved, x, B and C, with the features of each.
    pub fn convolved(&self) -> [(&'static str, usize); 3] {
        let grouped = self.groups * self.state;
        [("x", self.inner()), ("b", grouped), ("c", grouped)]
    }

    /// The names of the input's projections, z, x, B, C and Δ, with the features of each.
    pub fn projected(&self) -> [(&'static str, usize); 5] {
        let [x, b, c] = self.convolved();
        [("z", self.inner()), x, b, c, ("dt", self.heads)]
    }
}

/// A Mamba-2 layer. A rank holds its heads and the groups that they use; with fewer groups than ranks, neighbours hold
/// the same group.
#[derive(Module, Debug)]
pub struct Mamba2Mixer {
    /// The output's gate z, x, B, C, and for each head the step size before its function.
    input: ColumnParallelLinear,
    /// `[features of x, B and C, 1, kernel]`.
    convolution: Param<Tensor<3>>,
    conv_bias: Option<Param<Tensor<1>>>,
    dt_bias: Param<Tensor<1>>,
    /// Logarithm of each head's rate of forgetting, −A.
    a_log: Param<Tensor<1>>,
    /// What of x each head adds to its answers, D.
    skip: Param<Tensor<1>>,
    norm: ProjectionNorm,
    output: RowParallelLinear,
    /// Of this rank.
    #[module(skip)]
    of: SsdHeads,
}

impl Mamba2Mixer {
    /// A layer under the global name `name`.
    pub fn new(params: &mut ParamBuilder, name: &str, config: &Mamba2MixerConfig) -> Result<Self> {
        let Mamba2MixerConfig { hidden, heads, head_dim, groups, state, kernel, .. } = *config;
        let (place, inner) = (params.place(), config.inner());
        let ranks = place.size;
        let parts_of = |part: &str| if matches!(part, "b" | "c") { ranks.min(groups) } else { ranks };
        let named =
            config.projected().map(|(part, features)| (format!("{name}.{part}_proj"), features, parts_of(part)));
        let outputs =
            named.each_ref().map(|(name, features, parts)| Output { name, features: *features, parts: *parts });
        let input = ColumnParallelLinear::new(params, hidden, &outputs, config.input)?;
        // PyTorch's distribution and shape of a convolution's weights and biases; three dimensions, so no optimizer takes
        // them for a matrix.
        let bound = (kernel as f64).sqrt().recip();
        let uniform = Init::Uniform { low: -bound, high: bound };
        let taps = config.convolved().map(|(part, features)| {
            (Section::split(format!("{name}.{part}_conv"), &[features, 1, kernel], 0, parts_of(part), place), uniform)
        });
        let convolution = params.sections(taps.into())?;
        let biases = config.convolved().map(|(part, features)| {
            (Section::split(format!("{name}.{part}_conv_bias"), &[features], 0, parts_of(part), place), uniform)
        });
        let conv_bias = if config.conv_bias { Some(params.sections(biases.into())?) } else { None };
        let of_heads = |params: &mut ParamBuilder, part: &str, init| {
            let section = Section::split(format!("{name}.{part}"), &[heads], 0, ranks, place);
            params.sections(vec![(section, init)])
        };
        Ok(Self {
            input,
            convolution,
            conv_bias,
            dt_bias: of_heads(params, "dt_bias", STEPS)?,
            a_log: of_heads(params, "A_log", RATES)?,
            skip: of_heads(params, "D", Init::ONES)?,
            norm: ProjectionNorm::of_groups(params, &format!("{name}.norm"), inner, groups, config.norm_eps)?,
            output: RowParallelLinear::new(params, &format!("{name}.out_proj"), inner, hidden, config.output)?,
            of: SsdHeads {
                heads: heads / ranks,
                groups: groups / ranks.min(groups),
                head_dim,
                state,
                step_limit: config.step_limit,
            },
        })
    }
}

impl Recurrence for Mamba2Mixer {
    fn projections(&self) -> (&ColumnParallelLinear, &RowParallelLinear) {
        (&self.input, &self.output)
    }

    fn mix(&self, projected: Tensor<3>, state: Option<RecurrentState>, batch: &MicroBatch, with_state: bool) -> Mixed {
        let SsdHeads { heads, groups, head_dim, state: n, .. } = self.of;
        let ([seq, samples, _], inner) = (projected.dims(), heads * head_dim);
        let [gate, convolved, dt] = split(projected, [inner, self.of.width(), heads]);
        let (ranks, borders) = (HeadParallel::of(batch), Borders::of(batch, seq));
        let grouped = Features { heads: groups, each: n };
        let features = [Features { heads, each: head_dim }, grouped, grouped];
        let steps = [Features { heads, each: 1 }];
        let [convolved, dt] = ranks.enter([convolved, dt], features, steps);
        let of = SsdHeads { heads: ranks.share(heads), groups: ranks.share(groups), ..self.of };
        let (before, seen) = state.map(|state| (state.heads, state.convolution)).unzip();
        let weight = ranks.own(self.convolution.val(), features);
        let behind = with_state.then(|| tail(convolved.clone(), seen.clone(), weight.dims()[2]));
        let bias = self.conv_bias.as_ref().map(|bias| ranks.own(bias.val(), features));
        let inputs = SsdInputs {
            ages: borders.as_ref().map(|borders| borders.ages(&convolved.device())),
            x: convolve(convolved, weight, bias, seen, borders.as_ref()),
            dt,
            dt_bias: ranks.own(self.dt_bias.val(), steps),
            a_log: ranks.own(self.a_log.val(), steps),
            skip: ranks.own(self.skip.val(), steps),
        };
        let (answers, last) = match with_state {
            true => {
                let (answers, last) = ssd_with_states(inputs, of, before);
                (answers, Some(last))
            }
            false => (ssd(inputs, of), None),
        };
        let answers = ranks.leave(answers.unsqueeze_dim(2)).reshape([seq, samples, inner]);
        (
            self.norm.gated(answers, gate),
            last.zip(behind).map(|(heads, convolution)| RecurrentState { heads, convolution }),
        )
    }
}
