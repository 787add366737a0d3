//! What processes say of themselves when they find each other, and why they may not go together.

use super::{JoinError, ProcessWorld, host_name};
use crate::comm::remote::Introduction;
use crate::mesh::ParallelLayout;
use std::fs::File;
use std::io::{self, Read};
use std::sync::OnceLock;

/// Ranks that cannot be shared out.
pub(super) fn division(world: &ProcessWorld, ranks: usize, layout: &ParallelLayout) -> JoinError {
    let divisors = (1..=ranks).filter(|size| ranks.is_multiple_of(*size));
    let nearest = divisors.min_by_key(|size| size.abs_diff(world.processes)).unwrap_or(1);
    JoinError::Division { ranks, layout: layout.to_string(), processes: world.processes, nearest }
}

/// What this process says of itself, and what it must have in common with the others.
pub(super) fn introduction(world: &ProcessWorld, layout: &str, agreement: &[(&str, String)]) -> Introduction {
    let own = [
        ("version", env!("CARGO_PKG_VERSION").to_string()),
        ("executable", executable().to_string()),
        ("layout", layout.to_string()),
    ];
    let agreement = own.iter().chain(agreement);
    Introduction {
        process: world.process,
        processes: world.processes,
        host: host_name(),
        agreement: agreement.map(|(name, value)| (name.to_string(), value.clone())).collect(),
        port: None,
    }
}

/// Tells builds apart, also those of one version.
fn executable() -> &'static str {
    static EXECUTABLE: OnceLock<String> = OnceLock::new();
    EXECUTABLE.get_or_init(|| {
        // The first is the file that runs, even if another one has taken its name.
        let file = File::open("/proc/self/exe").or_else(|_| File::open(std::env::current_exe()?));
        file.and_then(checksum).unwrap_or_else(|error| format!("that cannot be read ({error})"))
    })
}

fn checksum(mut file: impl Read) -> io::Result<String> {
    let (mut sum, mut bytes, mut chunk) = (0, 0, vec![0; 1 << 20]);
    loop {
        let read = file.read(&mut chunk)?;
        if read == 0 {
            return Ok(format!("of {bytes} bytes with the checksum {sum:08x}"));
        }
        sum = crc32c::crc32c_append(sum, &chunk[..read]);
        bytes += read as u64;
    }
}
