//! SentencePiece models: `sentencepiece_model.proto` of <https://github.com/google/sentencepiece>.

use std::collections::{BTreeMap, HashMap};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use super::added_token::added_token;
use super::charsmap;
use super::config::{Config, End};
use super::wire::{Field, Fields};

/// What SentencePiece writes for a space.
const SPACE: &str = "▁";

/// `ModelProto.SentencePiece.Type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// An entry of the vocabulary.
struct Piece {
    text: String,
    score: f32,
    kind: Kind,
}

/// `TrainerSpec.ModelType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Algorithm {
    Unigram,
    Bpe,
    Word,
    Char,
}

/// A model, with the defaults of the schema.
struct Model {
    pieces: Vec<Piece>,
    algorithm: Algorithm,
    byte_fallback: bool,
    space_as_suffix: bool,
    charsmap: Vec<u8>,
    dummy_prefix: bool,
    removes_spaces: bool,
    escapes_spaces: bool,
}

const BROKEN: &str = "this is no SentencePiece model, or a damaged one";

/// What a piece that is never in a text is behind the lowest score of others: more than any division of its text.
const UNMATCHED: f64 = 1e6;

/// The most `<extra_id_N>`.
const EXTRA_IDS: u64 = 4096;

/// The model in a file of the name as a `tokenizer.json` with the tokens that `config` adds, and what is put around a text. The
/// error says what is wrong, or what is not read.
pub(super) fn as_json(bytes: &[u8], name: &str, config: &Config) -> Result<(Value, [End; 2]), String> {
    if name == "sentencepiece.bpe.model" {
        return Err(
            "ids of models with a sentencepiece.bpe.model (XLM-R, mBART, NLLB) are not those of its pieces, but \
                    shifted; take the model's tokenizer.json"
                .into(),
        );
    }
    let model = Model::read(bytes)?;
    model.check()?;
    let listed = config.added_tokens()?;
    let extra_ids = if name == "spiece.model" && listed.is_empty() { config.extra_ids() } else { 0 };
    if extra_ids > EXTRA_IDS {
        return Err(format!("tokenizer_config.json has {extra_ids} extra_ids, and {EXTRA_IDS} are the most"));
    }
    let is_first = model.dummy_prefix && config.prefixes_texts_alone();
    let unknown = model.pieces.iter().position(|piece| piece.kind == Kind::Unknown);
    let unknown = unknown.ok_or("the SentencePiece model has no unknown piece")?;
    let added = model.pieces.iter().enumerate().filter_map(|(id, piece)| {
        let is_control = piece.kind == Kind::Control;
        // A symbol with a space is never found: spaces have been escaped by then.
        let is_found = is_control || piece.kind == Kind::UserDefined && !piece.text.contains(' ');
        is_found.then(|| (id, added_token(id, &piece.text, is_control)))
    });
    // `T5Tokenizer` counts them from the end.
    let extra = (0..extra_ids).rev().enumerate().map(|(index, number)| {
        let id = model.pieces.len() + index;
        (id, added_token(id, &format!("<extra_id_{number}>"), true))
    });
    // What is listed counts, by id.
    let mut added: BTreeMap<usize, Value> = added.chain(extra).chain(listed).collect();
    for (id, token) in &mut added {
        // User-defined symbols are looked for where spaces have become pieces' spaces, other tokens before, whatever is listed:
        // there texts are divided, and a prefix is put before each part.
        token["normalized"] = model.pieces.get(*id).is_some_and(|piece| piece.kind == Kind::UserDefined).into();
    }
    let json = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added.into_values().collect::<Vec<_>>(),
        "normalizer": {"type": "Sequence", "normalizers": model.normalizers(is_first)},
        "pre_tokenizer": is_first.then(
            || json!({"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": false}),
        ),
        "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": model.decoders()},
        "model": match model.algorithm {
            Algorithm::Bpe => model.bpe(unknown),
            _ => model.unigram(unknown),
        },
    });
    Ok((json, model.ends(name)))
}

