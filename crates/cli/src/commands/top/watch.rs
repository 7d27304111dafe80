//! Rates of jobs and daemons: the differences of what they say.

use std::collections::HashMap;
use std::time::{Duration, Instant, SystemTime};

use dmalane::daemon::{ClientOptions, ClientStatus, DaemonStatus, status_with};
use dmalane::load::Stage;
use serde::Serialize;
use serde_json::{Value, json};

use crate::job::{self, Found, Snapshot};
use crate::layout::{Table, cut_end, plain, wrap};
use crate::size::{binary, per_second};

/// Time that a daemon has to answer.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Jobs and daemons as they were last seen.
pub struct Watcher {
    daemons: Vec<ClientOptions>,
    jobs: HashMap<String, Snapshot>,
    /// When each daemon was asked, and its clients then.
    clients: HashMap<usize, (Instant, Vec<ClientStatus>)>,
}

/// A snapshot of all jobs and daemons.
#[cfg_attr(test, derive(Clone))]
pub struct View {
    at: SystemTime,
    pub jobs: Vec<JobView>,
    pub daemons: Vec<DaemonView>,
}

/// A job.
#[cfg_attr(test, derive(Clone))]
pub struct JobView {
    pub name: String,
    pub pid: u32,
    pub answer: Result<Running, String>,
}

/// A job that answered, and its rates since it was last seen; since its beginning if it was not.
#[cfg_attr(test, derive(Clone))]
pub struct Running {
    pub now: Snapshot,
    /// Bytes or steps per second.
    pub rate: f64,
    pub stages: Vec<StageView>,
    /// Translations found in the IOTLB, of all; `None` if there were none.
    hit_ratio: Option<f64>,
    faults: u64,
    /// Bytes per second that a device reads (H2C) and writes (C2H).
    link: Option<(f64, f64)>,
}

/// A stage in an interval.
#[derive(Serialize)]
#[cfg_attr(test, derive(Clone))]
pub struct StageView {
    stage: String,
    /// Shares of the interval.
    busy: f64,
    wall: f64,
    bytes: u64,
    bytes_per_s: f64,
    in_flight: u64,
}

/// A daemon.
#[cfg_attr(test, derive(Clone))]
pub struct DaemonView {
    pub socket: String,
    pub status: Result<DaemonStatus, String>,
    /// Those of each client.
    rates: Vec<ClientRates>,
}

/// The rates of a client since it was last seen.
#[cfg_attr(test, derive(Clone))]
pub struct ClientRates {
    /// Bytes per second from the host to the card, and back.
    link: (f64, f64),
    hit_ratio: Option<f64>,
}

impl ClientRates {
    /// Bytes per second in both directions.
    fn bytes_per_s(&self) -> f64 {
        self.link.0 + self.link.1
    }
}

impl Watcher {
    /// Of the jobs of this user, and of these daemons.
    pub fn new(daemons: Vec<ClientOptions>) -> Self {
        let daemons = daemons.into_iter().map(|options| ClientOptions { timeout: TIMEOUT, ..options }).collect();
        Self { daemons, jobs: HashMap::new(), clients: HashMap::new() }
    }

    /// Asks all of them.
    pub fn look(&mut self) -> View {
        let at = SystemTime::now();
        let mut before = std::mem::take(&mut self.jobs);
        let mut jobs = Vec::new();
        for Found { name, pid, answer } in job::all() {
            let then = before.remove(&name);
            if let Ok(now) = &answer {
                self.jobs.insert(name.clone(), now.clone());
            }
            jobs.push(JobView { name, pid, answer: answer.map(|now| Running::since(then.as_ref(), now)) });
        }
        jobs.sort_by(|a, b| (a.pid, &a.name).cmp(&(b.pid, &b.name)));
        let daemons = (0..self.daemons.len()).map(|i| self.daemon(i)).collect();
        View { at, jobs, daemons }
    }

