//! A device's end of a connection: it answers the client's requests, and asks for memory that it has no file of.
//!
//! The threads of a device ask while the thread that answers may wait for one of them, as an unmap waits for accesses.
//! So whoever waits for a message receives, unless another thread does: what is not for it is kept for that other.

use std::collections::VecDeque;
use std::io;
use std::net::Shutdown;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dmalane_dma::lock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::wire::{Body, Command, ERROR, HEADER, MAX_PUSHED, Message, REPLY, receive, send};

/// Maximum bytes of requests that are kept, and half of what is kept in front of an answer; a descriptor counts for
/// more than it takes, as there are few.
const MAX_KEPT: usize = 4 << 20;
const COST_OF_FD: usize = 8 << 10;

pub(crate) struct Link {
    stream: UnixStream,
    /// For the client to answer.
    timeout: Duration,
    /// Maximum bytes of the client's memory in a message.
    max_data: usize,
    /// Messages are sent whole.
    sending: Mutex<()>,
    /// One question at a time, with its number.
    asking: Mutex<u16>,
    inbox: Mutex<Inbox>,
    changed: Condvar,
}

#[derive(Default)]
struct Inbox {
    /// A thread is receiving.
    receiving: bool,
    /// Threads that wait for `changed`.
    waiting: usize,
    requests: VecDeque<Message>,
    kept: usize,
    /// The number of the question that waits for its answer, and that.
    question: Option<(u16, Option<Message>)>,
    /// When the last answer came.
    answered: Option<Instant>,
    /// Nothing more is received, because of the error if there is one.
    ended: bool,
    error: Option<io::Error>,
}

impl Inbox {
    fn put(&mut self, received: io::Result<Option<Message>>) {
        match received {
            Ok(Some(message)) if message.flags & REPLY == 0 => {
                self.kept += cost(&message);
                self.requests.push_back(message);
            }
            // An answer to nothing, or too late, is none.
            Ok(Some(message)) => match &mut self.question {
                Some((id, answer)) if *id == message.id => {
                    (*answer, self.answered) = (Some(message), Some(Instant::now()));
                }
                _ => {}
            },
            ended => {
                self.ended = true;
                self.error = ended.err();
            }
        }
    }

    fn request(&mut self) -> Option<Message> {
        let request = self.requests.pop_front()?;
        self.kept -= cost(&request);
        Some(request)
    }
}

fn cost(message: &Message) -> usize {
    HEADER + message.body.len() + COST_OF_FD * message.fds.len()
}

impl Link {
    /// A link over a stream with timeouts, to a client that takes so many bytes in a message.
    pub(crate) fn new(stream: UnixStream, timeout: Duration, max_data: usize) -> Self {
        let (inbox, changed) = (Mutex::default(), Condvar::new());
        let max_data = max_data.min(MAX_PUSHED);
        Self { stream, timeout, max_data, sending: Mutex::default(), asking: Mutex::default(), inbox, changed }
    }

    pub(crate) fn max_data(&self) -> usize {
        self.max_data
    }

    /// The client's next request; `None` when it has closed the socket.
    ///
    /// # Errors
    /// As [`receive`].
    pub(crate) fn request(&self) -> io::Result<Option<Message>> {
        match self.wait(None, Inbox::request) {
            Some(request) => Ok(Some(request)),
            None => lock(&self.inbox).error.take().map_or(Ok(None), Err),
        }
    }

    /// Sends an answer; see [`send`].
    pub(crate) fn answer(&self, to: &Message, error: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let flags = if error == 0 { REPLY } else { REPLY | ERROR };
        let _whole = lock(&self.sending);
        send(&self.stream, to.id, to.command, flags, error, body, fds)
    }

