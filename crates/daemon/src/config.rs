//! What a daemon shares out, and how much of it anybody gets.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What one client may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Bytes of DDR: a multiple of 2 MiB.
    pub ddr: u64,
    /// Bytes of HBM: a multiple of 4 MiB.
    pub hbm: u64,
    /// Queues: 1 to 16.
    pub queues: u32,
    /// Buffers that are mapped, or made by the daemon.
    pub buffers: u32,
    /// Bytes of all of them together.
    pub bytes: u64,
}

impl Default for Limits {
    /// 1 GiB of DDR and of HBM, 2 queues, 256 buffers with 4 GiB.
    fn default() -> Self {
        Self { ddr: 1 << 30, hbm: 1 << 30, queues: 2, buffers: 256, bytes: 4 << 30 }
    }
}

/// How a daemon serves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Bytes of DDR to share out.
    pub ddr: u64,
    /// Bytes of HBM to share out.
    pub hbm: u64,
    /// What one client may have.
    pub limits: Limits,
    /// Clients at one time.
    pub clients: usize,
    /// Those of one user; `None` for three quarters of them, so that no user can take all places.
    pub user_clients: Option<usize>,
    /// Bytes of DDR that the clients of one user may have together; `None` for three quarters of it, but at least what one client may have.
    pub user_ddr: Option<u64>,
    /// The same of HBM.
    pub user_hbm: Option<u64>,
    /// Users who may connect, by number. With this and the next empty: everybody whom the socket's mode lets in.
    pub uids: Vec<u32>,
    /// Groups (primary ones) whose members may connect, by number.
    pub gids: Vec<u32>,
    /// How long the worker looks for work before it sleeps.
    pub spin: Duration,
    /// How long a client's queues get to stop when it has gone.
    pub patience: Duration,
    /// How long a client has to greet.
    pub greeting: Duration,
    /// How long it has to open a function.
    pub opening: Duration,
}

impl Default for Config {
    /// 32 GiB of each memory, 64 clients, 100 us of looking, 5 s of patience, 5 s to greet and 30 s to open a function.
    fn default() -> Self {
        Self {
            ddr: 32 << 30,
            hbm: 32 << 30,
            limits: Limits::default(),
            clients: 64,
            user_clients: None,
            user_ddr: None,
            user_hbm: None,
            uids: Vec::new(),
            gids: Vec::new(),
            spin: Duration::from_micros(100),
            patience: Duration::from_secs(5),
            greeting: Duration::from_secs(5),
            opening: Duration::from_secs(30),
        }
    }
}

/// A setting that cannot be.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{what} of {value}: {rule}")]
pub struct BadConfig {
    /// Which setting.
    pub what: &'static str,
    /// Its value.
    pub value: u64,
    /// What it should be.
    pub rule: &'static str,
}

impl Config {
    /// # Errors
    /// The first setting that cannot be.
    pub fn check(&self) -> Result<(), BadConfig> {
        let bad = |what, value, rule| Err(BadConfig { what, value, rule });
        let Limits { ddr, hbm, queues, buffers, bytes } = self.limits;
        let most = 256 << 30;
        let memories = [
            (
                "DDR of a client",
                ddr,
                self.ddr,
                2 << 20,
                "must be a multiple of 2 MiB, at most 256 GiB and all there is",
            ),
            (
                "HBM of a client",
                hbm,
                self.hbm,
                4 << 20,
                "must be a multiple of 4 MiB, at most 256 GiB and all there is",
            ),
        ];
        for (what, value, all, multiple, rule) in memories {
            if value == 0 || !value.is_multiple_of(multiple) || value > most || value > all {
                return bad(what, value, rule);
            }
        }
        if !(1..=dmalane_card::regs::MAX_CHANNELS).contains(&queues) {
            return bad("queues of a client", queues.into(), "must be 1 to 16");
        }
        if !(2..=4096).contains(&buffers) {
            return bad("buffers of a client", buffers.into(), "must be 2 to 4096");
        }
        if !(64 << 10..=1 << 40).contains(&bytes) {
            return bad("bytes of a client's buffers", bytes, "must be 64 KiB to 1 TiB");
        }
        if !(1..=1024).contains(&self.clients) {
            return bad("clients", self.clients as u64, "must be 1 to 1024");
        }
        if let Some(of_one) = self.user_clients.filter(|n| !(1..=self.clients).contains(n)) {
            return bad("clients of a user", of_one as u64, "must be 1 to the number of clients");
        }
        let of_one = [("DDR of a user", self.user_ddr, ddr, self.ddr), ("HBM of a user", self.user_hbm, hbm, self.hbm)];
        for (what, value, least, all) in of_one {
            if let Some(value) = value.filter(|value| !(least..=all).contains(value)) {
                return bad(what, value, "must be at least what one client may have, and at most all there is");
            }
        }
        Ok(())
    }

