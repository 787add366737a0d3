//! A build without GPUs has nothing to profile.

use super::Profile;
use std::convert::Infallible;

/// Profiles all GPUs of this process; this build has none.
#[derive(Debug)]
pub struct Session(Infallible);

#[allow(missing_docs, reason = "the same functions with the feature `cuda` have them")]
impl Session {
    pub fn start() -> Result<Self, String> {
        Err("this program was built without GPUs: build it with --features cuda".into())
    }

    pub fn begin(&mut self) -> Result<(), String> {
        match self.0 {}
    }

    pub fn end(self) -> Result<Profile, String> {
        match self.0 {}
    }
}
