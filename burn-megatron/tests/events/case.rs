//! A run, and what happens to it.

use std::fmt;
use std::path::Path;

use backend_dist::mesh::ParallelLayout;
use burn_megatron::config::{Precision, RunConfig};
use burn_megatron::data::indexed::{Dtype, IndexedWriter};
use burn_megatron::engine::ContextConfig;
use burn_megatron::verify::{Candidate, candidates};
use models::{FamilyConfig, ModelConfig};

use super::config::{END_OF_DOCUMENT, SEQ, VOCABULARY, config};
use super::draw::Draw;
use super::run;

/// One stretch of a run.
#[derive(Clone, Debug)]
pub struct Stretch {
    pub layout: Candidate,
    /// It resumes from the checkpoint of this step.
    pub from: usize,
    /// Its last step.
    pub to: usize,
    pub evaluate: (usize, usize),
    /// Steps between two checkpoints.
    pub save: Option<u64>,
    pub vocabulary_divisible_by: usize,
    /// Rows per step from here on; of the run that nothing happens to as well.
    pub global_batch: usize,
    pub background: bool,
}

/// A run in stretches.
pub struct Case {
    pub config: RunConfig,
    pub documents: Vec<Vec<usize>>,
    pub stretches: Vec<Stretch>,
    /// Nothing may differ at all.
    pub exact: bool,
}

impl Case {
    /// In f64, in layouts that have nothing to do with each other.
    pub fn draw(draw: &mut Draw) -> Self {
        let (config, documents) = (config(draw, false), documents(draw));
        let stretches = stretches(draw, &config, false);
        Self { config, documents, stretches, exact: false }
    }

    /// In another precision, in one layout.
    pub fn draw_narrow(draw: &mut Draw) -> Self {
        let (mut config, documents) = (config(draw, true), documents(draw));
        config.training.dtype =
            draw.of(&[Precision::F32, Precision::Bf16, Precision::Bf16, Precision::F16, Precision::F16]);
        config.loss_scale.initial_scale = draw.of(&[1024.0, 1e6, 1e9]);
        config.loss_scale.growth_interval = draw.of(&[1, 2, 1000]);
        config.loss_scale.hysteresis = draw.of(&[1, 2]);
        let stretches = stretches(draw, &config, true);
        Self { config, documents, stretches, exact: true }
    }

    /// Does the run twice and compares.
    pub fn check(&self) -> Result<(), String> {
        run::check(self)
    }

    /// Writes the run's data into a folder, and says so in its configuration.
    pub fn write_data(&self, folder: &Path) -> RunConfig {
        let mut config = self.config.clone();
        config.data.cache = config.data.cache.map(|_| folder.join("cache"));
        for (index, lengths) in self.documents.iter().enumerate() {
            let prefix = folder.join(format!("part{index}"));
            let mut writer = IndexedWriter::create(&prefix, Dtype::for_vocabulary(VOCABULARY)).unwrap();
            let mut token = Draw::new(index as u64 + 77);
            for &length in lengths {
                let mut tokens: Vec<i64> = (1..length).map(|_| token.below(END_OF_DOCUMENT as usize) as i64).collect();
                tokens.extend((length > 0).then_some(END_OF_DOCUMENT));
                writer.push_sequence(&tokens).unwrap();
                writer.end_document();
            }
            writer.finish().unwrap();
            config.data.prefixes.push(prefix);
        }
        config
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, stretches, .. } = self;
        for Stretch { layout, from, to, evaluate, save, vocabulary_divisible_by, global_batch, .. } in stretches {
            write!(
                f,
                "[{from}..{to} {layout} batch {global_batch} eval {evaluate:?} save {save:?} vocab/{vocabulary_divisible_by}] "
            )?;
        }
        write!(f, "{:?} {:?} {:?} {:?}", config.training, config.lr, config.optimizer, config.data)?;
        write!(f, " {:?} {:?}", config.model.config, config.fp8)
    }
}

/// Lengths of the documents of each file; some are empty, or nothing but their end.
fn documents(draw: &mut Draw) -> Vec<Vec<usize>> {
    let files = draw.of(&[1, 2, 3]);
    let lengths = |draw: &mut Draw| (0..40 + draw.below(40)).map(|_| draw.of(&[0, 1, 2, 5, 9, 14, 30, 60])).collect();
    (0..files).map(|_| lengths(draw)).collect()
}

fn layouts(config: &RunConfig, ranks: usize, batch: usize) -> Vec<Candidate> {
    let (dims, data) = (config.model.config.dims(), &config.data);
    let fits = |layout: &ParallelLayout, context: &ContextConfig| {
        dims.check(layout, SEQ).is_ok() && context.check(layout, &dims).is_ok()
    };
    let mut list = candidates(ranks, batch, dims.layers, dims.experts.is_some(), fits);
    // Separate documents can be assigned anew; routers then balance each of them alone, not whole sequences.
    let balanced = match &config.model.config {
        FamilyConfig::Mixtral(sizes) => sizes.router_aux_loss_coef > 0.0 || sizes.router_z_loss_coef > 0.0,
        FamilyConfig::DeepSeekV3(sizes) => sizes.router_aux_loss_coef > 0.0,
        _ => false,
    };
    if data.reset_attention_mask && data.reset_position_ids && config.training.dtype == Precision::F64 && !balanced {
        let dynamic = |candidate: &Candidate| {
            let mut dynamic = candidate.clone();
            dynamic.context.dynamic = true;
            dynamic.context.max_tokens_per_rank = Some([16, 24, 40][list.len() % 3]);
            dynamic
        };
        let more: Vec<Candidate> =
            list.iter().map(dynamic).filter(|c| c.context.check(&c.layout, &dims).is_ok()).collect();
        list.extend(more);
    }
    list
}

fn stretches(draw: &mut Draw, config: &RunConfig, one_layout: bool) -> Vec<Stretch> {
    let steps = config.training.steps;
    let changes_batch = draw.percent(20);
    let mut list: Vec<Stretch> = Vec::new();
    let (mut done, mut batch) = (0, config.training.global_batch);
    let fixed = one_layout.then(|| draw.of(&layouts(config, 4, batch)));
    while done < steps {
        let back = if list.is_empty() { 0 } else { draw.below(3) };
        let saved = list.last().map_or(0, |last| {
            let saved = |step: &usize| {
                *step == last.to
                    || *step > last.from && last.save.is_some_and(|every| step.is_multiple_of(every as usize))
            };
            (0..=done - back.min(done)).rev().find(|step| saved(step)).unwrap_or(done)
        });
        let to = if list.len() == 3 { steps } else { (saved + 1 + draw.below(steps)).min(steps) };
        if changes_batch && !one_layout && saved == done && !list.is_empty() {
            batch = draw.of(&[4, 8, 16]);
        }
        let ranks = draw.of(&[1, 2, 4, 6, 8]);
        let layout = fixed.clone().unwrap_or_else(|| match ranks {
            1 => Candidate { accumulation: draw.of(&[1, 2, 4]), ..Default::default() },
            _ => draw.of(&layouts(config, ranks, batch)),
        });
        list.push(Stretch {
            layout,
            from: saved,
            to,
            evaluate: (1 + draw.below(3), draw.below(3)),
            save: draw.of(&[None, Some(1), Some(2)]),
            vocabulary_divisible_by: if one_layout { 1 } else { draw.of(&[1, 1, 8, 16]) },
            global_batch: batch,
            background: draw.percent(50),
        });
        done = to;
    }
    list
}
