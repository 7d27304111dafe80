//! Runs the seeds of a fuzz target, then seeds with random changes for a time: `replay TARGET SECONDS`, in the root of
//! the repository. The input that runs lies in `fuzz/artifacts/TARGET/running` and stays there after a
//! panic. Without coverage it explores less than `scripts/fuzz`, and needs no special build.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Bytes of an input: libFuzzer's default.
const LONGEST: usize = 4096;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let parsed = match &arguments[..] {
        [name, seconds] => dmalane_fuzz::target(name).zip(seconds.parse().ok()).map(|(t, s)| (name, t, s)),
        _ => None,
    };
    let Some((name, target, seconds)) = parsed else {
        eprintln!("usage: replay TARGET SECONDS; targets:");
        dmalane_fuzz::TARGETS.iter().for_each(|(name, _)| eprintln!("  {name}"));
        return ExitCode::from(2);
    };
    let folder = Path::new("fuzz/artifacts").join(name);
    fs::create_dir_all(&folder).expect("a folder for the input that runs");
    let running = folder.join("running");
    let file = File::create(&running).expect("a file for the input that runs");
    let run = |input: &[u8]| {
        file.set_len(input.len() as u64).and_then(|()| file.write_all_at(input, 0)).expect("the input is written");
        target(input);
    };

    let seeds = fs::read_dir(Path::new("fuzz/seeds").join(name)).expect("a folder of seeds");
    let mut seeds: Vec<_> = seeds.map(|entry| entry.expect("an entry").path()).collect();
    seeds.sort();
    let seeds: Vec<Vec<u8>> = seeds.iter().map(|path| fs::read(path).expect("a seed")).collect();
    assert!(!seeds.is_empty(), "no seeds of {name}");
    seeds.iter().for_each(|seed| run(seed));
    // From here on: seeds may take as long.
    let deadline = Instant::now() + Duration::from_secs(seconds);
    let mut random = Random(1);
    let mut changed = 0u64;
    while Instant::now() < deadline {
        run(&random.change(&seeds));
        changed += 1;
    }
    println!("{} seeds, {changed} changed ones", seeds.len());
    let _ = fs::remove_file(&running);
    ExitCode::SUCCESS
}

/// Pseudo-random numbers (SplitMix64), the same in each run.
struct Random(u64);

impl Random {
    /// A number below `end`, which is not 0.
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % end as u64) as usize
    }

    /// A seed with one to eight changes.
    fn change(&mut self, seeds: &[Vec<u8>]) -> Vec<u8> {
        let mut input = seeds[self.below(seeds.len())].clone();
        for _ in 0..=self.below(8) {
            let at = self.below(input.len() + 1);
            match self.below(6) {
                0 if at < input.len() => input[at] ^= 1 << self.below(8),
                1 if at < input.len() => input[at] = self.below(256) as u8,
                2 => input.insert(at, self.below(256) as u8),
                3 => drop(input.drain(at..(at + self.below(16)).min(input.len()))),
                4 => input.truncate(at),
                _ => {
                    let other = &seeds[self.below(seeds.len())];
                    let from = self.below(other.len() + 1);
                    let end = (from + self.below(64)).min(other.len());
                    input.splice(at..at, other[from..end].iter().copied());
                }
            }
        }
        input.truncate(LONGEST);
        input
    }
}
