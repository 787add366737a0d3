//! What the processes of a run know, and nobody else: the token of the run, and its secret.
//!
//! Each end sends 32 random bytes and gets them back in an HMAC-SHA256 (RFC 2104) under the secret, so that neither what
//! was overheard of another start nor what process 0 itself has said lets anybody in. What follows the handshake is not
//! encrypted: the secret keeps strangers out, not those who can change what is on the wire.

use crate::process::{JoinError, ProcessWorld, Secret};
use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};

/// Bytes of a token, a nonce and a proof.
pub(super) const BYTES: usize = 32;

/// Random bytes of one end of a connection.
pub(super) type Nonce = [u8; BYTES];

/// Random bytes.
///
/// # Errors
/// If the system has none.
pub(super) fn nonce() -> Result<Nonce, JoinError> {
    let mut nonce = [0; BYTES];
    getrandom::fill(&mut nonce)
        .map_err(|error| JoinError::Refused(format!("the system has no random bytes: {error}")))?;
    Ok(nonce)
}

/// The same in all processes of a run.
#[derive(Clone)]
pub(super) struct Gate {
    /// Of what every process of the run has been told. It keeps out what connects by accident: port scanners, other
    /// programs and the processes of other runs. `WORLD_SIZE` is left out: a process that has another one belongs to
    /// the run, and ends it with a message; so is `MASTER_ADDR`, as a host has several names.
    pub token: [u8; BYTES],
    secret: Secret,
}

/// Who proves that it knows the secret.
#[derive(Clone, Copy)]
pub(super) enum End {
    First,
    Caller,
}

impl Gate {
    pub fn of(world: &ProcessWorld) -> Self {
        let mut hash = Sha256::new();
        for word in ["burn-megatron run", &world.port.to_string(), &world.run] {
            hash.update((word.len() as u64).to_le_bytes());
            hash.update(word);
        }
        Self { token: hash.finalize().into(), secret: world.secret.clone() }
    }

    fn mac(&self, end: End, [first, caller]: [&Nonce; 2], text: &[u8]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.secret.0.as_bytes()).expect("a key of any length will do");
        mac.update(match end {
            End::First => b"burn-megatron process 0",
            End::Caller => b"burn-megatron caller   ",
        });
        [&self.token, first, caller].into_iter().for_each(|bytes| mac.update(bytes));
        mac.update(text);
        mac
    }

    /// That `end` knows the secret and says `text`, to the ends that have sent these nonces: process 0's and the
    /// caller's.
    pub fn proof(&self, end: End, nonces: [&Nonce; 2], text: &[u8]) -> [u8; BYTES] {
        self.mac(end, nonces, text).finalize().into_bytes().into()
    }

    /// Whether that is so; how long it takes says nothing of the proof that would be right.
    pub fn accepts(&self, proof: &[u8; BYTES], end: End, nonces: [&Nonce; 2], text: &[u8]) -> bool {
        self.mac(end, nonces, text).verify_slice(proof).is_ok()
    }
}
