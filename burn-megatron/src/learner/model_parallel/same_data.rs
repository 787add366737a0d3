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
    Err(format!(
        "{}: its run read other samples: {saved}, now {now}; give the same data, seed, sequence length and number of steps, or \
         start a new run from its weights",
        checkpoint.path().display()
    )
    .into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Sample, TopK};

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
