//! The sections of a run's configuration, in the order of the reference.

/// A section of encoders alone.
pub(super) const MASKED: &str = "masked";

/// A section of vision models alone.
pub(super) const IMAGES: &str = "images";

/// Whether only models that are plain Burn modules have this section.
pub(super) fn is_of_modules(section: &str) -> bool {
    [MASKED, IMAGES].contains(&section)
}

/// The sections and their subjects.
pub const SECTIONS: [(&str, &str); 26] = [
    ("model", "The model: a Hugging Face folder, a preset, or a family with its sizes; sizes given here come first"),
    ("parallel", "The parallel layout; may change when a run is resumed"),
    (
        "context",
        "Context parallelism: attention over sequences that are split over ranks; may change when a run is resumed",
    ),
    ("pipeline", "Pipeline parallelism: the schedule and the layers of each stage; may change when a run is resumed"),
    ("recompute", "Activation recomputation (activation checkpointing); may change when a run is resumed"),
    ("training", "Length, batch, precision and loss"),
    (
        "fp8",
        "FP8 linear layers in the transformer blocks; needs GPUs of compute capability 8.9 or more, and is emulated on the CPU",
    ),
    ("lr", "Learning-rate schedule"),
    ("optimizer", "The optimizer; each kind has keys of its own"),
    (
        "param-groups",
        "Parameters with a learning rate or a weight decay of their own, and frozen ones, by patterns of their names, which `inspect` shows of a checkpoint",
    ),
    ("weight-decay", "Schedule of the weight decay, which ends at optimizer.weight-decay"),
    ("loss-scale", "Dynamic loss scaling of fp16; only with training.dtype = f16"),
    (
        "anomaly",
        "Steps with a bad loss or gradient: stop the run, or leave their samples out; may change when a run is resumed",
    ),
    ("data", "Training data: Megatron's .bin/.idx files, or text that is tokenized when the run starts"),
    (MASKED, "What BERT and T5 learn to tell of the sentences of data.prefixes; only with such a model"),
    (
        IMAGES,
        "What ViT and LLaVA learn from, instead of the files of [data]: lists of images with classes, captions or conversations; only \
         with such a model",
    ),
    (
        "chat",
        "Supervised fine-tuning on conversations, instead of the files of [data]; data.tokenizer is the tokenizer.json in whose folder \
         the chat template is",
    ),
    (
        "preference",
        "Preference tuning on pairs of a chosen and a rejected answer, instead of the files of [data]; the model that the run starts \
         from is the reference, and data.tokenizer is the tokenizer.json in whose folder the chat template is",
    ),
    (
        "grpo",
        "Group relative policy optimization: the run draws completions of prompts and learns from their rewards, instead of the files of \
         [data]; the model that the run starts from, with [lora] the model without adapters, is the reference, and data.tokenizer is the \
         tokenizer.json",
    ),
    (
        "distill",
        "Distillation: the loss is (1 - weight) times the cross-entropy plus weight times temperature² times the KL divergence from the teacher's distribution to the model's",
    ),
    ("lora", "Low-rank adapters of linear layers: only they are trained, everything else is frozen"),
    ("performance", "Speed and determinism on GPUs; may change when a run is resumed"),
    ("evaluation", "Loss on held-out data"),
    ("checkpoint", "Saving and resuming"),
    ("output", "Where a run writes"),
    ("log", "Additional log files"),
];
