//! What a teacher says of a run's training data, in a file for runs without a teacher.

use std::path::Path;
use std::sync::Arc;

use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::{Mesh, ParallelLayout};
use backend_dist::ops::softmax;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use models::{CausalLm, MicroBatch, ModelConfig, ParamBuilder, Part, WithModel};
use rayon::prelude::*;
use safetensors::Dtype;

use super::{Plan, Progress, RunData, TrainError};
use crate::config::RunConfig;
use crate::data::{TaughtDataset, TokenDataset, TopK, TopKFile, TopKWriter, sequence_key};
use crate::engine::{DocumentConfig, Teacher};
use crate::hf::HfFolder;
use crate::refusal::{Access, advice};

/// Writes the `k` likeliest tokens at every input of the sequences that a run of `plan` reads, as the teacher of its
/// configuration has them on one device. Gives the number of sequences. Fails if there is no teacher, data cannot be
/// read or the file not be written.
pub fn write_top_k(
    plan: &Plan,
    device: &Device,
    path: &Path,
    k: usize,
    progress: &mut (dyn FnMut(Progress) + Send),
) -> Result<usize, TrainError> {
    let config = plan.config();
    let refused = |what: String| TrainError::TopK { path: path.into(), what };
    let teacher =
        plan.teacher().ok_or_else(|| refused("it holds what a teacher says: distill.teacher is missing".into()))?;
    let vocabulary = teacher.config().vocab_size();
    if k == 0 || k > vocabulary {
        return Err(refused(format!("--top-k {k} of {vocabulary} tokens; nearest legal: {}", k.clamp(1, vocabulary))));
    }
    let data = RunData::of(config, plan.reward(), super::Tokens::find(config, progress)?)?.train;
    let count = sequences(config, data.as_ref());
    let (seq, temperature) = (data.seq_length(), config.distill.temperature);
    let io = |error: std::io::Error| refused(format!("{error}{}", advice(Access::Write, &error)));
    let dtype = FloatDType::from(config.training.dtype);
    let stored = if dtype == FloatDType::F64 { Dtype::F64 } else { Dtype::F32 };
    let writer = TopKWriter::create(path, [count, seq, k], vocabulary, (temperature, stored)).map_err(io)?;
    let documents = config.engine().documents;
    let write = |rank: Rank| -> Result<(), BoxError> {
        let teacher: Teacher =
            teacher.config().visit(BuildTeacher { rank: &rank, part: None, dtype, weights: &teacher })?;
        for index in 0..count {
            let sample = data.try_sample(index)?;
            let key = sequence_key(&sample);
            let tokens = TensorData::new(sample.tokens.clone(), [1, seq]);
            let tokens: Tensor<2, Int> = Tensor::from_data(tokens, (&rank.device, DType::I64));
            let logits = teacher.logits(tokens, &micro_batch(sample.documents, documents));
            let logits = if logits.dtype() == DType::F64 { logits } else { logits.cast(DType::F32) };
            let all: Vec<f64> = softmax(logits.div_scalar(temperature)).try_into_data()?.iter().collect();
            let none = || TopK { k, ids: Vec::new(), probabilities: Vec::new() };
            let each = all.par_chunks(vocabulary).map(|probabilities| {
                let mut said = none();
                said.push(probabilities);
                said
            });
            let said = TopK::concat(each.collect::<Vec<_>>().into_iter()).unwrap_or_else(none);
            writer.write(index, key, &said)?;
        }
        Ok(())
    };
    let mesh = Mesh::new(ParallelLayout::default())?;
    let done = backend_dist::launch::launch(&mesh, std::slice::from_ref(device), write);
    done.map_err(|error| refused(error.to_string()))?;
    writer.finish().map_err(io)?;
    Ok(count)
}

/// Samples that a run reads: beyond the last it begins again at the first.
fn sequences(config: &RunConfig, data: &dyn TokenDataset) -> usize {
    data.len().min(config.training.steps.saturating_mul(config.training.global_batch))
}

fn micro_batch(starts: Option<Vec<usize>>, config: DocumentConfig) -> MicroBatch {
    let documents = starts.map(|starts| backend_dist::ops::context::Documents::new(vec![starts]));
    MicroBatch {
        restarts: documents.clone().filter(|_| config.reset_position_ids),
        documents: documents.filter(|_| config.reset_attention_mask),
        ..MicroBatch::default()
    }
}

/// The training data with what the file of `distill.logits` says of it. Fails if the file is of other sequences,
/// another model or temperature.
pub(super) fn taught(config: &RunConfig, data: Arc<dyn TokenDataset>) -> Result<Arc<dyn TokenDataset>, TrainError> {
    let Some(path) = &config.distill.logits else { return Ok(data) };
    let refused = |what: String| TrainError::TopK { path: path.clone(), what };
    let file = TopKFile::open(path).map_err(refused)?;
    let (seq, vocabulary, temperature) =
        (data.seq_length(), config.model.config.vocab_size(), config.distill.temperature);
    if file.seq != seq {
        return Err(refused(format!("has sequences of {} tokens; nearest legal: training.seq-length = {0}", file.seq)));
    }
    if file.vocabulary != vocabulary {
        return Err(refused(format!(
            "its teacher has {} tokens, but model.vocab-size = {vocabulary}",
            file.vocabulary
        )));
    }
    if file.temperature != temperature {
        return Err(refused(format!("was written with distill.temperature = {}, not {temperature}", file.temperature)));
    }
    let count = sequences(config, data.as_ref());
    if file.sequences < count {
        return Err(refused(format!(
            "has {} sequences, but this run reads {count}; write it for as many steps",
            file.sequences
        )));
    }
    let taught = TaughtDataset { data, file: Arc::new(file) };
    taught.check(count).map_err(|error| refused(error.to_string()))?;
    Ok(Arc::new(taught))
}

/// A teacher, ready for its family.
pub(super) struct BuildTeacher<'a> {
    pub rank: &'a Rank,
    /// What it has of the model; `None` is all.
    pub part: Option<Part>,
    pub dtype: FloatDType,
    pub weights: &'a HfFolder,
}

impl WithModel for BuildTeacher<'_> {
    type Output = Result<Teacher, BoxError>;

    fn with<T: CausalLm + 'static>(self, sizes: &T::Config) -> Self::Output {
        let params = ParamBuilder::new(self.rank, self.dtype, 0).with_source(self.weights).without_autodiff();
        let params = if let Some(part) = self.part { params.with_part(part) } else { params };
        Ok(Teacher::new(T::build(sizes, params)?, &sizes.dims()))
    }
}
