//! Submits commands to a queue of the GPU, and collects what has ended.
//!
//! `unsafe` because every call of Vulkan is. A [`Recording`] owns every buffer that its commands name, checks that they
//! stay within them, and becomes a flight, which is given up only when the timeline says that the GPU is done with it,
//! or the driver that its queue has nothing to do. Without either, also after the loss of the device, it is leaked
//! (never freed).
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use ash::vk;

use crate::error::CallError;
use crate::gpu::{Buffer, Gpu, Timeline};

/// One of the GPU's queues, with commands in flight that carry a `T` each.
pub(crate) struct Channel<T> {
    gpu: Arc<Gpu>,
    /// Which queue of the GPU.
    queue: usize,
    pool: vk::CommandPool,
    /// `None` only during drop.
    timeline: Option<Arc<Timeline>>,
    /// Command buffers that nothing uses.
    free: Vec<vk::CommandBuffer>,
    /// Command buffers that were allocated.
    made: usize,
    flights: VecDeque<Flight<T>>,
    /// The value of the last submission. It may never be reached if the device is lost.
    last: u64,
}

/// A submission.
struct Flight<T> {
    value: u64,
    recording: Recording,
    load: T,
}

/// A command buffer that is being filled, and all that its commands use.
pub(crate) struct Recording {
    commands: vk::CommandBuffer,
    keep: Vec<Arc<Buffer>>,
    /// Those of them that were acquired from other devices, and are released at the end.
    foreign: Vec<Arc<Buffer>>,
    /// The commands wait for these.
    after: Vec<Arc<Timeline>>,
}

/// Time that a channel waits for the GPU after an error.
const GIVE_UP: Duration = Duration::from_secs(1);
/// Time that the drop of a channel waits for the GPU.
const DROP_TIMEOUT: Duration = Duration::from_secs(10);

impl<T> Channel<T> {
    pub fn new(gpu: &Arc<Gpu>, queue: usize) -> Result<Self, CallError> {
        let timeline = Arc::new(Timeline::new(gpu)?);
        let info = vk::CommandPoolCreateInfo::default()
            .queue_family_index(gpu.queue(queue).family)
            .flags(vk::CommandPoolCreateFlags::RESET_COMMAND_BUFFER);
        // SAFETY: the device has queues of this family.
        let pool = gpu.call("vkCreateCommandPool", |d| unsafe { d.create_command_pool(&info, None) })?;
        gpu.live().pools.fetch_add(1, Ordering::Relaxed);
        let (free, flights) = (Vec::new(), VecDeque::new());
        Ok(Self { gpu: gpu.clone(), queue, pool, timeline: Some(timeline), free, made: 0, flights, last: 0 })
    }

    /// Submissions in flight.
    pub fn in_flight(&self) -> usize {
        self.flights.len()
    }

    fn timeline(&self) -> &Arc<Timeline> {
        self.timeline.as_ref().expect("taken by drop only")
    }

    /// Begins with a command buffer.
    pub fn begin(&mut self) -> Result<Recording, CallError> {
        let commands = match self.free.pop() {
            Some(commands) => commands,
            None => {
                let info = vk::CommandBufferAllocateInfo::default()
                    .command_pool(self.pool)
                    .level(vk::CommandBufferLevel::PRIMARY)
                    .command_buffer_count(1);
                // SAFETY: the pool exists, and nobody else uses it: `self` is borrowed mutably.
                let made =
                    self.gpu.call("vkAllocateCommandBuffers", |d| unsafe { d.allocate_command_buffers(&info) })?;
                self.made += 1;
                made[0]
            }
        };
        let info = vk::CommandBufferBeginInfo::default().flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
        // SAFETY: the command buffer is not in flight: it is new, or was in the list of free ones. Beginning resets it.
        let begun = self.gpu.call("vkBeginCommandBuffer", |d| unsafe { d.begin_command_buffer(commands, &info) });
        match begun {
            Ok(()) => {
                let (keep, foreign, after) = (Vec::new(), Vec::new(), Vec::new());
                Ok(Recording { commands, keep, foreign, after })
            }
            Err(e) => {
                self.free.push(commands);
                Err(e)
            }
        }
    }

