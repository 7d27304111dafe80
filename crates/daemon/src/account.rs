//! Things that users share, by user: the card's memory, the memory of the machine that the kernel may charge to the
//! daemon for its clients, and descriptors.
//!
//! Card memory takes memory of the machine when it is touched. A mapped buffer counts whole, although its pages usually
//! belong to the client: a client may give pages back to the kernel at any time, and then the daemon's next access
//! allocates them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dmalane_sim::Allowance;

use crate::config::Config;

/// An amount in use, with its limits.
#[derive(Debug)]
pub(crate) struct Account {
    /// Most in all, and of one user.
    limits: (u64, u64),
    /// The name of the unit, and the options that limit it in all and for a user.
    names: [&'static str; 3],
    /// The way out for a user who is refused.
    remedy: &'static str,
    used: Mutex<Used>,
}

#[derive(Debug, Default)]
struct Used {
    all: u64,
    users: HashMap<u32, u64>,
}

/// The accounts of a daemon.
#[derive(Debug)]
pub(crate) struct Accounts {
    pub ddr: Arc<Account>,
    pub hbm: Arc<Account>,
    pub memory: Arc<Account>,
    pub descriptors: Arc<Account>,
}

impl Accounts {
    pub(crate) fn new(config: &Config) -> Self {
        let (ddr, hbm) = config.card_limits();
        let (card, mapped) = ("request less", "unmap buffers");
        let of = |limits, names, remedy| Arc::new(Account::new(limits, names, remedy));
        Self {
            ddr: of(ddr, ["bytes of DDR", "--ddr", "--user-ddr"], card),
            hbm: of(hbm, ["bytes of HBM", "--hbm", "--user-hbm"], card),
            memory: of(config.memory_limits(), ["bytes of memory", "--memory", "--user-memory"], mapped),
            descriptors: of(
                config.descriptor_limits(),
                ["descriptors", "LimitNOFILE= of the unit", "three quarters of LimitNOFILE="],
                mapped,
            ),
        }
    }
}

impl Account {
    fn new(limits: (u64, u64), names: [&'static str; 3], remedy: &'static str) -> Self {
        Self { limits, names, remedy, used: Mutex::default() }
    }

    fn used(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an amount for a user.
    ///
    /// # Errors
    /// Why the user cannot have it; then nothing is taken.
    fn take(&self, user: u32, more: u64) -> Result<(), String> {
        let [what, option, user_option] = self.names;
        let mut used = self.used();
        let has = used.users.get(&user).copied().unwrap_or(0);
        let fits = |used: u64, limit: u64| used.checked_add(more).filter(|sum| *sum <= limit);
        let all = fits(used.all, self.limits.0).ok_or_else(|| {
            format!(
                "{more} {what}; all clients use {} of {} ({option}): {}, or wait until other clients end",
                used.all, self.limits.0, self.remedy
            )
        })?;
        let user_now = fits(has, self.limits.1).ok_or_else(|| {
            format!(
                "{more} {what}; this user has {has} of {} ({user_option}): {}, or end another client",
                self.limits.1, self.remedy
            )
        })?;
        used.all = all;
        used.users.insert(user, user_now);
        Ok(())
    }

    /// True for a user beyond the limit of a user.
    pub(crate) fn is_over(&self, user: u32) -> bool {
        self.used().users.get(&user).is_some_and(|has| *has > self.limits.1)
    }

    pub(crate) fn give(&self, user: u32, bytes: u64) {
        let mut used = self.used();
        used.all -= bytes;
        if let Some(has) = used.users.get_mut(&user) {
            *has -= bytes;
            if *has == 0 {
                used.users.remove(&user);
            }
        }
    }

    /// In use by all users, or by this one.
    pub(crate) fn in_use(&self, user: Option<u32>) -> u64 {
        let used = self.used();
        user.map_or(used.all, |user| used.users.get(&user).copied().unwrap_or(0))
    }

    /// In all.
    pub(crate) fn total(&self) -> u64 {
        self.limits.0
    }
}

/// An amount that a user has taken; given back on drop.
#[derive(Debug)]
pub(crate) struct Charge {
    account: Arc<Account>,
    user: u32,
    bytes: AtomicU64,
}

impl Charge {
    /// Takes an amount for a user.
    ///
    /// # Errors
    /// Why the user cannot have it.
    pub(crate) fn new(account: &Arc<Account>, user: u32, bytes: u64) -> Result<Self, String> {
        account.take(user, bytes)?;
        Ok(Self { account: account.clone(), user, bytes: AtomicU64::new(bytes) })
    }

    /// For what a user has already: it counts beyond the limits, if need be.
    pub(crate) fn forced(account: &Arc<Account>, user: u32, bytes: u64) -> Self {
        let mut used = account.used();
        used.all += bytes;
        *used.users.entry(user).or_default() += bytes;
        drop(used);
        Self { account: account.clone(), user, bytes: AtomicU64::new(bytes) }
    }
}

impl Allowance for Charge {
    fn take(&self, bytes: u64) -> bool {
        let taken = self.account.take(self.user, bytes).is_ok();
        if taken {
            self.bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        taken
    }

    fn give(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.account.give(self.user, bytes);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.give(self.user, self.bytes.load(Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_hold_for_users_and_for_all() {
        let account = Arc::new(Account::new((100, 60), ["bytes", "--all", "--user"], "unmap"));
        let first = Charge::new(&account, 1, 60).unwrap();
        assert_eq!(
            Charge::new(&account, 1, 1).unwrap_err(),
            "1 bytes; this user has 60 of 60 (--user): unmap, or end another client"
        );
        let second = Charge::new(&account, 2, 30).unwrap();
        assert!(second.take(10) && !second.take(1));
        assert!(Charge::new(&account, 3, 1).unwrap_err().contains("all clients use 100 of 100 (--all)"));
        assert!(Charge::new(&account, 3, u64::MAX).is_err());
        // Amounts that exist already count beyond the limits, and keep others from more.
        let forced = Charge::forced(&account, 2, 30);
        assert!(account.is_over(2) && !account.is_over(1));
        drop(forced);
        assert!(!account.is_over(2));
        drop(first);
        second.give(5);
        assert_eq!((account.in_use(None), account.in_use(Some(2)), account.in_use(Some(1))), (35, 35, 0));
        drop(second);
        assert_eq!((account.in_use(None), account.used().users.len()), (0, 0));
    }

    #[test]
    fn one_user_cannot_take_all_memory_of_the_card() {
        let gib = 1 << 30;
        let Accounts { ddr, hbm, .. } = Accounts::new(&Config::default());
        let held: Vec<Charge> = (0..24).map(|_| Charge::new(&ddr, 7, gib).unwrap()).collect();
        assert!(Charge::new(&ddr, 7, gib).unwrap_err().contains("(--user-ddr): request less"));
        // The two memories are counted separately, and the rest is left for other users.
        let _all = Charge::new(&hbm, 7, 24 * gib).unwrap();
        let _rest = Charge::new(&ddr, 8, 8 * gib).unwrap();
        assert!(Charge::new(&ddr, 8, gib).unwrap_err().contains("all clients use 34359738368 of 34359738368 (--ddr)"));
        drop(held);
        Charge::new(&ddr, 7, 24 * gib).unwrap();
        // On a card with room for one client, that client gets all of it.
        let small = Accounts::new(&Config { ddr: gib, hbm: gib, ..Config::default() });
        Charge::new(&small.ddr, 7, gib).unwrap();
    }
}