impl Model {
    fn read(bytes: &[u8]) -> Result<Self, String> {
        let mut model = Self {
            pieces: Vec::new(),
            algorithm: Algorithm::Unigram,
            byte_fallback: false,
            space_as_suffix: false,
            charsmap: Vec::new(),
            dummy_prefix: true,
            removes_spaces: true,
            escapes_spaces: true,
        };
        for field in Fields::new(bytes) {
            match field.ok_or(BROKEN)? {
                (1, Field::Bytes(piece)) => model.pieces.push(Piece::read(piece)?),
                (2, Field::Bytes(trainer)) => model.read_trainer(trainer)?,
                (3, Field::Bytes(normalizer)) => model.read_normalizer(normalizer)?,
                _ => {}
            }
        }
        if model.pieces.is_empty() { Err(BROKEN.into()) } else { Ok(model) }
    }

    fn read_trainer(&mut self, message: &[u8]) -> Result<(), String> {
        for field in Fields::new(message) {
            match field.ok_or(BROKEN)? {
                (3, Field::Varint(1)) => self.algorithm = Algorithm::Unigram,
                (3, Field::Varint(2)) => self.algorithm = Algorithm::Bpe,
                (3, Field::Varint(3)) => self.algorithm = Algorithm::Word,
                (3, Field::Varint(4)) => self.algorithm = Algorithm::Char,
                (24, Field::Varint(flag)) => self.space_as_suffix = flag != 0,
                (35, Field::Varint(flag)) => self.byte_fallback = flag != 0,
                _ => {}
            }
        }
        Ok(())
    }

