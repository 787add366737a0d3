//! Every key of a run's configuration: kind, default, meaning, other spellings. This is their only documentation;
//! `train --print-config` shows it.
//!
//! The sizes in `[model]` are the fields of the family's configuration; [`SIZES`] says what they mean.

use super::kind::Kind;

/// A key.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Section and name.
    pub path: &'static str,
    /// Which values it takes.
    pub kind: Kind,
    /// The default as TOML; empty where it follows from other keys, as the meaning says.
    pub default: &'static str,
    /// What it means.
    pub doc: &'static str,
    /// Whether `none` is a value.
    pub optional: bool,
    /// Other names in the same section, most of them Megatron's.
    pub aliases: &'static [&'static str],
}

impl Key {
    /// Name of the section.
    pub fn section(&self) -> &'static str {
        self.path.split('.').next().unwrap_or_default()
    }

    /// Name in the section.
    pub fn name(&self) -> &'static str {
        self.path.split_once('.').map_or(self.path, |(_, name)| name)
    }

    /// The legal values in words.
    pub fn legal(&self) -> String {
        self.kind.legal() + if self.optional { ", or none" } else { "" }
    }

    const fn optional(mut self) -> Self {
        self.optional = true;
        self
    }

    const fn or(mut self, aliases: &'static [&'static str]) -> Self {
        self.aliases = aliases;
        self
    }
}

const fn key(path: &'static str, kind: Kind, default: &'static str, doc: &'static str) -> Key {
    Key { path, kind, default, doc, optional: false, aliases: &[] }
}

/// The sections and what they are about.
pub const SECTIONS: [(&str, &str); 9] = [
    ("model", "What is trained: a Hugging Face folder, a preset, or a family and its sizes; sizes given here win"),
    ("parallel", "How ranks are divided; may change when a run is resumed"),
    ("training", "The steps"),
    ("lr", "The learning rate"),
    ("optimizer", "AdamW"),
    ("data", "What is learned: Megatron's .bin/.idx files, or text that is tokenized at the start"),
    ("evaluation", "Loss on held-out data"),
    ("checkpoint", "Saving and going on"),
    ("output", "What a run writes"),
];

