//! How much memory this process may still take.

use std::fs;

/// Bytes that can be allocated without swapping: what the system and the control group of this process have left;
/// `None` where the system does not tell.
pub fn available() -> Option<u64> {
    let system = of_system(&fs::read_to_string("/proc/meminfo").ok()?)?;
    Some(of_group().map_or(system, |group| system.min(group)))
}

/// What distinguishes this host from others of a run, where the system tells.
pub fn host() -> Option<String> {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()
}

/// From the text of `/proc/meminfo`.
fn of_system(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

/// What the limit of a container leaves, where it has one; cached files give way.
fn of_group() -> Option<u64> {
    let text = |name: &str| fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok();
    let limit: u64 = text("memory.max")?.trim().parse().ok()?;
    let stat = text("memory.stat")?;
    let used = stat.lines().find_map(|line| line.strip_prefix("anon "))?.trim().parse().ok()?;
    Some(limit.saturating_sub(used))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_from_meminfo() {
        assert_eq!(of_system("MemTotal:  65843404 kB\nMemAvailable:   32921702 kB\n"), Some(32921702 * 1024));
        assert_eq!(of_system("MemTotal:  65843404 kB\n"), None);
        assert!(available().is_some_and(|bytes| bytes > 1 << 20));
    }
}
