//! A file or a stream as one kind of queue.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;

use dmalane_addr::FileOffset;
use dmalane_file::{FileQueue, How, Mode, Moved, StreamQueue};
use dmalane_queue::Queue;

use super::plan::Plan;
use super::{ReadError, ReadSource};

/// Bytes of a file or block device.
pub(crate) fn size(mut file: &File) -> io::Result<u64> {
    let meta = file.metadata()?;
    if !meta.file_type().is_block_device() {
        return Ok(meta.len());
    }
    // A block device has no length of its own. The position may be someone else's too.
    let position = file.stream_position()?;
    let size = file.seek(SeekFrom::End(0))?;
    file.seek(SeekFrom::Start(position)).map(|_| size)
}

/// The kernel's name of an open file.
pub(super) fn name(file: &File) -> PathBuf {
    let fd = file.as_raw_fd();
    std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap_or_else(|_| PathBuf::from(format!("file descriptor {fd}")))
}

pub(super) enum Source {
    File(Box<FileQueue>),
    Stream(Box<StreamQueue>),
}

impl Source {
    pub fn open(source: &ReadSource, plan: &Plan) -> Result<Self, ReadError> {
        let file = source.file.try_clone().map_err(|e| ReadError::Open { path: source.path.clone(), source: e })?;
        if plan.stream {
            return Ok(Self::Stream(Box::new(StreamQueue::new(file, plan.options.depth))));
        }
        let queue = FileQueue::from_file(file, source.path.clone(), plan.options)?;
        Ok(Self::File(Box::new(match plan.options.mode {
            Mode::Auto => queue.from_cache_where_cached(),
            Mode::Direct | Mode::Buffered => queue,
        })))
    }

    pub fn how(&self) -> How {
        match self {
            Self::File(queue) => queue.how().clone(),
            Self::Stream(_) => How::plain(),
        }
    }

    pub fn queue(&mut self) -> &mut dyn Queue<Addr = FileOffset> {
        match self {
            Self::File(queue) => &mut **queue,
            Self::Stream(queue) => queue,
        }
    }

    pub fn moved(&self) -> Moved {
        match self {
            Self::File(queue) => queue.moved(),
            Self::Stream(queue) => Moved { direct: 0, buffered: queue.position() },
        }
    }
}