/// All keys in the order in which they are shown.
pub const KEYS: &[Key] = {
    use Kind::*;
    &[
        key("model.hf", Path, "\"none\"", "Hugging Face folder: sizes and initial weights").optional(),
        key("model.preset", Text, "\"none\"", "Known sizes, with random initial weights").optional(),
        key("model.family", Text, "\"none\"", "Architecture, where neither folder nor preset says it").optional(),
        key("parallel.tensor-parallel", Count, "1", "Ranks that share each layer's matrices")
            .or(&["tensor-model-parallel-size", "tp"]),
        key("parallel.sequence-parallel", Flag, "false", "Also cut the activations between them along the sequence")
            .or(&["sp"]),
        key("parallel.pipeline-parallel", Count, "1", "Stages that the layers are divided over")
            .or(&["pipeline-model-parallel-size", "pp"]),
        key("parallel.virtual-pipeline", Count, "1", "Model chunks per pipeline stage")
            .or(&["num-virtual-stages-per-pipeline-rank", "vpp"]),
        key("parallel.context-parallel", Count, "1", "Ranks that each sequence is cut over")
            .or(&["context-parallel-size", "cp"]),
        key("parallel.expert-parallel", Count, "1", "Ranks that the experts of a layer are divided over")
            .or(&["expert-model-parallel-size", "ep"]),
        key("parallel.expert-tensor-parallel", Count, "\"none\"", "Ranks that share the matrices of an expert; none: as tensor-parallel")
            .or(&["expert-tensor-parallel-size", "etp"])
            .optional(),
        key("parallel.data-parallel", Count, "1", "Replicas of the model, each with its own rows of the batch")
            .or(&["data-parallel-size", "dp"]),
        key("parallel.zero", UpTo(3), "0", "Cut over the replicas: 1 optimizer states, 2 also gradients, 3 also weights"),
        key("training.steps", Count, "1000", "Optimizer steps").or(&["train-iters"]),
        key("training.micro-batch", Count, "1", "Rows that a replica takes at once").or(&["micro-batch-size"]),
        key("training.global-batch", Count, "8", "Rows per optimizer step over all replicas").or(&["global-batch-size"]),
        key("training.seq-length", Count, "128", "Tokens per row"),
        key("training.seed", Whole, "1234", "Seed of initial weights and dropout"),
        key("training.dtype", Choice(&["f32", "f64"]), "\"f32\"", "Precision of weights and arithmetic"),
        key("training.loss", Choice(&["per-token", "per-micro-batch"]), "\"per-token\"", "Mean over the tokens of the global batch, or Megatron's mean of means"),
        key("training.clip", Number, "1.0", "Largest norm of the gradient; larger ones are scaled down")
            .or(&["clip-grad"])
            .optional(),
        key("lr.max", Number, "3e-4", "Rate at the end of the warm-up").or(&["lr"]),
        key("lr.min", Number, "0.0", "Rate at the end of the decay").or(&["min-lr"]),
        key("lr.init", Number, "0.0", "Rate before the first step of the warm-up").or(&["lr-warmup-init"]),
        key("lr.warmup", Length, "0", "Length of the linear warm-up").or(&["lr-warmup-iters"]),
        key("lr.decay", Length, "", "From the start to the end of the decay; default: training.steps").or(&["lr-decay-iters"]),
        key("lr.form", Form, "\"cosine\"", "constant, linear, cosine, inverse-square-root, or { wsd = { tail, form } }")
            .or(&["lr-decay-style"]),
        key("optimizer.beta1", Number, "0.9", "Decay of the first moment").or(&["adam-beta1"]),
        key("optimizer.beta2", Number, "0.999", "Decay of the second moment").or(&["adam-beta2"]),
        key("optimizer.eps", Number, "1e-8", "Added to the root of the second moment").or(&["adam-eps"]),
        key("optimizer.weight-decay", Number, "0.01", "Share of a parameter removed per step, times the learning rate"),
        key("optimizer.decay-vectors", Flag, "false", "Decay norm weights and biases too"),
        key("data.prefixes", Paths, "[]", "Prefixes of .bin/.idx pairs"),
        key("data.weights", Numbers, "\"none\"", "How much of each prefix; none: everything once").optional(),
        key("data.text", Paths, "[]", "Instead of prefixes: .txt or .jsonl files to tokenize at the start"),
        key("data.text-documents", Choice(&["paragraph", "line", "file"]), "", "Documents of a text; default: the files, or the paragraphs of a single one"),
        key("data.tokenizer", Text, "", "A tokenizer.json; for text also char, byte, or bpe (trained on it); default: that of model.hf; else bpe for text, none for prefixes")
            .optional(),
        key("data.bpe-size", Count, "1024", "Entries of a bpe tokenizer"),
        key("data.split", Shares, "\"95,5,0\"", "Shares of training, validation and test"),
        key("data.samples", Count, "", "Training rows put in order before the first step; the order depends on it; default: all that the steps take")
            .or(&["train-samples"]),
        key("data.seed", UpTo(u32::MAX as u64), "", "Seed of document and sample order; default: training.seed"),
        key("data.eod-mask-loss", Flag, "false", "Leave out of the loss what is predicted at an end of document"),
        key("data.eod-id", Whole, "\"none\"", "Id of the end-of-document token; none: the tokenizer's").optional(),
        key("data.keep-partial-validation", Flag, "false", "Keep the last partial validation row, padded"),
        key("data.cache", Path, "\"none\"", "Folder that keeps sample orders between runs").or(&["data-cache-path"]).optional(),
        key("evaluation.every", Count, "", "Steps between two evaluations; default: a tenth of training.steps")
            .or(&["eval-interval"]),
        key("evaluation.batches", Whole, "8", "Global batches per evaluation; 0 does none").or(&["eval-iters"]),
        key("evaluation.final-batches", Whole, "64", "At most so many global batches of test data (else validation data) at the end"),
        key("checkpoint.directory", Path, "", "Where checkpoints lie; none saves none; default: checkpoints in output.directory").or(&["save"]).optional(),
        key("checkpoint.every", Count, "", "Steps between two checkpoints; none saves the last step only; default: evaluation.every")
            .or(&["save-interval"])
            .optional(),
        key("checkpoint.keep-last", Count, "2", "Newest checkpoints to keep; none keeps all").optional(),
        key("checkpoint.keep-every", Count, "\"none\"", "Also keep those whose step is a multiple of this").optional(),
        key("checkpoint.async", Flag, "true", "Write in the background").or(&["async-save"]),
        key("checkpoint.resume", Text, "\"if-present\"", "if-present, never, or the path of a checkpoint to go on from"),
        key("output.directory", Path, "", "Folder of logs, metrics and prepared text; default: runs/ and the name of the file"),
    ]
};

