//! Sentences as the samples of a run of a BERT or a T5.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::Device;
use models::{Bert, T5};
use serde_json::json;

use super::family::{Family, ModuleData, save_tokenizer, tokenizer};
use crate::config::ModuleConfig;
use crate::data::indexed::IndexedDataset;
use crate::data::masked::{BertDataset, BertOptions, MaskVocabulary, MaskedError, Masking, T5Dataset, T5Options};
use crate::hf::copy_small_files;
use crate::learner::{BertBatch, ReadBatch, T5Batch, Trainable};
use crate::train::TrainError;

/// A family that learns from sentences.
trait Masked: Trainable {
    /// So many samples of these documents.
    fn samples(
        config: &ModuleConfig,
        sizes: &Self::Config,
        sentences: &Arc<IndexedDataset>,
        documents: Range<usize>,
        count: usize,
    ) -> Result<ReadBatch<Self::Batch>, TrainError>;
}

impl Family for Bert {
    fn data(config: &ModuleConfig, sizes: &Self::Config) -> Result<ModuleData<BertBatch>, TrainError> {
        sentences::<Self>(config, sizes)
    }

    fn complete(config: &ModuleConfig, _: &Self::Config, exported: &Path) -> Result<(), TrainError> {
        with_tokenizer(config, exported)
    }
}

impl Family for T5 {
    fn data(config: &ModuleConfig, sizes: &Self::Config) -> Result<ModuleData<T5Batch>, TrainError> {
        sentences::<Self>(config, sizes)
    }

    fn complete(config: &ModuleConfig, _: &Self::Config, exported: &Path) -> Result<(), TrainError> {
        with_tokenizer(config, exported)
    }
}

/// Samples of the documents of `data.prefixes`.
fn sentences<M: Masked>(config: &ModuleConfig, sizes: &M::Config) -> Result<ModuleData<M::Batch>, TrainError> {
    let (training, evaluation) = (&config.training, &config.evaluation);
    let opened = IndexedDataset::open(&config.data.prefixes[0])
        .map_err(|error| TrainError::Module(format!("data.prefixes: {error}")))?;
    let sentences = Arc::new(opened);
    let [train, valid, _] = config.data.split.ranges(sentences.num_documents());
    let part = |documents: Option<Range<usize>>, name: &str, steps: usize| match documents {
        Some(documents) if !documents.is_empty() => {
            M::samples(config, sizes, &sentences, documents, steps * training.global_batch)
        }
        _ => Err(TrainError::Module(format!("data.split leaves no document for {name}; give it a larger share"))),
    };
    let train = part(train, "training", training.steps)?;
    let valid = if evaluation.batches == 0 { train.clone() } else { part(valid, "validation", evaluation.batches)? };
    Ok(ModuleData {
        train,
        valid,
        held_out: evaluation.batches * training.global_batch,
        notes: Vec::new(),
        digest: None,
    })
}

impl Masked for Bert {
    fn samples(
        config: &ModuleConfig,
        sizes: &Self::Config,
        sentences: &Arc<IndexedDataset>,
        documents: Range<usize>,
        count: usize,
    ) -> Result<ReadBatch<BertBatch>, TrainError> {
        let (length, most) = (config.training.seq_length, sizes.max_position_embeddings);
        if length > most {
            let what = format!("training.seq-length = {length}: the model has {most} positions; nearest legal: {most}");
            return Err(TrainError::Module(what));
        }
        let names = names(config, sizes.vocab_size)?;
        let vocabulary = MaskVocabulary::word_piece(names.iter().map(String::as_str))?;
        let defaults = BertOptions::new(length, config.data.seed);
        let options = BertOptions {
            num_samples: Some(count),
            short_sequence_probability: config.masked.short_seq_prob,
            masking: Masking { probability: config.masked.mask_prob, ..defaults.masking },
            classification_head: sizes.next_sentence,
            ..defaults
        };
        let data = BertDataset::new(sentences.clone(), documents, vocabulary, options).map_err(of_key)?;
        Ok(read(move |index| data.sample(index), |samples, device| BertBatch::new(&samples, device)))
    }
}

