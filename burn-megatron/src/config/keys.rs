//! Every key of a run's configuration: kind, default, meaning, other spellings. `train --print-config` and
//! docs/reference/configuration.md are made from this list.
//!
//! The sizes in `[model]` are the fields of the family's configuration, described in [`FamilyConfig::sizes`](models::FamilyConfig::sizes).

use super::key::{Key, key};
use super::kind::Kind;

/// All keys, in the order of the reference.
pub const KEYS: &[Key] = {
    use Kind::*;
    &[
        key("model.hf", Path, "\"none\"", "Hugging Face folder with the model's config.json and initial weights").optional(),
        key("model.preset", Text, "\"none\"", "Name of a known model, initialised with random weights").optional(),
        key("model.family", Text, "\"none\"", "Architecture of a model that neither model.hf nor model.preset names").optional(),
        key("parallel.tensor-parallel", Count, "1", "Tensor-parallel size: ranks that share each layer's weight matrices")
            .or(&["tensor-model-parallel-size", "tp"]),
        key("parallel.sequence-parallel", Flag, "false", "Sequence parallelism: shard the activations outside the tensor-parallel GEMMs along the sequence; without tensor parallelism there is nothing to shard")
            .or(&["sp"]),
        key("parallel.pipeline-parallel", Count, "1", "Pipeline-parallel size: ranks that the layers are split over")
            .or(&["pipeline-model-parallel-size", "pp"]),
        key("parallel.virtual-pipeline", Count, "1", "Virtual pipeline size: model chunks per pipeline rank")
            .or(&["num-virtual-stages-per-pipeline-rank", "vpp"]),
        key("parallel.context-parallel", Count, "1", "Context-parallel size: ranks that each sequence is split over")
            .or(&["context-parallel-size", "cp"]),
        key("parallel.expert-parallel", Count, "1", "Expert-parallel size: ranks that the experts of an MoE layer are distributed over")
            .or(&["expert-model-parallel-size", "ep"]),
        key("parallel.expert-tensor-parallel", Count, "\"none\"", "Tensor-parallel size inside each expert; none: the same as tensor-parallel")
            .or(&["expert-tensor-parallel-size", "etp"])
            .optional(),
        key("parallel.data-parallel", Automatic, "1", "Data-parallel size: groups of ranks that each train the whole model on their own share of the global batch; auto: what fills all ranks, one for each GPU (on CPUs one for each process), so that torchrun may start the run again with more or fewer processes")
            .or(&["data-parallel-size", "dp"]),
        key("parallel.zero", UpTo(3), "0", "ZeRO stage, what is sharded over the data-parallel ranks: 0 nothing, 1 optimizer states, 2 also gradients, 3 also weights (FSDP full shard)")
            .or(&["fsdp", "zero-stage"]),
        key("parallel.zero-group", Count, "\"none\"", "Hybrid sharding (HSDP): ZeRO shards inside groups of so many neighbouring data-parallel ranks, and the groups hold the same, so that links between hosts carry gradients only; must divide data-parallel times context-parallel; none: one group of all of them")
            .optional(),
        key("context.comm-type", CommTypes, "[\"p2p\"]", "Communication of context-parallel attention: p2p (ring), all_gather, a2a (all-to-all over heads, as Ulysses), or a2a+p2p (hierarchical); one for all layers, or a list with one per layer")
            .or(&["cp-comm-type"]),
        key("context.hierarchical-sizes", Pair, "\"none\"", "With a2a+p2p: size of the all-to-all groups and number of groups in the ring, for example [4, 2]")
            .or(&["hierarchical-context-parallel-sizes"])
            .optional(),
        key("context.dynamic", Flag, "false", "Dynamic context parallelism: split each document over as many ranks as its length needs, instead of a fixed context-parallel size")
            .or(&["hybrid-context-parallel"]),
        key("context.max-tokens-per-rank", Count, "\"none\"", "With context.dynamic: maximum tokens per rank of one document or packed sequence")
            .or(&["max-seqlen-per-dp-cp-rank"])
            .optional(),
        key("pipeline.schedule", Choice(&["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]), "\"none\"", "Pipeline schedule; none: 1f1b, or interleaved if virtual-pipeline is above 1").optional(),
        key("pipeline.group-size", Count, "\"none\"", "Interleaved schedule: consecutive micro-batches per model chunk; none: pipeline-parallel")
            .or(&["microbatch-group-size", "microbatch-group-size-per-virtual-pipeline-stage"])
            .optional(),
        key("pipeline.passes", Text, "\"none\"", "Passes of a schedule of your own: a line per rank, a word per pass, for example 0F0 0F1 0B0 0B1 (stage, pass, micro-batch), as plan --schedule-file reads and draws them; none: a built-in schedule").optional(),
        key("pipeline.layout", Text, "\"none\"", "Layers of each stage in Megatron's notation, for example Et*3|(tt|)*4L; auto: balance the stages by the cost of their layers and the output layer; none: the same number of layers each")
            .or(&["pipeline-layout", "pipeline-model-parallel-layout"])
            .optional(),
        key("pipeline.first-layers", Count, "\"none\"", "Number of layers on the first pipeline rank; none: as many as on the others")
            .or(&["first-stage-layers", "decoder-first-pipeline-num-layers"])
            .optional(),
        key("pipeline.last-layers", Count, "\"none\"", "Number of layers on the last pipeline rank; none: as many as on the others")
            .or(&["last-stage-layers", "decoder-last-pipeline-num-layers"])
            .optional(),
        key("pipeline.count-embedding", Flag, "false", "Count the embedding as a layer when the layers are split into stages")
            .or(&["account-for-embedding-in-pipeline-split"]),
        key("pipeline.count-loss", Flag, "false", "Count the output layer with the loss as a layer when the layers are split into stages")
            .or(&["account-for-loss-in-pipeline-split"]),
        key("recompute.granularity", Choice(&["none", "selective", "full"]), "\"none\"", "What the backward pass recomputes: none, selective (parts of layers), or full (whole layers)")
            .or(&["recompute-granularity"]),
        key("recompute.modules", Modules, "[\"core-attention\"]", "With granularity = selective: modules to recompute, from core-attention, mlp-activation and norms")
            .or(&["recompute-modules"]),
        key("recompute.method", Choice(&["uniform", "block"]), "\"uniform\"", "With granularity = full: uniform recomputes all layers, block only the first ones of each stage")
            .or(&["recompute-method"]),
        key("recompute.keep-attention", Flag, "false", "With granularity = full: save the attention output and softmax statistics instead of recomputing attention"),
        key("recompute.cpu-offload", Flag, "false", "With granularity = full: the inputs of recomputed layers wait for the backward pass in page-locked host memory; DMA engines copy them while the GPU computes")
            .or(&["cpu-offloading", "cpu-checkpointing", "activation-cpu-offload"]),
        key("recompute.num-layers", Count, "1", "With granularity = full: layers per saved input (uniform), or recomputed layers per stage (block)")
            .or(&["recompute-num-layers"]),
        key("training.steps", Count, "1000", "Training length in optimizer steps").or(&["train-iters", "max-steps"]),
        key("training.samples", Count, "\"none\"", "Training length in samples (sequences), those of whole steps, instead of training.steps")
            .or(&["train-samples"])
            .optional(),
        key("training.tokens", Count, "\"none\"", "Training length in tokens, training.seq-length for each sample of whole steps, instead of training.steps")
            .or(&["train-tokens"])
            .optional(),
        key("training.micro-batch", Count, "1", "Sequences per micro-batch and data-parallel rank").or(&["micro-batch-size", "per-device-batch-size"]),
        key("training.global-batch", Count, "8", "Sequences per optimizer step over all data-parallel ranks").or(&["global-batch-size"]),
        key("training.rampup-batch-size", Triple, "\"none\"", "Batch-size ramp [start, increment, samples]: the global batch begins with so many sequences and grows in equal increments to training.global-batch over so many samples; lengths in steps are counted in the steps of the ramp")
            .optional(),
        key("training.seq-length", Count, "128", "Sequence length in tokens"),
        key("training.seed", Whole, "1234", "Seed of weight initialisation and dropout"),
        key("training.dtype", Choice(&["f32", "f64", "bf16", "f16"]), "\"f32\"", "Precision of weights and activations; with bf16 and f16, master weights and gradients are fp32"),
        key("training.loss", Choice(&["per-token", "per-micro-batch"]), "\"per-token\"", "Loss reduction: per-token (mean over the tokens of the global batch) or per-micro-batch (Megatron's default: mean of the micro-batches' means)"),
        key("training.clip", Number, "1.0", "Gradient clipping: maximum global norm of the gradient; none: no clipping")
            .or(&["clip-grad", "grad-clip", "max-grad-norm"])
            .optional(),
        key("training.ema-decay", Number, "\"none\"", "Decay of an exponential moving average of the weights, in fp32, sharded as the optimizer states are; export --ema writes it; none: no average")
            .optional(),
        key("training.exit-duration-in-mins", Number, "\"none\"", "Save and end, with exit code 0, after the first step that ends so many minutes after the start of the program; the same command continues the run")
            .optional(),
        key("training.exit-interval", Count, "\"none\"", "Save and end, with exit code 0, after a step whose number is a multiple of this; the same command continues the run")
            .optional(),
        key("training.max-restarts", Whole, "0", "If a rank fails in a run of one process: how often all ranks may begin again in the process, from the newest copy in host memory or on disk; processes that fail are started again by torchrun --max-restarts or Slurm"),
        key("training.min-data-parallel", Count, "\"none\"", "With training.max-restarts, if a device is lost for good: the run continues with the largest data-parallel size that the other devices allow, at least this one, and the same global batch; none: it ends")
            .optional(),
        key("training.distributed-timeout-minutes", Number, "10.0", "Minutes that a rank waits for others before the run counts as dead; more than any computation between two collectives takes"),
        key("fp8.format", Choice(&["e4m3", "hybrid"]), "\"none\"", "FP8 format: e4m3 for all tensors, or hybrid with e5m2 for output gradients; none: no FP8")
            .or(&["fp8-format"])
            .optional(),
        key("fp8.recipe", Choice(&["tensorwise", "delayed", "blockwise"]), "\"tensorwise\"", "FP8 scaling: tensorwise (current scaling by each tensor's amax), delayed (by the amax of previous steps), or blockwise (by the amax of each 128 numbers, of weights of each 128 x 128)")
            .or(&["fp8-recipe"]),
        key("fp8.margin", UpTo(16), "0", "FP8 scaling margin: amax maps to the largest FP8 value divided by 2^margin").or(&["fp8-margin"]),
        key("fp8.amax-history-len", Count, "1", "Delayed scaling: length of the amax history in steps").or(&["fp8-amax-history-len"]),
        key("fp8.amax-compute-algo", Choice(&["max", "most_recent"]), "\"most_recent\"", "Delayed scaling: how the amax follows from its history")
            .or(&["fp8-amax-compute-algo"]),
        key("fp8.keep-weights", Flag, "true", "Keep the FP8 copies of the weights for a whole step (2 bytes per weight) instead of casting them in every pass"),
        key("fp8.experts", Flag, "true", "Use FP8 for routed experts too; false keeps them in training.dtype"),
        key("fp8.first-last-layers-bf16", Flag, "false", "Keep the first and last layers in training.dtype"),
        key("fp8.num-layers-at-start-in-bf16", Whole, "1", "Number of first layers that stay in training.dtype"),
        key("fp8.num-layers-at-end-in-bf16", Whole, "1", "Number of last layers that stay in training.dtype"),
        key("lr.max", Number, "3e-4", "Maximum learning rate, reached at the end of the warm-up").or(&["lr"]),
        key("lr.min", Number, "0.0", "Minimum learning rate, reached at the end of the decay").or(&["min-lr"]),
        key("lr.init", Number, "0.0", "Learning rate at the start of the warm-up").or(&["lr-warmup-init"]),
        key("lr.warmup", Length, "0", "Length of the linear warm-up").or(&["lr-warmup-iters"]),
        key("lr.decay", Length, "", "Length of the schedule, from the first step to the end of the decay; default: training.steps").or(&["lr-decay-iters"]),
        key("lr.form", Form, "\"cosine\"", "Decay style: constant, linear, cosine, inverse-square-root, or { wsd = { tail, form } }")
            .or(&["lr-decay-style", "decay-style", "scheduler"]),
        key("optimizer.kind", Choice(&["adamw", "sgd", "lion", "muon"]), "\"adamw\"", "Optimizer").or(&["optimizer"]),
        key("optimizer.beta1", Number, "", "Decay rate of the first moment; default: 0.9, lion 0.95").or(&["adam-beta1", "lion-beta1"]),
        key("optimizer.beta2", Number, "", "Decay rate of the second moment; default: 0.999, lion 0.98").or(&["adam-beta2", "lion-beta2"]),
        key("optimizer.eps", Number, "", "Epsilon added to the root of the second moment; default: 1e-8").or(&["adam-eps"]),
        key("optimizer.momentum", Number, "", "Momentum; default: sgd 0.9, muon 0.95")
            .or(&["sgd-momentum", "muon-momentum"]),
        key("optimizer.nesterov", Flag, "", "Nesterov momentum; default: sgd false, muon true").or(&["muon-nesterov"]),
        key("optimizer.ns-steps", Count, "", "Muon: number of Newton-Schulz iterations; default: 5").or(&["muon-num-ns-steps"]),
        key("optimizer.scale", Choice(&["spectral", "unit-rms", "shape-scaling"]), "", "Muon: how the size of an update follows from the shape of its matrix; default: spectral")
            .or(&["muon-scale-mode"]),
        key("optimizer.extra-scale", Number, "", "Muon: additional factor of every update; default: 1.0").or(&["muon-extra-scale-factor"]),
        key("optimizer.weight-decay", Number, "", "Decoupled weight decay, multiplied by the learning rate; default: 0.01")
            .or(&["end-weight-decay"]),
        key("optimizer.decay-vectors", Flag, "", "Apply weight decay to norm weights and biases too; default: false"),
        key("optimizer.exp-avg-dtype", Choice(&["f32", "bf16", "8bit"]), "", "Type of the first moment (exp_avg): in bf16 with stochastic rounding, in 8bit by blockwise dynamic quantisation as in bitsandbytes, which is for both moments; default: f32"),
        key("optimizer.exp-avg-sq-dtype", Choice(&["f32", "bf16", "8bit"]), "", "Type of the second moment (exp_avg_sq), likewise; default: f32"),
        key("optimizer.main-grads-dtype", Choice(&["f32", "bf16"]), "", "Type in which gradients are accumulated over micro-batches and reduced over data-parallel ranks; bf16 for bf16 training of dense models without FP8; default: f32"),
        key("optimizer.main-params-dtype", Choice(&["f32", "bf16-remainder"]), "", "Master weights of bf16 training: fp32 copies, or the 16 bits that a bf16 weight lacks of its fp32 master (2 bytes instead of 4, same master bit for bit); default: f32"),
        key("optimizer.cpu-offload", Flag, "", "AdamW: moments, and master weights of bf16 and f16 training, in page-locked host memory; a step updates them on the GPU in pieces, while others are copied, with the same bits; default: false").or(&["optimizer-cpu-offload"]),
        key("optimizer.offload-fraction", Number, "", "With optimizer.cpu-offload: share of the parameters whose states are in host memory, by whole layers, above 0 and at most 1; default: 1.0").or(&["optimizer-offload-fraction"]),
        key("param-groups.lr-scale", Scales, "{}", "Factors of the learning rate by pattern of the names of tensors, in which * stands for any characters, for example { \"embed_tokens.*\" = 0.1 }, of adapters { \"*.lora_B.weight\" = 16 } (LoRA+)"),
        key("param-groups.weight-decay-scale", Scales, "{}", "Factors of the weight decay by pattern, for example { \"*.mlp.*\" = 0.5 }"),
        key("param-groups.frozen", Names, "[]", "Patterns of the names of tensors that are not trained: they have no gradient, moments or master weights, and checkpoints have them with the other weights"),
        key("weight-decay.incr-style", Choice(&["constant", "linear", "cosine"]), "\"constant\"", "Weight decay over the run: constant, or growing linearly or as a cosine")
            .or(&["weight-decay-incr-style"]),
        key("weight-decay.start", Number, "0.0", "Weight decay of the first step").or(&["start-weight-decay"]),
        key("weight-decay.length", Length, "\"none\"", "Length of the growth to optimizer.weight-decay; none: training.steps").optional(),
        key("loss-scale.initial-scale", Number, "4294967296.0", "Initial loss scale").or(&["init", "initial-loss-scale"]),
        key("loss-scale.min-scale", Number, "1.0", "Minimum loss scale").or(&["min", "min-loss-scale"]),
        key("loss-scale.growth-factor", Number, "2.0", "Factor by which the loss scale grows"),
        key("loss-scale.backoff-factor", Number, "0.5", "Factor by which the loss scale shrinks"),
        key("loss-scale.growth-interval", Count, "1000", "Consecutive steps without overflow before the loss scale grows").or(&["loss-scale-window"]),
        key("loss-scale.hysteresis", Count, "2", "Overflows before the loss scale shrinks"),
        key("anomaly.non-finite", Choice(&["stop", "skip", "roll-back"]), "\"stop\"", "If the loss or the gradient norm is NaN or infinite: stop with an error, or skip the step, so that weights, optimizer and learning rate are as if its samples had not been read, or roll back: continue from a checkpoint with the samples after it"),
        key("anomaly.spike", Choice(&["stop", "skip", "roll-back"]), "\"none\"", "The same if one of them is far above those of the last steps (OLMo's skip-step); none: not looked for").optional(),
        key("anomaly.sigma-factor", Number, "6.0", "Standard deviations above the mean that make a spike"),
        key("anomaly.window", Count, "128", "Steps of which mean and standard deviation are taken; a spike is found after half as many at the earliest")
            .or(&["rolling-interval-length"]),
        key("anomaly.max-consecutive", Count, "16", "Consecutive skipped steps, or roll-backs to one checkpoint, after which the run stops with an error"),
        key("anomaly.roll-back-steps", Whole, "0", "Roll back to the newest checkpoint that is at least so many steps before the bad one, and remove those after it; 0: the newest checkpoint"),
        key("data.prefixes", Paths, "[]", "Path prefixes of Megatron's .bin/.idx file pairs").or(&["data-path"]),
        key("data.weights", Numbers, "\"none\"", "Blend weight of each prefix; none: every prefix whole, once").optional(),
        key("data.text", Paths, "[]", "Text files (.txt, .jsonl or .parquet) that are tokenized when the run starts, instead of data.prefixes"),
        key("data.validation", Paths, "[]", "Validation data of its own, in the form of data.prefixes or data.text, whichever is given; empty: the validation share of data.split"),
        key("data.validation-weights", Numbers, "\"none\"", "Blend weight of each prefix of data.validation; none: every prefix whole, once").optional(),
        key("data.test", Paths, "[]", "Test data of its own, likewise; empty: the test share of data.split"),
        key("data.test-weights", Numbers, "\"none\"", "Blend weight of each prefix of data.test; none: every prefix whole, once").optional(),
        key("data.text-documents", Choice(&["paragraph", "line", "file"]), "", "What counts as a document in .txt files; default: paragraph for a single file, file for several"),
        key("data.tokenizer", Text, "", "Path of a tokenizer.json, a SentencePiece model or tiktoken ranks; with data.text also char, byte, or bpe (trained on the text); default: the tokenizer of model.hf (with data.prefixes if it can be read), else bpe with data.text and none with data.prefixes")
            .optional(),
        key("data.bpe-size", Count, "1024", "Vocabulary size of a bpe tokenizer that is trained on the text"),
        key("data.split", Shares, "", "Proportions of the data for training, validation and test; default: 95,5,0, or 1,0,0 with data.validation or data.test"),
        key("data.samples", Count, "", "Training samples that are drawn and shuffled before the first step; the order depends on this number; default: all samples of the run"),
        key("data.seed", UpTo(u32::MAX as u64), "", "Seed of the document and sample order; default: training.seed"),
        key("data.reset-attention-mask", Flag, "false", "Restrict attention to within documents, which end with data.eod-id"),
        key("data.reset-position-ids", Flag, "false", "Restart position ids at the start of each document"),
        key("data.eod-mask-loss", Flag, "false", "Mask the loss at end-of-document tokens"),
        key("data.eod-id", Whole, "\"none\"", "Token id of the end of a document; none: the tokenizer's").optional(),
        key("data.keep-partial-validation", Flag, "false", "Keep the last, partial validation sequence, padded"),
        key("data.cache", Path, "\"none\"", "Folder that caches sample orders between runs; none: no cache").or(&["data-cache-path"]).optional(),
        key("masked.mask-prob", Number, "0.15", "Share of the tokens of a sample that are masked"),
        key("masked.short-seq-prob", Number, "0.1", "Share of the samples that are truncated to a random shorter length"),
        key("masked.decoder-seq-length", Count, "128", "T5: tokens of the output, the masked spans with their sentinels"),
        key("masked.vocab-extra-ids", Count, "100", "T5: number of sentinels, which the tokenizer calls `<extra_id_0>` and so on; a sample needs one for each span"),
        key("images.train", Paths, "[]", "Lists of images to train on: JSON lines of image (a path relative to the list) and label, text or messages, or WebDataset's .tar files"),
        key("images.validation", Paths, "[]", "Lists of images to evaluate on; empty: the validation share of data.split of images.train"),
        key("images.processor", Path, "\"none\"", "preprocessor_config.json that says how pixels are made of an image; none: that of model.hf, or the one of transformers' class at the image size of the model").optional(),
        key("images.template", Path, "\"none\"", "LLaVA: Jinja chat template of messages; none: the tokenizer's own").or(&["chat-template"]).optional(),
        key("images.skip-bad-rows", Flag, "false", "Leave out and count samples that cannot be used, such as missing files, images that are damaged and shards that are cut off, instead of stopping at the first"),
        key("chat.train", Paths, "[]", "Conversations to train on: JSON lines or a JSON array, also .gz and .zst, or .parquet; rows with messages, conversations (ShareGPT), prompt and completion, or instruction and output (Alpaca)"),
        key("chat.weights", Numbers, "\"none\"", "Blend weight of each file of chat.train, which is then packed by itself; none: every row of every file once per epoch").optional(),
        key("chat.validation", Paths, "[]", "Conversations to evaluate on; empty: the validation share of data.split of the packed sequences"),
        key("chat.template", Path, "\"none\"", "Jinja chat template; none: the tokenizer's own").or(&["chat-template"]).optional(),
        key("chat.loss", Choice(&["assistant", "last-turn", "all"]), "\"assistant\"", "Tokens in the loss: those of all assistant turns, of the last one, or all"),
        key("chat.packing", Choice(&["best-fit", "none"]), "\"best-fit\"", "best-fit: several samples share a sequence, each with its own attention and positions; none: one sample per sequence, padded"),
        key("chat.too-long", Choice(&["refuse", "truncate", "drop"]), "\"refuse\"", "Samples longer than training.seq-length: refuse the run, truncate or drop them; the run says how many"),
        key("chat.skip-bad-rows", Flag, "false", "Leave out and count rows that cannot be used, instead of stopping at the first"),
        key("preference.train", Paths, "[]", "Pairs to train on: JSON lines or a JSON array, also .gz and .zst, or .parquet; rows with prompt, chosen and rejected, texts or lists of messages"),
        key("preference.validation", Paths, "[]", "Pairs to evaluate on; empty: the validation share of data.split of the packed sequences"),
        key("preference.loss", Choice(&["dpo", "ipo", "kto", "orpo", "simpo"]), "\"dpo\"", "Loss of a pair: dpo, ipo, kto (chosen answers are desirable, rejected ones are not), orpo and simpo (both without a reference model)"),
        key("preference.beta", Number, "0.1", "How strongly the policy may differ from the reference model: less with a larger value; the lambda of orpo, the tau of ipo; simpo is used with 2 to 10"),
        key("preference.label-smoothing", Number, "0.0", "With dpo or simpo: share of pairs that are taken to be the wrong way round, below 0.5 (conservative DPO)"),
        key("preference.gamma", Number, "0.5", "With simpo: the margin of rewards that is aimed at").or(&["simpo-gamma"]),
        key("preference.desirable-weight", Number, "1.0", "With kto: weight of chosen answers"),
        key("preference.undesirable-weight", Number, "1.0", "With kto: weight of rejected answers"),
        key("preference.template", Path, "\"none\"", "Jinja chat template; none: the tokenizer's own").or(&["chat-template"]).optional(),
        key("preference.packing", Choice(&["best-fit", "none"]), "\"best-fit\"", "best-fit: several pairs share a sequence, each answer with its own attention and positions; none: one pair per sequence, padded"),
        key("preference.too-long", Choice(&["refuse", "truncate", "drop"]), "\"refuse\"", "Pairs whose answers are longer than training.seq-length together: refuse the run, truncate both to their share of it, or drop them; the run says how many"),
        key("preference.skip-bad-rows", Flag, "false", "Leave out and count rows that cannot be used, instead of stopping at the first"),
        key("grpo.train", Paths, "[]", "Prompts to complete: JSON lines or a JSON array, also .gz and .zst, or .parquet; rows with prompt, a text or a list of messages, and answer, which a completion is compared with"),
        key("grpo.answer-pattern", Text, "\"none\"", "Regular expression that finds the answer in a completion: the first group of its last match; none: the whole completion is the answer. The reward is 1 where it is the answer of the row, else 0").optional(),
        key("grpo.num-generations", Count, "8", "Completions of each prompt, a group; training.global-batch counts completions").or(&["num-generations-per-prompt"]),
        key("grpo.max-completion-length", Count, "256", "Maximum tokens of a completion; with its prompt it must fit into training.seq-length"),
        key("grpo.temperature", Number, "1.0", "Temperature of the distribution that completions are drawn from, which is the one that is trained"),
        key("grpo.num-iterations", Count, "1", "Optimizer steps on the same completions; the importance ratio is 1 in the first of them"),
        key("grpo.beta", Number, "0.04", "Weight of the KL divergence from the reference model; 0: no reference model").or(&["reference-policy-kl-penalty"]),
        key("grpo.epsilon", Number, "0.2", "The importance ratio is clipped to 1 - epsilon and 1 + epsilon").or(&["ratio-clip-min"]),
        key("grpo.epsilon-high", Number, "\"none\"", "The upper bound is 1 + epsilon-high; none: 1 + epsilon").or(&["ratio-clip-max"]).optional(),
        key("grpo.loss-type", Choice(&["grpo", "dapo", "dr-grpo"]), "\"grpo\"", "grpo: mean over completions of the means over their tokens; dapo: mean over all tokens of the global batch; dr-grpo: sum over tokens divided by completions times grpo.max-completion-length"),
        key("grpo.scale-rewards", Flag, "true", "Divide advantages by the standard deviation of the rewards of the group"),
        key("grpo.template", Path, "\"none\"", "Jinja chat template for prompts that are lists of messages; none: the tokenizer's own").or(&["chat-template"]).optional(),
        key("grpo.skip-bad-rows", Flag, "false", "Leave out and count rows that cannot be used, instead of stopping at the first"),
        key("distill.teacher", Path, "\"none\"", "Hugging Face folder of a frozen model with the same tokens, of any size, that runs in the same layout; none: no distillation").optional(),
        key("distill.logits", Path, "\"none\"", "File of the likeliest tokens of a teacher, which `train --write-top-k FILE` has written for the same data; in place of distill.teacher").optional(),
        key("distill.temperature", Number, "1.0", "The logits of both models are divided by it in the KL divergence"),
        key("distill.weight", Number, "0.5", "Share of the KL divergence in the loss; 1: no cross-entropy"),
        key("lora.rank", Count, "\"none\"", "Rank of the adapters; none: no adapters, all weights are trained").or(&["r", "lora-rank"]).optional(),
        key("lora.alpha", Number, "16.0", "Numerator of the adapters' scale, which is alpha / rank").or(&["lora-alpha"]),
        key("lora.target-modules", Names, "[\"all-linear\"]", "Linear layers with an adapter: Hugging Face's names or their last parts, such as q_proj, in which * stands for any characters (experts.*: all routed experts), or all-linear (all but the output layer, routers and routed experts)"),
        key("lora.rslora", Flag, "false", "Scale alpha / √rank (rsLoRA)").or(&["use-rslora"]),
        key("lora.dora", Flag, "false", "Train magnitude and direction of each weight apart (DoRA)").or(&["use-dora"]),
        key("lora.rank-pattern", Counts, "{}", "Other ranks by the names of modules, in which * stands for any characters, for example { \"q_proj\" = 32 }"),
        key("lora.alpha-pattern", Scales, "{}", "Other numerators of the scale, above 0, by the names of modules"),
        key("lora.base", Choice(&["nf4", "fp8-block"]), "\"none\"", "How the frozen weights of linear layers and routed experts are stored (QLoRA), dequantized in front of each GEMM: nf4 (4 bits, in blocks of 64, with double quantization), fp8-block (E4M3 in blocks of 128 x 128); none: in training.dtype").or(&["quantize-base"]).optional(),
        key("lora.adapter", Path, "\"none\"", "Folder of an adapter, as peft writes it, to start from; none: adapters that change nothing yet").optional(),
        key("performance.deterministic", Flag, "false", "GPUs: use a fixed order for every sum, so that a resumed run is bitwise identical to an uninterrupted one; the backward pass of attention is slower")
            .or(&["deterministic-mode"]),
        key("performance.tp-comm-overlap", Flag, "true", "GPUs: overlap tensor-parallel communication with GEMMs"),
        key("performance.copy-engines", Flag, "true", "GPUs: let DMA copy engines transfer tensor-parallel activations and MoE tokens between the GPUs of one process, without using SMs; false: NCCL kernels"),
        key("performance.moe-comm-overlap", Flag, "true", "GPUs: overlap the all-to-alls of MoE tokens with the experts' GEMMs where the cost model expects a gain")
            .or(&["overlap-moe-expert-parallel-comm"]),
        key("performance.moe-comm-chunks", Count, "\"none\"", "GPUs: number of chunks that the local experts are split into to overlap all-to-alls with their GEMMs; none: chosen by the cost model")
            .optional(),
        key("performance.moe-router-force-load-balancing", Flag, "false", "For bench only: route tokens to random experts, so that the load is balanced"),
        key("performance.logits-at-once", Count, "\"none\"", "About how many logits a rank holds at a time; the output layer computes the loss of more in chunks of half as many, and its GEMM twice; none: 2147483648, 4 GiB in half precision")
            .optional(),
        key("evaluation.every", Count, "", "Steps between evaluations; default: a tenth of training.steps")
            .or(&["eval-interval"]),
        key("evaluation.batches", Whole, "8", "Global batches per evaluation; 0: no evaluation").or(&["eval-iters"]),
        key("evaluation.final-batches", Whole, "64", "Maximum global batches of the final evaluation, which uses the test data, or the validation data if there is no test data"),
        key("evaluation.ema", Flag, "false", "With training.ema-decay: evaluate the moving average of the weights instead of the weights"),
        key("evaluation.tasks", Paths, "[]", "Tasks to score at every evaluation: JSON lines with context and continuations and answer (acc, acc_norm, acc_bytes), or with context and continuation (perplexity), as eval --task takes them; needs data.tokenizer"),
        key("checkpoint.directory", Path, "", "Folder of the checkpoints; none: save none; default: checkpoints in output.directory").or(&["save"]).optional(),
        key("checkpoint.storage", Text, "\"none\"", "Also copy every checkpoint to s3://BUCKET/FOLDER, gs://… or az://… (credentials from the environment, AWS_ENDPOINT for other S3 servers; build with --features object-store), or to a folder of another disk by its absolute path, while training continues; fetch brings one back; none: no copies")
            .optional(),
        key("checkpoint.every", Automatic, "\"auto\"", "Steps between checkpoints; auto: as often as keeps saving within 5 % of the time; none: only after the last step")
            .or(&["save-interval"])
            .optional(),
        key("checkpoint.non-persistent-every", Count, "\"none\"", "Steps between copies of the state in host memory, from which training.max-restarts begins again without a disk; none: only from checkpoints")
            .or(&["non-persistent-save-interval"])
            .optional(),
        key("checkpoint.non-persistent-local-dir", Path, "\"none\"", "Folder in the host's memory, such as /dev/shm, for the copies of checkpoint.non-persistent-every: they outlive the processes, which resume from a copy that is newer than the last checkpoint when torchrun or Slurm start them again on this host; needs twice the memory of a checkpoint; none: in the memory of one process")
            .or(&["non-persistent-local-ckpt-dir"])
            .optional(),
        key("checkpoint.keep-last", Count, "2", "Number of newest checkpoints to keep; none: all").optional(),
        key("checkpoint.keep-every", Count, "\"none\"", "Also keep checkpoints whose step is a multiple of this number; none: no others").optional(),
        key("checkpoint.async", Flag, "true", "Write checkpoints in the background").or(&["async-save"]),
        key("checkpoint.pinned-memory", Flag, "true", "GPUs: with async, copy the state to page-locked host memory while the next step computes, which needs as much memory of the host as checkpoints have bytes; with too little of it, a line says so and training waits for the copy"),
        key("checkpoint.resume", Text, "\"if-present\"", "if-present: resume from the newest checkpoint in checkpoint.directory if there is one; never: start anew; or the path of a checkpoint to resume from, unless the run has saved a later one since"),
        key("output.directory", Path, "", "Folder of logs, metrics and prepared text; default: runs/ and the name of the configuration file"),
        key("log.jsonl", Path, "\"none\"", "JSON-lines file of the metrics of every step; none: steps.jsonl in output.directory").optional(),
        key("log.tensorboard", Path, "\"none\"", "Folder for TensorBoard events of the metrics of every step; none: no events").or(&["tensorboard-dir"]).optional(),
        key("log.wandb", Path, "\"none\"", "Folder for an offline run of Weights & Biases with the metrics of every step, which wandb sync uploads; none: no such run").or(&["wandb-save-dir"]).optional(),
        key("log.mlflow", Path, "\"none\"", "MLflow file store (mlruns) for the metrics of every step, which mlflow ui --backend-store-uri shows; none: no such run").optional(),
        key("log.straggler", Flag, "false", "Every ten steps, name ranks that work more than 1.5 times as long as the median of the ranks instead of waiting for others, with their share of the time; on GPUs a rank also waits while its compute stream waits for a collective")
            .or(&["log-straggler"]),
        key("log.layer-norms", Flag, "false", "Also log the norms of the gradients of embedding, layers and head, as grad_norm/layers.N"),
        key("log.num-zeros-in-grad", Flag, "false", "Also log how many elements of the gradient are zero").or(&["log-num-zeros-in-grad"]),
        key("log.max-attention-logit", Flag, "false", "Also log the greatest attention logit of all layers, heads and tokens; costs as much as the forward pass of attention")
            .or(&["log-max-attention-logit"]),
        key("log.trace", Path, "\"none\"", "File for a timeline of a few steps on every rank, for Perfetto or chrome://tracing; none: no timeline").optional(),
    ]
};