    fn daemon(&mut self, i: usize) -> DaemonView {
        let socket = plain(&self.daemons[i].path.to_string_lossy());
        let (now, status) = (Instant::now(), status_with(&self.daemons[i]));
        let status = status.map(|mut status| {
            // Not the connection of this question.
            status.clients.retain(|c| c.pid != std::process::id() || c.queues > 0);
            status
        });
        let Ok(status) = &status else {
            self.clients.remove(&i);
            return DaemonView { socket, status: status.map_err(|e| plain(&e.to_string())), rates: Vec::new() };
        };
        let (then, before) = self.clients.insert(i, (now, status.clients.clone())).unwrap_or((now, Vec::new()));
        let time = now.saturating_duration_since(then).as_secs_f64();
        let rates = |c: &ClientStatus| {
            let old = before.iter().find(|old| old.client == c.client);
            let (hits, misses) = old.map_or((0, 0), |old| (old.iotlb_hits, old.iotlb_misses));
            let per_s = |now: u64, old: u64| now.saturating_sub(old) as f64 / time;
            let link = old.filter(|_| time > 0.0).map(|old| (per_s(c.h2c, old.h2c), per_s(c.c2h, old.c2h)));
            ClientRates {
                link: link.unwrap_or((0.0, 0.0)),
                hit_ratio: ratio(c.iotlb_hits.saturating_sub(hits), c.iotlb_misses.saturating_sub(misses)),
            }
        };
        let rates = status.clients.iter().map(rates).collect();
        DaemonView { socket, status: Ok(status.clone()), rates }
    }
}

/// The share of hits, if there was any translation.
fn ratio(hits: u64, misses: u64) -> Option<f64> {
    let all = hits.saturating_add(misses);
    (all > 0).then(|| hits as f64 / all as f64)
}

impl Running {
    fn since(then: Option<&Snapshot>, now: Snapshot) -> Self {
        let time = (now.elapsed_s - then.map_or(0.0, |then| then.elapsed_s)).max(1e-6);
        // Of a job that lies, too, the figures stay short.
        let per_s = |n: u64| (n as f64 / time).min(1e15);
        // A phase that has ended meanwhile counts no more.
        let before = then.filter(|then| then.phase == now.phase).map_or(0, |then| then.done);
        let done = now.done.checked_sub(before).unwrap_or(now.done);
        let stages = now.stages.iter().take(Stage::ALL.len()).map(|s| {
            let old = then.and_then(|then| then.stages.iter().find(|old| old.stage == s.stage));
            let share = |now: f64, old: Option<f64>| ((now - old.unwrap_or(0.0)) / time).clamp(0.0, 1e3);
            StageView {
                stage: cut_end(&plain(&s.stage), 12),
                busy: share(s.busy_s, old.map(|old| old.busy_s)),
                wall: share(s.wall_s, old.map(|old| old.wall_s)),
                bytes: s.bytes,
                bytes_per_s: per_s(s.bytes.saturating_sub(old.map_or(0, |old| old.bytes))),
                in_flight: s.in_flight,
            }
        });
        let iommu = now.iommu.as_ref().map(|i| {
            let old =
                then.and_then(|then| then.iommu.as_ref()).filter(|old| old.hits <= i.hits && old.misses <= i.misses);
            let (hits, misses) = old.map_or((0, 0), |old| (old.hits, old.misses));
            (i.hits - hits, i.misses.saturating_sub(misses))
        });
        let hit_ratio = iommu.and_then(|(hits, misses)| ratio(hits, misses));
        let faults = now.iommu.as_ref().map_or(0, |i| i.faults);
        let link = now.link.as_ref().map(|link| {
            let old = then.and_then(|then| then.link).map_or((0, 0), |old| (old.read, old.written));
            (per_s(link.read.saturating_sub(old.0)), per_s(link.written.saturating_sub(old.1)))
        });
        Self { rate: per_s(done), stages: stages.collect(), hit_ratio, faults, link, now }
    }

    /// The share of the phase that is done, if that is known.
    pub fn share(&self) -> Option<f64> {
        (self.now.total > 0).then(|| (self.now.done as f64 / self.now.total as f64).min(1.0))
    }

    /// The work that is done, the work in all, and the rate.
    pub fn progress(&self) -> String {
        let amount = |n: u64| if self.now.bytes { binary(n) } else { n.to_string() };
        let rate = if self.now.bytes { format!(", {}", per_second(self.rate)) } else { String::new() };
        let left = self.now.total.saturating_sub(self.now.done) as f64 / self.rate;
        let left = match self.now.bytes && left.is_finite() && left > 0.0 {
            true => format!(", {} left", clock(left)),
            false => String::new(),
        };
        match (self.share(), self.now.bytes) {
            (Some(share), _) => {
                let steps = if self.now.bytes { "" } else { " steps" };
                let of = (amount(self.now.done), amount(self.now.total));
                format!("{:.0} %, {} of {}{steps}{rate}{left}", share * 100.0, of.0, of.1)
            }
            (None, true) if self.stage_bytes() > 0 => format!("{}{rate}", amount(self.stage_bytes())),
            (None, _) => format!("{}{rate}", amount(self.now.done)),
        }
    }

