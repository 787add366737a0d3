//! Tokens per second of a Llama of 20 million parameters in f32 on CPU ranks: with a cache, and reading everything anew
//! for every token.
//!
//! ```text
//! cargo run --release --example bench_generate -- [TP] [TOKENS]
//! ```

use std::ops::ControlFlow;
use std::time::Instant;

use backend_dist::launch::launch;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use burn_megatron::prelude::*;

const PROMPT: usize = 128;

fn main() {
    let arguments: Vec<usize> = std::env::args().skip(1).map(|text| text.parse().expect("a number")).collect();
    let tp = arguments.first().copied().unwrap_or(1);
    let tokens = arguments.get(1).copied().unwrap_or(128);
    let config = LlamaConfig {
        vocab_size: 16_384,
        hidden_size: 384,
        intermediate_size: 1344,
        num_hidden_layers: 6,
        num_attention_heads: 12,
        num_key_value_heads: 4,
        head_dim: 32,
        ..LlamaConfig::tiny()
    };
    println!("{:.1} million parameters, tensor parallel {tp}", config.parameter_count() as f64 / 1e6);
    let mesh = Mesh::new(ParallelLayout { tp, ..Default::default() }).expect("a legal layout");
    let prompt: Vec<i64> = (0..PROMPT as i64).map(|index| index * 7919 % 16_384).collect();
    launch(&mesh, &[Device::flex()], |rank| {
        let model = Llama::build(&config, ParamBuilder::new(&rank, FloatDType::F32, 1).without_autodiff())?;
        let options = GenerateOptions::new(tokens, Sampling::greedy());
        for _ in 0..2 {
            let text = generate(&rank, &model, &prompt, &options, |_| ControlFlow::Continue(()))?;
            if rank.rank == 0 {
                println!(
                    "cache: prompt {:.0} tokens/s, then {:.1} tokens/s",
                    PROMPT as f64 / text.prompt_seconds,
                    (tokens - 1) as f64 / text.decode_seconds
                );
            }
        }
        let start = Instant::now();
        let mut all = prompt.clone();
        for _ in 0..tokens.min(8) {
            let data = TensorData::new(all.clone(), [1, all.len()]);
            let logits = model.logits(Tensor::<2, Int>::from_data(data, &rank.device)).into_data();
            let last = logits.iter::<f64>().skip((all.len() - 1) * 16_384);
            let best = last.enumerate().fold((0, f64::MIN), |best, next| if next.1 > best.1 { next } else { best });
            all.push(best.0 as i64);
        }
        if rank.rank == 0 {
            println!("anew: {:.1} tokens/s", tokens.min(8) as f64 / start.elapsed().as_secs_f64());
        }
        Ok(())
    })
    .expect("the ranks finish");
}
