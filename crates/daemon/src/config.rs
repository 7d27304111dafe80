//! What a daemon shares out, and how much of it anybody gets.

use std::sync::Mutex;
use std::sync::PoisonError;
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
        Ok(())
    }

    /// What is going to be in the way of a daemon like this in a process that may have so many descriptors (`None` for any number), on a kernel
    /// whose `vm.overcommit_memory` is so.
    pub fn warnings(&self, descriptors: Option<u64>, overcommit: Option<&str>) -> Vec<String> {
        let mut warnings = Vec::new();
        // Of a client: connection, register page, bells, the card's two memories, and its buffers. Of all: what waits to be closed, and
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

    /// Whether this user may connect.
    pub(crate) fn admits(&self, uid: u32, gid: u32) -> bool {
        (self.uids.is_empty() && self.gids.is_empty()) || self.uids.contains(&uid) || self.gids.contains(&gid)
    }
}

/// The card memory that nobody has.
pub(crate) struct Budget(Mutex<(u64, u64)>);

impl Budget {
    pub(crate) fn new(ddr: u64, hbm: u64) -> Self {
        Self(Mutex::new((ddr, hbm)))
    }

    /// DDR and HBM that are left.
    pub(crate) fn left(&self) -> (u64, u64) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes both, or nothing.
    pub(crate) fn take(&self, ddr: u64, hbm: u64) -> Option<()> {
        let mut left = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *left = (left.0.checked_sub(ddr)?, left.1.checked_sub(hbm)?);
        Some(())
    }

    /// Gives both back.
    pub(crate) fn give(&self, ddr: u64, hbm: u64) {
        let mut left = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *left = (left.0 + ddr, left.1 + hbm);
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
        let shares = [1, 2, 3, 4, 64].map(|clients| Config { clients, ..Config::default() }.of_one_user());
        assert_eq!(shares, [1, 2, 3, 3, 48]);
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
