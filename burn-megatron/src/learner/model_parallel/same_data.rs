//! Whether a run that resumes reads the samples that the run before would have read.

use backend_dist::launch::BoxError;
use backend_dist::shard::stable_hash;
use serde_json::{Value, json};

use crate::checkpoint::Checkpoint;
use crate::data::{SampleError, TokenDataset};

/// What fixes the order of a run's samples: the size of the data set, a hash of three of its samples, and one of what
/// they are drawn from.
pub(super) fn fingerprint(data: &dyn TokenDataset) -> Result<Value, SampleError> {
    let hash = |index: usize| Ok(format!("{:016x}", stable_hash(&as_read(&data.untaught(index)?))));
    let samples = [0, data.len() / 2, data.len().saturating_sub(1)];
    let hashes = samples.into_iter().filter(|_| !data.is_empty()).map(hash);
    let (hashes, content) = (hashes.collect::<Result<Vec<String>, SampleError>>()?, data.content()?);
    Ok(json!({ "samples": data.len(), "seq-length": data.seq_length(), "hashes": hashes, "content": content }))
}

/// A sample as text. What a teacher or a reference model says of it is not read from the data.
fn as_read(sample: &crate::data::Sample) -> String {
    // Name and fields are those whose text checkpoints have hashes of.
    #[derive(Debug)]
    #[expect(dead_code, reason = "the fields are read as text")]
    struct Sample<'a> {
        tokens: &'a [i64],
        labels: &'a [i64],
        loss_mask: Option<&'a [bool]>,
        documents: Option<&'a [usize]>,
        references: Option<&'a [f64]>,
    }
    let crate::data::Sample { tokens, labels, loss_mask, documents, references, taught: _ } = sample;
    let unknown = references.as_ref().map(|references| vec![0.0; references.len()]);
    let (loss_mask, documents, references) = (loss_mask.as_deref(), documents.as_deref(), unknown.as_deref());
    format!("{:?}", Sample { tokens, labels, loss_mask, documents, references })
}

/// Whether a run over `data` reads the samples that the checkpoint's run would have read.
pub(super) fn check_data(checkpoint: &Checkpoint, data: &dyn TokenDataset) -> Result<(), BoxError> {
    let (saved, mut now) = (&checkpoint.state().data, fingerprint(data)?);
    // Older checkpoints do not say it.
    if let (None, Some(now)) = (saved.get("content"), now.as_object_mut()) {
        now.remove("content");
    }
    // Imported weights have read no data, or that of another system.
    if checkpoint.state().consumed_samples == 0 || saved.is_null() || *saved == now {
        return Ok(());
    }
    let (path, files) = (checkpoint.path().display().to_string(), files(&checkpoint.state().config));
    Err(difference(saved, &now, &path, &files).into())
}

/// What differs in the samples of two runs, and what to do about it. `path` is the checkpoint of the first, which read
/// `files`.
fn difference(saved: &Value, now: &Value, path: &str, files: &str) -> String {
    let sizes = [("samples", "its number of samples"), ("seq-length", "training.seq-length")];
    let other = sizes.iter().filter(|(size, _)| saved[size] != now[size]);
    let other: Vec<String> =
        other.map(|(size, name)| format!("{name} was {}, is {}", saved[size], now[size])).collect();
    let known = saved["content"].is_string() && now["content"].is_string();
    let same = saved["content"] == now["content"];
    if known && !same || other.is_empty() && !known {
        return format!(
            "{files} other contents than when {path} was saved; restore what has changed, or start a new run"
        );
    }
    let (what, legal) = match other.is_empty() {
        true => ("the samples in another order".into(), "data.seed, data.samples and number of steps"),
        false => (format!("other samples: {}", other.join(", ")), "data and sizes"),
    };
    format!("{path}: its run read {what}; give the same {legal}, or start a new run from its weights")
}

/// The files that a run reads, with their key, as the subject of a sentence.
fn files(config: &Value) -> String {
    let keys = [("data", "text"), ("data", "prefixes"), ("chat", "train"), ("preference", "train"), ("grpo", "train")];
    let named = keys.iter().find_map(|(section, key)| {
        let files: Vec<&str> = config[section][key].as_array()?.iter().filter_map(Value::as_str).collect();
        (!files.is_empty()).then(|| format!("{section}.{key} = {}", files.join(", ")))
    });
    named.map_or("the data has".into(), |named| format!("{named} has"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Sample, TopK};

    #[test]
    fn what_differs_is_named_without_hashes() {
        let of = |samples: usize, hash: &str, content: &str| json!({ "samples": samples, "seq-length": 16, "hashes": [hash], "content": content });
        let config = json!({ "data": { "text": ["bk.txt"], "prefixes": [] } });
        let said = |now: Value| difference(&of(8, "aa", "bb"), &now, "step_4", &files(&config));
        for (hash, content) in [("cc", "dd"), ("aa", "dd")] {
            let said = said(of(8, hash, content));
            assert_eq!(
                said,
                "data.text = bk.txt has other contents than when step_4 was saved; restore what has changed, or start a new run"
            );
        }
        says!(said(of(8, "cc", "bb")), "in another order");
        says!(said(of(9, "cc", "bb")), "other samples: its number of samples was 8, is 9; give the same");
        says!(said(of(9, "cc", "dd")), "other contents");
        assert_eq!(files(&Value::Null), "the data has");
    }

    /// Another text would refuse all checkpoints that exist.
    #[test]
    fn samples_are_hashed_as_they_always_were() {
        let plain = Sample::from_tokens(vec![1, 2, 3]);
        let text = "Sample { tokens: [1, 2], labels: [2, 3], loss_mask: None, documents: None, references: None }";
        assert_eq!(as_read(&plain), text);
        assert_eq!(format!("{:016x}", stable_hash(text)), "3ce6495c484d2ad4");
        let taught = TopK { k: 1, ids: vec![0], probabilities: vec![0.5, 0.5] };
        let masked = Sample { loss_mask: Some(vec![true, false]), taught: Some(taught), ..plain };
        assert_eq!(as_read(&masked), text.replace("loss_mask: None", "loss_mask: Some([true, false])"));
        let of = |references: f64| as_read(&Sample { references: Some(vec![references]), ..masked.clone() });
        assert_eq!(of(-3.5), of(0.0));
    }
}
