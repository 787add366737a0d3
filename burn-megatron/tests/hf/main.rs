//! Hugging Face folders: read, written, computed with; see `tests/golden/README.md` of the workspace.

mod deepseek;
mod files;
mod folder;
mod forward;
mod round_trip;