    /// Bytes that were read by a job that does not say how much it has done.
    fn stage_bytes(&self) -> u64 {
        self.now.stages.iter().find(|s| s.stage == "read").map_or(0, |s| s.bytes)
    }

    /// The device in words: its link, its queues and its IOMMU; nothing for a job without either.
    pub fn device(&self) -> Option<String> {
        let link = self.link.map(|(h2c, c2h)| format!("H2C {}, C2H {}", per_second(h2c), per_second(c2h)));
        let in_flight = self.now.in_flight.map(|n| format!("{n} operations in flight"));
        let hits = self.hit_ratio.map(|ratio| format!("IOTLB: {:.2} % hits", ratio * 100.0));
        let faults = self.now.iommu.as_ref().map(|_| format!("{} faults", self.faults));
        let said: Vec<String> = [link, in_flight, hits, faults].into_iter().flatten().collect();
        (!said.is_empty()).then(|| said.join("; "))
    }
}

/// Seconds as minutes and seconds, or with hours.
pub fn clock(seconds: f64) -> String {
    let s = seconds.clamp(0.0, 1e9) as u64;
    match s / 3600 {
        0 => format!("{}:{:02}", s / 60, s % 60),
        h => format!("{h}:{:02}:{:02}", s / 60 % 60, s % 60),
    }
}

/// The names of the columns of [`job_row`], and how they are aligned.
pub const JOB_HEAD: [&str; 6] = ["pid", "phase", "done", "rate", "time", "command"];

/// A job in a line.
pub fn job_row(job: &JobView) -> [String; 6] {
    let none = String::new;
    match &job.answer {
        Err(why) => [job.pid.to_string(), why.clone(), none(), none(), none(), none()],
        Ok(running) => [
            job.pid.to_string(),
            cut_end(&plain(&running.now.phase), 30),
            running.share().map_or_else(none, |share| format!("{:.0} %", share * 100.0)),
            if running.now.bytes { per_second(running.rate) } else { none() },
            clock(running.now.elapsed_s),
            plain(&running.now.command),
        ],
    }
}

/// The names of the columns of [`stage_row`].
pub const STAGE_HEAD: [&str; 6] = ["stage", "busy", "wall", "rate", "size", "in flight"];

/// A stage in a line.
pub fn stage_row(s: &StageView) -> [String; 6] {
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    let in_flight = if s.in_flight > 0 { s.in_flight.to_string() } else { String::new() };
    [s.stage.clone(), percent(s.busy), percent(s.wall), per_second(s.bytes_per_s), binary(s.bytes), in_flight]
}

/// The names of the columns of [`client_rows`].
pub const CLIENT_HEAD: [&str; 12] =
    ["client", "pid", "uid", "queues", "in flight", "buffers", "card", "H2C", "C2H", "hits", "faults", "errors"];
/// How they are aligned.
pub const CLIENT_ALIGN: &str = "rrrrrrrrrrrr";

impl DaemonView {
    /// The clients in lines.
    pub fn client_rows(&self) -> Vec<[String; 12]> {
        let clients = self.status.iter().flat_map(|status| &status.clients);
        let row = |(c, rates): (&ClientStatus, &ClientRates)| {
            let number = |n: u64| n.to_string();
            [
                if c.closing { format!("{} closing", c.client) } else { number(c.client) },
                number(c.pid.into()),
                number(c.uid.into()),
                number(c.queues.into()),
                number(c.in_flight),
                binary(c.bytes),
                binary(c.ddr.saturating_add(c.hbm)),
                per_second(rates.link.0),
                per_second(rates.link.1),
                rates.hit_ratio.map_or("-".to_owned(), |ratio| format!("{:.1} %", ratio * 100.0)),
                number(c.faults),
                number(c.errors),
            ]
        };
        clients.zip(&self.rates).map(row).collect()
    }

    /// Bytes per second of all clients, in both directions.
    pub fn rate(&self) -> f64 {
        // The sum of no floating-point numbers is -0.0, and would be shown so.
        self.rates.iter().fold(0.0, |sum, rates| sum + rates.bytes_per_s())
    }

    /// The daemon in a line.
    pub fn text(&self) -> String {
        match &self.status {
            Err(why) => format!("daemon {}: {why}", self.socket),
            Ok(DaemonStatus { uptime, totals, quarantined, ddr, hbm, clients }) => format!(
                "daemon {}: {} clients, {}; DDR {} of {}, HBM {} of {}; {} requests, {} refused; {quarantined} \
                 quarantined; up {}",
                self.socket,
                clients.len(),
                per_second(self.rate()),
                binary(ddr.0),
                binary(ddr.1),
                binary(hbm.0),
                binary(hbm.1),
                totals.requests,
                totals.errors,
                clock(*uptime as f64),
            ),
        }
    }
}

