//! Hugging Face folders: read, written, computed with; see `tests/golden/README.md` of the workspace.

#[macro_use]
#[path = "../support/says.rs"]
mod says;

#[path = "../support/damage.rs"]
mod damage;
mod dcp;
mod deepseek;
mod files;
mod folder;
mod forward;
mod fuzz;
mod gemma3;
mod images;
mod images_generate;
mod images_siglip;
mod modules;
mod optimizer;
mod published;
mod quantised;
mod round_trip;
mod siglip;
mod sweep;
mod untrusted;
mod vit_model;
