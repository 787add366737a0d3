//! The training that burn-train launches.

use std::fs;
use std::sync::Arc;

use backend_dist::process::Processes;
use burn::optim::SgdConfig;
use burn::train::logger::InMemoryMetricLogger;
use burn::train::{Interrupter, Learner, SupervisedTraining};
use models::CausalLm;

use super::super::batches::BatchStream;
use super::super::burn_train_bridge::{BySteps, Records, SaveRequest};
use super::super::copies::Copies;
use super::super::fit::ModelParallel;
use super::super::metric_files::MetricFiles;
use super::super::placeholder::Megatron;
use super::super::shown_metrics::with_metrics;
use super::Pretraining;
use crate::checkpoint::CheckpointError;
use crate::console::{LogRenderer, dashboard_possible, renderer};
use crate::learner::custom;
use crate::metrics::{checkpoints, on_gpu};

impl<M: CausalLm + 'static, R: Send + 'static> Pretraining<M, R> {
    /// burn-train's training with the metrics, the screen and the strategy of this run, and the learner to launch it
    /// with. Early stopping, a summary and further metrics may be added.
    pub fn supervised(&self) -> (SupervisedTraining<Megatron>, Learner<Megatron>) {
        let settings = &self.settings;
        let (engine, epoch_steps) = (&settings.engine, settings.epoch);
        let train =
            BatchStream::advancing(settings.data.train.clone(), engine.batch_sizes(), settings.steps, epoch_steps);
        let valid = BatchStream::repeating(settings.data.valid.clone(), engine.global_batch, self.evaluation_batches);
        let first = settings.processes.as_ref().is_none_or(Processes::is_first);
        // burn-train's log would panic where there can be no folder.
        let folder = if first { fs::create_dir_all(&self.directory) } else { Ok(()) };
        let is_refused = folder.is_err();
        let (action, path) = ("create", self.directory.clone());
        let folder = folder.map_err(|cause| CheckpointError::Io { action, path, cause: cause.into() });
        let resumed = folder.and_then(|()| self.resume.open(settings.checkpoints.as_ref()));
        let epoch = match &resumed {
            Ok(Some(checkpoint)) => Some(checkpoint.state().step as usize / epoch_steps),
            _ => None,
        };
        let interrupter = Interrupter::new();
        let screen = match first && dashboard_possible() {
            true => renderer(interrupter.clone(), epoch),
            false if first => Box::new(LogRenderer::stdout().counting_steps(settings.steps, epoch_steps)),
            false => Box::new(LogRenderer::new(std::io::sink())),
        };
        let request = SaveRequest::default();
        let records = settings.checkpoints.as_ref().map(|options| Records::of(options.root.clone(), epoch_steps));
        let in_one = settings.processes.as_ref().is_none_or(|all| all.count() == 1);
        let copies = settings.restarts.copy_every.filter(|_| in_one && settings.local_copies.is_none());
        let strategy = ModelParallel {
            settings: settings.clone(),
            build: self.build.clone(),
            reference: self.reference.clone(),
            finish: self.finish.clone(),
            finished: self.finished.clone(),
            copies: copies.map(Copies::new),
            files: settings.logs.files(&self.directory),
            train: train.clone(),
            request: request.clone(),
            records: records.clone(),
            resumed: resumed.map(|checkpoint| checkpoint.map(Arc::new)),
        };
        let mut training = SupervisedTraining::new(&self.directory, Arc::new(train), Arc::new(valid))
            .num_epochs(settings.steps.div_ceil(epoch_steps))
            .with_interrupter(interrupter)
            .renderer(screen)
            .with_training_strategy(custom(strategy));
        training = match first && !is_refused {
            true => training.with_metric_logger(MetricFiles::new(&self.directory)),
            // All processes would write burn-train's files over each other.
            false => training.with_metric_logger(InMemoryMetricLogger::default()).with_application_logger(None),
        };
        training = with_metrics(
            training,
            settings.logs.flops,
            engine,
            settings.teacher.is_some(),
            settings.dims.experts.is_some(),
            settings.devices.iter().any(on_gpu),
        );
        if let Some(records) = records {
            training = training
                .metric_train(checkpoints())
                .with_custom_checkpointers(records.clone(), records.clone(), records)
                .with_checkpointing_strategy(BySteps);
        }
        if let Some(epoch) = epoch {
            training = training.checkpoint(epoch);
        }
        // The ranks have their own optimizer and learning rate; burn-train's are never stepped.
        (training, Learner::new(Megatron::new(), SgdConfig::new().init(), request))
    }
}