impl View {
    /// The snapshot as text.
    pub fn text(&self) -> String {
        let mut out = String::new();
        if self.jobs.is_empty() {
            out += "No command of this user is running\n";
        } else {
            let mut table = Table::new("rlrrrl", JOB_HEAD);
            self.jobs.iter().for_each(|job| table.row(job_row(job)));
            out += &table.text();
        }
        for JobView { pid, answer, .. } in &self.jobs {
            let Ok(running) = answer else { continue };
            out += &format!("\n{}", wrap(&format!("{pid}: {}; {}", plain(&running.now.phase), running.progress()), 2));
            if !running.stages.is_empty() {
                let mut table = Table::new("lrrrrr", STAGE_HEAD);
                running.stages.iter().for_each(|stage| table.row(stage_row(stage)));
                out += &table.text();
            }
            out += &running.device().map_or(String::new(), |device| format!("{device}\n"));
        }
        for daemon in &self.daemons {
            out += &format!("\n{}", wrap(&daemon.text(), 2));
            let rows = daemon.client_rows();
            if !rows.is_empty() {
                let mut table = Table::new(CLIENT_ALIGN, CLIENT_HEAD);
                rows.into_iter().for_each(|row| table.row(row));
                out += &table.text();
            }
        }
        out
    }

    /// The snapshot as `docs/formats/json.md` describes it.
    pub fn json(&self) -> Value {
        let job = |JobView { pid, answer, .. }: &JobView| match answer {
            Err(why) => json!({ "pid": pid, "error": why }),
            Ok(Running { now, rate, stages, hit_ratio, link, .. }) => json!({
                "pid": pid,
                "error": null,
                "command": now.command,
                "phase": now.phase,
                "elapsed_s": now.elapsed_s,
                "unit": if now.bytes { "bytes" } else { "steps" },
                "done": now.done,
                "total": if now.total > 0 { Some(now.total) } else { None },
                "bytes_per_s": now.bytes.then_some(rate),
                "stages": stages,
                "iommu": now.iommu.map(|i| json!({
                    "hits": i.hits, "misses": i.misses, "faults": i.faults, "hit_ratio": hit_ratio,
                })),
                "in_flight": now.in_flight,
                "link": now.link.zip(*link).map(|(all, (h2c, c2h))| json!({
                    "h2c_bytes": all.read, "c2h_bytes": all.written,
                    "h2c_bytes_per_s": h2c, "c2h_bytes_per_s": c2h,
                })),
            }),
        };
        let daemon = |daemon: &DaemonView| {
            let client = |(c, rates): (&ClientStatus, &ClientRates)| {
                let ClientRates { link: (h2c, c2h), hit_ratio } = rates;
                let (hits, misses, faults) = (c.iotlb_hits, c.iotlb_misses, c.faults);
                json!({
                    "client": c.client, "pid": c.pid, "uid": c.uid, "queues": c.queues, "buffers": c.buffers,
                    "buffer_bytes": c.bytes, "ddr_bytes": c.ddr, "hbm_bytes": c.hbm, "moved_bytes": c.moved(),
                    "bytes_per_s": rates.bytes_per_s(), "in_flight": c.in_flight, "errors": c.errors,
                    "closing": c.closing,
                    "link": {
                        "h2c_bytes": c.h2c, "c2h_bytes": c.c2h, "h2c_bytes_per_s": h2c, "c2h_bytes_per_s": c2h,
                    },
                    "iommu": { "hits": hits, "misses": misses, "faults": faults, "hit_ratio": hit_ratio },
                })
            };
            match &daemon.status {
                Err(why) => json!({ "socket": daemon.socket, "error": why }),
                Ok(status) => json!({
                    "socket": daemon.socket,
                    "error": null,
                    "uptime_s": status.uptime,
                    "bytes_per_s": daemon.rate(),
                    "requests": status.totals.requests,
                    "errors": status.totals.errors,
                    "quarantined": status.quarantined,
                    "ddr_bytes": status.ddr.0,
                    "ddr_total_bytes": status.ddr.1,
                    "hbm_bytes": status.hbm.0,
                    "hbm_total_bytes": status.hbm.1,
                    "clients": status.clients.iter().zip(&daemon.rates).map(client).collect::<Value>(),
                }),
            }
        };
        json!({
            "schema": 1,
            "command": "top",
            "time_s": self.at.duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64()),
            "jobs": self.jobs.iter().map(job).collect::<Value>(),
            "daemons": self.daemons.iter().map(daemon).collect::<Value>(),
        })
    }
}

