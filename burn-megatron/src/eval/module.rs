//! The work of an evaluation with a T5, over tensor- and data-parallel ranks: its encoder reads contexts, its decoder scores
//! continuations or writes answers.

use backend_dist::launch::BoxError;
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use backend_dist::mesh_backend::Teams;
use backend_dist::parallelize::parallelize_on;
use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use models::T5;
use models::hf::IGNORED;
use parking_lot::Mutex;
use tokenizers::Tokenizer;

use super::EvalError;
use super::answer::Answer;
use super::likelihood::{Request, Scored, passes};
use super::run::{Answers, EvalSettings, Share};
use super::work::{Prompt, Work};
use crate::forward::{ForwardError, Settings, read_module};
use crate::generate::{GenerateError, GenerateOptions, Sampling, write_by};
use crate::hf::ModuleFolder;

/// Does the work with the T5 of a folder, whose [`Encoder`](super::Encoder) has to be [`apart`](super::Encoder::apart).
///
/// # Errors
/// If the folder's model is no T5, the layout has more than tensor, sequence and data parallelism or does not fit, or a rank
/// fails.
pub fn compute_module(
    folder: &ModuleFolder,
    work: &Work,
    tokenizer: &Tokenizer,
    settings: &EvalSettings,
) -> Result<Answers, EvalError> {
    if settings.batch_size == 0 {
        return Err(EvalError::Zero { key: "--batch-size", nearest: 1 });
    }
    let (layout, stop_tokens) = (&settings.forward.layout, &settings.stop_tokens);
    // Of the batch a data-parallel rank has its share, of the model all.
    let whole = Settings { layout: ParallelLayout { dp: 1, ..layout.clone() }, ..settings.forward.clone() };
    let (model, _) = read_module::<T5>(folder, &whole)?;
    let passes = passes(&work.requests, settings.batch_size);
    let mesh = Mesh::new(layout.clone()).map_err(ForwardError::from)?;
    let teams = Teams::new(&mesh, Axis::Tp).sequence_parallel(layout.sequence_parallel());
    let all = settings.forward.cluster.launch_all(&mesh, |rank| {
        let dp = rank.group(Axis::Dp);
        let own = |index: usize| index % dp.size() == dp.rank();
        teams.run(&rank, |device| -> Result<Share, BoxError> {
            let model = parallelize_on(model.clone(), &device, &rank, &T5::plan())?;
            let mut scores = Vec::new();
            for (_, pass) in passes.iter().enumerate().filter(|(index, _)| own(*index)) {
                let of: Vec<&Request> = pass.iter().map(|index| &work.requests[*index]).collect();
                scores.extend(pass.iter().copied().zip(score(&model, &of, &device)));
            }
            let own_prompts = work.prompts.iter().enumerate().filter(|(index, _)| own(*index));
            let written = own_prompts.map(|(index, prompt)| {
                text(&model, &device, prompt, tokenizer, stop_tokens).map(|answer| (index, answer))
            });
            Ok((scores, written.collect::<Result<_, _>>()?))
        })
    });
    let shares = all.map_err(ForwardError::from)?.into_iter().flatten();
    Ok(Answers::of(work, shares))
}

/// Of requests that are computed together.
fn score(model: &T5, requests: &[&Request], device: &Device) -> Vec<Scored> {
    let parts = requests.iter().map(|request| request.tokens.split_at(request.tokens.len() - request.scored));
    let (contexts, continuations): (Vec<&[i64]>, Vec<&[i64]>) = parts.unzip();
    let present: Vec<Vec<i64>> = contexts.iter().map(|tokens| vec![0; tokens.len()]).collect();
    let padding = padded(&present, 1, device).equal_elem(1);
    let labels = padded(&continuations, IGNORED, device);
    let logits = model.forward(padded(&contexts, 0, device), Some(padding), model.shifted(labels.clone()));
    let logits = if logits.dtype() == DType::F64 { logits } else { logits.cast(FloatDType::F32) };

    let targets = labels.clone().mask_fill(labels.equal_elem(IGNORED), 0).unsqueeze_dim::<3>(2);
    let best: Vec<i64> = logits.clone().argmax(2).into_data().iter::<i64>().collect();
    let found: Vec<f64> = log_softmax(logits, 2).gather(2, targets).into_data().iter::<f64>().collect();
    let longest = found.len() / requests.len();
    let rows = found.chunks(longest).zip(best.chunks(longest)).zip(continuations);
    rows.map(|((found, best), continuation)| Scored {
        log_likelihood: found[..continuation.len()].iter().sum(),
        is_greedy: best[..continuation.len()] == *continuation,
    })
    .collect()
}

/// `[rows, longest]`, with `fill` after rows that are shorter.
fn padded(rows: &[impl AsRef<[i64]>], fill: i64, device: &Device) -> Tensor<2, Int> {
    let longest = rows.iter().map(|row| row.as_ref().len()).max().unwrap_or(0);
    let mut values = vec![fill; rows.len() * longest];
    for (row, to) in rows.iter().zip(values.chunks_mut(longest.max(1))) {
        to[..row.as_ref().len()].copy_from_slice(row.as_ref());
    }
    Tensor::from_data(TensorData::new(values, [rows.len(), longest]), device)
}

/// What the decoder answers, by the likeliest token each time.
fn text(
    model: &T5,
    device: &Device,
    prompt: &Prompt,
    tokenizer: &Tokenizer,
    stop_tokens: &[i64],
) -> Result<String, GenerateError> {
    let options = GenerateOptions {
        stop_tokens: stop_tokens.to_vec(),
        ..GenerateOptions::new(prompt.max_new_tokens, Sampling::greedy())
    };
    // It does not continue what the encoder reads.
    let answer = Mutex::new(Answer::new(tokenizer, &[], &prompt.until, stop_tokens));
    write_by(model, device, &prompt.tokens, None, &options, &|token| answer.lock().push(token))?;
    Ok(answer.into_inner().finish())
}
