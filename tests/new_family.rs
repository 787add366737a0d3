//! A family that the crates do not know is written outside them, in the layers of `models`, and trains in every layout
//! like on one device: attention alternates between a window and all positions, and MLPs become narrower with depth.

use backend_dist::shard::Init;
use burn_megatron::config::decoder_of;
use models::family::{PrunedSizes, Sample, SampleSizes};
use models::hf::{HfArchitecture, HfError};
use models::layers::{
    Activation, AttentionConfig, BlockConfig, Ffn, LinearConfig, Mixer, MlpConfig, NormKind, NormPlacement, RopeConfig,
    Vocab,
};
use models::layout::ModelDims;
use models::names::NameMap;
use models::{Decoder, DecoderConfig, Family, Frame, ModelConfig};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tests::{SETTINGS, equal_one_device, layouts};

/// The sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct FunnelConfig {
    vocab: usize,
    hidden: usize,
    heads: usize,
    layers: usize,
    window: usize,
}

const FUNNEL: FunnelConfig = FunnelConfig { vocab: 101, hidden: 32, heads: 4, layers: 4, window: 5 };

impl FunnelConfig {
    fn width(&self, layer: usize) -> usize {
        2 * self.hidden * (self.layers - layer)
    }
}

impl DecoderConfig for FunnelConfig {
    fn frame(&self) -> Frame {
        let vocab = Vocab { size: self.vocab, hidden: self.hidden, divisor: 1 };
        Frame { tied: true, dropout: 0.1, ..Frame::new(vocab, self.layers, Init::Normal { std: 0.02 }, 1e-5) }
    }

    fn block(&self, layer: usize) -> BlockConfig {
        let linear = LinearConfig { bias: false, init: Init::Normal { std: 0.02 } };
        let head_dim = self.hidden / self.heads;
        BlockConfig {
            mixer: Some(Mixer::Attention(AttentionConfig {
                rope: Some(RopeConfig { head_dim, theta: 10_000.0, scaling: None }),
                window: layer.is_multiple_of(2).then_some(self.window),
                ..AttentionConfig::new(self.hidden, [self.heads, self.heads / 2], head_dim, [linear; 2])
            })),
            mlp: Some(Ffn::Dense(MlpConfig {
                hidden: self.hidden,
                intermediate: self.width(layer),
                activation: Activation::SwiGlu,
                input: linear,
                output: linear,
            })),
            norm: NormKind::Rms,
            placement: NormPlacement::Before,
            norm_eps: 1e-5,
            dropout: 0.1,
        }
    }
}

impl ModelConfig for FunnelConfig {
    fn dims(&self) -> ModelDims {
        ModelDims {
            vocab: self.vocab,
            hidden: self.hidden,
            heads: self.heads,
            kv_heads: self.heads / 2,
            intermediate: self.width(self.layers - 1),
            experts: None,
            layers: self.layers,
            max_positions: None,
            states: None,
        }
    }

    fn megatron_names(&self) -> NameMap {
        self.frame().megatron_names(|layer| self.block(layer))
    }

    fn hf_names(&self) -> NameMap {
        self.frame().hf_names(|layer| self.block(layer))
    }
}

impl Family for FunnelConfig {
    const SIZES: &'static [(&'static str, &'static str)] = &[("window", "Window of every other layer")];

    fn architectures() -> Vec<HfArchitecture> {
        vec![HfArchitecture::new("funnel", "FunnelForCausalLM")]
    }

    fn read_hf(config: &Value, _kind: &str) -> Result<Self, HfError> {
        serde_json::from_value(config["sizes"].clone()).map_err(|error| HfError::Missing { key: error.to_string() })
    }

    fn write_hf(&self) -> Result<Value, HfError> {
        Ok(json!({"model_type": Self::architectures()[0].model_type, "sizes": self}))
    }

    fn samples(sizes: &SampleSizes) -> Vec<Sample<Self>> {
        let &SampleSizes { vocab, hidden, heads, layers, seq, .. } = sizes;
        let config = Self { vocab, hidden, heads, layers, window: seq / 4 };
        vec![Sample::new("funnel", "MLPs that become narrower with depth", config)]
    }

    fn pruned(&self, to: &PrunedSizes) -> Option<Self> {
        Some(Self { layers: to.layers.len(), hidden: to.hidden, ..self.clone() })
    }
}

#[test]
fn a_family_from_outside_trains_in_every_kind_of_layout() {
    let layouts = layouts![
        "TP2" "TP4 SP" "DP2 ZeRO1 x2" "DP4 ZeRO3" "CP2" "PP2 x4 1f1b" "PP2 VPP2 x4 interleaved" "PP2 x4 zb-h1"
        "TP2 SP PP2 DP2 ZeRO2 x2" "TP2 CP2 PP2 x2 uniform1"
    ];
    equal_one_device::<Decoder<FunnelConfig>>(&FUNNEL, &SETTINGS, &layouts);
}

#[test]
fn its_names_and_limits_follow_from_its_blocks() {
    // Embedding, norms, attention and the MLPs of widths 256, 192, 128 and 64.
    let layer = 2 * 32 + 32 * (32 + 16 + 16) + 32 * 32;
    assert_eq!(FUNNEL.parameter_count(), 101 * 32 + 32 + 4 * layer + 3 * 32 * (256 + 192 + 128 + 64));
    assert_eq!(FUNNEL.megatron_names().iter().count(), FUNNEL.hf_names().iter().count());
    let refused = FUNNEL.dims().check_tp(3).unwrap_err().to_string();
    assert!(refused.contains("nearest legal: 2, 4"), "{refused}");
}

#[test]
fn what_others_ask_of_a_family_it_says_itself() {
    // The planner's model follows from the blocks.
    let planned = decoder_of(&FUNNEL);
    assert_eq!((planned.layers, planned.heads, planned.kv_heads, planned.head_dim), (4, 4, 2, 8));
    assert_eq!((planned.window, planned.windowed_layers, planned.intermediate), (Some(5), 2, FUNNEL.width(0)));
    assert!(planned.tied && planned.rope && planned.gated && planned.is_dense());
    // Those of Hugging Face.
    let file = FUNNEL.write_hf().unwrap();
    assert_eq!(FunnelConfig::read_hf(&file, "funnel").unwrap(), FUNNEL);
    // What is not said is nothing that the family has.
    assert!(FunnelConfig::owners("window").is_empty() && FunnelConfig::is_needed("window", &json!(5)));
    let to = PrunedSizes { layers: vec![0, 3], hidden: 16, intermediate: 0, kv_heads: 2 };
    assert_eq!(FUNNEL.pruned(&to).map(|of| (of.layers, of.hidden)), Some((2, 16)));
}

#[test]
fn its_samples_are_verified() {
    for Sample { name, config, .. } in FunnelConfig::samples(&SampleSizes::default()) {
        assert_eq!(name, "funnel");
        equal_one_device::<Decoder<FunnelConfig>>(&config, &SETTINGS, &layouts!["TP2 SP" "PP2 x2"]);
    }
}
