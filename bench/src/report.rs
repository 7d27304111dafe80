//! Rows and bars, as a table and as JSON.

use std::fmt::Write;

use serde::Serialize;

/// What a benchmark found.
#[derive(Serialize)]
pub struct Report {
    schema: u32,
    bench: &'static str,
    machine: Machine,
    rows: Vec<Row>,
    bars: Vec<Bar>,
}

/// Where it ran.
#[derive(Serialize)]
struct Machine {
    cpu: String,
    cores: usize,
    memory_bytes: u64,
    kernel: String,
}

/// One variant of one case: the median and the spread of its samples.
#[derive(Serialize)]
pub struct Row {
    case: String,
    variant: String,
    median_s: f64,
    min_s: f64,
    max_s: f64,
    bytes_per_s: f64,
    samples: usize,
}

/// A promise, and what this run gave.
#[derive(Serialize)]
struct Bar {
    name: String,
    goal: f64,
    got: f64,
    unit: &'static str,
    ok: bool,
}

impl Report {
    pub fn new(bench: &'static str) -> Self {
        Self { schema: 1, bench, machine: Machine::this(), rows: Vec::new(), bars: Vec::new() }
    }

    /// Adds a row and gives its median, in seconds.
    pub fn row(&mut self, case: &str, variant: &str, bytes: u64, samples: &[f64]) -> f64 {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let median = sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN);
        self.rows.push(Row {
            case: case.to_owned(),
            variant: variant.to_owned(),
            median_s: median,
            min_s: sorted.first().copied().unwrap_or(f64::NAN),
            max_s: sorted.last().copied().unwrap_or(f64::NAN),
            bytes_per_s: bytes as f64 / median,
            samples: samples.len(),
        });
        median
    }

    /// A ratio that must not exceed `goal`.
    pub fn at_most(&mut self, name: &str, goal: f64, got: f64) {
        self.bars.push(Bar { name: name.to_owned(), goal, got, unit: "ratio, at most", ok: got <= goal });
    }

    pub fn all_met(&self) -> bool {
        self.bars.iter().all(|b| b.ok)
    }

    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("numbers and strings")
    }

    pub fn text(&self) -> String {
        let m = &self.machine;
        let mut out = format!(
            "{}: {} x {}, {:.0} GiB, Linux {}\n\n",
            self.bench,
            m.cores,
            m.cpu,
            m.memory_bytes as f64 / (1u64 << 30) as f64,
            m.kernel
        );
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "{:<8} {:<44} {:>10} {:>10} {:>10} {:>8}",
            "case", "variant", "median ms", "min", "max", "GB/s"
        );
        for r in &self.rows {
            let _ = writeln!(
                out,
                "{:<8} {:<44} {:>10.1} {:>10.1} {:>10.1} {:>8.2}",
                r.case,
                r.variant,
                r.median_s * 1e3,
                r.min_s * 1e3,
                r.max_s * 1e3,
                r.bytes_per_s / 1e9
            );
        }
        out.push('\n');
        for b in &self.bars {
            let verdict = if b.ok { "met" } else { "MISSED" };
            let _ = writeln!(out, "{verdict:<6} {}: {:.3} ({} {})", b.name, b.got, b.unit, b.goal);
        }
        out
    }
}

impl Machine {
    fn this() -> Self {
        let field = |file: &str, name: &str| {
            let text = std::fs::read_to_string(file).unwrap_or_default();
            let line = text.lines().find(|l| l.starts_with(name)).unwrap_or_default().to_owned();
            line.split_once(':').map_or(String::new(), |(_, value)| value.trim().to_owned())
        };
        let kib = field("/proc/meminfo", "MemTotal");
        let kib: u64 = kib.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0);
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            cpu: field("/proc/cpuinfo", "model name"),
            cores: std::thread::available_parallelism().map_or(0, |n| n.get()),
            memory_bytes: kib * 1024,
            kernel: kernel.trim().to_owned(),
        }
    }
}
