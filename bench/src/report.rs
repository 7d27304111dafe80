//! Rows and goals, as a table and as JSON.

use std::fmt::Write;

use serde::Serialize;

/// The result of a benchmark.
#[derive(Serialize)]
pub struct Report {
    schema: u32,
    bench: &'static str,
    machine: Machine,
    /// The text of the bench.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    lines: Vec<String>,
    rows: Vec<Row>,
    goals: Vec<Goal>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<Note>,
    /// Rounds of the rows that the next goal is about.
    #[serde(skip)]
    rounds: Option<usize>,
}

/// Rounds that prove a goal, where a bench says how many it had.
const PROOF: usize = 11;
/// With fewer rounds than this there is no median, and no verdict.
const LEAST: usize = 3;

/// Where it ran.
#[derive(Serialize)]
struct Machine {
    /// Of the program; with a `+` where files differed from it.
    commit: String,
    cpu: String,
    cores: usize,
    memory_bytes: u64,
    kernel: String,
    /// Processes that ran or wanted to, on average of the minute before.
    load: f64,
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
    #[serde(flatten)]
    details: Details,
}

/// Other facts about a row; unknown ones are left out.
#[derive(Clone, Copy, Default, Serialize)]
pub struct Details {
    /// Things done in one sample (leaves mapped, addresses looked up).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub items: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ns_per_item: Option<f64>,
    /// Counted by callgrind, so free of noise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instructions_per_item: Option<f64>,
    /// Calls from one layer into the next.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub crossings: Option<u64>,
    /// Walks from the root.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub walks: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_pairs: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub invalidations: Option<u64>,
    /// Tables in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tables: Option<usize>,
    /// Memory taken, for each of the things that take it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_item: Option<f64>,
    /// Look-ups, leaves visited: whatever the bench counts as one step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
}

/// A promise, and what this run gave.
#[derive(Serialize)]
struct Goal {
    name: String,
    goal: f64,
    got: f64,
    unit: &'static str,
    /// None where it was not judged, for too few rounds.
    ok: Option<bool>,
    /// Rounds that were too few to prove it.
    #[serde(skip_serializing_if = "Option::is_none")]
    too_few_rounds: Option<usize>,
}

/// A ratio worth knowing that nobody promised.
#[derive(Serialize)]
struct Note {
    case: String,
    name: String,
    got: f64,
}

impl Report {
    pub fn new(bench: &'static str) -> Self {
        Self {
            schema: 1,
            bench,
            machine: Machine::this(),
            lines: Vec::new(),
            rows: Vec::new(),
            goals: Vec::new(),
            notes: Vec::new(),
            rounds: None,
        }
    }

    /// Adds a row and gives its median, in seconds.
    pub fn row(&mut self, case: &str, variant: &str, bytes: u64, samples: &[f64]) -> f64 {
        self.detailed_row(case, variant, bytes, samples, Details::default())
    }

