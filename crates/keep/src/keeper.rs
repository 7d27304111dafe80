//! The keeper's loop: connections, what they ask, and what is answered.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dmalane_daemon::{Listener, pass_rights};
use dmalane_dma::{receive_with_fds, send_with_fds};
use dmalane_load::Error;
use dmalane_load::kept::wire::{KeepRefusal, KeeperAnswer, KeeperAsk, MAX_FDS, MAX_MESSAGE, Message, VERSION, parse};
use dmalane_load::kept::{KeepError, KeptModel, check, sealed_text};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{RecvFlags, SendFlags, SocketFlags, accept_with};

use crate::close::Closers;
use crate::config::KeeperConfig;
use crate::shelf::{Checked, Kept, Refused, Shelf, described};
use crate::store::{Store, Stored};

/// How long nothing is accepted where that fails for lack of descriptors.
const FAILED_REST: Duration = Duration::from_millis(250);
/// Descriptors of one model, at most: a description, a manifest, and its files.
const MAX_MODEL_FDS: usize = 4096;
/// Descriptors of a user that may wait to be closed before its connections are refused.
const MAX_CLOSING: usize = 8192;
/// How long a connection may ask nothing while others are refused, and one that was promised room, which reads a model.
const IDLE: Duration = Duration::from_secs(10);
const PROMISED: Duration = Duration::from_secs(3600);

/// A client.
struct Connection {
    socket: OwnedFd,
    user: u32,
    /// Room that it was promised.
    promised: u64,
    /// Descriptors of a model that has not come whole.
    parts: Vec<OwnedFd>,
    asked: Instant,
}

/// A model that was hashed, and whether it is what its manifest says; `None` where that cannot be told now.
type Hashed = (u64, Option<Result<(), String>>);

/// Another process that holds models, and those that it has.
type Replaced = (Store, Vec<Stored>);

/// The "user" for whom the keeper closes memory that it held: no client can make that take long.
const MYSELF: u32 = u32::MAX;

/// A keeper of models.
pub struct Keeper {
    shelf: Shelf,
    connections: HashMap<u64, Connection>,
    /// The last number of a connection or a model.
    last: u64,
    closers: Closers,
    hashed: (Sender<Hashed>, Receiver<Hashed>),
    /// A model is being hashed; or none is, until then, since one could not be.
    hashing: bool,
    hash_after: Instant,
    store: Store,
    /// When whoever holds models was last replaced.
    replaced: Option<Instant>,
    /// Another one, which a thread starts, and models that were let go of meanwhile.
    next_store: Option<Receiver<std::io::Result<Replaced>>>,
    let_go: Vec<u64>,
    log: Box<dyn FnMut(&str) + Send>,
}

impl Keeper {
    /// A keeper without models, which tells what it does line by line.
    pub fn new(config: KeeperConfig, log: impl FnMut(&str) + Send + 'static) -> Self {
        Self {
            shelf: Shelf { config, ..Shelf::default() },
            connections: HashMap::new(),
            last: 0,
            closers: Closers::default(),
            hashed: channel(),
            hashing: false,
            hash_after: Instant::now(),
            store: Store::None,
            replaced: None,
            next_store: None,
            let_go: Vec::new(),
            log: Box::new(log),
        }
    }

    /// Bytes of all models.
    pub fn bytes(&self) -> u64 {
        self.shelf.bytes(None)
    }

    /// Sets how much memory all models may take.
    pub fn limit(&mut self, bytes: u64) {
        self.shelf.config.memory = bytes;
    }

