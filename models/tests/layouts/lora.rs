//! Adapters next to frozen weights, in every layout, with all operations finding what others have left for them.

use std::sync::Arc;

use crate::assert_same;
use crate::fp8::wide_llama;
use crate::harness::{Batch, Noise, run_on};
use backend_dist::ops::fp8::Fp8Format;
use burn::tensor::FloatDType;
use models::lora::LoraConfig;
use models::{Fp8Config, Llama, LlamaConfig, LlamaVariant, ModelConfig};

#[test]
fn adapters_in_all_layouts() {
    let lora = LoraConfig { rank: 3, ..LoraConfig::default() };
    let kinds = [lora.clone(), LoraConfig { dora: true, ..lora }];
    let without_biases = LlamaConfig { attention_bias: false, ..wide_llama() };
    let fused = LlamaConfig { variant: LlamaVariant::Phi3, ..without_biases.clone() };
    for (config, lora) in
        [wide_llama(), without_biases, fused].iter().flat_map(|config| kinds.iter().map(move |lora| (config, lora)))
    {
        for format in [None, Some(Fp8Format::Hybrid)] {
            let fp8 = Fp8Config { format, ..Fp8Config::default() };
            let plan = Arc::new(lora.plan(&config.hf_names()).unwrap());
            let (batch, layers) = (Batch::synthetic(config.vocab_size), config.num_hidden_layers);
            let of = |layout| {
                run_on::<Llama>(config, layout, FloatDType::F64, &Noise, &batch, None, |params| {
                    params.with_fp8(&fp8, layers).with_lora(&plan, Some(&Noise))
                })
            };
            let alone = of("TP1");
            assert!(alone.gradients.keys().all(|name| name.contains("lora")), "only adapters are trained");
            for layout in ["TP2", "TP2 SP", "TP4 SP"] {
                assert_same(&format!("{layout} {lora:?} {format:?}"), &of(layout), &alone);
            }
        }
    }
}
