//! Processor, memory and disk.

use super::{Item, Verdict, bytes};
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::time::Instant;

/// Cores, memory, and the disk under `folder`, which is written to for a moment (256 MiB, gone afterwards).
pub fn host(folder: &Path) -> Vec<Item> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut items = vec![Item::new(Verdict::Good, "CPU", format!("{cores} cores, {} lanes of f32", lanes()))];
    items.push(memory(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default()));
    items.push(shared_memory(Path::new("/dev/shm")));
    items.push(disk(folder));
    items
}

/// Elements of f32 that one instruction takes.
fn lanes() -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        match (std::is_x86_feature_detected!("avx512f"), std::is_x86_feature_detected!("avx2")) {
            (true, _) => 16,
            (false, true) => 8,
            (false, false) => 4,
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    4
}

/// Bytes that this process can still allocate: by the system's memory, the container's limit and the limit of the
/// address space. `None` where the system does not tell.
pub fn available_memory() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let system = read("/proc/meminfo");
    let of_system = kib(&system, "MemAvailable:").map(|free| free + kib(&system, "SwapFree:").unwrap_or_default());
    let number = |path: &str| read(path).trim().parse::<u64>().ok();
    let of_container = number("/sys/fs/cgroup/memory.max").map(|most| {
        let stat = read("/sys/fs/cgroup/memory.stat");
        let cached = stat.lines().find_map(|line| line.strip_prefix("file ")?.parse::<u64>().ok());
        let used = number("/sys/fs/cgroup/memory.current").unwrap_or_default();
        most.saturating_sub(used.saturating_sub(cached.unwrap_or_default()))
    });
    let of_process = address_space(&read("/proc/self/limits"), &read("/proc/self/status"));
    [of_system, of_container, of_process].into_iter().flatten().min()
}

/// What is left of a limited address space, from the texts of `/proc/self/limits` and `/proc/self/status`.
fn address_space(limits: &str, status: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    let most = line.split_whitespace().next()?.parse::<u64>().ok()?;
    Some(most.saturating_sub(kib(status, "VmSize:").unwrap_or_default()))
}

/// The bytes of a line such as `MemTotal:  65843404 kB`.
fn kib(text: &str, name: &str) -> Option<u64> {
    let kib = text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse::<u64>();
    kib.ok().map(|kib| kib * 1024)
}

/// From the text of `/proc/meminfo`.
fn memory(text: &str) -> Item {
    match (kib(text, "MemTotal:"), kib(text, "MemAvailable:")) {
        (Some(total), Some(free)) => {
            Item::new(Verdict::Good, "memory", format!("{}, {} available", bytes(total), bytes(free)))
        }
        _ => Item::new(Verdict::Note, "memory", "the system does not tell (/proc/meminfo)"),
    }
}

/// Less than this is too little for the buffers of NCCL between processes; containers have 64 MiB by default.
const SHARED: u64 = 1 << 30;

fn shared_memory(folder: &Path) -> Item {
    match space(folder) {
        Ok(free) if free >= SHARED => Item::new(Verdict::Good, "shared memory", format!("{} free", bytes(free))),
        Ok(free) => Item::new(
            Verdict::Note,
            "shared memory",
            format!(
                "{} free in {}: NCCL between processes needs more; start the container with --shm-size=1g",
                bytes(free),
                folder.display()
            ),
        ),
        Err(error) => Item::new(Verdict::Note, "shared memory", format!("{}: {error}", folder.display())),
    }
}

fn disk(folder: &Path) -> Item {
    let measured = || -> io::Result<String> {
        let free = space(folder)?;
        let speed = write_speed(folder, TRIAL)?;
        Ok(format!("{} free in {}, {:.2} GB/s written and synced", bytes(free), folder.display(), speed / 1e9))
    };
    match measured() {
        Ok(text) => Item::new(Verdict::Good, "disk", text),
        Err(error) => {
            Item::new(Verdict::Note, "disk", format!("{}: {error}; checkpoints need another folder", folder.display()))
        }
    }
}

fn space(folder: &Path) -> io::Result<u64> {
    let space = rustix::fs::statvfs(folder)?;
    Ok(space.f_bavail * space.f_frsize)
}

/// Bytes written to measure the disk.
const TRIAL: usize = 256 << 20;

/// Bytes per second, until they are on the disk. The file has no name, so nothing stays.
fn write_speed(folder: &Path, bytes: usize) -> io::Result<f64> {
    let mut file: File = tempfile::tempfile_in(folder)?;
    // Not zeros: some file systems do not store them.
    let block: Vec<u8> = (0..8usize << 20).map(|i| (i.wrapping_mul(0x9E37_79B9) >> 13) as u8).collect();
    let start = Instant::now();
    for _ in 0..bytes.div_ceil(block.len()) {
        file.write_all(&block)?;
    }
    file.sync_all()?;
    Ok(bytes.next_multiple_of(block.len()) as f64 / start.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_from_the_system() {
        let text = "MemTotal:       65843404 kB\nMemFree:  1 kB\nMemAvailable:   32921702 kB\n";
        assert_eq!(memory(text).found, "62.8 GiB, 31.4 GiB available");
        assert_eq!(memory("").verdict, Verdict::Note);
    }

    #[test]
    fn the_address_space_may_be_limited() {
        let limits =
            |most: &str| format!("Limit  Soft Limit  Hard Limit  Units\nMax address space  {most}  unlimited  bytes\n");
        assert_eq!(address_space(&limits("1048576"), "VmPeak: 9 kB\nVmSize:  24 kB\n"), Some(1_000_000 + 24_000));
        assert_eq!(address_space(&limits("unlimited"), "VmSize: 24 kB\n"), None);
        assert!(available_memory().is_none_or(|bytes| bytes > 0));
    }

    #[test]
    fn a_disk_is_measured_and_left_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        assert!(write_speed(folder.path(), 1 << 20).unwrap() > 0.0);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let item = disk(&folder.path().join("nowhere"));
        assert!(item.verdict == Verdict::Note && item.found.contains("another folder"), "{item}");
    }
}