    /// Keeps a buffer as long as the commands are in flight, and owns it from here to their end if it is foreign.
    pub fn keep(&self, into: &mut Recording, buffer: &Arc<Buffer>) {
        // Most commands name what one of the last has named.
        if into.keep.iter().rev().take(4).any(|b| Arc::ptr_eq(b, buffer)) {
            return;
        }
        into.keep.push(buffer.clone());
        if buffer.foreign().is_some() && !into.foreign.iter().any(|b| Arc::ptr_eq(b, buffer)) {
            let from_others = (vk::QUEUE_FAMILY_FOREIGN_EXT, self.gpu.owner(self.queue));
            self.transfer(into, std::slice::from_ref(buffer), from_others);
            into.foreign.push(buffer.clone());
        }
    }

    /// Makes buffers another family's, after all commands before and before all that come.
    fn transfer(&self, into: &Recording, buffers: &[Arc<Buffer>], (from, to): (u32, u32)) {
        use vk::AccessFlags as Access;
        let (all, any) = (vk::PipelineStageFlags::ALL_COMMANDS, Access::MEMORY_READ | Access::MEMORY_WRITE);
        let of = |buffer: &Arc<Buffer>| {
            let barrier = vk::BufferMemoryBarrier::default().buffer(buffer.handle()).size(vk::WHOLE_SIZE);
            let barrier = barrier.src_queue_family_index(from).dst_queue_family_index(to);
            barrier.src_access_mask(any).dst_access_mask(any)
        };
        let transfers: Vec<_> = buffers.iter().map(of).collect();
        // Sparse buffers reach the memory, too, and a barrier of a buffer is for accesses through that one only.
        let memory = [vk::MemoryBarrier::default().src_access_mask(any).dst_access_mask(any)];
        #[cfg(test)]
        self.gpu.live().transfers.fetch_add(buffers.len() as u64, Ordering::Relaxed);
        let none = vk::DependencyFlags::empty();
        // SAFETY: the recording has begun, is not in flight, and keeps the buffers, as `keep` sees to; a buffer is
        // foreign only where the device has the extension of that family, and is made for one family at a time.
        unsafe {
            self.gpu.device().cmd_pipeline_barrier(into.commands, all, all, none, &memory, &transfers, &[]);
        }
    }

    /// Adds the last submissions of other queues that use the recording's foreign buffers to those that it comes after:
    /// only one owns a buffer at a time. On this queue, the barriers of both order them.
    fn after_owners(&self, recording: &Recording, after: &mut Vec<(Arc<Timeline>, u64)>) {
        let own = after.len();
        for last in recording.foreign.iter().filter_map(|buffer| buffer.foreign()) {
            let last = last.lock().unwrap_or_else(PoisonError::into_inner);
            let Some((timeline, value)) = last.as_ref().filter(|(t, _)| !Arc::ptr_eq(t, self.timeline())) else {
                continue;
            };
            match after[own..].iter_mut().find(|(t, _)| Arc::ptr_eq(t, timeline)) {
                Some((_, most)) => *most = (*most).max(*value),
                None => after.push((timeline.clone(), *value)),
            }
        }
        #[cfg(test)]
        self.gpu.live().handovers.fetch_add((after.len() - own) as u64, Ordering::Relaxed);
    }

    /// Copies regions, none of which may overlap another that is written.
    pub fn copy(&self, into: &mut Recording, from: &Arc<Buffer>, to: &Arc<Buffer>, regions: &[vk::BufferCopy]) {
        for r in regions {
            let inside = |at: u64, of: &Buffer| at.checked_add(r.size).is_some_and(|end| end <= of.len());
            assert!(
                r.size > 0 && inside(r.src_offset, from) && inside(r.dst_offset, to),
                "a region within its buffers"
            );
        }
        self.keep(into, from);
        self.keep(into, to);
        // SAFETY: the recording has begun and is not in flight; it keeps the buffers; the regions lie within them.
        unsafe { self.gpu.device().cmd_copy_buffer(into.commands, from.handle(), to.handle(), regions) }
    }

    /// Fills a range, both a multiple of four, with four bytes.
    pub fn fill(&self, into: &mut Recording, to: &Arc<Buffer>, at: u64, len: u64, pattern: u32) {
        let whole = len > 0 && (at | len).is_multiple_of(4);
        assert!(whole && at.checked_add(len).is_some_and(|end| end <= to.len()), "a range within its buffer");
        self.keep(into, to);
        // SAFETY: as for `copy`; both numbers are multiples of four.
        unsafe { self.gpu.device().cmd_fill_buffer(into.commands, to.handle(), at, len, pattern) }
    }