    /// Adds a row of which more is known and gives its median, in seconds.
    pub fn detailed_row(
        &mut self,
        case: &str,
        variant: &str,
        bytes: u64,
        samples: &[f64],
        mut details: Details,
    ) -> f64 {
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
            details: {
                details.ns_per_item = details.items.map(|items| median * 1e9 / items as f64);
                details
            },
        });
        median
    }

    /// Adds a line of text, printed before the rows.
    pub fn say(&mut self, line: String) {
        self.lines.push(line);
    }

    /// The instructions for one item of a row.
    pub fn instructions(&self, case: &str, variant: &str) -> Option<f64> {
        let row = self.rows.iter().find(|r| r.case == case && r.variant == variant)?;
        row.details.instructions_per_item
    }

    /// The next goal is about rows with this number of rounds: below [`PROOF`] it is not proven, below [`LEAST`] not
    /// judged.
    pub fn of_rounds(&mut self, rounds: usize) -> &mut Self {
        self.rounds = Some(rounds);
        self
    }

    fn goal(&mut self, name: &str, goal: f64, got: f64, unit: &'static str, ok: bool) {
        let too_few_rounds = self.rounds.take().filter(|rounds| *rounds < PROOF);
        let ok = Some(ok).filter(|_| too_few_rounds.is_none_or(|rounds| rounds >= LEAST));
        self.goals.push(Goal { name: name.to_owned(), goal, got, unit, ok, too_few_rounds });
    }

    /// A ratio that must not exceed `goal`.
    pub fn at_most(&mut self, name: &str, goal: f64, got: f64) {
        self.goal(name, goal, got, "ratio, at most", got <= goal);
    }

    /// A number that must be `goal` or more.
    pub fn at_least(&mut self, name: &str, goal: f64, got: f64) {
        self.goal(name, goal, got, "ratio, at least", got >= goal);
    }

    /// A number with a unit that must not exceed `goal`.
    pub fn at_most_in(&mut self, name: &str, goal: f64, got: f64, unit: &'static str) {
        self.goal(name, goal, got, unit, got <= goal);
    }

    /// A ratio worth knowing.
    pub fn note(&mut self, case: &str, name: &str, got: f64) {
        self.notes.push(Note { case: case.to_owned(), name: name.to_owned(), got });
    }

    /// Whether a goal was missed. One that was not judged was not.
    pub fn has_missed(&self) -> bool {
        self.goals.iter().any(|b| b.ok == Some(false))
    }

    /// The number of goals that were not judged.
    pub fn not_judged(&self) -> usize {
        self.goals.iter().filter(|b| b.ok.is_none()).count()
    }

    /// A line that says so.
    pub fn unjudged(&self) -> String {
        format!("goals that were not judged, as they had fewer than {LEAST} rounds: {}", self.not_judged())
    }

    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("numbers and strings")
    }

    pub fn text(&self) -> String {
        let m = &self.machine;
        let mut out = format!(
            "{} at {}: {} x {}, {:.0} GiB, Linux {}, load {:.1}\n\n",
            self.bench,
            m.commit,
            m.cores,
            m.cpu,
            m.memory_bytes as f64 / (1u64 << 30) as f64,
            m.kernel,
            m.load
        );
        for line in &self.lines {
            let _ = writeln!(out, "{line}");
        }
        if !self.lines.is_empty() {
            out.push('\n');
        }
        match self.rows.iter().any(|r| r.details.items.is_some()) {
            true => self.per_item(&mut out),
            false => self.per_byte(&mut out),
        }
        out.push('\n');
        for b in &self.goals {
            let verdict = match (b.ok, b.too_few_rounds) {
                (None, rounds) => format!("not judged ({} of {LEAST} rounds):", rounds.unwrap_or(0)),
                (Some(ok), Some(rounds)) => {
                    format!("{}, not proven ({rounds} of {PROOF} rounds):", if ok { "met" } else { "MISSED" })
                }
                (Some(ok), None) => (if ok { "met   " } else { "MISSED" }).to_owned(),
            };
            let _ = writeln!(out, "{verdict} {}: {:.3} ({} {})", b.name, b.got, b.unit, b.goal);
        }
        for n in &self.notes {
            let _ = writeln!(out, "note   {}: {}: {:.3}", n.case, n.name, n.got);
        }
        if self.not_judged() > 0 {
            let _ = writeln!(out, "{}", self.unjudged());
        }
        out
    }

    /// Rows of transfers.
    fn per_byte(&self, out: &mut String) {
        // Times of some microseconds are printed in them.
        let ms = |seconds: f64| {
            if seconds < 0.01 { format!("{:.3}", seconds * 1e3) } else { format!("{:.1}", seconds * 1e3) }
        };
        let case = self.rows.iter().map(|r| r.case.len()).fold(11, usize::max);
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "{:<case$} {:<54} {:>10} {:>10} {:>10} {:>8}",
            "case", "variant", "median ms", "min", "max", "GB/s"
        );
        for r in &self.rows {
            let _ = writeln!(
                out,
                "{:<case$} {:<54} {:>10} {:>10} {:>10} {:>8.2}",
                r.case,
                r.variant,
                ms(r.median_s),
                ms(r.min_s),
                ms(r.max_s),
                r.bytes_per_s / 1e9
            );
        }
    }

    /// Rows of many small things, with what was counted.
    fn per_item(&self, out: &mut String) {
        let _ = writeln!(
            out,
            "{:<26} {:<50} {:>11} {:>11} {:>11} {:>9} {:>8}  counted",
            "case", "variant", "median us", "min", "max", "ns each", "instr"
        );
        for r in &self.rows {
            let d = &r.details;
            let number = |n: Option<f64>| n.map_or("-".to_owned(), |n| format!("{n:.2}"));
            let mut counted = String::new();
            let counts = [
                ("crossings", d.crossings),
                ("walks", d.walks),
                ("power pairs", d.power_pairs),
                ("invalidations", d.invalidations),
                ("tables", d.tables.map(|n| n as u64)),
                ("steps", d.steps),
            ];
            for (name, n) in counts {
                if let Some(n) = n
                    && n > 0
                {
                    let _ = write!(counted, " {n} {name}");
                }
            }
            if let Some(bytes) = d.bytes_per_item {
                let _ = write!(counted, " {bytes:.2} B");
            }
            let line = format!(
                "{:<26} {:<50} {:>11.3} {:>11.3} {:>11.3} {:>9} {:>8} {counted}",
                r.case,
                r.variant,
                r.median_s * 1e6,
                r.min_s * 1e6,
                r.max_s * 1e6,
                number(d.ns_per_item),
                number(d.instructions_per_item),
            );
            let _ = writeln!(out, "{}", line.trim_end());
        }
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
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let number = |name| field("/proc/cpuinfo", name).parse::<u32>().map_or(String::new(), |n| n.to_string());
        let model = format!("family {}, model {}", number("cpu family"), number("model\t"));
        Self {
            commit: commit(),
            cpu: format!("{} ({model})", field("/proc/cpuinfo", "model name")),
            cores: std::thread::available_parallelism().map_or(0, |n| n.get()),
            memory_bytes: kib * 1024,
            kernel: kernel.trim().to_owned(),
            load: load.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(f64::NAN),
        }
    }
}

