//! The models of a keeper: which there are, who may have them, and which make room for others.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use dmalane_load::kept::wire::{KeepRefusal, KeptList, KeptRow};
use dmalane_load::kept::{KeptModel, KeptTimes};

use crate::config::KeeperConfig;
use crate::lend::{is_lent, lend, pass_on, sealed_bytes};

/// Descriptors of texts, which come first: the description and the manifest.
const TEXTS: usize = 2;
/// The shortest beginning of a hash that names a model.
const SHORTEST_HASH: usize = 8;

/// Whether the bytes of a model are known to be those of its manifest. Its owner gets it anyway; nobody else does
/// before they are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Checked {
    /// Its owner says so.
    ByItsOwner,
    /// They are hashed, once it is its turn.
    Soon,
    /// They were hashed here.
    Here,
}

/// A model.
pub(crate) struct Kept {
    /// Of this keeper, never used again.
    pub(crate) number: u64,
    pub(crate) model: KeptModel,
    pub(crate) user: u32,
    /// The description, the manifest, and the files.
    pub(crate) fds: Vec<OwnedFd>,
    /// Of all of them.
    pub(crate) bytes: u64,
    pub(crate) used: Instant,
    pub(crate) attaches: u64,
    pub(crate) checked: Checked,
}

impl Kept {
    /// Whether it has the place of a user's model: one of the same name, in the same memory.
    pub(crate) fn is(&self, user: u32, model: &KeptModel) -> bool {
        self.user == user && self.model.name == model.name && self.model.device == model.device
    }

    /// Those of its descriptors that are sealed memfds: of a model in memory of a device, only its texts.
    fn sealed(&self) -> &[OwnedFd] {
        let count = if self.model.device.is_some() { TEXTS } else { self.fds.len() };
        &self.fds[..count.min(self.fds.len())]
    }

    /// Whether anybody is attached.
    pub(crate) fn is_lent(&self) -> bool {
        self.sealed().iter().any(is_lent)
    }

    /// Some of its descriptors, for who attaches.
    pub(crate) fn lend(&self, from: usize, most: usize) -> io::Result<Vec<OwnedFd>> {
        let sealed = self.sealed().len();
        let wanted = self.fds.iter().enumerate().skip(from).take(most);
        wanted.map(|(i, fd)| if i < sealed { lend(fd) } else { pass_on(fd) }).collect()
    }
}

/// The model behind its descriptors, and the bytes of host memory that they take.
///
/// # Errors
/// They are not those of a model.
pub(crate) fn described(fds: &[OwnedFd]) -> Result<(KeptModel, u64), String> {
    let model = fds.first().ok_or("it has no descriptors").map_err(str::to_owned);
    let mut model = model.and_then(|first| KeptModel::read(first).map_err(|e| e.to_string()))?;
    if model.descriptors() != fds.len() {
        return Err(format!("{} descriptors for {} files", fds.len(), model.files.len()));
    }
    // Of what is no memfd, nothing is asked: an answer may take for ever.
    let sealed = if model.device.is_some() { &fds[..TEXTS] } else { fds };
    let bytes = sealed.iter().map(|fd| sealed_bytes(fd.as_fd())).try_fold(0u64, |sum, n| sum.checked_add(n?));
    let bytes = bytes.ok_or("its memory is not sealed memfds of ordinary pages")?;
    // Of a million tensors, their names and places are not needed here.
    for file in &mut model.files {
        file.listed = None;
        file.placed.iter_mut().for_each(|places| places.offsets = Vec::new());
    }
    Ok((model, bytes))
}

/// The models, and room that is promised.
#[derive(Default)]
pub(crate) struct Shelf {
    pub(crate) config: KeeperConfig,
    pub(crate) models: Vec<Kept>,
    /// Models that are lent no more but still in use: their memory counts until they are not.
    pub(crate) leaving: Vec<Kept>,
    pub(crate) hits: u64,
    pub(crate) misses: u64,
    pub(crate) evicted: u64,
    /// How long the models took that were kept since this keeper began.
    pub(crate) took: KeptTimes,
}

