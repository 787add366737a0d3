//! A run that passed all checks, in words.

use std::fmt;

use indicatif::HumanCount;

use super::Plan;
use crate::train::data::text_prefix;
use crate::train::resume::ResumePoint;

/// `1 sequence`, `2 sequences`, `2 micro-batches`.
fn several(number: usize, what: &str) -> String {
    let ending = match (number, what.ends_with("ch")) {
        (1, _) => "",
        (_, true) => "es",
        _ => "s",
    };
    format!("{} {what}{ending}", HumanCount(number as u64))
}

/// A line for each part of the run.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, parameters, data, start, .. } = self;
        let count = |number: usize| HumanCount(number as u64);
        let (training, layout) = (&config.training, &config.parallel);
        let weights = match &config.model.hf {
            Some(folder) => format!("weights of {}", folder.display()),
            None => format!("random weights of seed {}", training.seed),
        };
        let family = config.model.config.family();
        writeln!(f, "model        {family}, {} parameters, {weights}", count(*parameters))?;
        for folder in self.weights.iter().chain(&self.teacher) {
            folder.left_out().map_or(Ok(()), |what| writeln!(f, "left out     {what}"))?;
        }
        if let Ok(Some(plan)) = config.lora.plan(&config.model.config) {
            let names = plan.names("");
            let trained: usize = names.iter().map(|(_, tensor)| tensor.our_shape().iter().product::<usize>()).sum();
            let mut ranks: Vec<usize> = plan.modules().into_values().map(|(rank, _)| rank).collect();
            ranks.sort_unstable();
            let rank = match (ranks.first(), ranks.last()) {
                (Some(least), Some(most)) if least != most => format!("ranks {least} to {most}"),
                _ => format!("rank {}", ranks[0]),
            };
            writeln!(f, "adapters     {rank} of {} layers, {} parameters are trained", plan.len(), count(trained))?;
        }
        if let Some(teacher) = &config.distill.teacher {
            let (weight, temperature) = (config.distill.weight, config.distill.temperature);
            writeln!(f, "teacher      {}, weight {weight}, temperature {temperature}", teacher.display())?;
        }
        writeln!(f, "layout       {layout} on {}", several(layout.world_size(), "rank"))?;
        let sequences = training.global_batch;
        let micro_batches = sequences / (training.micro_batch * layout.dp).max(1);
        writeln!(
            f,
            "step         {}: {} of {}, on {}; {} tokens",
            several(sequences, "sequence"),
            several(micro_batches, "micro-batch"),
            several(training.micro_batch, "sequence"),
            several(layout.dp, "data-parallel rank"),
            count(config.tokens_per_step())
        )?;
        let sizes = serde_json::to_value(&config.model.config).unwrap_or_default();
        match sizes["max_position_embeddings"].as_u64() {
            Some(made) if training.seq_length as u64 > made => writeln!(
                f,
                "warning      training.seq-length = {} is more than the model is made for: model.max-position-embeddings = {made}",
                training.seq_length
            )?,
            _ => {}
        }
        if let Some(ramp) = training.rampup_batch_size {
            writeln!(
                f,
                "ramp         from {} over {} samples",
                several(ramp.start, "sequence"),
                HumanCount(ramp.samples)
            )?;
        }
        let tokens = HumanCount(config.tokens());
        writeln!(f, "run          {}, {tokens} tokens", several(training.steps, "step"))?;
        for (index, line) in data.iter().enumerate() {
            writeln!(f, "{:<12} {line}", if index == 0 { "data" } else { "" })?;
        }
        if let (false, Some(tokenizer)) = (config.data.text.is_empty(), &config.data.tokenizer) {
            writeln!(f, "             tokenized with {tokenizer} to {}*", text_prefix(config).display())?;
        }
        let evaluation = &config.evaluation;
        match evaluation.batches {
            0 => writeln!(f, "evaluation   none while training")?,
            batches => {
                let (every, sequences) = (several(evaluation.every, "step"), several(batches * sequences, "sequence"));
                writeln!(f, "evaluation   every {every}, on {sequences}")?;
            }
        }
        match &config.checkpoint.directory {
            None => writeln!(f, "checkpoints  none")?,
            Some(folder) => writeln!(f, "checkpoints  {} in {}", config.checkpoint.every, folder.display())?,
        }
        if let Some(start) = start {
            let ResumePoint { path, step, layout, warning, .. } = start;
            let end = if *step as usize >= training.steps { ": all steps are done" } else { "" };
            writeln!(f, "resumes      after step {step} from {} (saved with {layout}){end}", path.display())?;
            if let Some(warning) = warning {
                writeln!(f, "warning      {warning}")?;
            }
        }
        write!(f, "output       {}", config.output.directory.display())
    }
}
