//! Reading device memory as programs see it: a program on the GPU copies it, by its device address.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ash::vk;
use dmalane_device::PolledQueue;
use dmalane_queue::{
    Capabilities, DeviceQueue, Direction, HostSlice, Limits, OpError, Operation, Refusal, StopReason, Work,
};

use crate::channel::{Channel, Recording};
use crate::error::{CallError, Error};
use crate::gpu::{Buffer, Program};
use crate::queue::{MAX_LEN, Parts, Run};
use crate::shader;

/// Time that a read may take.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Pause before the driver is asked again whether a read that failed has ended, and how often it is asked.
const PAUSE: Duration = Duration::from_millis(100);
const ASKED: usize = 50;

/// Reads through a program, one operation at a time.
struct Reader {
    parts: Parts,
    channel: Channel<()>,
    program: Arc<Program>,
    /// The program writes here, and copies go on to the host from here: host memory has no device address, and need
    /// not lie at multiples of four.
    scratch: Arc<Buffer>,
    device_runs: Vec<Run>,
    host_runs: Vec<Run>,
}

/// A queue that copies to the host only, and waits for each copy.
///
/// # Errors
/// Why the GPU cannot run the program.
pub(crate) fn queue(parts: Parts) -> Result<Box<DeviceQueue>, Error> {
    let gpu = &parts.gpu;
    let queue = gpu.compute_queue().ok_or(Error::NoPrograms(match gpu.info().device_address {
        true => "has no queue that runs programs",
        false => "gives programs no addresses (bufferDeviceAddress)",
    }))?;
    let (channel, program) = (Channel::new(gpu, queue)?, Arc::new(Program::new(gpu)?));
    let scratch = parts.memory.scratch(shader::MOST)?;
    let mut reader = Reader { parts, channel, program, scratch, device_runs: Vec::new(), host_runs: Vec::new() };
    let limits = Limits { capacity: 16, max_len: MAX_LEN };
    Ok(Box::new(PolledQueue::new(Capabilities::TO_HOST, limits, move |operation| reader.read(operation))))
}

impl Reader {
    /// The error of a read that has ended, also on a GPU that is lost.
    fn stopped(&self, e: CallError) -> OpError {
        let error = self.parts.gpu.error(e).into();
        OpError::Stopped(if e.is_lost() { StopReason::Device(error) } else { StopReason::Driver(error) })
    }

    fn read(&mut self, operation: &Operation) -> Result<(), OpError> {
        let Work::Copy { direction: Direction::ToHost, host, at } = &operation.work else {
            return Err(OpError::Refused(Refusal::Unsupported(operation.needs())));
        };
        operation.check_registered(&self.parts.importer).map_err(OpError::Refused)?;
        // Nothing is unbound between the look at it and the end of the read.
        let sparse = self.parts.sparse.clone();
        let _stays = sparse.as_ref().map(|sparse| sparse.stays());
        self.device_runs.clear();
        self.parts.device(*at, host.slice.len() as u64, false, &mut self.device_runs)?;
        let mut recording = self.channel.begin().map_err(|e| self.stopped(e))?;
        if let Err(e) = self.record(&mut recording, host) {
            self.channel.discard(recording);
            return Err(e);
        }
        let after = sparse.as_ref().and_then(|sparse| sparse.pending());
        self.channel.submit(recording, after, ()).map_err(|((), e)| self.stopped(e))?;
        let ended = self.channel.wait(TIMEOUT).and_then(|()| self.channel.ended(drop));
        if ended.is_ok() && self.channel.in_flight() == 0 {
            return Ok(());
        }
        // A GPU that has not ended in time may never do so: it is not waited for without a limit, as `give_up` does.
        let late = ended.is_ok();
        let error = ended.err().unwrap_or(CallError { call: "vkWaitSemaphores", result: vk::Result::TIMEOUT });
        // The GPU may still write into the caller's memory, which is given back with the error only once it does not.
        for _ in 0..if error.is_lost() { 1 } else { ASKED } {
            let is_over = match late {
                true => {
                    let _ = self.channel.wait(PAUSE).and_then(|()| self.channel.ended(drop));
                    self.channel.in_flight() == 0
                }
                false => self.channel.give_up(drop),
            };
            if is_over {
                return Err(self.stopped(error));
            }
            thread::sleep(PAUSE);
        }
        if let Some(sparse) = &sparse {
            let (timeline, value) = self.channel.last();
            sparse.used_until(timeline, value);
        }
        let why = format!("{}, and the GPU may still write to the memory of the read", self.parts.gpu.error(error));
        Err(OpError::Stopped(StopReason::Lost(why.into())))
    }

    /// Writes down the copies of all runs.
    fn record(&mut self, recording: &mut Recording, host: &HostSlice) -> Result<(), OpError> {
        let mut done = 0;
        for run in &self.device_runs {
            if let Some(memory) = &run.behind {
                self.channel.keep(recording, memory);
            }
            let mut within = 0;
            while within < run.len {
                let len = (run.len - within).min(shader::MOST);
                self.channel.before_read(recording);
                let from = (&run.buffer, run.offset + within);
                self.channel.read(recording, &self.program, from, &self.scratch, len);
                self.channel.after_read(recording);
                self.host_runs.clear();
                self.parts.host(host, done, len, &mut self.host_runs)?;
                let mut src_offset = 0;
                for to in &self.host_runs {
                    let region = vk::BufferCopy { src_offset, dst_offset: to.offset, size: to.len };
                    self.channel.copy(recording, &self.scratch, &to.buffer, &[region]);
                    src_offset += to.len;
                }
                (within, done) = (within + len, done + len);
            }
        }
        self.channel.show_host(recording);
        Ok(())
    }
}
