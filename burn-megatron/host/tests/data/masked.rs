//! The masked datasets' samples are Megatron's; see `tests/golden/masked/README.md`.

use std::ops::Range;
use std::sync::Arc;

use host::data::indexed::{Dtype, IndexedDataset, IndexedWriter};
use host::data::masked::{BertDataset, BertOptions, MaskVocabulary, Masking, SampleSentences, T5Dataset, T5Options};
use serde_json::Value;

fn golden() -> Value {
    serde_json::from_str(include_str!("../golden/masked/masked.json")).unwrap()
}

fn ints(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|value| value.as_i64().unwrap()).collect()
}

/// The sentences of the golden file as a `.bin` file, and its vocabulary.
fn corpus(golden: &Value) -> (Arc<IndexedDataset>, MaskVocabulary) {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = IndexedWriter::create(folder.path().join("corpus"), Dtype::U16).unwrap();
    let sentences: Vec<Vec<i64>> = golden["sentences"].as_array().unwrap().iter().map(ints).collect();
    for document in ints(&golden["documents"]).windows(2) {
        for sentence in &sentences[document[0] as usize..document[1] as usize] {
            writer.push_sequence(sentence).unwrap();
        }
        writer.end_document();
    }
    writer.finish().unwrap();
    let tokens = golden["vocabulary"].as_array().unwrap().iter().map(|token| token.as_str().unwrap());
    (Arc::new(IndexedDataset::open(folder.path().join("corpus")).unwrap()), MaskVocabulary::word_piece(tokens).unwrap())
}

fn masking(case: &Value) -> Masking {
    let flag = |key: &str, default| case[key].as_bool().unwrap_or(default);
    Masking {
        probability: case["probability"].as_f64().unwrap(),
        max_ngram: case["max_ngram"].as_u64().unwrap() as usize,
        whole_words: flag("whole_words", true),
        favor_long: flag("favor_long", false),
        geometric: flag("geometric", false),
    }
}

fn size(case: &Value, key: &str) -> usize {
    case[key].as_u64().unwrap() as usize
}

fn check_mapping(case: &Value, mapping: &[SampleSentences]) {
    assert_eq!(mapping.len(), size(case, "length"));
    let expected = case["mapping"].as_array().unwrap();
    for (found, expected) in mapping.iter().zip(expected) {
        let Range { start, end } = found.sentences;
        assert_eq!([start, end, found.target].map(|size| size as i64).to_vec(), ints(expected));
    }
}

fn cases<'a>(golden: &'a Value, kind: &str) -> Vec<&'a Value> {
    let cases: Vec<&Value> = golden["cases"].as_array().unwrap().iter().filter(|case| case["kind"] == kind).collect();
    assert!(cases.len() > 1);
    assert!(
        cases.iter().all(|case| ["mapping", "samples"].iter().all(|list| !case[list].as_array().unwrap().is_empty()))
    );
    cases
}

#[test]
fn samples_of_bert_are_megatrons() {
    let golden = golden();
    let (sentences, vocabulary) = corpus(&golden);
    for case in cases(&golden, "bert") {
        let options = BertOptions {
            num_samples: case["num_samples"].as_u64().map(|count| count as usize),
            masking: masking(case),
            classification_head: case["classification_head"].as_bool().unwrap(),
            ..BertOptions::new(size(case, "seq_length"), size(case, "seed") as u32)
        };
        let documents = 0..sentences.num_documents();
        let data = BertDataset::new(sentences.clone(), documents, vocabulary.clone(), options).unwrap();
        check_mapping(case, data.mapping());
        for (index, expected) in case["samples"].as_array().unwrap().iter().enumerate() {
            let sample = data.sample(index).unwrap();
            assert_eq!(sample.tokens, ints(&expected["text"]), "tokens of {index}");
            assert_eq!(sample.labels, ints(&expected["labels"]), "labels of {index}");
            assert_eq!(sample.types, ints(&expected["types"]), "types of {index}");
            assert_eq!(sample.padding_mask, ints(&expected["padding_mask"]), "padding of {index}");
            assert_eq!(i64::from(sample.is_random), expected["is_random"].as_i64().unwrap());
            assert_eq!(i64::from(sample.truncated), expected["truncated"].as_i64().unwrap());
        }
    }
}