    /// Puts the descriptors of models away in `store`, where the next keeper finds them, and takes back those that are
    /// there.
    pub fn with_store(mut self, mut store: Store) -> Self {
        let (found, is_all) = store.take_back();
        if !is_all {
            (self.log)("warning: whoever holds models has not told of all of them");
            // Numbers that none of those has which are not known.
            self.last = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() << 16);
        }
        self.store = store;
        self.take_in(found);
        self
    }

    /// Adds models that the store has, but those that are here.
    fn take_in(&mut self, found: Vec<Stored>) {
        for (number, user, fds) in found {
            if self.shelf.models.iter().any(|kept| kept.number == number) {
                self.closers.close(user, fds);
                continue;
            }
            self.last = self.last.max(number);
            match described(&fds) {
                // A later one has its name.
                Ok((model, _))
                    if self.shelf.models.iter().any(|kept| kept.number > number && kept.is(user, &model)) =>
                {
                    self.told(self.store.remove(number, user, fds.len()));
                    self.closers.close(user, fds);
                }
                Ok(described) => {
                    let name = self.shelve(user, fds, described, Some(number));
                    (self.log)(&format!("took back {name:?} of user {user}"));
                }
                Err(why) => {
                    // Its keeper ended while it was put there.
                    self.told(self.store.remove(number, user, fds.len()));
                    self.closers.close(user, fds);
                    (self.log)(&format!("warning: a model of user {user} is lost: {why}"));
                }
            }
        }
    }

    /// Serves until `stop` becomes readable. Models that nobody has attached to are gone then; where its other end was
    /// closed, and nothing can be read, they stay in the store.
    ///
    /// # Errors
    /// A system call failed, and the keeper cannot go on.
    pub fn run(mut self, listener: Listener, stop: BorrowedFd<'_>) -> std::io::Result<()> {
        let socket = listener.socket();
        rustix::io::ioctl_fionbio(socket, true)?;
        pass_rights(socket, true);
        let mut rest = None::<Instant>;
        loop {
            rest = rest.filter(|until| Instant::now() < *until);
            let is_full = self.connections.len() >= self.shelf.config.connections;
            let accepts = rest.is_none() && !is_full;
            let numbers: Vec<u64> = self.connections.keys().copied().collect();
            let fds = [Some(stop), accepts.then_some(socket), self.store.holder()].into_iter().flatten();
            let sockets = numbers.iter().map(|number| self.connections[number].socket.as_fd());
            let mut fds: Vec<PollFd<'_>> =
                fds.chain(sockets).map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            let is_busy = rest.is_some() || self.hashing || self.next_store.is_some();
            let wait = if is_busy { Duration::from_millis(5) } else { IDLE / 10 };
            match poll(&mut fds, Timespec::try_from(wait).ok().as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            drop(fds);
            if ready[0] {
                let in_order = rustix::io::read(stop, &mut [0; 1]).is_ok_and(|n| n > 0);
                // One that is just being started, too.
                if let Some(next) = self.next_store.take() {
                    match next.recv() {
                        Ok(Ok((store, _))) if in_order => self.store = store,
                        Ok(replaced) => self.adopt(replaced),
                        Err(_) => {}
                    }
                }
                if in_order || self.shelf.models.is_empty() {
                    self.store.end();
                }
                return Ok(());
            }
            let mut first = 1 + usize::from(accepts);
            if self.store.holder().is_some() {
                if ready[first] {
                    self.replace_holder();
                }
                first += 1;
            }
            self.take_next_store();
            self.take_hashed();
            self.hash_next();
            let left = self.shelf.take_left();
            left.into_iter().for_each(|kept| self.close(kept));
            for (number, _) in numbers.iter().zip(&ready[first..]).filter(|(_, ready)| **ready) {
                if !self.serve(*number) {
                    self.disconnect(*number);
                }
            }
            if accepts && ready[1] {
                rest = self.accept(socket).err().map(|_| Instant::now() + FAILED_REST);
            }
            if is_full {
                let limit = |c: &Connection| if c.promised == 0 { IDLE } else { PROMISED };
                let idle = self.connections.iter().filter(|(_, c)| c.asked.elapsed() > limit(c));
                let idle: Vec<u64> = idle.map(|(number, _)| *number).collect();
                idle.into_iter().for_each(|number| self.disconnect(number));
            }
        }
    }

    /// Whoever holds models is gone: another one takes its place, unless that one did so just now.
    fn replace_holder(&mut self) {
        let is_new = self.replaced.is_some_and(|at| at.elapsed() < IDLE);
        self.replaced = Some(Instant::now());
        let (tell, next) = channel();
        self.next_store = Some(next);
        let Some(holder) = std::mem::replace(&mut self.store, Store::None).into_holder() else { return };
        if is_new {
            let _ = tell.send(Err(std::io::Error::other("it ends at once")));
        } else {
            // It may take long. Where there is no thread, the answer is that nobody will tell.
            let start = move || tell.send(Store::replacing(&holder));
            let _ = thread::Builder::new().name("dmalane-hold".to_owned()).spawn(start);
        }
    }

    /// Takes another place for models, once it is there.
    fn take_next_store(&mut self) {
        let replaced = match self.next_store.as_ref().map(Receiver::try_recv) {
            None | Some(Err(TryRecvError::Empty)) => return,
            Some(Ok(replaced)) => replaced,
            Some(Err(e)) => Err(std::io::Error::other(e)),
        };
        self.next_store = None;
        self.adopt(replaced);
    }

    /// Puts all models into another place.
    fn adopt(&mut self, replaced: std::io::Result<Replaced>) {
        let let_go = std::mem::take(&mut self.let_go);
        match replaced {
            Ok((store, found)) => {
                self.store = store;
                // It may be the same one, which this keeper had given up and which has it, or a part of it.
                self.told(self.shelf.models.iter().try_for_each(|kept| {
                    self.store.remove(kept.number, kept.user, kept.fds.len())?;
                    self.store.put(kept.number, kept.user, &kept.fds)
                }));
                let (gone, found) = found.into_iter().partition::<Vec<_>, _>(|(number, ..)| let_go.contains(number));
                for (number, user, fds) in gone {
                    self.told(self.store.remove(number, user, fds.len()));
                    if self.next_store.is_some() {
                        self.let_go.push(number);
                    }
                    self.closers.close(user, fds);
                }
                self.take_in(found);
                if self.next_store.is_none() {
                    (self.log)("warning: the process that holds models was gone; another one has them");
                }
            }
            Err(e) => {
                (self.log)(&format!("warning: the process that holds models is gone; they end with this keeper: {e}"));
            }
        }
    }

    /// Looks at whether the holder of models took what it was told. One that is gone is replaced: clients wait for it
    /// once.
    fn told(&mut self, told: Result<(), Errno>) {
        let Err(e) = told else { return };
        (self.log)(&format!("warning: what holds models does not take what it is told: {e}"));
        let is_gone = matches!(e, Errno::AGAIN | Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN);
        if is_gone && self.store.holder().is_some() {
            self.replace_holder();
        }
    }

    fn accept(&mut self, listener: BorrowedFd<'_>) -> Result<(), Errno> {
        let socket = match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => socket,
            Err(Errno::CONNABORTED | Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(e) => return Err(e),
        };
        let Ok(user) = socket_peercred(&socket).map(|peer| peer.uid.as_raw()) else { return Ok(()) };
        let of_the_user = self.connections.values().filter(|connection| connection.user == user).count();
        if of_the_user >= self.shelf.config.user_connections || self.closers.waiting(user) > MAX_CLOSING {
            self.closers.close(user, vec![socket]);
            return Ok(());
        }
        pass_rights(&socket, true);
        self.last += 1;
        let connection = Connection { socket, user, promised: 0, parts: Vec::new(), asked: Instant::now() };
        self.connections.insert(self.last, connection);
        Ok(())
    }

    fn disconnect(&mut self, number: u64) {
        if let Some(Connection { socket, user, mut parts, .. }) = self.connections.remove(&number) {
            parts.push(socket);
            self.closers.close(user, parts);
        }
    }

    /// Answers a message of a connection; false when the connection ends.
    fn serve(&mut self, number: u64) -> bool {
        let Some(connection) = self.connections.get_mut(&number) else { return true };
        let mut text = [0; MAX_MESSAGE];
        let got = match receive_with_fds(&connection.socket, &mut text, RecvFlags::DONTWAIT) {
            Ok(got) => got,
            Err(Errno::AGAIN) => return true,
            Err(_) => return false,
        };
        connection.asked = Instant::now();
        let user = connection.user;
        let message = match got.is_cut {
            true => Err("it is too long, or has too many descriptors".to_owned()),
            false => parse::<KeeperAsk>(&text[..got.len]),
        };
        let message = message.map_err(|why| format!("the message: {why}"));
        let mut fds = got.fds;
        let answer = match message {
            Ok(KeeperAsk::Keep { more }) => {
                connection.parts.append(&mut fds);
                let many = connection.parts.len() > MAX_MODEL_FDS;
                let sent = self.connections.values().filter(|of| of.user == user).map(|of| of.parts.len());
                let has = sent.sum::<usize>() + self.shelf.descriptors(user);
                if many || has > self.shelf.config.user_descriptors {
                    let most = self.shelf.config.user_descriptors;
                    let text = format!("a model has at most {MAX_MODEL_FDS} descriptors, and a user's models {most}");
                    // With the descriptors, which the connection has.
                    Err((KeepRefusal::Bad, text))
                } else if more {
                    return true;
                } else {
                    self.keep(number)
                }
            }
            Ok(KeeperAsk::Attach { name, from, device }) => self.attach(user, &name, from, device.as_deref()),
            Ok(KeeperAsk::Room { on_device: true, .. }) if !is_ours(user) => {
                Err((KeepRefusal::Bad, NOT_OURS.to_owned()))
            }
            Ok(KeeperAsk::Room { bytes, .. }) => self.room(number, bytes),
            Ok(KeeperAsk::DeviceRoom { device, bytes, name }) => {
                self.shelf.make_room_on(user, &device, bytes, &name).map(|gone| self.make_way(gone))
            }
            Ok(KeeperAsk::Drop { name }) => self.drop_model(user, &name),
            Ok(KeeperAsk::List) => {
                let list = serde_json::to_vec(&self.shelf.list(user)).unwrap_or_default();
                let fd = sealed_text("dmalane-kept", &list).map_err(|e| (KeepRefusal::Bad, e.to_string()));
                fd.map(|fd| (KeeperAnswer::List, vec![fd]))
            }
            Err(why) => Err((KeepRefusal::Bad, why)),
        };
        self.closers.close(user, fds);
        let goes_on = !matches!(answer, Err((KeepRefusal::Bad, _)));
        let (answer, lent) =
            answer.unwrap_or_else(|(kind, why)| (KeeperAnswer::Refused { kind, why: short(why) }, vec![]));
        let Some(Connection { socket, .. }) = self.connections.get(&number) else { return false };
        let text = serde_json::to_vec(&Message { version: VERSION, body: answer }).unwrap_or_default();
        let lent: Vec<_> = lent.iter().map(AsFd::as_fd).collect();
        // Who does not read its answers is not waited for.
        send_with_fds(socket, &text, &lent, SendFlags::DONTWAIT).is_ok() && goes_on
    }

    fn attach(
        &mut self,
        user: u32,
        name: &str,
        from: usize,
        device: Option<&str>,
    ) -> Result<(KeeperAnswer, Vec<OwnedFd>), Refused> {
        let found = self.shelf.find(user, name, device).inspect_err(|_| self.shelf.misses += 1)?;
        let kept = &mut self.shelf.models[found];
        if kept.user != user && kept.checked != Checked::Here {
            return Err((KeepRefusal::Checking, format!("{name:?} is being compared with its manifest")));
        }
        let lent = kept.lend(from, MAX_FDS);
        let lent = lent.map_err(|e| (KeepRefusal::Room, format!("the keeper cannot open more: {e}")))?;
        if lent.is_empty() {
            return Err((KeepRefusal::Bad, format!("{name:?} has {} descriptors", kept.fds.len())));
        }
        kept.used = Instant::now();
        if from == 0 {
            kept.attaches += 1;
            self.shelf.hits += 1;
        }
        Ok((KeeperAnswer::Lent { of: kept.fds.len(), number: kept.number }, lent))
    }

    /// Room that is promised to connections of a user, and to all, but one.
    fn promised(&self, user: u32, but: u64) -> (u64, u64) {
        let others = || self.connections.iter().filter(move |(number, _)| **number != but).map(|(_, of)| of);
        let of_the_user = others().filter(|of| of.user == user).fold(0, |n: u64, of| n.saturating_add(of.promised));
        (of_the_user, others().fold(0, |n: u64, of| n.saturating_add(of.promised)))
    }

    fn room(&mut self, number: u64, bytes: u64) -> Result<(KeeperAnswer, Vec<OwnedFd>), Refused> {
        let user = self.connections[&number].user;
        let gone = self.shelf.make_room(user, bytes, self.promised(user, number))?;
        let done = self.make_way(gone);
        self.connections.entry(number).and_modify(|connection| connection.promised = bytes);
        Ok(done)
    }

    /// Lets go of models that make room for others.
    fn make_way(&mut self, gone: Vec<Kept>) -> (KeeperAnswer, Vec<OwnedFd>) {
        for kept in gone {
            (self.log)(&format!("{:?} of user {} makes room", kept.model.name, kept.user));
            self.release(kept);
        }
        (KeeperAnswer::Done, Vec::new())
    }

    /// Memory is freed by whoever closes it last, and counts until then.
    fn release(&mut self, kept: Kept) {
        self.told(self.store.remove(kept.number, kept.user, kept.fds.len()));
        if self.next_store.is_some() {
            self.let_go.push(kept.number);
        }
        match kept.is_lent() {
            true => self.shelf.leaving.push(kept),
            false => self.close(kept),
        }
    }

    /// Closes the descriptors of a model. What says that it is memory of a device may take long, as what users send.
    fn close(&mut self, Kept { model, user, fds, .. }: Kept) {
        self.closers.close(if model.device.is_some() { user } else { MYSELF }, fds);
    }

    fn keep(&mut self, number: u64) -> Result<(KeeperAnswer, Vec<OwnedFd>), Refused> {
        let Some(connection) = self.connections.get_mut(&number) else { return Ok((KeeperAnswer::Done, Vec::new())) };
        let (user, fds, promised) = (connection.user, std::mem::take(&mut connection.parts), connection.promised);
        let (model, bytes) = match described(&fds) {
            Ok(described) => described,
            Err(why) => {
                self.closers.close(user, fds);
                return Err((KeepRefusal::Bad, why));
            }
        };
        if model.device.is_some() && !is_ours(user) {
            self.closers.close(user, fds);
            return Err((KeepRefusal::Bad, NOT_OURS.to_owned()));
        }
        if bytes > promised
            && let Err(refused) = self.room(number, bytes)
        {
            self.closers.close(user, fds);
            return Err(refused);
        }
        self.shelf.took.add(model.took);
        let is_other = |kept: &&Kept| kept.is(user, &model) && kept.model.id != model.id;
        let replaced = self.shelf.models.iter().find(is_other).map(|kept| kept.model.id.clone());
        let name = self.shelve(user, fds, (model, bytes), None);
        self.connections.entry(number).and_modify(|connection| connection.promised = 0);
        let of = replaced.as_ref().map_or(String::new(), |id| format!(", in place of {id}"));
        (self.log)(&format!("keeps {name:?} of user {user}: {bytes} bytes{of}"));
        Ok((KeeperAnswer::Kept { replaced }, Vec::new()))
    }

    /// Adds a model, in place of another one of its name, or one that the store has under a number; returns the name.
    fn shelve(
        &mut self,
        user: u32,
        fds: Vec<OwnedFd>,
        (model, bytes): (KeptModel, u64),
        stored: Option<u64>,
    ) -> String {
        let (number, name) = (stored.unwrap_or(self.last + 1), model.name.clone());
        if stored.is_none() {
            self.last = number;
            self.told(self.store.put(number, user, &fds));
        }
        // Of two the later one stays, also where a keeper ended between these lines.
        let same = |kept: &mut Kept| kept.is(user, &model);
        let before: Vec<Kept> = self.shelf.models.extract_if(.., same).collect();
        before.into_iter().for_each(|kept| self.release(kept));
        // Nobody can have changed what is sealed; but who says so may be another user, or a process that held it.
        // Memory of a device is only its owner's, and not mapped here.
        let soon = model.device.is_none() && (stored.is_some() || model.shared);
        let checked = if soon { Checked::Soon } else { Checked::ByItsOwner };
        let (used, attaches) = (Instant::now(), 0);
        self.shelf.models.push(Kept { number, model, user, fds, bytes, used, attaches, checked });
        name
    }

    /// Hashes the next model on another thread, one at a time.
    fn hash_next(&mut self) {
        if self.hashing || Instant::now() < self.hash_after {
            return;
        }
        let Some(kept) = self.shelf.models.iter().find(|kept| kept.checked == Checked::Soon) else { return };
        let (number, tell) = (kept.number, self.hashed.0.clone());
        let copies = kept.fds.iter().map(OwnedFd::try_clone).collect::<Result<Vec<_>, _>>();
        let hashed = move || {
            // Of a thread that panics, too, the keeper learns that it has ended.
            let checked = copies.ok().and_then(|fds| catch_unwind(AssertUnwindSafe(|| check(fds))).ok());
            let found = checked.and_then(|checked| match checked {
                Ok(()) => Some(Ok(())),
                Err(e @ (Error::Differs { .. } | Error::Kept(KeepError::Bad { .. }) | Error::Format { .. })) => {
                    Some(Err(e.to_string()))
                }
                // Of this machine, and not of the model: a lack of memory or descriptors.
                Err(_) => None,
            });
            let _ = tell.send((number, found));
        };
        self.hashing = thread::Builder::new().name("dmalane-hash".to_owned()).spawn(hashed).is_ok();
        if !self.hashing {
            self.hash_after = Instant::now() + IDLE;
        }
    }

    fn take_hashed(&mut self) {
        while let Ok((number, checked)) = self.hashed.1.try_recv() {
            self.hashing = false;
            let at = self.shelf.models.iter().position(|kept| kept.number == number);
            match (checked, at) {
                (None, at) => {
                    self.hash_after = Instant::now() + IDLE;
                    // It is the last one to be tried again.
                    let tried = at.map(|at| self.shelf.models.remove(at));
                    self.shelf.models.extend(tried);
                }
                (Some(Ok(())), Some(at)) => self.shelf.models[at].checked = Checked::Here,
                (Some(Err(why)), Some(at)) => {
                    let kept = self.shelf.models.remove(at);
                    (self.log)(&format!("warning: {:?} of user {} goes: {why}", kept.model.name, kept.user));
                    self.release(kept);
                }
                (Some(_), None) => {}
            }
        }
    }

    fn drop_model(&mut self, user: u32, name: &str) -> Result<(KeeperAnswer, Vec<OwnedFd>), Refused> {
        let found = self.shelf.find(user, name, None)?;
        if self.shelf.models[found].user != user {
            return Err((KeepRefusal::Absent, format!("{name:?} is another user's")));
        }
        // With it those of its name that are in other memory.
        let named = self.shelf.models[found].model.name.clone();
        let is_it = |kept: &mut Kept| kept.user == user && kept.model.name == named;
        let dropped: Vec<Kept> = self.shelf.models.extract_if(.., is_it).collect();
        (self.log)(&format!("drops {named:?} of user {user}"));
        dropped.into_iter().for_each(|kept| self.release(kept));
        Ok((KeeperAnswer::Done, Vec::new()))
    }
}

/// Why others' memory of a device is not kept: what such a descriptor is cannot be asked, and to close it may take any
/// time.
const NOT_OURS: &str = "a keeper keeps memory of a device for its own user alone";

/// Whether this is the keeper's own user.
fn is_ours(user: u32) -> bool {
    user == rustix::process::geteuid().as_raw()
}

/// A reason that fits a message.
fn short(mut why: String) -> String {
    let end = (0..=why.len().min(1000)).rev().find(|at| why.is_char_boundary(*at)).unwrap_or(0);
    why.truncate(end);
    why
}