/// A refusal with its reason in words.
pub(crate) type Refused = (KeepRefusal, String);

impl Shelf {
    /// The models of a user; of anyone with `None`.
    fn of(&self, user: Option<u32>) -> impl Iterator<Item = &Kept> {
        self.models.iter().filter(move |kept| user.is_none_or(|user| kept.user == user))
    }

    /// Bytes of the models of a user, or of all.
    pub(crate) fn bytes(&self, user: Option<u32>) -> u64 {
        self.of(user).fold(self.leaving(user), |sum, kept| sum.saturating_add(kept.bytes))
    }

    fn leaving(&self, user: Option<u32>) -> u64 {
        let of = self.leaving.iter().filter(|kept| user.is_none_or(|user| kept.user == user));
        of.fold(0, |sum, kept| sum.saturating_add(kept.bytes))
    }

    /// Descriptors of the models of a user.
    pub(crate) fn descriptors(&self, user: u32) -> usize {
        let all = self.models.iter().chain(&self.leaving).filter(|kept| kept.user == user);
        all.map(|kept| kept.fds.len()).sum()
    }

    /// Models that were lent no more, and that nobody uses any more.
    pub(crate) fn take_left(&mut self) -> Vec<Kept> {
        self.leaving.extract_if(.., |kept| !kept.is_lent()).collect()
    }

    /// Which model a user means: one of its own by name, else by the beginning of its hash, or another user's by
    /// `USER:NAME` if it is shared. Of several of a name, the one of a device is wanted, or else the
    /// one in the host's memory.
    pub(crate) fn find(&self, user: u32, name: &str, device: Option<&str>) -> Result<usize, Refused> {
        let absent = |why: String| (KeepRefusal::Absent, why);
        let is_other = |(_, kept): &(usize, &Kept)| {
            let on = kept.model.device.as_deref();
            (on != device, on.is_some())
        };
        if let Some((owner, name)) = name.split_once(':') {
            let owner: u32 = owner.parse().map_err(|_| absent(format!("{owner:?} is not the number of a user")))?;
            let is_it = |kept: &Kept| kept.user == owner && kept.model.name == name;
            let lent = |(_, kept): &(usize, &Kept)| is_it(kept) && (kept.model.shared || owner == user);
            let found = self.models.iter().enumerate().filter(lent).min_by_key(is_other).map(|(found, _)| found);
            return found.ok_or_else(|| absent(format!("user {owner} shares no model {name:?}")));
        }
        let own = |(_, kept): &(usize, &Kept)| kept.user == user;
        let named = self.models.iter().enumerate().filter(own).filter(|(_, kept)| kept.model.name == name);
        if let Some((found, _)) = named.min_by_key(is_other) {
            return Ok(found);
        }
        let begins = |(_, kept): &(usize, &Kept)| name.len() >= SHORTEST_HASH && kept.model.id.starts_with(name);
        let mut hashed: Vec<(usize, &Kept)> = self.models.iter().enumerate().filter(own).filter(begins).collect();
        hashed.sort_by_key(is_other);
        if let [(first, one), others @ ..] = &hashed[..] {
            // Models of one hash are the same, under several names.
            return match others.iter().all(|(_, kept)| kept.model.id == one.model.id) {
                true => Ok(*first),
                false => Err((KeepRefusal::Ambiguous, format!("several models have a hash that begins with {name}"))),
            };
        }
        let shares = |kept: &&Kept| kept.model.shared && kept.checked == Checked::Here && kept.model.name == name;
        Err(absent(match self.models.iter().find(shares) {
            Some(kept) => format!("no model {name:?} of yours is kept; user {0} shares one: {0}:{name}", kept.user),
            None => format!("no model {name:?} is kept (dmalane kept lists those that are)"),
        }))
    }

