//! Memory of the ranks, or of this process as the operating system sees it.

use backend_dist::memory;

/// The most bytes that one of the CPU ranks `0..world` has held at once since the last call, the largest of them, where
/// a [`RankAllocator`](memory::RankAllocator) counts them; else the resident memory of the process, where `/proc`
/// tells.
///
/// One rank calls it after each step; what another is still doing counts in its next one.
pub fn step_memory(world: usize) -> Option<u64> {
    if !memory::is_counting() {
        return resident_bytes();
    }
    let peak = (0..world).map(memory::peak).max();
    (0..world).for_each(memory::reset_peak);
    peak
}

/// Resident memory of the process in bytes, or `None` where `/proc` does not exist.
pub fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    resident_of(&status)
}

/// In bytes, from `/proc/<pid>/status`, where it is `VmRSS:   1234 kB`.
fn resident_of(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_resident_set_of_a_status_file() {
        let status = "Name:\tx\nVmPeak:\t  900 kB\nVmRSS:\t    123 kB\nRssAnon:\t 7 kB\n";
        assert_eq!(resident_of(status), Some(123 * 1024));
        assert_eq!(resident_of("Name:\tx\n"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn an_allocation_that_is_touched_shows() {
        let shows = || {
            let before = resident_bytes().unwrap();
            let block = vec![1u8; 64 << 20];
            let after = resident_bytes().unwrap();
            std::hint::black_box(&block);
            after >= before + (48 << 20)
        };
        // Other tests of this process may give memory back in between.
        assert!((0..20).any(|_| shows()));
    }
}
