//! The daemon's configuration, with the limits of clients and users.

use std::ops::Range;
use std::time::Duration;

use crate::wire::MAX_FDS;

/// The most resources that one client may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClientLimits {
    /// Bytes of DDR: a multiple of 2 MiB.
    pub ddr: u64,
    /// Bytes of HBM: a multiple of 4 MiB.
    pub hbm: u64,
    /// Queues: 1 to 16.
    pub queues: u32,
    /// Buffers that are mapped.
    pub buffers: u32,
    /// Bytes of all buffers together.
    pub bytes: u64,
}

impl Default for ClientLimits {
    /// 1 GiB of DDR and of HBM, 2 queues, 256 buffers with 4 GiB.
    fn default() -> Self {
        Self { ddr: 1 << 30, hbm: 1 << 30, queues: 2, buffers: 256, bytes: 4 << 30 }
    }
}

/// Descriptors of a client's process without buffers, with those of a message.
const CLIENT_DESCRIPTORS: u64 = 64 + MAX_FDS as u64;

/// Configuration of a daemon.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Bytes of DDR to share out.
    pub ddr: u64,
    /// Bytes of HBM to share out.
    pub hbm: u64,
    /// Limits of one client.
    pub limits: ClientLimits,
    /// Most clients at one time.
    pub clients: usize,
    /// Most bytes of memory for all clients: card memory that was touched, page tables, and processes. `None` for no
    /// limit.
    pub memory: Option<u64>,
    /// The part of the clients, the card's memories and the memory that one user may have, in percent, so that no user
    /// takes all; of the card's memories at least the limit of one client.
    pub user_percent: u32,
    /// Subordinate users, which count as their owner ([`Config::system_subordinates`]).
    pub subordinates: Vec<(Range<u64>, u32)>,
    /// Time within which the queues of a disconnected client must stop.
    pub stop_timeout: Duration,
    /// Time within which a client must open a function.
    pub open_timeout: Duration,
}

impl Default for Config {
    /// 32 GiB of each memory, 64 clients, 5 s to stop, 30 s to open a function.
    fn default() -> Self {
        Self {
            ddr: 32 << 30,
            hbm: 32 << 30,
            limits: ClientLimits::default(),
            clients: 64,
            memory: None,
            user_percent: 75,
            subordinates: Vec::new(),
            stop_timeout: Duration::from_secs(5),
            open_timeout: Duration::from_secs(30),
        }
    }
}

/// An invalid value of a setting.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{setting} of {value}: must be {rule}")]
pub struct BadConfig {
    /// The setting.
    pub setting: &'static str,
    /// The invalid value.
    pub value: u64,
    /// The values that it can have.
    pub rule: &'static str,
}

impl Config {
    /// Checks all settings.
    ///
    /// # Errors
    /// The first invalid setting.
    pub fn check(&self) -> Result<(), BadConfig> {
        let ClientLimits { ddr, hbm, queues, buffers, bytes } = self.limits;
        let check = |setting, value, is_good, rule| {
            if is_good { Ok(()) } else { Err(BadConfig { setting, value, rule }) }
        };
        let memory = |value: u64, all: u64, multiple: u64| {
            value > 0 && value.is_multiple_of(multiple) && value <= all.min(256 << 30)
        };
        let of_ddr = "a multiple of 2 MiB, at most 256 GiB and at most the card's DDR";
        check("DDR of a client", ddr, memory(ddr, self.ddr, 2 << 20), of_ddr)?;
        let of_hbm = "a multiple of 4 MiB, at most 256 GiB and at most the card's HBM";
        check("HBM of a client", hbm, memory(hbm, self.hbm, 4 << 20), of_hbm)?;
        let can_have = (1..=dmalane_card::regs::MAX_CHANNELS).contains(&queues);
        check("queues of a client", queues.into(), can_have, "1 to 16")?;
        check("buffers of a client", buffers.into(), (2..=4096).contains(&buffers), "2 to 4096")?;
        check("bytes of a client's buffers", bytes, (64 << 10..=1 << 40).contains(&bytes), "64 KiB to 1 TiB")?;
        check("clients", self.clients as u64, (1..=1024).contains(&self.clients), "1 to 1024")?;
        let limit = self.memory.unwrap_or(u64::MAX);
        check("memory", limit, limit >= 16 << 20, "at least 16 MiB")?;
        let percent = self.user_percent;
        check("share of a user", percent.into(), (1..=100).contains(&percent), "1 to 100 percent")
    }

    /// A warning when this process may open too few descriptors (`None` for no limit).
    pub fn warning(&self, descriptors: Option<u64>) -> Option<String> {
        let needed = CLIENT_DESCRIPTORS + u64::from(self.limits.buffers);
        let have = descriptors.filter(|have| *have < needed)?;
        Some(format!(
            "a process of the daemon needs {needed} descriptors, and may have {have}; some buffers would be refused: \
             raise LimitNOFILE= of the unit (ulimit -Hn), or lower --client-buffers"
        ))
    }

    /// Subordinate users of `/etc/subuid` with their owners, as [`Config::subordinates_of`] finds them. Names are those
    /// that the system knows (nsswitch.conf(5)), of LDAP or SSSD too. Takes as long as their services take.
    pub fn system_subordinates() -> (Vec<(Range<u64>, u32)>, Vec<String>) {
        Self::subordinates_of(&std::fs::read_to_string("/etc/subuid").unwrap_or_default(), number_of)
    }

