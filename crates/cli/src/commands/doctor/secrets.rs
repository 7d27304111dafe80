//! Removing from a text what identifies a machine or its user.

use std::path::Path;

use crate::probe::Probe;

/// Names to remove; addresses, UUIDs, serial numbers and names below home directories are found by their form.
pub struct Secrets {
    /// Each secret, and the text that takes its place. Longer ones come first.
    names: Vec<(String, &'static str)>,
}

/// Directories that hold home directories.
const HOMES: [&str; 4] = ["/home/", "/root/", "/Users/", "/var/home/"];

impl Secrets {
    /// The host's name, and the user's home directory and name.
    pub fn of(probe: &Probe, home: Option<&Path>) -> Self {
        let mut names = Vec::new();
        let host = probe.text("/proc/sys/kernel/hostname").unwrap_or_default();
        let short = host.split('.').next().unwrap_or_default().to_owned();
        names.extend([(host, "(host)"), (short, "(host)")]);
        if let Some(home) = home {
            let user = home.file_name().map(|name| name.to_string_lossy().into_owned());
            names.push((home.to_string_lossy().into_owned(), "(home)"));
            names.extend(user.map(|user| (user, "(user)")));
        }
        // Words that every report has tell nothing, and would leave holes.
        names.retain(|(name, _)| !["", "/", "(none)", "root", "home", "localhost"].contains(&name.as_str()));
        names.sort_by_key(|(name, _)| std::cmp::Reverse(name.len()));
        Self { names }
    }

    /// A line without secrets.
    pub fn hide(&self, line: &str) -> String {
        let mut line = line.to_owned();
        // Paths below the user's home first, whole: their last components are secrets too.
        let homes = self.names.iter().filter(|(_, by)| *by == "(home)").map(|(home, _)| format!("{home}/"));
        for home in homes.chain(HOMES.map(str::to_owned)) {
            line = hide_paths(&line, &home);
        }
        for (name, by) in &self.names {
            line = hide_word(&line, name, by);
        }
        hide_serials(&hide_forms(&line))
    }
}

/// True for characters that words are made of.
fn in_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Replaces paths that begin so: up to the quote that ends them, or else the rest of the line, since a name may have
/// spaces in it.
fn hide_paths(line: &str, begin: &str) -> String {
    let (mut out, mut rest) = (String::new(), line);
    while let Some(at) = rest.find(begin) {
        let (before, path) = rest.split_at(at);
        let quote = before.chars().next_back().filter(|c| "'\"`".contains(*c));
        let end = quote.and_then(|quote| path.find(quote)).unwrap_or(path.len());
        out += before;
        out += "(home)";
        rest = &path[end..];
    }
    out + rest
}

/// Replaces a name where it is a word of its own, in either case.
fn hide_word(line: &str, name: &str, by: &str) -> String {
    let (lower, name) = (line.to_ascii_lowercase(), name.to_ascii_lowercase());
    let (mut out, mut from) = (String::new(), 0);
    let mut at = 0;
    while let Some(found) = lower[at..].find(&name) {
        let (begin, end) = (at + found, at + found + name.len());
        at = end;
        let before = line[..begin].chars().next_back().is_some_and(in_word);
        if before || line[end..].starts_with(in_word) {
            continue;
        }
        out += &line[from..begin];
        out += by;
        from = end;
    }
    out + &line[from..]
}

/// Replaces UUIDs, MAC addresses and IP addresses.
fn hide_forms(line: &str) -> String {
    let part_of_form = |c: char| c.is_ascii_hexdigit() || "-:.".contains(c);
    let (mut out, mut rest) = (String::new(), line);
    while let Some(begin) = rest.find(|c: char| c.is_ascii_hexdigit() || c == ':') {
        let (before, from) = rest.split_at(begin);
        let end = from.find(|c| !part_of_form(c)).unwrap_or(from.len());
        let (word, after) = from.split_at(end);
        out += before;
        let bare = word.trim_end_matches(['-', ':', '.']);
        out += match form(bare) {
            Some(by) => by,
            None => bare,
        };
        out += &word[bare.len()..];
        rest = after;
    }
    out + rest
}

/// The form that identifies something.
fn form(word: &str) -> Option<&'static str> {
    let hex = |part: &str, len: usize| part.len() == len && part.chars().all(|c| c.is_ascii_hexdigit());
    let split = |by: char| word.split(by).collect::<Vec<_>>();
    let ends_in_uuid = |parts: &[&str]| {
        let [.., a, b, c, d, e] = parts[..] else { return false };
        a.len() >= 8 && hex(&a[a.len() - 8..], 8) && [b, c, d].iter().all(|p| hex(p, 4)) && hex(e, 12)
    };
    let is_mac = |parts: &[&str]| parts.len() == 6 && parts.iter().all(|p| hex(p, 2));
    let number = |part: &&str| part.parse::<u8>().is_ok();
    match () {
        () if ends_in_uuid(&split('-')) => Some("(uuid)"),
        () if is_mac(&split(':')) || is_mac(&split('-')) => Some("(mac)"),
        () if split('.').len() == 4 && split('.').iter().all(number) => Some("(ip)"),
        () if word.matches(':').count() >= 3 && split(':').iter().all(|p| p.len() <= 4) => Some("(ip)"),
        () => None,
    }
}

