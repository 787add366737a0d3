//! From a document to the tokens of each key, in the element type of the output.

use tokenizers::Tokenizer;

use super::super::indexed::{Dtype, IndexedError, paths};
use super::document::{Field, fields};
use super::fast_bpe::FastBpe;
use super::long_texts::LongTexts;
use super::source::Record;
use super::tokenizer::{end_of_document, usual_end_tokens, vocab_size};
use super::{PreprocessError, PreprocessOptions, Result};

pub(super) struct Encoder<'a> {
    options: &'a PreprocessOptions,
    tokenizer: Option<&'a Tokenizer>,
    fast: Option<FastBpe<'a>>,
    long: LongTexts,
    /// Entries of the vocabulary, if they are known.
    pub vocab_size: Option<usize>,
    /// Id of the end-of-document token, if there is one.
    pub eod: Option<i64>,
    /// Element type of the output.
    pub dtype: Dtype,
}

/// Tokens in the element type of the output: a large document has no other copy of them.
struct Tokens {
    dtype: Dtype,
    bytes: Vec<u8>,
    /// The first id that does not fit.
    misfit: Option<i64>,
}

impl Tokens {
    fn new(dtype: Dtype) -> Self {
        Self { dtype, bytes: Vec::new(), misfit: None }
    }

    fn push(&mut self, id: i64) {
        if !self.dtype.holds(id) {
            self.misfit.get_or_insert(id);
        }
        self.dtype.encode(id, &mut self.bytes);
    }
}

impl<'a> Encoder<'a> {
    pub fn new(options: &'a PreprocessOptions, tokenizer: Option<&'a Tokenizer>) -> Result<Self> {
        let found = tokenizer.and_then(|tokenizer| end_of_document(tokenizer, options.eod_token.as_deref()));
        let eod = options.eod_id.or(found);
        if options.append_eod && eod.is_none() {
            return Err(PreprocessError::Options(match (&options.eod_token, tokenizer) {
                (Some(token), Some(_)) => format!("the tokenizer has no token '{token}' to end a document with"),
                (None, Some(_)) => format!(
                    "the tokenizer has none of the usual end-of-document tokens ({}); name its own one: data.eod-id in a run, --eod-token or --eod-id here",
                    usual_end_tokens()
                ),
                (_, None) => "token ids can only be ended with an end-of-document token if its id is given".into(),
            }));
        }
        let vocab_size = tokenizer.map(vocab_size).or(options.vocab_size);
        if let (Some(eod), Some(vocab_size)) = (options.eod_id, vocab_size)
            && usize::try_from(eod).is_ok_and(|eod| eod >= vocab_size)
        {
            let what = format!(
                "end-of-document token {eod}: the vocabulary has {vocab_size} tokens; nearest legal: {}",
                vocab_size.max(1) - 1
            );
            return Err(PreprocessError::Options(what));
        }
        let fast = tokenizer.and_then(|tokenizer| FastBpe::new(tokenizer, options.workers));
        let dtype = options.dtype.unwrap_or_else(|| vocab_size.map_or(Dtype::I32, Dtype::for_vocabulary));
        let long = tokenizer.filter(|_| fast.is_none()).map(LongTexts::of).unwrap_or_default();
        Ok(Self { options, tokenizer, fast, long, vocab_size, eod, dtype })
    }

    /// The sequences of each key, none of them empty: one, or a sentence each.
    pub fn encode(&self, record: Record) -> Result<Vec<Vec<Vec<u8>>>> {
        let (location, keys) = (record.location, &self.options.json_keys);
        let refuse = |what| PreprocessError::Document { location: location.clone(), what };
        let values = fields(record.body, keys).map_err(refuse)?;
        let encode = |(field, key): (Field, &String)| {
            let sequences = self.sequences(field, key).map_err(refuse)?;
            match sequences.iter().find_map(|sequence| sequence.misfit) {
                None => Ok(sequences.into_iter().map(|sequence| sequence.bytes).collect()),
                Some(value) => {
                    let path = paths(&self.options.prefix_of(key)).0;
                    Err(IndexedError::Value { path, value, dtype: self.dtype }.into())
                }
            }
        };
        values.into_iter().zip(keys).map(encode).collect()
    }

    fn sequences(&self, field: Field, key: &str) -> Result<Vec<Tokens>, String> {
        let named = |what: String| format!("key '{key}': {what}");
        let keep = self.options.keep_newlines;
        let sequences = match (field, self.options.split_sentences) {
            (Field::Ids(_), Some(_)) => {
                return Err(named("token ids have no sentences that could be split; nearest legal: texts".into()));
            }
            (Field::Sentences(_), None) => {
                return Err(named(
                    "an array of texts; --split-sentences takes them as the sentences of a document".into(),
                ));
            }
            (Field::Ids(ids), None) => self.ids(ids).map(|tokens| vec![tokens]),
            (Field::Text(text), None) => self.text(&text).map(|tokens| vec![tokens]),
            (Field::Text(text), Some(split)) => split.of(&text, keep).into_iter().map(|text| self.text(text)).collect(),
            (Field::Sentences(texts), Some(_)) => texts.iter().map(|text| self.text(text)).collect(),
        };
        let mut sequences = sequences.map_err(named)?;
        sequences.retain(|sequence| !sequence.bytes.is_empty());
        // Megatron leaves empty documents without their end as well, and ends the last sentence of the others.
        if let (Some(last), Some(eod), true) = (sequences.last_mut(), self.eod, self.options.append_eod) {
            last.push(eod);
        }
        Ok(sequences)
    }

    fn ids(&self, ids: Vec<i64>) -> Result<Tokens, String> {
        let limit = self.vocab_size.map_or(i64::MAX, |size| size as i64);
        if let Some(id) = ids.iter().find(|id| !(0..limit).contains(id)) {
            let why = if *id < 0 { "below 0".into() } else { format!("outside the vocabulary of {limit}") };
            return Err(format!("token id {id} is {why}"));
        }
        let mut tokens = Tokens::new(self.dtype);
        ids.into_iter().for_each(|id| tokens.push(id));
        Ok(tokens)
    }

    fn text(&self, text: &str) -> Result<Tokens, String> {
        let tokenizer = self
            .tokenizer
            .ok_or("it is text, and no tokenizer is chosen (--tokenizer, --train-tokenizer or --train-wordpiece)")?;
        let mut tokens = Tokens::new(self.dtype);
        match &self.fast {
            Some(fast) => fast.encode(text, |id| tokens.push(id.into()))?,
            None => self.long.encode(tokenizer, text, |id| tokens.push(id.into()))?,
        }
        Ok(tokens)
    }
}