impl Masked for T5 {
    fn samples(
        config: &ModuleConfig,
        sizes: &Self::Config,
        sentences: &Arc<IndexedDataset>,
        documents: Range<usize>,
        count: usize,
    ) -> Result<ReadBatch<T5Batch>, TrainError> {
        let names = names(config, sizes.vocab_size)?;
        let [start, end, pad] =
            [sizes.decoder_start_token_id, sizes.eos_token_id, sizes.pad_token_id].map(|token| token as i64);
        // Of SentencePiece a token that begins a word has a mark. What is masked becomes sentinels, so that no token stands
        // for it.
        let begins = |name: &String| name.starts_with('▁') || name.starts_with('<');
        let has_marks = names.iter().any(|name| name.starts_with('▁'));
        let continues = names.iter().map(|name| has_marks && !begins(name)).collect();
        let vocabulary = match names.iter().any(|name| name == "[CLS]") {
            true => MaskVocabulary::word_piece(names.iter().map(String::as_str))?,
            false => MaskVocabulary { cls: end, sep: end, mask: end, pad, continues },
        };
        let sentinel = |number: usize| {
            let name = format!("<extra_id_{number}>");
            let found = names.iter().position(|known| *known == name).map(|id| id as i64);
            found.ok_or_else(|| {
                let what = format!(
                    "masked.vocab-extra-ids = {}: the tokenizer has no {name}; nearest legal: {number}",
                    config.masked.vocab_extra_ids
                );
                TrainError::Module(what)
            })
        };
        let sentinels = (0..config.masked.vocab_extra_ids).map(sentinel).collect::<Result<_, _>>()?;
        let lengths = [config.training.seq_length, config.masked.decoder_seq_length];
        let defaults = T5Options::new(lengths, config.data.seed, sentinels, [start, end]);
        let options = T5Options {
            num_samples: Some(count),
            short_sequence_probability: config.masked.short_seq_prob,
            masking: Masking { probability: config.masked.mask_prob, ..defaults.masking },
            ..defaults
        };
        let data = T5Dataset::new(sentences.clone(), documents, vocabulary, options).map_err(of_key)?;
        Ok(read(move |index| data.sample(index), |samples, device| T5Batch::new(&samples, device)))
    }
}

/// The error with the key of the file in place of the option.
fn of_key(error: MaskedError) -> TrainError {
    let keys = [
        ("masking.probability", "masked.mask-prob"),
        ("short_sequence_probability", "masked.short-seq-prob"),
        ("decoder_seq_length", "masked.decoder-seq-length"),
        ("seq_length", "training.seq-length"),
        ("seed", "data.seed"),
    ];
    if let MaskedError::Option { name, value, legal } = &error
        && let Some((_, key)) = keys.iter().find(|(option, _)| option == name)
    {
        return TrainError::Module(format!("{key} = {value}; nearest legal: {legal}"));
    }
    error.into()
}

fn read<S: 'static, E: ToString + 'static, B: 'static>(
    sample: impl Fn(usize) -> Result<S, E> + Send + Sync + 'static,
    batch: fn(Vec<S>, &Device) -> B,
) -> ReadBatch<B> {
    Arc::new(move |indices, device| {
        let samples: Result<Vec<S>, E> = indices.map(&sample).collect();
        Ok(batch(samples.map_err(|error| error.to_string())?, device))
    })
}

/// What a special token is for, and how BERT and T5 write it.
const SPECIAL: [(&str, &[&str]); 6] = [
    ("pad_token", &["[PAD]", "<pad>"]),
    ("unk_token", &["[UNK]", "<unk>"]),
    ("cls_token", &["[CLS]"]),
    ("sep_token", &["[SEP]"]),
    ("mask_token", &["[MASK]"]),
    ("eos_token", &["</s>"]),
];

/// Adds to an exported folder the tokenizer of the run, with which of its tokens are special.
fn with_tokenizer(config: &ModuleConfig, exported: &Path) -> Result<(), TrainError> {
    if let Some(folder) = &config.model.hf {
        copy_small_files(folder, exported)?;
    }
    let (tokenizer, about) = (save_tokenizer(config, exported)?, exported.join("tokenizer_config.json"));
    if about.exists() {
        return Ok(());
    }
    let mut keys = json!({"tokenizer_class": "PreTrainedTokenizerFast"});
    for (what, names) in SPECIAL {
        if let Some(name) = names.iter().find(|name| tokenizer.token_to_id(name).is_some()) {
            keys[what] = json!(name);
        }
    }
    std::fs::write(&about, format!("{keys:#}\n")).map_err(|cause| TrainError::Io { path: about, cause })
}

/// The tokens of `data.tokenizer` by id.
fn names(config: &ModuleConfig, vocabulary: usize) -> Result<Vec<String>, TrainError> {
    let (tokenizer, path) = tokenizer(config)?;
    let tokens = tokenizer.get_vocab_size(true);
    if tokens > vocabulary {
        let advice = format!("nearest legal: model.vocab-size = {tokens}");
        return Err(TrainError::Vocabulary { path, tokens, vocabulary, advice });
    }
    Ok((0..tokens as u32).map(|id| tokenizer.id_to_token(id).unwrap_or_default()).collect())
}
