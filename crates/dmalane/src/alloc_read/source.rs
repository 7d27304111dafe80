//! A file or a stream as one kind of channel.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::time::Duration;

use dmalane_addr::FileOffset;
use dmalane_file::{FileQueue, How, Moved, StreamQueue};
use dmalane_queue::{Abilities, Completion, Limits, Operation, Queue, Refused, Ticket};

use super::choose::Choice;
use super::{ReadError, ReadSource};

/// Bytes of a file or block device.
pub(super) fn size(mut file: &File) -> io::Result<u64> {
    let meta = file.metadata()?;
    if !meta.file_type().is_block_device() {
        return Ok(meta.len());
    }
    // A block device has no length of its own. The position may be someone else's too.
    let position = file.stream_position()?;
    let size = file.seek(SeekFrom::End(0))?;
    file.seek(SeekFrom::Start(position)).map(|_| size)
}

/// What the kernel calls an open file.
pub(super) fn name(file: &File) -> PathBuf {
    let fd = file.as_raw_fd();
    std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap_or_else(|_| PathBuf::from(format!("file descriptor {fd}")))
}

pub(super) enum Source {
    File(Box<FileQueue>),
    Stream(StreamQueue),
}

impl Source {
    pub fn open(source: &ReadSource, choice: &Choice) -> Result<Self, ReadError> {
        let file = source.file.try_clone().map_err(|e| ReadError::Open { path: source.path.clone(), source: e })?;
        if choice.stream {
            return Ok(Self::Stream(StreamQueue::new(file, choice.options.depth)));
        }
        Ok(Self::File(Box::new(FileQueue::from_file(file, source.path.clone(), choice.options)?)))
    }

    pub fn how(&self) -> How {
        match self {
            Self::File(channel) => channel.how().clone(),
            Self::Stream(_) => How { direct: false, uring: false, reasons: Vec::new() },
        }
    }

    pub fn moved(&self) -> Moved {
        match self {
            Self::File(channel) => channel.moved(),
            Self::Stream(channel) => Moved { direct: 0, buffered: channel.position() },
        }
    }
}

impl Source {
    fn queue(&self) -> &dyn Queue<Addr = FileOffset> {
        match self {
            Self::File(queue) => &**queue,
            Self::Stream(queue) => queue,
        }
    }

    fn queue_mut(&mut self) -> &mut dyn Queue<Addr = FileOffset> {
        match self {
            Self::File(queue) => &mut **queue,
            Self::Stream(queue) => queue,
        }
    }
}

impl Queue for Source {
    type Addr = FileOffset;

    fn limits(&self) -> Limits {
        self.queue().limits()
    }

    fn abilities(&self) -> Abilities {
        self.queue().abilities()
    }

    fn in_flight(&self) -> usize {
        self.queue().in_flight()
    }

    fn submit(&mut self, operation: Operation<FileOffset>) -> Result<Ticket, Refused<FileOffset>> {
        self.queue_mut().submit(operation)
    }

    fn flush(&mut self) {
        self.queue_mut().flush();
    }

    fn poll(&mut self, done: &mut Vec<Completion<FileOffset>>) -> usize {
        self.queue_mut().poll(done)
    }

    fn wait(&mut self, done: &mut Vec<Completion<FileOffset>>, timeout: Duration) -> usize {
        self.queue_mut().wait(done, timeout)
    }
}
