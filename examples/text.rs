//! Text files to the two data sets of a run.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use backend_dist::process::Cluster;
use burn_megatron::data::preprocess::{PreprocessOptions, TextDocuments, TokenizerChoice, prepare};
use burn_megatron::data::{Blend, GptDataConfig, GptSplits, TokenDataset};
use tokenizers::Tokenizer;

/// Tokenized text, part of it held out.
pub struct Text {
    /// 95 of 100 documents, in Megatron's shuffled order.
    pub train: Arc<dyn TokenDataset>,
    /// The other documents.
    pub valid: Arc<dyn TokenDataset>,
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// Documents read.
    pub documents: u64,
    /// Tokens in them.
    pub tokens: usize,
    /// The tokenizer's file.
    pub tokenizer_path: PathBuf,
    tokenizer: Tokenizer,
}

impl Text {
    /// Reads `files`, loads or trains a tokenizer, writes tokens and tokenizer to `folder`, and divides them into samples
    /// of `seq_length` tokens, `samples` of them for training. The first process of the cluster reads and writes.
    ///
    /// # Errors
    /// If a file cannot be read or there is too little text.
    pub fn prepare(
        files: Vec<PathBuf>,
        folder: &Path,
        tokenizer: TokenizerChoice,
        (seq_length, samples): (usize, usize),
        cluster: &Cluster,
    ) -> Result<Self> {
        // The documents of a single file are its paragraphs, those of several files the files.
        let text_documents = if files.len() == 1 { TextDocuments::Paragraph } else { TextDocuments::File };
        let options =
            PreprocessOptions { text_documents, ..PreprocessOptions::new(files, folder.join("text"), tokenizer) };
        let written = cluster.from_first(|| {
            std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
            let report = prepare(&options, &mut |_| ())?;
            let output = report.outputs.first().context("no text was written")?;
            let (prefix, tokens) = (output.prefix.clone(), output.summary.tokens);
            anyhow::Ok((prefix, tokens, report.documents, report.vocab_size, report.tokenizer))
        })?;
        let (prefix, tokens, documents, vocab_size, tokenizer) = written;

        let config = GptDataConfig {
            split: "95,5".parse()?,
            num_samples: [Some(samples), None, None],
            ..GptDataConfig::new(seq_length)
        };
        let parts = cluster.first_then_others(|| anyhow::Ok(GptSplits::build(&Blend::single(&prefix), &config)?))?;
        let valid = parts.valid.filter(|valid| !valid.is_empty());
        let path = tokenizer.context("no tokenizer was written")?;
        Ok(Self {
            train: parts.train.context("no text to train on")?,
            valid: valid.with_context(|| {
                format!("the held-out text has no sample of {seq_length} tokens: --data names too short a text")
            })?,
            vocab_size: vocab_size.context("the tokenizer does not say its size")?,
            documents,
            tokens,
            tokenizer: Tokenizer::from_file(&path).map_err(|error| anyhow!("{}: {error}", path.display()))?,
            tokenizer_path: path,
        })
    }

    /// Token ids of a prompt.
    ///
    /// # Errors
    /// If the tokenizer refuses it.
    pub fn encode(&self, prompt: &str) -> Result<Vec<i64>> {
        let encoded = self.tokenizer.encode_fast(prompt, false).map_err(|error| anyhow!("{prompt:?}: {error}"))?;
        Ok(encoded.get_ids().iter().map(|id| i64::from(*id)).collect())
    }

    /// The text of token ids.
    ///
    /// # Errors
    /// If the tokenizer refuses them.
    pub fn decode(&self, tokens: &[i64]) -> Result<String> {
        let ids: Vec<u32> = tokens.iter().map(|id| *id as u32).collect();
        self.tokenizer.decode(&ids, true).map_err(|error| anyhow!("{error}"))
    }
}