    /// Reads bytes of the client's memory, as many as [`Link::max_data`] at most. `None` when the client refuses it, or
    /// has not answered in time.
    pub(crate) fn read(&self, at: u64, into: &mut [u8]) -> Option<()> {
        let answer = self.ask(Command::DmaRead, Body::default().u64(at).u64(into.len() as u64))?;
        // Some clients take the count for 32 bits, and their bytes begin too early: then these are no count.
        let (place, data) = answer.body.split_at_checked(16)?;
        let asked = Body::default().u64(at).u64(into.len() as u64);
        (place == asked.0 && data.len() == into.len()).then(|| into.copy_from_slice(data))
    }

    /// As [`Link::read`], writes.
    pub(crate) fn write(&self, at: u64, from: &[u8]) -> Option<()> {
        self.ask(Command::DmaWrite, Body::default().u64(at).u64(from.len() as u64).bytes(from)).map(drop)
    }

    fn ask(&self, command: Command, body: Body) -> Option<Message> {
        let began = Instant::now();
        let mut asking = lock(&self.asking);
        if began.elapsed() > self.timeout && lock(&self.inbox).answered.is_none_or(|last| last < began) {
            // Those in front have asked meanwhile, and nobody has got an answer.
            return None;
        }
        let deadline = Instant::now() + self.timeout;
        *asking = asking.wrapping_add(1);
        let id = *asking;
        lock(&self.inbox).question = Some((id, None));
        let sending = lock(&self.sending);
        let sent = send(&self.stream, id, command as u16, 0, 0, &body.0, &[]);
        drop(sending);
        if let Err(error) = sent {
            // Part of the message may have gone.
            self.end(Some(error));
        }
        let answer = self.wait(Some(deadline), |inbox| inbox.question.as_mut()?.1.take());
        lock(&self.inbox).question = None;
        answer.filter(|answer| answer.command == command as u16 && answer.flags & ERROR == 0)
    }

    /// Ends the connection, and all waits for the client.
    pub(crate) fn end(&self, error: Option<io::Error>) {
        let mut inbox = lock(&self.inbox);
        inbox.ended = true;
        inbox.error = inbox.error.take().or(error);
        drop(inbox);
        self.changed.notify_all();
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Waits until `take` finds something; `None` at the deadline and at the end of the connection.
    fn wait<T>(&self, deadline: Option<Instant>, take: impl Fn(&mut Inbox) -> Option<T>) -> Option<T> {
        let mut inbox = lock(&self.inbox);
        loop {
            let found = take(&mut inbox);
            // Another thread may have waited for this one to receive no more, or for room.
            if inbox.waiting > 0 && !inbox.receiving {
                self.changed.notify_all();
            }
            if found.is_some() || inbox.ended {
                return found;
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return None;
            }
            // Who has asked looks further for the answer: whoever takes the requests may wait for it to have come.
            let most = if deadline.is_some() { 2 * MAX_KEPT } else { MAX_KEPT };
            if inbox.receiving || inbox.kept >= most {
                inbox = self.sleep(inbox, left);
                continue;
            }
            inbox.receiving = true;
            drop(inbox);
            let received = self.readable(left).then(|| receive(&self.stream));
            inbox = lock(&self.inbox);
            inbox.receiving = false;
            if let Some(received) = received {
                inbox.put(received);
            }
        }
    }

    fn sleep<'a>(&self, mut inbox: MutexGuard<'a, Inbox>, left: Option<Duration>) -> MutexGuard<'a, Inbox> {
        inbox.waiting += 1;
        let mut inbox = match left {
            Some(left) => self.changed.wait_timeout(inbox, left).unwrap_or_else(PoisonError::into_inner).0,
            None => self.changed.wait(inbox).unwrap_or_else(PoisonError::into_inner),
        };
        inbox.waiting -= 1;
        inbox
    }

    /// Waits until there is something to receive. False when nothing has come in time.
    fn readable(&self, left: Option<Duration>) -> bool {
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        // An error says that a signal came: the caller looks at its clock, and comes back.
        poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], left.as_ref()).is_ok_and(|ready| ready > 0)
    }
}