/// Replaces what follows `serial`, `serial number`, `S/N` or `sn`.
fn hide_serials(line: &str) -> String {
    let lower = line.to_ascii_lowercase();
    let (mut out, mut from) = (String::new(), 0);
    for key in ["serial", "s/n", "sn"] {
        for (found, _) in lower.match_indices(key) {
            let end = found + key.len();
            let before = lower[..found].chars().next_back().is_some_and(in_word) && key != "serial";
            if before || found < from || (key == "sn" && lower[end..].starts_with(in_word)) {
                continue;
            }
            // "serial number: X", "serial=X", "SerialNumber X", "SN X".
            let tail = &lower[end..];
            let skip = |text: &str, what: &str| text.strip_prefix(what).map(|rest| text.len() - rest.len());
            let gap = |text: &str| text.len() - text.trim_start_matches([' ', '_', '-', ':', '=', '#', '.', '"']).len();
            let mut at = gap(tail);
            for word in ["number", "num", "no"] {
                if let Some(n) = skip(&tail[at..], word).filter(|n| !tail[at + n..].starts_with(in_word)) {
                    at += n;
                    at += gap(&tail[at..]);
                    break;
                }
            }
            let value = &tail[at..];
            let len = value.find(|c: char| c.is_whitespace() || ",;\")".contains(c)).unwrap_or(value.len());
            // A number has a digit; "serial console" has none.
            if at == 0 || !value[..len].contains(|c: char| c.is_ascii_digit()) {
                continue;
            }
            out += &line[from..end + at];
            out += "(serial)";
            from = end + at + len;
        }
    }
    out + &line[from..]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secrets() -> Secrets {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("proc/sys/kernel");
        std::fs::create_dir_all(&path).unwrap();
        std::fs::write(path.join("hostname"), "Mill7.example.org\n").unwrap();
        Secrets::of(&Probe::new(root.path()), Some(Path::new("/srv/people/alice")))
    }

    #[test]
    fn what_identifies_is_replaced() {
        let secrets = secrets();
        for (line, hidden) in [
            ("on mill7.example.org: up", "on (host): up"),
            ("MILL7 said, not mill70 nor windmill7", "(host) said, not mill70 nor windmill7"),
            ("open /srv/people/alice/a model.gguf: no", "open (home)"),
            ("/srv/people/alice is the home of alice", "(home) is the home of (user)"),
            ("'/home/bob/secret plan' and /root/.ssh/key,", "'(home)' and (home)"),
            ("GPU-0a1b2c3d-1111-2222-3333-0123456789ab", "GPU-(uuid)"),
            ("root=UUID=0a1b2c3d-1111-2222-3333-0123456789AB ro", "root=UUID=(uuid) ro"),
            ("mac 52:54:00:ab:cd:ef, 52-54-00-ab-cd-ef", "mac (mac), (mac)"),
            ("from 10.1.2.3 to fe80::1:2:3.", "from (ip) to (ip)."),
            ("board serial number: XFL1ABC2DEF3, ok", "board serial number: (serial), ok"),
            ("serial=AB12 S/N 99X; SN: 12", "serial=(serial) S/N (serial); SN: (serial)"),
            ("SerialNumber: 77", "SerialNumber: (serial)"),
        ] {
            assert_eq!(secrets.hide(line), hidden, "{line}");
        }
    }

    #[test]
    fn what_a_report_needs_stays() {
        let secrets = secrets();
        for line in [
            "0000:61:00.1 10ee:50c1 class 120000 driver slash_qdma IOMMU group 15",
            "[12.000456] slash_qdma 0000:61:00.1: probe failed: -22",
            "kernel 6.12.3-amd64, x86_64",
            "/dev/slash_qdma_ctl0 char 240:2 mode 0600 uid 990 gid 990, closed to this user",
            "BAR 4: 274877906944 bytes, flags 0x14220c",
            "serial console; a snap of 3",
            "2026-11-23 00:04:00.123456",
            "Max locked memory 8388608 8388608 bytes",
            "",
            "\u{e9}\u{130}l\u{1F600}",
        ] {
            assert_eq!(secrets.hide(line), line);
        }
    }
}
