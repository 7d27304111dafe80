//! Things that users share, by user: the card's memory, and the memory of the machine that the kernel charges to the
//! daemon for its clients. What each client has taken is in the table that all processes share.
//!
//! Card memory takes memory of the machine when it is touched. Mapped buffers are the client's in the kernel's accounts
//! too: the daemon only uses pages that are there ([`crate::guard`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmalane_sim::Allowance;

use crate::config::Config;
use crate::table::{Seat, Table};
use crate::wire::{Code, Denied};

/// An amount that clients take, with its limits.
pub(crate) struct Account {
    table: Arc<Table>,
    /// Of what the table knows of each client.
    index: usize,
    /// Most in all, and of one user.
    pub limits: (u64, u64),
    /// The name of the unit, and the options that limit it in all and for a user.
    names: [&'static str; 2],
    /// The way out for a user who is refused.
    remedy: &'static str,
}

/// The accounts of a daemon.
pub(crate) struct Accounts {
    pub ddr: Arc<Account>,
    pub hbm: Arc<Account>,
    pub memory: Arc<Account>,
}

impl Accounts {
    pub(crate) fn new(config: &Config, table: &Arc<Table>) -> Self {
        let (ddr, hbm) = config.card_limits();
        let of =
            |index, limits, names, remedy| Arc::new(Account { table: table.clone(), index, limits, names, remedy });
        let card = "request less";
        Self {
            ddr: of(0, ddr, ["bytes of DDR", "--ddr"], card),
            hbm: of(1, hbm, ["bytes of HBM", "--hbm"], card),
            memory: of(2, config.memory_limits(), ["bytes of memory", "--memory"], "unmap buffers"),
        }
    }
}

impl Account {
    /// In use by all users, or by this one.
    pub(crate) fn in_use(&self, user: Option<u32>) -> u64 {
        let of = self.table.seats().filter(|(_, seat)| user.is_none_or(|user| seat.user() == user));
        of.map(|(_, seat)| self.of(seat).load(Ordering::Relaxed)).sum()
    }