    /// Writes bytes at the start of a buffer: a multiple of four, 64 KiB at most.
    pub fn update(&self, into: &mut Recording, to: &Arc<Buffer>, bytes: &[u8]) {
        let whole = bytes.len().is_multiple_of(4) && (1..=65536).contains(&bytes.len());
        assert!(whole && bytes.len() as u64 <= to.len(), "bytes within the buffer");
        self.keep(into, to);
        // SAFETY: as for `copy`; the length is one that the call takes.
        unsafe { self.gpu.device().cmd_update_buffer(into.commands, to.handle(), 0, bytes) }
    }

    /// Orders commands: what comes after this begins when what came before has ended, and sees it.
    pub fn barrier(&self, into: &Recording) {
        use vk::AccessFlags as Access;
        let (transfer, both) = (vk::PipelineStageFlags::TRANSFER, Access::TRANSFER_READ | Access::TRANSFER_WRITE);
        self.dependency(into, (transfer, both), (transfer, both));
    }

    /// Makes what other queues have written, as far as the host has seen them end, visible to what follows. It waits
    /// for nothing on this queue.
    pub fn see_others(&self, into: &Recording) {
        use vk::AccessFlags as Access;
        let both = Access::TRANSFER_READ | Access::TRANSFER_WRITE;
        let host = (vk::PipelineStageFlags::HOST, Access::HOST_WRITE);
        self.dependency(into, host, (vk::PipelineStageFlags::TRANSFER, both));
    }

    /// Makes what was written visible to the host, which may write there too once it has seen the end.
    pub fn show_host(&self, into: &Recording) {
        let written = (vk::PipelineStageFlags::TRANSFER, vk::AccessFlags::TRANSFER_WRITE);
        let host = vk::AccessFlags::HOST_READ | vk::AccessFlags::HOST_WRITE;
        self.dependency(into, written, (vk::PipelineStageFlags::HOST, host));
    }

    fn dependency(
        &self,
        into: &Recording,
        (before, from): (vk::PipelineStageFlags, vk::AccessFlags),
        (after, to): (vk::PipelineStageFlags, vk::AccessFlags),
    ) {
        let memory = [vk::MemoryBarrier::default().src_access_mask(from).dst_access_mask(to)];
        let none = vk::DependencyFlags::empty();
        // SAFETY: the recording has begun and is not in flight.
        unsafe { self.gpu.device().cmd_pipeline_barrier(into.commands, before, after, none, &memory, &[], &[]) }
    }

    /// The timeline, and the value that it reaches when the last submission has ended.
    pub fn last(&self) -> (&Arc<Timeline>, u64) {
        (self.timeline(), self.last)
    }

    /// Sends the commands to the GPU, to begin when `after` has reached its value.
    ///
    /// # Errors
    /// With the load back; nothing was sent. A lost device is sent nothing.
    pub fn submit(
        &mut self,
        mut recording: Recording,
        after: Option<(Arc<Timeline>, u64)>,
        load: T,
    ) -> Result<(), (T, CallError)> {
        if !recording.foreign.is_empty() {
            let to_others = (self.gpu.owner(self.queue), vk::QUEUE_FAMILY_FOREIGN_EXT);
            self.transfer(&recording, &recording.foreign, to_others);
        }
        // SAFETY: the recording has begun, and all commands were recorded.
        let ended = self.gpu.call("vkEndCommandBuffer", |d| unsafe { d.end_command_buffer(recording.commands) });
        if let Err(e) = ended.and_then(|()| self.gpu.check()) {
            self.free.push(recording.commands);
            return Err((load, e));
        }
        let gpu = self.gpu.clone();
        let ownership = (!recording.foreign.is_empty()).then(|| gpu.ownership());
        let mut after: Vec<_> = after.into_iter().collect();
        self.after_owners(&recording, &mut after);
        let value = self.last + 1;
        let (commands, signals) = ([recording.commands], [self.timeline().handle()]);
        let (waits, wait_values): (Vec<_>, Vec<_>) = after.iter().map(|(t, value)| (t.handle(), *value)).unzip();
        let stages = vec![vk::PipelineStageFlags::ALL_COMMANDS; waits.len()];
        let values = [value];
        let mut timeline = vk::TimelineSemaphoreSubmitInfo::default()
            .wait_semaphore_values(&wait_values)
            .signal_semaphore_values(&values);
        let info = vk::SubmitInfo::default()
            .command_buffers(&commands)
            .wait_semaphores(&waits)
            .wait_dst_stage_mask(&stages)
            .signal_semaphores(&signals)
            .push_next(&mut timeline);
        let queue = self.gpu.queue(self.queue).lock();
        recording.after = after.into_iter().map(|(timeline, _)| timeline).collect();
        // SAFETY: the structures live until the call returns; what the commands use and wait for is kept by the
        // recording, which becomes a flight; the queue is locked.
        let sent = self.gpu.call("vkQueueSubmit", |d| unsafe { d.queue_submit(*queue, &[info], vk::Fence::null()) });
        drop(queue);
        match sent {
            Err(e) if !e.is_lost() => {
                self.free.push(recording.commands);
                Err((load, e))
            }
            // A call that finds the device lost may have sent them.
            _ => {
                self.last = value;
                for last in recording.foreign.iter().filter_map(|buffer| buffer.foreign()) {
                    *last.lock().unwrap_or_else(PoisonError::into_inner) = Some((self.timeline().clone(), value));
                }
                drop(ownership);
                self.flights.push_back(Flight { value, recording, load });
                Ok(())
            }
        }
    }

