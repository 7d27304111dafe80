//! The daemon's memory, by user: what the kernel may charge to the daemon for its clients. And its descriptors.
//!
//! Card memory counts when it is touched. A mapped buffer counts whole, although its pages usually belong to the
//! client: a client may give pages back to the kernel at any time, and then the daemon's next access allocates them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dmalane_sim::Allowance;

/// Bytes in use, with the limits.
#[derive(Debug)]
pub(crate) struct Account {
    /// Most in all, and of one user.
    limits: (u64, u64),
    /// The name of the unit, and the options that limit it in all and for a user.
    names: [&'static str; 3],
    used: Mutex<Used>,
}

#[derive(Debug, Default)]
struct Used {
    all: u64,
    users: HashMap<u32, u64>,
}

impl Account {
    /// Of bytes of memory.
    pub(crate) fn new(all: u64, user: u64) -> Self {
        Self { limits: (all, user), names: ["bytes of memory", "--memory", "--user-memory"], used: Mutex::default() }
    }

    /// Of descriptors.
    pub(crate) fn of_descriptors((all, user): (u64, u64)) -> Self {
        let names = ["descriptors", "LimitNOFILE= of the unit", "three quarters of LimitNOFILE="];
        Self { limits: (all, user), names, used: Mutex::default() }
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
                "{more} {what}; all clients use {} of {} ({option}): unmap buffers, or wait until other clients end",
                used.all, self.limits.0
            )
        })?;
        let user_now = fits(has, self.limits.1).ok_or_else(|| {
            format!(
                "{more} {what}; this user has {has} of {} ({user_option}): unmap buffers, or end another client",
                self.limits.1
            )
        })?;
        used.all = all;
        used.users.insert(user, user_now);
        Ok(())
    }

    /// Counts what a user has already, beyond the limits if need be.
    pub(crate) fn force(&self, user: u32, more: u64) {
        let mut used = self.used();
        used.all += more;
        *used.users.entry(user).or_default() += more;
    }

    /// True for a user beyond the limit of a user; with `waits`, also while all are beyond that of all.
    pub(crate) fn is_over(&self, user: u32, waits: bool) -> bool {
        let used = self.used();
        used.users.get(&user).is_some_and(|has| *has > self.limits.1) || (waits && used.all > self.limits.0)
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

    /// Bytes in use by all users.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn in_use(&self) -> u64 {
        self.used().all
    }
}

/// Bytes that a user has taken; given back on drop.
#[derive(Debug)]
pub(crate) struct Charge {
    account: Arc<Account>,
    user: u32,
    bytes: AtomicU64,
}

impl Charge {
    /// Takes bytes for a user.
    ///
    /// # Errors
    /// Why the user cannot have them.
    pub(crate) fn new(account: &Arc<Account>, user: u32, bytes: u64) -> Result<Self, String> {
        account.take(user, bytes)?;
        Ok(Self { account: account.clone(), user, bytes: AtomicU64::new(bytes) })
    }

    /// For what a user has already ([`Account::force`]).
    pub(crate) fn forced(account: &Arc<Account>, user: u32, bytes: u64) -> Self {
        account.force(user, bytes);
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
        let account = Arc::new(Account::new(100, 60));
        let first = Charge::new(&account, 1, 60).unwrap();
        assert!(Charge::new(&account, 1, 1).unwrap_err().contains("this user has 60 of 60 (--user-memory)"));
        let second = Charge::new(&account, 2, 30).unwrap();
        assert!(second.take(10) && !second.take(1));
        assert!(Charge::new(&account, 3, 1).unwrap_err().contains("all clients use 100 of 100 (--memory)"));
        assert!(Charge::new(&account, 3, u64::MAX).is_err());
        // Amounts that exist already count beyond the limits, and keep others from more.
        let forced = Charge::forced(&account, 2, 30);
        assert!(account.is_over(2, false) && !account.is_over(1, false) && account.is_over(1, true));
        drop(forced);
        assert!(!account.is_over(2, true) && !account.is_over(1, true));
        drop(first);
        second.give(5);
        assert_eq!(account.in_use(), 35);
        drop(second);
        assert_eq!((account.in_use(), account.used().users.len()), (0, 0));
    }
}