/// The commit that is checked out here, as that from which the program was built.
fn commit() -> String {
    let git = |arguments: &[&str]| {
        let out = std::process::Command::new("git").args(["-C", env!("CARGO_MANIFEST_DIR")]).args(arguments).output();
        let out = out.ok().filter(|out| out.status.success())?;
        Some(String::from_utf8_lossy(&out.stdout).trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short", "HEAD"]) else { return "an unknown commit".to_owned() };
    let changed = git(&["status", "--porcelain", "--untracked-files=no"]).is_none_or(|list| !list.is_empty());
    if changed { commit + "+" } else { commit }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_goal_of_two_rounds_is_not_judged() {
        let mut report = Report::new("test");
        report.of_rounds(2).at_most("two", 1.0, 2.0);
        assert!(!report.has_missed() && report.not_judged() == 1);
        report.of_rounds(3).at_most("three", 1.0, 2.0);
        report.at_most("all", 1.0, 0.5);
        assert!(report.has_missed() && report.not_judged() == 1);
        let text = report.text();
        assert!(text.contains("\nnot judged (2 of 3 rounds): two: 2.000 "), "{text}");
        assert!(text.contains("\nMISSED, not proven (3 of 11 rounds): three: "), "{text}");
        assert!(text.contains("\nmet    all: ") && text.ends_with("they had fewer than 3 rounds: 1\n"));
        let goals: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
        assert_eq!(goals["goals"][0]["ok"], serde_json::Value::Null);
    }
}
