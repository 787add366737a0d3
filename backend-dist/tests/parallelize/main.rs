//! Unmodified modules of burn-nn on a logical device equal one device: losses and every gradient within 1e-10 of their
//! norms, in f64.

mod adapted;
mod attention;
mod classifier;
mod convolution;
mod decoder;
mod failures;
mod fp8;
mod harness;
mod llama;
mod mamba;
mod masks;
mod parts;
mod recurrent;
mod sequence;
mod training;
mod transformer;
mod vocabulary;