/// The meaning of a model's sizes. Which of them a model has, and of which kind they are, its family decides.
pub const SIZES: &[(&str, &str)] = &[
    ("variant", "Relative of Llama: llama, mistral, qwen3"),
    ("vocab-size", "Number of tokens; default with a tokenizer made here: its size"),
    ("hidden-size", "Width of the residual stream"),
    ("intermediate-size", "Width of the MLP"),
    ("num-hidden-layers", "Number of blocks"),
    ("num-attention-heads", "Query heads"),
    ("num-key-value-heads", "Key-value heads; default of a family: as many as query heads"),
    ("head-dim", "Features of a head; default of a family: hidden-size / num-attention-heads"),
    ("max-position-embeddings", "Longest sequence; default of a family: training.seq-length"),
    ("sliding-window", "Positions that one sees, itself included (mistral); none: all before it"),
    ("rope-theta", "Base of the rotary frequencies"),
    ("rope-scaling", "Llama 3.1's stretching of the rotary frequencies: { factor, low-freq-factor, ... }"),
    ("rms-norm-eps", "Epsilon of the norms"),
    ("layer-norm-epsilon", "Epsilon of the norms"),
    ("gelu-tanh", "GPT-2's approximation of GELU"),
    ("bias", "Linear layers have biases"),
    ("attention-bias", "Query, key, value and output projections have biases"),
    ("mlp-bias", "The MLP's linear layers have biases"),
    ("tie-word-embeddings", "The output layer shares the embedding's weight"),
    ("initializer-range", "Standard deviation of random initial weights"),
    ("hidden-dropout", "Share dropped after the embedding and before each residual addition"),
    ("attention-dropout", "Share of attention dropped; training needs 0"),
    ("make-vocab-size-divisible-by", "Every rank's rows of the vocabulary are a multiple of this"),
];

/// The key of a path in any spelling.
pub fn find(path: &str) -> Option<&'static Key> {
    let (section, name) = path.split_once('.')?;
    let named = |key: &&Key| key.section() == section && (key.name() == name || key.aliases.contains(&name));
    KEYS.iter().find(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unambiguous_and_sections_known() {
        let mut names: Vec<String> = Vec::new();
        for key in KEYS {
            assert!(SECTIONS.iter().any(|(section, _)| *section == key.section()), "{}", key.path);
            names.push(key.path.into());
            names.extend(key.aliases.iter().map(|alias| format!("{}.{alias}", key.section())));
        }
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all);
        assert_eq!(find("parallel.tensor-model-parallel-size").map(|key| key.path), Some("parallel.tensor-parallel"));
        assert!(find("steps").is_none());
    }

    #[test]
    fn every_size_of_every_family_has_a_meaning() {
        let names = super::super::size_names();
        for (name, _) in SIZES {
            assert!(names.iter().any(|known| known == name), "{name} is no size");
        }
        assert_eq!(names.len(), SIZES.len(), "{names:?}");
    }
}