#[test]
fn samples_of_t5_are_megatrons() {
    let golden = golden();
    let (sentences, vocabulary) = corpus(&golden);
    for case in cases(&golden, "t5") {
        let lengths = [size(case, "seq_length"), size(case, "decoder")];
        let special = ["bos", "eos"].map(|key| case[key].as_i64().unwrap());
        let options = T5Options {
            num_samples: case["num_samples"].as_u64().map(|count| count as usize),
            masking: masking(case),
            ..T5Options::new(lengths, size(case, "seed") as u32, ints(&case["sentinels"]), special)
        };
        let documents = 0..sentences.num_documents();
        let data = T5Dataset::new(sentences.clone(), documents, vocabulary.clone(), options).unwrap();
        check_mapping(case, data.mapping());
        for (index, expected) in case["samples"].as_array().unwrap().iter().enumerate() {
            let sample = data.sample(index).unwrap();
            assert_eq!(sample.encoder, ints(&expected["text_enc"]), "encoder of {index}");
            assert_eq!(sample.encoder_mask, ints(&expected["enc_mask"]), "mask of {index}");
            assert_eq!(sample.decoder, ints(&expected["text_dec"]), "decoder of {index}");
            assert_eq!(sample.labels, ints(&expected["labels"]), "labels of {index}");
            assert_eq!(i64::from(sample.truncated), expected["truncated"].as_i64().unwrap());
        }
    }
}

#[test]
fn outputs_of_t5_that_do_not_fit_are_named() {
    let golden = golden();
    let (sentences, vocabulary) = corpus(&golden);
    let data = |lengths, sentinels: Range<i64>| {
        let options = T5Options::new(lengths, 1, sentinels.collect(), [2, 3]);
        T5Dataset::new(sentences.clone(), 0..9, vocabulary.clone(), options)
    };
    // Megatron's own lengths: 76 tokens are masked at most, in fewer spans.
    let whole = data([512, 128], 0..100).unwrap();
    for index in 0..whole.len() {
        let sample = whole.sample(index).unwrap();
        let outputs = sample.labels.iter().filter(|label| **label != -1).count();
        let spans = (0..100).filter(|sentinel| sample.labels.contains(sentinel)).count();
        assert!(outputs > 1 && spans > 0);
    }
    for (lengths, sentinels, text) in
        [([64, 40], 90..91, "sentinels and "), ([64, 4], 80..97, "decoder_seq_length = 4")]
    {
        let data = data(lengths, sentinels).unwrap();
        let errors: Vec<String> = (0..data.len())
            .filter_map(|index| data.sample(index).err().map(|error| format!("{index} {error}")))
            .collect();
        let index = errors[0].split(' ').next().unwrap();
        assert!(errors[0].contains(&format!("sample {index} needs ")) && errors[0].contains(text), "{}", errors[0]);
    }
    for (lengths, sentinels, text) in [
        ([64, 40], 0..0, "sentinels = 0; nearest legal: 1"),
        ([64, 2], 80..97, "decoder_seq_length = 2; nearest legal: 3"),
    ] {
        let error = data(lengths, sentinels).unwrap_err().to_string();
        assert!(error.starts_with(text), "{error}");
    }
}

#[test]
fn options_out_of_range_are_named() {
    let golden = golden();
    let (sentences, vocabulary) = corpus(&golden);
    let with = |change: &dyn Fn(&mut BertOptions), documents: Range<usize>| {
        let mut options = BertOptions::new(64, 1);
        change(&mut options);
        BertDataset::new(sentences.clone(), documents, vocabulary.clone(), options).unwrap_err().to_string()
    };
    let all = 0..sentences.num_documents();
    for (error, text) in [
        (with(&|options| options.seq_length = 4, all.clone()), "seq_length = 4; nearest legal: 5"),
        (with(&|options| options.seed = 0, all.clone()), "seed = 0; nearest legal: 1"),
        (
            with(&|options| options.masking.probability = 1.0, all.clone()),
            "masking.probability = 1; nearest legal: above 0",
        ),
        (with(&|options| options.masking.max_ngram = 0, all.clone()), "masking.max_ngram = 0; nearest legal: 1"),
        (with(&|options| options.short_sequence_probability = 1.5, all), "short_sequence_probability = 1.5"),
        (with(&|_| {}, 5..24), "corpus.bin: documents 5..24; legal: within 0..23"),
        (with(&|_| {}, 0..1), "none of 1 documents makes a sample: it needs at least 2 sentences"),
    ] {
        assert!(error.contains(text), "{error}");
    }
    let few = MaskVocabulary::word_piece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word"]).unwrap();
    let all = 0..sentences.num_documents();
    let data = BertDataset::new(sentences.clone(), all, few, BertOptions::new(64, 1)).unwrap();
    let error = data.sample(0).unwrap_err().to_string();
    assert!(error.contains("corpus.bin: sequence ") && error.ends_with("the vocabulary has 0 to 5"), "{error}");
    let missing = MaskVocabulary::word_piece(["[PAD]", "[CLS]", "[SEP]"]).unwrap_err().to_string();
    assert_eq!(missing, "the vocabulary has no token [MASK]");
}