    /// What is going to be in the way of a daemon like this in a process that may have so many descriptors (`None` for any number), on a kernel
    /// whose `vm.overcommit_memory` is so.
    pub fn warnings(&self, descriptors: Option<u64>, overcommit: Option<&str>) -> Vec<String> {
        let mut warnings = Vec::new();
        // Of a client: connection, register page, calls, the card's two memories, and its buffers. Of all: what waits to be closed, and
        // some.
        let Limits { queues, buffers, .. } = self.limits;
        let needed = self.clients as u64 * (5 + u64::from(queues) + u64::from(buffers)) + 1024 + 64;
        if let Some(have) = descriptors.filter(|have| *have < needed) {
            warnings.push(format!(
                "all clients with all their buffers need {needed} descriptors, and this process may have {have}; some would be refused: \
                 raise LimitNOFILE= of the unit (ulimit -Hn), or lower --clients or --client-buffers"
            ));
        }
        if overcommit.is_some_and(|mode| mode.trim() == "2") {
            warnings.push(
                "vm.overcommit_memory is 2, so the kernel counts memory of the card that nobody has touched yet: lower --client-ddr and \
                 --client-hbm, or clients are refused"
                    .to_owned(),
            );
        }
        warnings
    }

    /// Clients that one user may have.
    pub(crate) fn of_one_user(&self) -> usize {
        self.user_clients.unwrap_or(self.clients - self.clients / 4)
    }

    /// DDR and HBM that one user may have.
    fn memory_of_one_user(&self) -> (u64, u64) {
        let most = |asked: Option<u64>, all: u64, client: u64| asked.unwrap_or((all - all / 4).max(client));
        (most(self.user_ddr, self.ddr, self.limits.ddr), most(self.user_hbm, self.hbm, self.limits.hbm))
    }

    /// Whether this user may connect.
    pub(crate) fn admits(&self, uid: u32, gid: u32) -> bool {
        (self.uids.is_empty() && self.gids.is_empty()) || self.uids.contains(&uid) || self.gids.contains(&gid)
    }
}

/// The card's memory, and who has how much of it.
pub(crate) struct Budget {
    /// DDR and HBM that one user may have.
    of_one_user: (u64, u64),
    shares: Mutex<Shares>,
}

struct Shares {
    /// DDR and HBM that nobody has.
    left: (u64, u64),
    /// Those that users have, by number; nobody who has nothing.
    users: HashMap<u32, (u64, u64)>,
}

impl Budget {
    pub(crate) fn new(config: &Config) -> Self {
        let shares = Shares { left: (config.ddr, config.hbm), users: HashMap::new() };
        Self { of_one_user: config.memory_of_one_user(), shares: Mutex::new(shares) }
    }

    fn shares(&self) -> MutexGuard<'_, Shares> {
        self.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// DDR and HBM that are left.
    pub(crate) fn left(&self) -> (u64, u64) {
        self.shares().left
    }

    /// Takes both for a user, or nothing, and says why.
    pub(crate) fn take(&self, uid: u32, ddr: u64, hbm: u64) -> Result<(), String> {
        let mut shares = self.shares();
        let left = shares.left;
        let after = left.0.checked_sub(ddr).zip(left.1.checked_sub(hbm));
        let after = after.ok_or_else(|| {
            format!(
                "the card has {} bytes of DDR and {} of HBM left, {ddr} and {hbm} were asked for: ask for less, or wait until another \
                 client ends",
                left.0, left.1
            )
        })?;
        let (has, most) = (shares.users.get(&uid).copied().unwrap_or_default(), self.of_one_user);
        let grown = has.0.checked_add(ddr).zip(has.1.checked_add(hbm)).filter(|(d, h)| *d <= most.0 && *h <= most.1);
        let grown = grown.ok_or_else(|| {
            format!(
                "this user has {} bytes of DDR and {} of HBM, and may have {} and {} (--user-ddr, --user-hbm); {ddr} and {hbm} more \
                 were asked for: ask for less, or wait until another client of the user ends",
                has.0, has.1, most.0, most.1
            )
        })?;
        shares.left = after;
        shares.users.insert(uid, grown);
        Ok(())
    }