    fn read_normalizer(&mut self, message: &[u8]) -> Result<(), String> {
        for field in Fields::new(message) {
            match field.ok_or(BROKEN)? {
                (2, Field::Bytes(bytes)) if bytes.is_empty() || charsmap::is_sound(bytes) => {
                    self.charsmap = bytes.to_vec()
                }
                (2, _) => return Err(BROKEN.into()),
                (3, Field::Varint(flag)) => self.dummy_prefix = flag != 0,
                (4, Field::Varint(flag)) => self.removes_spaces = flag != 0,
                (5, Field::Varint(flag)) => self.escapes_spaces = flag != 0,
                _ => {}
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        let refused = |what: &str| Err(format!("the SentencePiece model {what}; take the model's tokenizer.json"));
        let user_defined = self.pieces.iter().any(|piece| piece.kind == Kind::UserDefined);
        let mut unused = self.pieces.iter().filter(|piece| piece.kind == Kind::Unused);
        match self.algorithm {
            Algorithm::Word => refused("is one of words, and unigram and BPE are read"),
            Algorithm::Char => refused("is one of characters, and unigram and BPE are read"),
            // SentencePiece merges into unused pieces, and divides them again at the end.
            Algorithm::Bpe if unused.next().is_some() => refused("is a BPE with unused pieces"),
            // It would be found where SentencePiece finds an unknown character.
            _ if unused.any(|piece| piece.text.chars().count() == 1) => refused("has an unused piece of one character"),
            _ if self.space_as_suffix => refused("has spaces at the end of words"),
            _ if !self.escapes_spaces => refused("does not escape spaces"),
            // A prefix before such a symbol would be looked for as a part of it.
            _ if self.dummy_prefix && user_defined => refused("has user-defined symbols and a dummy prefix"),
            _ => Ok(()),
        }
    }

    /// What the model's own tokenizer puts around a text, told by the name of the file: that of T5 has no first token.
    fn ends(&self, name: &str) -> [End; 2] {
        let is_control =
            |text: &&str| self.pieces.iter().any(|piece| piece.kind == Kind::Control && piece.text == *text);
        let [bos, eos] =
            [["<s>", "<bos>"], ["</s>", "<eos>"]].map(|names| names.into_iter().find(is_control).map(String::from));
        let is_t5 = name == "spiece.model" && bos.is_none();
        [End { token: bos, is_added: name == "tokenizer.model" }, End { token: eos, is_added: is_t5 }]
    }

    /// `Normalizer::Normalize`: characters, then spaces, then the prefix; all of U+0020 alone. A prefix of the first part alone
    /// comes later, and a space at the beginning of a part is one.
    fn normalizers(&self, is_first: bool) -> Vec<Value> {
        let replace =
            |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
        let mut all = Vec::new();
        if !self.charsmap.is_empty() {
            let charsmap = BASE64_STANDARD.encode(&self.charsmap);
            all.push(json!({"type": "Precompiled", "precompiled_charsmap": charsmap}));
        }
        if self.removes_spaces {
            let ends = if is_first { r" +\z" } else { r"\A +| +\z" };
            all.push(replace(json!({"Regex": ends}), ""));
            all.push(replace(json!({"Regex": " {2,}"}), " "));
        }
        if self.dummy_prefix && !is_first {
            all.push(json!({"type": "Prepend", "prepend": SPACE}));
        }
        all.push(replace(json!({"String": " "}), SPACE));
        all
    }

    fn decoders(&self) -> Vec<Value> {
        let mut all = vec![
            json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if self.dummy_prefix || self.removes_spaces {
            all.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        all
    }

    /// Bytes, unused pieces, control symbols and the unknown piece have no score in SentencePiece: they are never matched.
    /// `tokenizers` gives an unknown character a lower score still. That changes no division where every character of a
    /// piece is a piece too, as in trained models; one with an unknown character, such as T5's `<unk>`, is still found.
    fn unigram(&self, unknown: usize) -> Value {
        let normal = self.pieces.iter().filter(|piece| piece.kind == Kind::Normal);
        let lowest = normal.map(|piece| f64::from(piece.score)).fold(0.0, f64::min);
        let score = |piece: &Piece| match piece.kind {
            Kind::Normal | Kind::UserDefined => f64::from(piece.score),
            _ => lowest - UNMATCHED,
        };
        let vocab: Vec<Value> = self.pieces.iter().map(|piece| json!([piece.text, score(piece)])).collect();
        json!({"type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": self.byte_fallback})
    }

    /// SentencePiece merges two neighbours if their text is a piece, the one with the highest score first. So every
    /// division of a piece into two is a merge, in the order of scores.
    fn bpe(&self, unknown: usize) -> Value {
        let is_merged = |piece: &&Piece| piece.kind == Kind::Normal;
        let scores: HashMap<&str, f32> =
            self.pieces.iter().filter(is_merged).map(|piece| (piece.text.as_str(), piece.score)).collect();
        let mut merges: Vec<(f32, [&str; 2])> = Vec::new();
        for piece in self.pieces.iter().filter(is_merged) {
            let divisions = piece.text.char_indices().skip(1).map(|(at, _)| piece.text.split_at(at));
            let known = divisions.filter(|(left, right)| scores.contains_key(left) && scores.contains_key(right));
            merges.extend(known.map(|(left, right)| (piece.score, [left, right])));
        }
        merges.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        let vocab: serde_json::Map<String, Value> =
            self.pieces.iter().enumerate().map(|(id, piece)| (piece.text.clone(), json!(id))).collect();
        json!({
            "type": "BPE", "dropout": null, "unk_token": self.pieces[unknown].text, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": self.byte_fallback, "ignore_merges": false,
            "vocab": vocab, "merges": merges.into_iter().map(|(_, merge)| merge).collect::<Vec<_>>(),
        })
    }
}

impl Piece {
    fn read(message: &[u8]) -> Result<Self, String> {
        let mut piece = Self { text: String::new(), score: 0.0, kind: Kind::Normal };
        for field in Fields::new(message) {
            match field.ok_or(BROKEN)? {
                (1, Field::Bytes(text)) => piece.text = String::from_utf8(text.to_vec()).map_err(|_| BROKEN)?,
                (2, Field::Fixed32(score)) => piece.score = f32::from_le_bytes(score),
                (3, Field::Varint(kind)) => {
                    piece.kind = match kind {
                        1 => Kind::Normal,
                        2 => Kind::Unknown,
                        3 => Kind::Control,
                        4 => Kind::UserDefined,
                        5 => Kind::Unused,
                        6 => Kind::Byte,
                        _ => return Err(BROKEN.into()),
                    }
                }
                _ => {}
            }
        }
        Ok(piece)
    }
}
