//! A file or a stream as one kind of queue.

use dmalane_addr::FileOffset;
use dmalane_file::{FileQueue, How, Mode, Moved, SharedReads, StreamQueue};
use dmalane_queue::Queue;

use super::plan::Plan;
use crate::error::Error;
use crate::open_file::OpenFile;

pub(super) enum Source {
    File(Box<FileQueue>),
    Stream(Box<StreamQueue>),
}

impl Source {
    pub fn open(source: &OpenFile, plan: &Plan, reads: &SharedReads) -> Result<Self, Error> {
        if plan.stream {
            let file = source.file()?.try_clone().map_err(|e| source.error("open it", e))?;
            return Ok(Self::Stream(Box::new(StreamQueue::new(file, plan.options.depth))));
        }
        let queue = FileQueue::of_handle(source.handle.clone(), plan.options)?.sharing(reads);
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
