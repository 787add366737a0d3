//! BERT (Devlin et al. 2018, arXiv:1810.04805): masked language model, with or without next-sentence prediction.

mod config;
mod hf;
mod model;

pub use config::BertConfig;
pub use model::{Bert, BertEmbeddings, BertLayer, BertPredictions};
