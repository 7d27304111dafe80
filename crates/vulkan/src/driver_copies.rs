//! Copies by the driver alone, back to back: what the queues are measured beside.

use std::error::Error as StdError;
use std::sync::Arc;
use std::time::Duration;

use ash::vk;
use dmalane_device::{DriverCopies, DriverCopy};
use dmalane_queue::{DeviceAddr, Direction, Registered};

use crate::channel::Channel;
use crate::error::{CallError, Error};
use crate::gpu::Buffer;
use crate::queue::{Parts, pairs};

/// Time that a submission may take.
const LONG: Duration = Duration::from_secs(60);
/// Submissions in flight: while the GPU works on one, the next is written down.
const IN_FLIGHT: usize = 4;

/// A command buffer for each time, on a queue of the driver for each direction, or one for both.
pub(crate) struct BackToBack {
    parts: Parts,
    /// Host memory stays registered until the GPU is done with it.
    channels: Vec<Channel<Arc<[Registered]>>>,
}

/// The regions of a command, and the buffers that they are in.
type Command = (Arc<Buffer>, Arc<Buffer>, Vec<vk::BufferCopy>);

impl BackToBack {
    pub fn new(parts: Parts) -> Result<Self, Error> {
        let queues = 0..parts.gpu.copy_queues().min(2);
        let channels = queues.map(|queue| Channel::new(&parts.gpu, queue)).collect::<Result<_, _>>()?;
        Ok(Self { parts, channels })
    }

    /// Adds the regions of a copy to the commands.
    fn add(&self, copy: &DriverCopy, commands: &mut Vec<Command>) -> Result<(), Box<dyn StdError + Send + Sync>> {
        copy.check(&self.parts.importer)?;
        let (mut host, mut device) = (Vec::new(), Vec::new());
        self.parts.host(copy.iova(), &mut host)?;
        self.parts.device(DeviceAddr::Card(copy.at), copy.len, copy.direction == Direction::FromHost, &mut device)?;
        let (from, to) = match copy.direction {
            Direction::FromHost => (&host, &device),
            Direction::ToHost => (&device, &host),
        };
        pairs(from, to, |(from, in_from), (to, in_to), size| {
            let (src_offset, dst_offset) = (from.offset + in_from, to.offset + in_to);
            let region = vk::BufferCopy { src_offset, dst_offset, size };
            let same = |(f, t, _): &&mut Command| Arc::ptr_eq(f, &from.buffer) && Arc::ptr_eq(t, &to.buffer);
            match commands.iter_mut().find(same) {
                Some((_, _, regions)) => regions.push(region),
                None => commands.push((from.buffer.clone(), to.buffer.clone(), vec![region])),
            }
        });
        Ok(())
    }

    /// Waits until a channel has fewer submissions in flight.
    fn wait(channel: &mut Channel<Arc<[Registered]>>, fewer_than: usize) -> Result<(), Error> {
        while channel.in_flight() >= fewer_than {
            let before = channel.in_flight();
            channel.wait(LONG).and_then(|()| channel.ended(drop))?;
            if channel.in_flight() == before {
                return Err(CallError { call: "vkWaitSemaphores", result: vk::Result::TIMEOUT }.into());
            }
        }
        Ok(())
    }

    /// Gives all copies to the driver, `times` times.
    fn give(&mut self, copies: &[DriverCopy], times: u64) -> Result<(), Box<dyn StdError + Send + Sync>> {
        let hosts: Arc<[Registered]> = copies.iter().map(|copy| copy.host.clone()).collect();
        let mut commands = vec![Vec::new(); self.channels.len()];
        for copy in copies {
            let channel = match copy.direction {
                Direction::FromHost => 0,
                Direction::ToHost => self.channels.len() - 1,
            };
            self.add(copy, &mut commands[channel])?;
        }
        for _ in 0..times {
            for (channel, commands) in self.channels.iter_mut().zip(&commands).filter(|(_, all)| !all.is_empty()) {
                Self::wait(channel, IN_FLIGHT)?;
                let mut recording = channel.begin().map_err(Error::from)?;
                // Other queues may have written the memory, and this one has the time before.
                channel.see_others(&recording);
                channel.barrier(&recording);
                for (from, to, regions) in commands {
                    channel.copy(&mut recording, from, to, regions);
                }
                channel.show_host(&recording);
                channel.submit(recording, None, hosts.clone()).map_err(|(_, e)| Error::from(e))?;
            }
        }
        Ok(())
    }
}

impl DriverCopies for BackToBack {
    fn copy(&mut self, copies: &[DriverCopy], times: u64) -> Result<(), Box<dyn StdError + Send + Sync>> {
        let given = self.give(copies, times);
        // Also after an error, which leaves some of the copies under way. Those that do not end keep their memory.
        let ended: Vec<_> = self.channels.iter_mut().map(|channel| Self::wait(channel, 1)).collect();
        given?;
        Ok(ended.into_iter().collect::<Result<(), _>>()?)
    }
}
