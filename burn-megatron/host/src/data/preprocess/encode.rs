//! From a document to the tokens of each key, in the element type of the output.

use tokenizers::Tokenizer;

use super::super::indexed::{Dtype, IndexedError, paths, with_suffix};
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

    /// The tokens of each key; none where the document has none.
    pub fn encode(&self, record: Record) -> Result<Vec<Vec<u8>>> {
        let (location, keys) = (record.location, &self.options.json_keys);
        let refuse = |what| PreprocessError::Document { location: location.clone(), what };
        let values = fields(record.body, keys).map_err(refuse)?;
        let encode = |(field, key): (Field, &String)| {
            let tokens = self.tokens(field, key).map_err(refuse)?;
            match tokens.misfit {
                None => Ok(tokens.bytes),
                Some(value) => {
                    let path = paths(&with_suffix(&self.options.output_prefix, &format!("_{key}_document"))).0;
                    Err(IndexedError::Value { path, value, dtype: self.dtype }.into())
                }
            }
        };
        values.into_iter().zip(keys).map(encode).collect()
    }

    fn tokens(&self, field: Field, key: &str) -> Result<Tokens, String> {
        let mut tokens = Tokens { dtype: self.dtype, bytes: Vec::new(), misfit: None };
        match field {
            Field::Ids(ids) => {
                let limit = self.vocab_size.map_or(i64::MAX, |size| size as i64);
                if let Some(id) = ids.iter().find(|id| !(0..limit).contains(id)) {
                    let why = if *id < 0 { "below 0".into() } else { format!("outside the vocabulary of {limit}") };
                    return Err(format!("key '{key}': token id {id} is {why}"));
                }
                ids.into_iter().for_each(|id| tokens.push(id));
            }
            Field::Text(text) => {
                let tokenizer = self.tokenizer.ok_or_else(|| {
                    format!("key '{key}' is text, and no tokenizer is chosen (--tokenizer or --train-tokenizer)")
                })?;
                let named = |error| format!("key '{key}': {error}");
                match &self.fast {
                    Some(fast) => fast.encode(&text, |id| tokens.push(id.into())).map_err(named)?,
                    None => {
                        let give = |id: u32| tokens.push(id.into());
                        self.long.encode(tokenizer, &text, give).map_err(named)?;
                    }
                }
            }
        }
        // Megatron leaves empty documents without their end as well.
        if self.options.append_eod && !tokens.bytes.is_empty() {
            self.eod.into_iter().for_each(|id| tokens.push(id));
        }
        Ok(tokens)
    }
}