    /// Subordinate users with their owners, from the contents of `/etc/subuid` (subuid(5)), where owners are numbers or
    /// names that `number_of` knows. Also the lines that are not understood: their users count as users of their own.
    pub fn subordinates_of(
        subuid: &str,
        number_of: impl Fn(&str) -> Option<u32>,
    ) -> (Vec<(Range<u64>, u32)>, Vec<String>) {
        let line = |line: &str| {
            let mut fields = line.split(':').map(str::trim);
            let (owner, first, count) = (fields.next()?, fields.next()?, fields.next()?);
            // As a name first, since the file says so.
            let owner = number_of(owner).or_else(|| owner.parse().ok())?;
            let first = u64::from(first.parse::<u32>().ok()?);
            let end = first.checked_add(count.parse().ok()?).filter(|end| *end <= 1 << 32)?;
            fields.next().is_none().then_some((first..end, owner))
        };
        let (mut found, mut dropped) = (Vec::new(), Vec::new());
        for text in subuid.lines().map(str::trim).filter(|text| !text.is_empty() && !text.starts_with('#')) {
            match line(text) {
                Some(range) => found.push(range),
                None => dropped.push(text.to_owned()),
            }
        }
        (found, dropped)
    }

    /// The user who is charged for what this one does.
    pub(crate) fn user_of(&self, uid: u32) -> u32 {
        let owner = self.subordinates.iter().find(|(range, _)| range.contains(&uid.into()));
        owner.map_or(uid, |(_, owner)| *owner)
    }

    /// Most clients of one user.
    pub(crate) fn clients_per_user(&self) -> usize {
        self.of_a_user(self.clients as u64) as usize
    }

    /// Most bytes of memory in all, and of one user.
    pub(crate) fn memory_limits(&self) -> (u64, u64) {
        self.memory.map_or((u64::MAX, u64::MAX), |all| (all, self.of_a_user(all)))
    }

    /// Most bytes of DDR and of HBM, in all and of one user.
    pub(crate) fn card_limits(&self) -> ((u64, u64), (u64, u64)) {
        let limits = |all: u64, client: u64| (all, self.of_a_user(all).max(client));
        (limits(self.ddr, self.limits.ddr), limits(self.hbm, self.limits.hbm))
    }

    fn of_a_user(&self, all: u64) -> u64 {
        (u128::from(all) * u128::from(self.user_percent)).div_ceil(100) as u64
    }
}

/// The number of a user by name.
fn number_of(name: &str) -> Option<u32> {
    Some(nix::unistd::User::from_name(name).ok()??.uid.as_raw())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_settings_are_named() {
        let check = |change: fn(&mut Config)| {
            let mut config = Config::default();
            change(&mut config);
            config.check()
        };
        assert_eq!(check(|_| ()), Ok(()));
        assert_eq!(check(|c| c.limits.ddr = 1 << 20).unwrap_err().setting, "DDR of a client");
        assert_eq!(check(|c| c.hbm = 4 << 20).unwrap_err().setting, "HBM of a client");
        assert_eq!(check(|c| c.limits.queues = 17).unwrap_err().setting, "queues of a client");
        assert_eq!(check(|c| c.limits.buffers = 0).unwrap_err().setting, "buffers of a client");
        assert_eq!(check(|c| c.limits.bytes = 1).unwrap_err().setting, "bytes of a client's buffers");
        assert_eq!(check(|c| c.clients = 0).unwrap_err().setting, "clients");
        assert_eq!(check(|c| c.memory = Some(1 << 20)).unwrap_err().setting, "memory");
        assert_eq!(check(|c| c.user_percent = 101).unwrap_err().setting, "share of a user");
        let shares = [1, 2, 3, 4, 64].map(|clients| Config { clients, ..Config::default() }.clients_per_user());
        assert_eq!(shares, [1, 2, 3, 3, 48]);
    }

    #[test]
    fn warns_about_resource_limits() {
        let config = Config::default();
        let needed = 64 + MAX_FDS as u64 + 256;
        assert_eq!([None, Some(needed), Some(1 << 20)].map(|have| config.warning(have)), [None, None, None]);
        let few = config.warning(Some(needed - 1)).unwrap();
        assert!(few.contains(&format!("needs {needed} descriptors, and may have {}", needed - 1)), "{few}");
    }

    #[test]
    fn subordinate_users_count_as_their_owner() {
        let subuid = "alice:100000:65536\n# comment\n1001:165536:10\nnobody-here:1:1\nbad\nalice:x:1\n\n\
                      remote:4294901760:65536\nalice:4294967295:9\n";
        let number_of =
            |name: &str| [("alice", 1000), ("remote", 70_000)].iter().find(|(n, _)| *n == name).map(|n| n.1);
        let (subordinates, dropped) = Config::subordinates_of(subuid, number_of);
        let last = 0xffff_0000..1 << 32;
        assert_eq!(subordinates, [(100_000..165_536, 1000), (165_536..165_546, 1001), (last, 70_000)]);
        assert_eq!(dropped, ["nobody-here:1:1", "bad", "alice:x:1", "alice:4294967295:9"]);
        let config = Config { subordinates, ..Config::default() };
        let users = [0, 1000, 100_000, 165_535, 165_536, 165_546, u32::MAX - 1].map(|uid| config.user_of(uid));
        assert_eq!(users, [0, 1000, 1000, 1000, 1001, 165_546, 70_000]);
    }

    #[test]
    fn names_of_users_are_those_that_the_system_knows() {
        assert_eq!((number_of("root"), number_of("nobody-has-this-name"), number_of("\0")), (Some(0), None, None));
    }
}