    /// Makes room for a model of a user, beside room that is promised to it and to all. Returns the models that make
    /// room: nobody is attached to them, and they were used longest ago.
    pub(crate) fn make_room(&mut self, user: u32, bytes: u64, promised: (u64, u64)) -> Result<Vec<Kept>, Refused> {
        let mut gone: Vec<u64> = Vec::new();
        for (of, limit, promised) in
            [(Some(user), self.config.of_a_user(), promised.0), (None, self.config.memory, promised.1)]
        {
            let promised = promised.saturating_add(self.leaving(of));
            // What is in memory of a device makes no room here.
            let mut order: Vec<&Kept> = self.of(of).filter(|kept| kept.model.device.is_none()).collect();
            order.sort_by_key(|kept| kept.used);
            let mut order = order.into_iter();
            let left = |gone: &[u64]| {
                self.of(of)
                    .filter(|kept| !gone.contains(&kept.number))
                    .fold(promised, |sum, kept| sum.saturating_add(kept.bytes))
            };
            while left(&gone).saturating_add(bytes) > limit {
                // What can never fit takes nothing away.
                let Some(kept) = order.next().filter(|_| bytes.saturating_add(promised) <= limit) else {
                    let whose = if of.is_some() { "your models may take" } else { "all models may take" };
                    let used = self.of(of).fold(promised, |sum, kept| sum.saturating_add(kept.bytes));
                    let text = format!(
                        "{bytes} bytes do not fit: {whose} {limit}, and {used} are in use or promised; those to which \
                         somebody is attached stay (dmalane kept, dmalane drop)"
                    );
                    return Err((KeepRefusal::Room, text));
                };
                if !gone.contains(&kept.number) && !kept.is_lent() {
                    gone.push(kept.number);
                }
            }
        }
        self.evicted += gone.len() as u64;
        Ok(self.models.extract_if(.., |kept| gone.contains(&kept.number)).collect())
    }

    /// Makes room in memory of a device, of which nobody knows here how much there is: at least so many bytes of a
    /// user's models, first of one of the name of that which comes, whose place that takes. Returns those that make
    /// room, as [`Shelf::make_room`].
    pub(crate) fn make_room_on(
        &mut self,
        user: u32,
        device: &str,
        bytes: u64,
        name: &str,
    ) -> Result<Vec<Kept>, Refused> {
        let is_there = |kept: &&Kept| kept.model.device.as_deref() == Some(device) && !kept.is_lent();
        let mut order: Vec<&Kept> = self.of(Some(user)).filter(is_there).collect();
        order.sort_by_key(|kept| (kept.model.name != name, kept.used));
        let (mut has, mut gone) = (0, Vec::new());
        for kept in order {
            if has >= bytes {
                break;
            }
            has = kept.model.device_bytes().saturating_add(has);
            gone.push(kept.number);
        }
        if has < bytes {
            let text = format!(
                "{bytes} bytes are missing on {device}: your models there to which nobody is attached have {has}"
            );
            return Err((KeepRefusal::Room, text));
        }
        self.evicted += gone.len() as u64;
        Ok(self.models.extract_if(.., |kept| gone.contains(&kept.number)).collect())
    }

    /// The models that a user may see.
    pub(crate) fn list(&self, user: u32) -> KeptList {
        let is_right = |kept: &&Kept| kept.model.shared && kept.checked == Checked::Here;
        let seen = self.models.iter().filter(|kept| kept.user == user || is_right(kept));
        let row = |kept: &Kept| KeptRow {
            name: kept.model.name.clone(),
            id: kept.model.id.clone(),
            user: kept.user,
            device: kept.model.device.clone(),
            bytes: kept.model.device.as_ref().map_or(kept.bytes, |_| kept.model.device_bytes()),
            files: kept.model.files.len(),
            shared: kept.model.shared,
            attached: kept.is_lent(),
            attaches: kept.attaches,
            idle_s: kept.used.elapsed().as_secs(),
        };
        let Self { hits, misses, evicted, took, .. } = *self;
        let (used, limit) = (self.bytes(None), self.config.memory);
        KeptList { models: seen.map(row).collect(), used, limit, hits, misses, evicted, took }
    }
}