#[cfg(test)]
impl View {
    /// Views of nothing, of jobs of every kind and of daemons.
    pub fn examples() -> Vec<Self> {
        use dmalane::daemon::Totals;
        let snapshot = |bytes, total| {
            let stages = ["read", "transfer"]
                .map(|stage| json!({"stage": stage, "busy_s": 1.0, "wall_s": 0.5, "bytes": 1 << 30, "in_flight": 4}));
            let iommu = json!({"hits": 10, "misses": 1, "faults": 0});
            let (command, phase) = ("dmalane load m.safetensors", "load");
            let value = json!({"schema": 1, "command": command, "phase": phase, "elapsed_s": 2.5, "done": 7,
                "total": total, "bytes": bytes, "stages": stages, "iommu": iommu});
            Running::since(None, serde_json::from_value(value).unwrap())
        };
        let job = |pid: u32, answer| JobView { name: pid.to_string(), pid, answer };
        let answers = [Ok(snapshot(true, 10)), Ok(snapshot(true, 0)), Ok(snapshot(false, 10)), Err("no answer".into())];
        let jobs: Vec<_> = (1..).zip(answers).map(|(pid, answer)| job(pid, answer)).collect();
        let client = ClientStatus {
            client: 1,
            pid: 2,
            uid: 0,
            queues: 2,
            buffers: 3,
            mappings: 4,
            closing: false,
            bytes: 5,
            ddr: 6,
            hbm: 7,
            h2c: 8,
            c2h: 14,
            errors: 9,
            in_flight: 10,
            iotlb_hits: 11,
            iotlb_misses: 12,
            faults: 13,
        };
        let (totals, memory) = (Totals::default(), (1 << 30, 4 << 30));
        let clients = vec![client; 3];
        let status = DaemonStatus { uptime: 7, totals, quarantined: 0, ddr: memory, hbm: memory, clients };
        let rates = ClientRates { link: (1e9, 5e8), hit_ratio: Some(0.9) };
        let daemon =
            |socket: &str, status| DaemonView { socket: socket.to_owned(), status, rates: vec![rates.clone(); 3] };
        let daemons = vec![daemon("/run/a", Ok(status)), daemon("/run/b", Err("cannot connect".into()))];
        let at = SystemTime::now();
        vec![
            Self { at, jobs: Vec::new(), daemons: Vec::new() },
            Self { at, jobs: jobs.clone(), daemons: Vec::new() },
            Self { at, jobs: Vec::new(), daemons: daemons.clone() },
            Self { at, jobs, daemons },
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_json_name_everything() {
        let view = View::examples().pop().unwrap();
        let text = view.text();
        for there in ["dmalane load m.safetensors", "no answer", "daemon /run/a: 3 clients", "daemon /run/b: cannot"] {
            assert!(text.contains(there), "{text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        let json = view.json();
        assert_eq!(
            (json["jobs"].as_array().unwrap().len(), &json["daemons"][1]["error"]),
            (4, &"cannot connect".into())
        );
    }

    #[test]
    fn a_daemon_without_clients_moves_nothing() {
        let idle = DaemonView { socket: String::new(), status: Err(String::new()), rates: Vec::new() };
        assert_eq!(per_second(idle.rate()), "0.00 GB/s");
    }

    #[test]
    fn rates_are_those_of_the_interval_and_a_new_phase_starts_again() {
        let at = |phase: &str, elapsed: f64, done: u64, read: u64| -> Snapshot {
            let stage = json!({"stage": "read", "busy_s": elapsed / 2.0, "wall_s": 0.0, "bytes": read, "in_flight": 0});
            let value = json!({"schema": 1, "command": "", "phase": phase, "elapsed_s": elapsed, "done": done,
                "total": 100, "bytes": true, "stages": [stage], "iommu": null});
            serde_json::from_value(value).unwrap()
        };
        let then = at("load", 2.0, 60, 600);
        let running = Running::since(Some(&then), at("load", 4.0, 80, 640));
        assert_eq!((running.rate, running.stages[0].bytes_per_s, running.stages[0].busy), (10.0, 20.0, 0.5));
        for (phase, done) in [("verify", 50), ("load", 50)] {
            let running = Running::since(Some(&then), at(phase, 4.0, done, 600));
            assert_eq!((running.rate, running.stages[0].bytes_per_s), (25.0, 0.0), "{phase}: a run that began anew");
        }
        assert_eq!((clock(59.9), clock(3661.0)), ("0:59".to_owned(), "1:01:01".to_owned()));
    }
}