    /// Asks the driver whether the device is still there.
    ///
    /// # Errors
    /// The device is lost, or does not answer.
    pub fn is_alive(&self) -> Result<(), CallError> {
        // Waiting is the call that finds a lost device.
        self.gpu.check().and_then(|()| self.timeline().wait(0, Duration::ZERO)).map(drop)
    }

    /// Gives the loads of what has ended, in the order in which it was submitted.
    ///
    /// # Errors
    /// The device is lost, or does not answer; what is in flight stays so.
    pub fn ended(&mut self, mut each: impl FnMut(T)) -> Result<(), CallError> {
        self.gpu.check()?;
        if self.flights.is_empty() {
            return Ok(());
        }
        let reached = self.timeline().value()?;
        if self.flights.front().is_some_and(|f| f.value <= reached) {
            // After a reset of the GPU the value may be reached without the commands: only waiting tells.
            self.timeline().wait(reached, Duration::ZERO)?;
        }
        while self.flights.front().is_some_and(|f| f.value <= reached) {
            let Flight { recording, load, .. } = self.flights.pop_front().expect("there is one");
            self.free.push(recording.commands);
            each(load);
        }
        Ok(())
    }

    /// Waits until the first submission in flight has ended, or `timeout` has passed.
    ///
    /// # Errors
    /// As [`Channel::ended`].
    pub fn wait(&self, timeout: Duration) -> Result<(), CallError> {
        let Some(first) = self.flights.front() else { return Ok(()) };
        self.gpu.check()?;
        self.timeline().wait(first.value, timeout).map(drop)
    }

    /// After an error: gives the loads of everything in flight if the driver says within a second that the GPU uses
    /// none of it any more. False if it does not say so.
    pub fn give_up(&mut self, mut each: impl FnMut(T)) -> bool {
        if self.flights.is_empty() {
            return true;
        }
        let ended = self.gpu.check().and_then(|()| self.timeline().wait_despite_errors(self.last, GIVE_UP));
        // Only a lost device is asked in a way that has no timeout: it answers in finite time.
        if !ended.unwrap_or_else(|_lost| self.gpu.is_idle(self.queue)) {
            return false;
        }
        for Flight { recording, load, .. } in self.flights.drain(..) {
            self.free.push(recording.commands);
            each(load);
        }
        true
    }
}

impl<T> Drop for Channel<T> {
    fn drop(&mut self) {
        let waited = match self.flights.is_empty() {
            true => Ok(true),
            false => self.gpu.check().and_then(|()| self.timeline().wait(self.last, DROP_TIMEOUT)),
        };
        if !waited.unwrap_or_else(|_| self.give_up(drop)) {
            // Never freed: the GPU may still use it. The timeline and the buffers keep the device.
            std::mem::forget((std::mem::take(&mut self.flights), self.timeline.take()));
            return;
        }
        debug_assert_eq!(self.free.len() + self.flights.len(), self.made, "a recording was not sent");
        self.flights.clear();
        // SAFETY: none of the command buffers is in flight: the timeline has reached the value of the last, or the
        // queue has nothing to do.
        unsafe { self.gpu.device().destroy_command_pool(self.pool, None) }
        self.gpu.live().pools.fetch_sub(1, Ordering::Relaxed);
    }
}