    fn of<'s>(&self, seat: &'s Seat) -> &'s AtomicU64 {
        &seat.taken[self.index]
    }

    /// Takes an amount for a client, until the charge is dropped.
    ///
    /// # Errors
    /// Why its user cannot have it; then nothing is taken.
    pub(crate) fn charge(self: &Arc<Self>, seat: usize, bytes: u64) -> Result<Charge, Denied> {
        self.take(seat, bytes)?;
        Ok(Charge { account: self.clone(), seat, bytes: AtomicU64::new(bytes) })
    }

    fn take(&self, seat: usize, more: u64) -> Result<(), Denied> {
        let Self { limits: (most, of_a_user), names: [what, option], remedy, .. } = self;
        let seat = self.table.seat(seat);
        // Nobody else takes anything until this is taken.
        self.table.locked(|_| {
            let (all, has) = (self.in_use(None), self.in_use(Some(seat.user())));
            let fits = |used: u64, limit: u64| used.checked_add(more).is_some_and(|sum| sum <= limit);
            Denied::unless(fits(all, *most), Code::Quota, || {
                let or = "or wait until other clients end";
                format!("{more} {what}; all clients use {all} of {most} ({option}): {remedy}, {or}")
            })?;
            Denied::unless(fits(has, *of_a_user), Code::Quota, || {
                let or = "or end another client";
                format!("{more} {what}; this user has {has} of {of_a_user} (--user-share): {remedy}, {or}")
            })?;
            self.of(seat).fetch_add(more, Ordering::Relaxed);
            Ok(())
        })
    }

    fn give(&self, seat: usize, bytes: u64) {
        self.of(self.table.seat(seat)).fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// An amount that a client has taken; given back on drop.
pub(crate) struct Charge {
    account: Arc<Account>,
    seat: usize,
    bytes: AtomicU64,
}

impl Allowance for Charge {
    fn take(&self, bytes: u64) -> bool {
        let taken = self.account.take(self.seat, bytes).is_ok();
        if taken {
            self.bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        taken
    }

    fn give(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.account.give(self.seat, bytes);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.give(self.seat, self.bytes.load(Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;
    use crate::wire::ClientStatus;

    /// A table with a client for each of these users.
    fn clients(users: &[u32]) -> Arc<Table> {
        let table = Arc::new(Table::new().unwrap());
        for (i, user) in users.iter().enumerate() {
            let row = ClientStatus { client: i as u64 + 1, ..ClientStatus::new_zeroed() };
            assert_eq!(table.sit(*user, row), Some(i));
        }
        table
    }

    #[test]
    fn limits_hold_for_users_and_for_all() {
        let table = clients(&[1, 2, 3, 1]);
        let names = ["bytes", "--all"];
        let account = Arc::new(Account { table: table.clone(), index: 2, limits: (100, 60), names, remedy: "unmap" });
        let in_use = |user| account.in_use(user);
        let first = account.charge(0, 60).unwrap();
        assert_eq!(
            account.charge(3, 1).err().unwrap().1,
            "1 bytes; this user has 60 of 60 (--user-share): unmap, or end another client"
        );
        let second = account.charge(1, 30).unwrap();
        assert!(second.take(10) && !second.take(1));
        assert!(account.charge(2, 1).err().unwrap().1.contains("all clients use 100 of 100 (--all)"));
        for seat in 0..4 {
            assert!(account.charge(seat, u64::MAX).is_err() && account.charge(seat, u64::MAX - 30).is_err());
        }
        drop(first);
        second.give(5);
        assert_eq!((in_use(None), in_use(Some(2)), in_use(Some(1))), (35, 35, 0));
        // What a process that was killed had taken goes with its place.
        second.bytes.store(0, Ordering::Relaxed);
        table.stand(1);
        assert_eq!(in_use(None), 0);
    }

    #[test]
    fn a_charge_gives_back_what_it_has() {
        let account = Accounts::new(&Config::default(), &clients(&[1])).memory;
        let other = account.charge(0, 1000).unwrap();
        let charge = account.charge(0, 100).unwrap();
        assert!(charge.take(20));
        // A refusal takes nothing.
        assert!(!charge.take(u64::MAX) && !charge.take(account.limits.1));
        charge.give(50);
        assert_eq!(account.in_use(None), 1070);
        drop(charge);
        assert_eq!(account.in_use(None), 1000);
        drop(other);
    }

    #[test]
    fn the_last_of_an_amount_is_taken_once() {
        let table = clients(&[1, 2]);
        let account = Arc::new(Account { table, index: 0, limits: (1, 1), names: ["bytes", "--all"], remedy: "unmap" });
        let arrived = AtomicU64::new(0);
        // A barrier of the library would let one go long before the other.
        let wait = |round: u64| {
            arrived.fetch_add(1, Ordering::SeqCst);
            for spins in 0.. {
                match arrived.load(Ordering::SeqCst) < 2 * round {
                    true if spins < 10_000 => std::hint::spin_loop(),
                    true => std::thread::yield_now(),
                    false => break,
                }
            }
        };
        let take = |seat| {
            let mut taken = 0;
            for round in 0..500 {
                wait(2 * round + 1);
                let charge = account.charge(seat, 1);
                wait(2 * round + 2);
                taken += u32::from(charge.is_ok());
            }
            taken
        };
        let taken = std::thread::scope(|scope| {
            let other = scope.spawn(|| take(1));
            take(0) + other.join().unwrap()
        });
        assert_eq!(taken, 500);
    }

    #[test]
    fn one_user_cannot_take_all_memory_of_the_card() {
        let gib = 1 << 30;
        let table = clients(&[7, 8]);
        let Accounts { ddr, hbm, .. } = Accounts::new(&Config::default(), &table);
        let held: Vec<Charge> = (0..24).map(|_| ddr.charge(0, gib).unwrap()).collect();
        assert!(ddr.charge(0, gib).err().unwrap().1.contains("(--user-share): request less"));
        // The two memories are counted separately, and the rest is left for other users.
        let _all = hbm.charge(0, 24 * gib).unwrap();
        let _rest = ddr.charge(1, 8 * gib).unwrap();
        let refused = ddr.charge(1, gib).err().unwrap().1;
        assert!(refused.contains("all clients use 34359738368 of 34359738368 (--ddr)"), "{refused}");
        drop(held);
        ddr.charge(0, 24 * gib).unwrap();
        // On a card with room for one client, that client gets all of it.
        let small = Accounts::new(&Config { ddr: gib, hbm: gib, ..Config::default() }, &clients(&[7]));
        small.ddr.charge(0, gib).unwrap();
    }
}
