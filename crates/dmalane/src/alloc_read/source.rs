//! A file or a stream as one kind of channel.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::time::Duration;

use dmalane_addr::FileOffset;
use dmalane_file::{FileChannel, How, Moved, StreamChannel};
use dmalane_queue::{Channel, Completion, Limits, Refused, Ticket, Transfer};

use super::choose::Choice;
use super::{ReadError, ReadSource};

/// Bytes of a file or block device.
pub(super) fn size(mut file: &File) -> io::Result<u64> {
    let meta = file.metadata()?;
    // A block device has no length of its own; all reads here name their offset, so the position does not matter.
    if meta.file_type().is_block_device() { file.seek(SeekFrom::End(0)) } else { Ok(meta.len()) }
}

/// What the kernel calls an open file.
pub(super) fn name(file: &File) -> PathBuf {
    let fd = file.as_raw_fd();
    std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap_or_else(|_| PathBuf::from(format!("file descriptor {fd}")))
}

pub(super) enum Source {
    File(Box<FileChannel>),
    Stream(StreamChannel),
}

impl Source {
    pub fn open(source: &ReadSource, choice: &Choice) -> Result<Self, ReadError> {
        let file = source.file.try_clone().map_err(|e| ReadError::Open { path: source.path.clone(), source: e })?;
        if choice.stream {
            return Ok(Self::Stream(StreamChannel::new(file, choice.options.depth)));
        }
        Ok(Self::File(Box::new(FileChannel::from_file(file, source.path.clone(), choice.options)?)))
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

impl Channel for Source {
    type Far = FileOffset;

    fn limits(&self) -> Limits {
        match self {
            Self::File(channel) => channel.limits(),
            Self::Stream(channel) => channel.limits(),
        }
    }

    fn in_flight(&self) -> usize {
        match self {
            Self::File(channel) => channel.in_flight(),
            Self::Stream(channel) => channel.in_flight(),
        }
    }

    fn submit(&mut self, transfer: Transfer<FileOffset>) -> Result<Ticket, Refused<FileOffset>> {
        match self {
            Self::File(channel) => channel.submit(transfer),
            Self::Stream(channel) => channel.submit(transfer),
        }
    }

    fn poll(&mut self, done: &mut Vec<Completion<FileOffset>>) -> usize {
        match self {
            Self::File(channel) => channel.poll(done),
            Self::Stream(channel) => channel.poll(done),
        }
    }

    fn wait(&mut self, done: &mut Vec<Completion<FileOffset>>, timeout: Duration) -> usize {
        match self {
            Self::File(channel) => channel.wait(done, timeout),
            Self::Stream(channel) => channel.wait(done, timeout),
        }
    }
}
