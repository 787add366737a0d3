//! Hugging Face folders: reading one as the source of a model's weights, and writing one.

mod adapter;
mod adapter_patterns;
mod adapter_targets;
mod checkpoint;
mod companions;
mod compressed;
mod compressed_writer;
mod distributed;
mod distributed_writer;
mod dp_reshardable;
mod error;
mod folder;
mod generation;
mod module;
mod optimizer;
mod outputs;
mod plain;
mod quantised;
mod shards;
mod tensors;
mod torch_dist;
mod writer;

pub use adapter::{Merged, adapter_of, read_adapter, read_module_adapter, write_adapter, write_module_adapter};
pub use checkpoint::{CheckpointWeights, companions_of, import, keep_companions, model_of};
pub use companions::Companions;
pub use compressed_writer::{Compressed, InputFactors, export_compressed, linear_inputs};
pub use error::HfFolderError;
pub use folder::HfFolder;
pub(crate) use folder::read_config;
pub use generation::GenerationConfig;
pub use module::{ModuleExport, ModuleFolder};
pub(crate) use module::{Wanted, named_tensors};
pub use optimizer::OptimizerStates;
pub use outputs::TensorReader;
pub use shards::parse_size;
pub use writer::{Export, Format, export, export_states};
