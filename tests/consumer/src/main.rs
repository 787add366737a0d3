//! Trains a Llama of the library's layers, and a module that knows only Burn, both in TP2 on CPU ranks.

mod any_module;

use std::error::Error;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::tensor::FloatDType;
use burn_megatron::metrics::{LogEntry, MetricsSink};
use burn_megatron::{data::TokensInMemory, prelude::*};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args_os().nth(1).ok_or("usage: consumer FOLDER")?;
    let losses = llama(Path::new(&folder))?;
    learned("Llama in TP2", &losses)?;
    learned("a module of burn-nn in TP2", &any_module::losses(&Path::new(&folder).join("any_module"))?)
}

/// Keeps the losses of all steps.
#[derive(Clone, Default)]
struct Losses(Arc<Mutex<Vec<f64>>>);

impl MetricsSink for Losses {
    fn entry(&mut self, entry: &LogEntry) -> io::Result<()> {
        let loss = entry.scalars().into_iter().find(|(name, _)| name == "train/loss");
        self.0.lock().expect("no thread has panicked").extend(loss.map(|(_, loss)| loss));
        Ok(())
    }
}

fn llama(folder: &Path) -> Result<Vec<f64>, Box<dyn Error>> {
    let config = LlamaConfig::tiny();
    // Each token follows from the one before it.
    let tokens: Vec<i64> = (0..20_000).scan(1, |token, _| Some(std::mem::replace(token, *token * 5 % 97))).collect();
    let data = Arc::new(TokensInMemory::new(tokens, 64));
    let (mesh, losses) = (Mesh::new("TP2".parse()?)?, Losses::default());
    let (recipe, dims) = (EngineConfig::new(2, 8, LrConfig::constant(1e-2)), config.dims());
    let run = Pretraining::new(mesh, recipe, 40, (data.clone(), data), dims, move |rank, part| {
        Ok(Llama::build(&config, ParamBuilder::new(rank, FloatDType::F32, 1234).with_part(part))?)
    })
    .directory(folder.join("llama"))
    .metrics_sink(losses.clone());
    let (training, learner) = run.supervised();
    if let Some(error) = training.launch(learner).error {
        return Err(error.to_string().into());
    }
    let losses = losses.0.lock().expect("no thread has panicked").clone();
    Ok(losses)
}

/// Prints the first and the last loss.
fn learned(what: &str, losses: &[f64]) -> Result<(), Box<dyn Error>> {
    let [first, .., last] = losses else { return Err(format!("{what}: {} losses", losses.len()).into()) };
    println!("{what}: loss {first:.3} in the first step, {last:.3} after {}", losses.len());
    if *last < 0.5 * first { Ok(()) } else { Err(format!("{what} has not learned").into()) }
}
