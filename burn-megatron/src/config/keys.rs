//! Every key of a run's configuration: kind, default, meaning, other spellings. This is their only documentation;
//! `train --print-config` shows it.
//!
//! The sizes in `[model]` are the fields of the family's configuration; [`SIZES`](super::SIZES) says what they mean.

use serde_json::Value;

use super::kind::{Kind, NONE};

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

    /// The default, of a key that has one.
    ///
    /// # Panics
    /// If it follows from other keys.
    pub(super) fn default_value(&self) -> Value {
        let table: toml::Table = format!("value = {}", self.default).parse().expect("defaults are TOML");
        let none = self.optional && table["value"].as_str() == Some(NONE);
        if none { Value::Null } else { self.kind.accept(&table["value"]).expect("defaults are legal") }
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
pub const SECTIONS: [(&str, &str); 17] = [
    ("model", "What is trained: a Hugging Face folder, a preset, or a family and its sizes; sizes given here win"),
    ("parallel", "How ranks are divided; may change when a run is resumed"),
    ("context", "How context parallel ranks compute attention together; may change when a run is resumed"),
    ("pipeline", "How a pipeline's stages are cut and take turns; may change when a run is resumed"),
    ("recompute", "What the backward pass computes again instead of keeping it; may change when a run is resumed"),
    ("training", "The steps"),
    (
        "fp8",
        "Linear layers of the blocks in 8-bit floating point; on GPUs with compute capability 8.9 or more, emulated on the CPU",
    ),
    ("lr", "The learning rate"),
    ("optimizer", "The optimizer; each kind has its own keys"),
    ("weight-decay", "The weight decay's way to optimizer.weight-decay"),
    ("loss-scale", "The factor that keeps small fp16 gradients from vanishing; only with training.dtype = f16"),
    ("data", "What is learned: Megatron's .bin/.idx files, or text that is tokenized at the start"),
    ("performance", "What makes steps quicker at a price; may change when a run is resumed"),
    ("evaluation", "Loss on held-out data"),
    ("checkpoint", "Saving and going on"),
    ("output", "What a run writes"),
    ("log", "Files that follow a run's numbers"),
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
        key("context.comm-type", CommTypes, "[\"p2p\"]", "p2p (a ring), all_gather, a2a (heads for positions), a2a+p2p; one for all layers, or one for each")
            .or(&["cp-comm-type"]),
        key("context.hierarchical-sizes", Pair, "\"none\"", "a2a+p2p: ranks of a block that exchange heads, and blocks in a ring: [4, 2]")
            .or(&["hierarchical-context-parallel-sizes"])
            .optional(),
        key("context.dynamic", Flag, "false", "Each document of a step is shared by as many replicas as its length asks for, not by context-parallel")
            .or(&["hybrid-context-parallel"]),
        key("context.max-tokens-per-rank", Count, "\"none\"", "If so, tokens that a rank may have of a document, or of short ones in a row")
            .or(&["max-seqlen-per-dp-cp-rank"])
            .optional(),
        key("pipeline.schedule", Choice(&["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]), "\"none\"", "Order of the passes; none: by the sizes no pipeline, 1f1b, or interleaved with several chunks").optional(),
        key("pipeline.group-size", Count, "\"none\"", "Interleaved: micro-batches that a chunk takes in a row; none: as many as stages")
            .or(&["microbatch-group-size", "microbatch-group-size-per-virtual-pipeline-stage"])
            .optional(),
        key("pipeline.layout", Text, "\"none\"", "Layers of every stage as Megatron writes them, Et*3|(tt|)*4L; auto: by what they and the output layer cost")
            .or(&["pipeline-layout", "pipeline-model-parallel-layout"])
            .optional(),
        key("pipeline.first-layers", Count, "\"none\"", "Layers of the first rank; none: as the others")
            .or(&["first-stage-layers", "decoder-first-pipeline-num-layers"])
            .optional(),
        key("pipeline.last-layers", Count, "\"none\"", "Layers of the last rank; none: as the others")
            .or(&["last-stage-layers", "decoder-last-pipeline-num-layers"])
            .optional(),
        key("pipeline.count-embedding", Flag, "false", "The embedding takes the place of a layer")
            .or(&["account-for-embedding-in-pipeline-split"]),
        key("pipeline.count-loss", Flag, "false", "The loss takes the place of a layer")
            .or(&["account-for-loss-in-pipeline-split"]),
        key("recompute.granularity", Choice(&["none", "selective", "full"]), "\"none\"", "Nothing, parts of layers, or whole layers")
            .or(&["recompute-granularity"]),
        key("recompute.modules", Modules, "[\"core-attention\"]", "Selective: which of core-attention, mlp-activation, norms")
            .or(&["recompute-modules"]),
        key("recompute.method", Choice(&["uniform", "block"]), "\"uniform\"", "Full: all layers, or the first ones of each stage")
            .or(&["recompute-method"]),
        key("recompute.keep-attention", Flag, "false", "Full: attention's output and softmax statistics are kept, not computed again"),
        key("recompute.num-layers", Count, "1", "Full: layers between two kept inputs (uniform), layers per stage (block)")
            .or(&["recompute-num-layers"]),
        key("training.steps", Count, "1000", "Optimizer steps").or(&["train-iters"]),
        key("training.micro-batch", Count, "1", "Rows that a replica takes at once").or(&["micro-batch-size"]),
        key("training.global-batch", Count, "8", "Rows per optimizer step over all replicas").or(&["global-batch-size"]),
        key("training.seq-length", Count, "128", "Tokens per row"),
        key("training.seed", Whole, "1234", "Seed of initial weights and dropout"),
        key("training.dtype", Choice(&["f32", "f64", "bf16", "f16"]), "\"f32\"", "Precision of weights and arithmetic; bf16 and f16 keep fp32 weights for the optimizer"),
        key("training.loss", Choice(&["per-token", "per-micro-batch"]), "\"per-token\"", "Mean over the tokens of the global batch, or Megatron's mean of means"),
        key("training.clip", Number, "1.0", "Largest norm of the gradient; larger ones are scaled down")
            .or(&["clip-grad"])
            .optional(),
        key("fp8.format", Choice(&["e4m3", "hybrid"]), "\"none\"", "e4m3 everywhere, or with e5m2 for gradients of outputs")
            .or(&["fp8-format"])
            .optional(),
        key("fp8.recipe", Choice(&["tensorwise", "delayed"]), "\"tensorwise\"", "Where a tensor's scale comes from: its own largest magnitude, or those of steps before")
            .or(&["fp8-recipe"]),
        key("fp8.margin", UpTo(16), "0", "The largest magnitude becomes the largest number divided by 2^margin").or(&["fp8-margin"]),
        key("fp8.amax-history-len", Count, "1", "Delayed: steps to look back").or(&["fp8-amax-history-len"]),
        key("fp8.amax-compute-algo", Choice(&["max", "most_recent"]), "\"most_recent\"", "Delayed: which of their magnitudes counts")
            .or(&["fp8-amax-compute-algo"]),
        key("fp8.keep-weights", Flag, "true", "Keep quantised weights for a step (2 bytes each), instead of casting them in every pass"),
        key("fp8.experts", Flag, "true", "Routed experts too; false leaves them in training.dtype, which is quicker where they are small: plan says where"),
        key("fp8.first-last-layers-bf16", Flag, "false", "The first and last layers stay out"),
        key("fp8.num-layers-at-start-in-bf16", Whole, "1", "How many at the start"),
        key("fp8.num-layers-at-end-in-bf16", Whole, "1", "How many at the end"),
        key("lr.max", Number, "3e-4", "Rate at the end of the warm-up").or(&["lr"]),
        key("lr.min", Number, "0.0", "Rate at the end of the decay").or(&["min-lr"]),
        key("lr.init", Number, "0.0", "Rate before the first step of the warm-up").or(&["lr-warmup-init"]),
        key("lr.warmup", Length, "0", "Length of the linear warm-up").or(&["lr-warmup-iters"]),
        key("lr.decay", Length, "", "From the start to the end of the decay; default: training.steps").or(&["lr-decay-iters"]),
        key("lr.form", Form, "\"cosine\"", "constant, linear, cosine, inverse-square-root, or { wsd = { tail, form } }")
            .or(&["lr-decay-style"]),
        key("optimizer.kind", Choice(&["adamw", "sgd", "lion", "muon"]), "\"adamw\"", "Which one").or(&["optimizer"]),
        key("optimizer.beta1", Number, "", "Decay of the first moment; default: 0.9, lion 0.95").or(&["adam-beta1", "lion-beta1"]),
        key("optimizer.beta2", Number, "", "Decay of the second moment; default: 0.999, lion 0.98").or(&["adam-beta2", "lion-beta2"]),
        key("optimizer.eps", Number, "", "Added to the root of the second moment; default: 1e-8").or(&["adam-eps"]),
        key("optimizer.momentum", Number, "", "Share of the sum of gradients kept per step; default: sgd 0.9, muon 0.95")
            .or(&["sgd-momentum", "muon-momentum"]),
        key("optimizer.nesterov", Flag, "", "Look a step ahead; default: sgd false, muon true").or(&["muon-nesterov"]),
        key("optimizer.ns-steps", Count, "", "Newton-Schulz iterations; default: 5").or(&["muon-num-ns-steps"]),
        key("optimizer.scale", Choice(&["spectral", "unit-rms", "shape-scaling"]), "", "Size of an orthogonal update; default: spectral")
            .or(&["muon-scale-mode"]),
        key("optimizer.extra-scale", Number, "", "Multiplies it; default: 1.0").or(&["muon-extra-scale-factor"]),
        key("optimizer.weight-decay", Number, "", "Share of a parameter removed per step, times the learning rate; default: 0.01")
            .or(&["end-weight-decay"]),
        key("optimizer.decay-vectors", Flag, "", "Decay norm weights and biases too; default: false"),
        key("weight-decay.incr-style", Choice(&["constant", "linear", "cosine"]), "\"constant\"", "constant: it is there from the start; linear, cosine: it grows")
            .or(&["weight-decay-incr-style"]),
        key("weight-decay.start", Number, "0.0", "Weight decay of the first step").or(&["start-weight-decay"]),
        key("weight-decay.length", Length, "\"none\"", "From the start to optimizer.weight-decay; none: training.steps").optional(),
        key("loss-scale.initial-scale", Number, "4294967296.0", "The first factor").or(&["init", "initial-loss-scale"]),
        key("loss-scale.min-scale", Number, "1.0", "No factor is smaller").or(&["min", "min-loss-scale"]),
        key("loss-scale.growth-factor", Number, "2.0", "Multiplies the factor when it grows"),
        key("loss-scale.backoff-factor", Number, "0.5", "Multiplies the factor when it shrinks"),
        key("loss-scale.growth-interval", Count, "1000", "Steps without overflow after which it grows").or(&["loss-scale-window"]),
        key("loss-scale.hysteresis", Count, "2", "Overflows after which it shrinks"),
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
        key("data.reset-attention-mask", Flag, "false", "Attention stays inside documents, which end with data.eod-id"),
        key("data.reset-position-ids", Flag, "false", "Positions count from the start of their document"),
        key("data.eod-mask-loss", Flag, "false", "Leave out of the loss what is predicted at an end of document"),
        key("data.eod-id", Whole, "\"none\"", "Id of the end-of-document token; none: the tokenizer's").optional(),
        key("data.keep-partial-validation", Flag, "false", "Keep the last partial validation row, padded"),
        key("data.cache", Path, "\"none\"", "Folder that keeps sample orders between runs").or(&["data-cache-path"]).optional(),
        key("performance.tune-products", Flag, "false", "On GPUs: time cuBLASLt's algorithms for every matrix product of the first steps and keep the choice in ~/.cache/burn-megatron; runs with other choices differ in rounding"),
        key("performance.deterministic", Flag, "false", "On GPUs: take every sum in one order, so that a run that goes on has the bits of one that never stopped; attention's backward pass is slower")
            .or(&["deterministic-mode"]),
        key("performance.tp-comm-overlap", Flag, "true", "On GPUs: exchanges of tensor parallelism run beside the matrix products"),
        key("performance.copy-engines", Flag, "true", "On GPUs: copy engines carry the activations of tensor parallelism and routed tokens between GPUs of one process, without multiprocessors; otherwise NCCL's kernels"),
        key("performance.moe-comm-overlap", Flag, "true", "On GPUs: all-to-alls of routed tokens run beside the experts' products, where that seems quicker")
            .or(&["overlap-moe-expert-parallel-comm"]),
        key("performance.moe-comm-pieces", Count, "\"none\"", "Into how many pieces a rank's experts are cut for that, quicker or not; none: two where that seems quicker")
            .optional(),
        key("performance.moe-router-force-load-balancing", Flag, "false", "For bench only: tokens use experts at random, so that all have as much to do"),
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
        key("log.jsonl", Path, "\"none\"", "File for the numbers of every step, a JSON object per line").optional(),
        key("log.tensorboard", Path, "\"none\"", "Folder for the same as TensorBoard events").or(&["tensorboard-dir"]).optional(),
        key("log.trace", Path, "\"none\"", "File for what every rank did when in a step, for chrome://tracing or Perfetto").optional(),
    ]
};

/// The key of a path in any spelling.
pub fn find(path: &str) -> Option<&'static Key> {
    let (section, name) = path.split_once('.')?;
    let named = |key: &&Key| key.section() == section && (key.name() == name || key.aliases.contains(&name));
    KEYS.iter().find(named)
}

/// The key that is called so in any section; its own name before other spellings.
pub fn find_anywhere(name: &str) -> Option<&'static Key> {
    let own = KEYS.iter().find(|key| key.name() == name);
    own.or_else(|| KEYS.iter().find(|key| key.aliases.contains(&name)))
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
}
