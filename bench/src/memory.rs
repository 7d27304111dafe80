//! Memory of a process of this program, for structures that cannot tell their size; and the processor's caches.

use std::error::Error;
use std::process::Command;

/// Bytes resident in this process.
pub fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("Rss:"));
    line.and_then(|l| l.trim().strip_suffix("kB")?.trim().parse().ok()).map_or(0, |kib: u64| kib * 1024)
}

/// The number that this program prints when it runs with these arguments.
pub fn of(arguments: &[&str]) -> Result<f64, Box<dyn Error>> {
    let out = Command::new(std::env::current_exe()?).args(arguments).output()?;
    let text = String::from_utf8_lossy(&out.stdout);
    text.trim().parse().map_err(|_| format!("{arguments:?} printed {text:?}").into())
}

/// Has the kernel find so many bytes of memory, and gives them back: the host of a virtual machine may have taken what
/// its kernel has not used for a while, and takes longer to give it again than what is measured.
pub fn find(bytes: usize) {
    drop(std::hint::black_box(vec![1u8; bytes]));
}

/// Bytes that no cache of the processor holds: twice those of the last one as the kernel says, whoever shares it, in
/// multiples of 128 MiB, and 256 MiB at least.
pub fn past_the_caches() -> usize {
    let read = |i: usize| std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{i}/size")).ok();
    let last = (0..8).map_while(read).filter_map(|size| size_of_cache(&size)).max();
    (2 * last.unwrap_or(0)).next_multiple_of(128 << 20).max(256 << 20)
}

/// Bytes of a size such as `32768K`.
fn size_of_cache(size: &str) -> Option<usize> {
    size.trim().strip_suffix('K')?.parse::<usize>().ok()?.checked_mul(1 << 10)
}

/// Fills the caches with something else.
pub struct Evict(Vec<u64>);

impl Evict {
    pub fn new() -> Self {
        Self((0..past_the_caches() as u64 / 8).collect())
    }

    pub fn run(&self) {
        std::hint::black_box(self.0.iter().step_by(8).fold(0u64, |sum, &n| sum.wrapping_add(n)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caches_are_filled_with_more_than_they_hold() {
        assert_eq!(size_of_cache("266240K\n"), Some(260 << 20));
        assert_eq!((size_of_cache("2M"), size_of_cache("")), (None, None));
        for i in 0..8 {
            let size = std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{i}/size"));
            let holds = size.ok().and_then(|size| size_of_cache(&size)).unwrap_or(0);
            assert!(Evict::new().0.len() * 8 >= 2 * holds, "index{i}: {holds}");
        }
    }
}