    /// Gives both of a user back.
    pub(crate) fn give(&self, uid: u32, ddr: u64, hbm: u64) {
        let mut shares = self.shares();
        shares.left = (shares.left.0 + ddr, shares.left.1 + hbm);
        if let Some(has) = shares.users.get_mut(&uid) {
            *has = (has.0 - ddr, has.1 - hbm);
            if *has == (0, 0) {
                shares.users.remove(&uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_is_named() {
        let check = |change: fn(&mut Config)| {
            let mut config = Config::default();
            change(&mut config);
            config.check()
        };
        assert_eq!(check(|_| ()), Ok(()));
        assert_eq!(check(|c| c.limits.ddr = 1 << 20).unwrap_err().what, "DDR of a client");
        assert_eq!(check(|c| c.hbm = 4 << 20).unwrap_err().what, "HBM of a client");
        assert_eq!(check(|c| c.limits.queues = 17).unwrap_err().what, "queues of a client");
        assert_eq!(check(|c| c.limits.buffers = 0).unwrap_err().what, "buffers of a client");
        assert_eq!(check(|c| c.limits.bytes = 1).unwrap_err().what, "bytes of a client's buffers");
        assert_eq!(check(|c| c.clients = 0).unwrap_err().what, "clients");
        assert_eq!(check(|c| c.user_clients = Some(65)).unwrap_err().what, "clients of a user");
        assert_eq!(check(|c| c.user_ddr = Some(c.ddr + 1)).unwrap_err().what, "DDR of a user");
        assert_eq!(check(|c| c.user_hbm = Some(c.limits.hbm - 1)).unwrap_err().what, "HBM of a user");
        let shares = [1, 2, 3, 4, 64].map(|clients| Config { clients, ..Config::default() }.of_one_user());
        assert_eq!(shares, [1, 2, 3, 3, 48]);
    }

    #[test]
    fn no_user_takes_all_memory() {
        let gib = 1 << 30;
        let budget = Budget::new(&Config::default());
        for _ in 0..24 {
            budget.take(7, gib, 0).unwrap();
        }
        let refused = budget.take(7, gib, gib).unwrap_err();
        assert!(refused.contains("--user-ddr"), "{refused}");
        // The refused took nothing, and the other memory is counted by itself.
        budget.take(7, 0, 24 * gib).unwrap();
        assert!(budget.take(7, 0, 1).is_err());
        // The others have the rest.
        budget.take(8, 8 * gib, 8 * gib).unwrap();
        let refused = budget.take(8, gib, 0).unwrap_err();
        assert!(refused.contains("the card has 0 bytes of DDR"), "{refused}");
        budget.give(7, gib, gib);
        budget.take(7, gib, gib).unwrap();
        budget.give(7, 24 * gib, 24 * gib);
        budget.give(8, 8 * gib, 8 * gib);
        assert_eq!((budget.left(), budget.shares().users.len()), ((32 * gib, 32 * gib), 0));
        // A card for one client: that one has all of it.
        let small = Config { ddr: gib, hbm: gib, ..Config::default() };
        Budget::new(&small).take(7, gib, gib).unwrap();
    }

    #[test]
    fn what_is_going_to_be_in_the_way_is_said() {
        let config = Config::default();
        let needed = 64 * (5 + 2 + 256) + 1024 + 64;
        for (descriptors, overcommit) in [(None, None), (Some(needed), Some("0\n")), (Some(1 << 20), Some("1"))] {
            assert!(config.warnings(descriptors, overcommit).is_empty(), "{descriptors:?} {overcommit:?}");
        }
        let [few] = &config.warnings(Some(needed - 1), Some("0"))[..] else { panic!("one") };
        assert!(few.contains(&format!("need {needed} descriptors, and this process may have {}", needed - 1)), "{few}");
        let [strict] = &config.warnings(None, Some("2\n"))[..] else { panic!("one") };
        assert!(strict.contains("--client-ddr"), "{strict}");
    }

    #[test]
    fn who_is_named_may_connect() {
        let mut config = Config::default();
        assert!(config.admits(7, 7));
        config.uids.push(7);
        assert!(config.admits(7, 0) && !config.admits(0, 7));
        config.gids.push(9);
        assert!(config.admits(1, 9) && !config.admits(1, 1));
    }
}
